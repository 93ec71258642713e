"""Weights & Biases: into the run's directory, or online."""

import os
import shlex
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoscale.errors import UserError
from isoscale.observe.events import Ended, Started
from isoscale.observe.loggers.logger import Logger, Moment, require

if TYPE_CHECKING:
    from PIL.Image import Image


class WandB(Logger):
    """Hands a run on to Weights & Biases: by default into files in the run's directory, to be synchronised later."""

    name = "wandb"

    def __init__(
        self, project: str = "isoscale", entity: str | None = None, mode: Literal["offline", "online"] = "offline"
    ) -> None:
        """Write to a project of an entity, which is a user or a team; online needs `wandb login` first."""
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        self._wandb = require("wandb", self.name)
        self._project = project
        self._entity = entity
        self._mode = mode
        self._run: Any = None
        self._exit_code = 0
        if mode == "online" and not self._wandb.login(prompt=False, verify=False):
            raise UserError("wandb is not logged in; type `wandb login`, or leave out mode: online to write files")

    @property
    def destination(self) -> str:
        """The project; files are a place of their own, because nobody knows whether they were sent."""
        return " ".join(filter(None, [self.name, self._mode, self._entity, self._project]))

    def commands(self, directory: Path) -> list[tuple[str, str]]:
        """How to send the files."""
        if self._mode == "online":
            return []
        return [("wandb", f"wandb sync {shlex.quote(str(directory / 'wandb'))}/offline-run-*")]

    def close(self) -> None:
        """Write or send what is left."""
        if self._run is not None:
            self._run.finish(exit_code=self._exit_code)

    def _open(self, started: Started, run_id: str | None) -> str:
        directory = Path(started.directory)
        run_id = run_id or uuid.uuid4().hex[:8]
        self._run = self._wandb.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode,
            dir=str(directory),
            id=run_id,
            name=directory.name,
            resume="allow" if self._mode == "online" else None,
            settings=self._settings(),
        )
        about = {**dict(started.rows), "recipe": started.name, "directory": str(directory.resolve())}
        self._run.config.update({**started.settings, "about": about}, allow_val_change=True)
        shutil.copy(directory / "recipe.yaml", self._run.dir)
        return run_id

    def _settings(self) -> Any:
        return self._wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
            init_timeout=15,  # less than the end of a run waits, so that the reason is known by then
        )

    def _log(self, moment: Moment, values: dict[str, float]) -> None:
        self._run.log({**values, "epoch": moment.epoch, "_timestamp": moment.time}, step=moment.step)

    def _show(self, moment: Moment, name: str, image: "Image") -> None:
        self._run.log({name: self._wandb.Image(image)}, step=moment.step)

    def _end(self, ended: Ended) -> None:
        self._run.summary["status"] = ended.status
        self._exit_code = int(ended.status == "failed")
