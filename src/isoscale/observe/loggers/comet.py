"""Comet: into an archive in the run's directory, or online."""

import os
import shlex
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoscale.errors import UserError
from isoscale.observe.events import Ended, Started
from isoscale.observe.loggers.logger import Logger, Moment, hush, require

if TYPE_CHECKING:
    from PIL.Image import Image


class Comet(Logger):
    """Hands a run on to Comet: by default into an archive in the run's directory, to be uploaded later."""

    name = "comet"

    def __init__(
        self, project: str = "isoscale", workspace: str | None = None, mode: Literal["offline", "online"] = "offline"
    ) -> None:
        """Write to a project of a workspace; online needs `comet login` first."""
        os.environ.setdefault("COMET_LOGGING_CONSOLE", "ERROR")
        os.environ.setdefault("COMET_INTERNAL_SENTRY_DSN", "")
        self._comet = require("comet_ml", self.name)
        hush("comet_ml")
        self._project = project
        self._workspace = workspace
        self._mode = mode
        self._run: Any = None
        if mode == "online" and not self._comet.get_config("comet.api_key"):
            raise UserError("comet is not logged in; type `comet login`, or leave out mode: online to write files")

    @property
    def destination(self) -> str:
        """The project; files are a place of their own, because nobody knows whether they were sent."""
        return " ".join(filter(None, [self.name, self._mode, self._workspace, self._project]))

    def commands(self, directory: Path) -> list[tuple[str, str]]:
        """How to send the archives."""
        if self._mode == "online":
            return []
        return [("comet", f"comet upload {shlex.quote(str(directory / 'comet'))}/*.zip")]

    def close(self) -> None:
        """Write the archive, or send what is left."""
        if self._run is not None:
            self._run.end()

    def _open(self, started: Started, run_id: str | None) -> str:
        directory = Path(started.directory)
        key = run_id or uuid.uuid4().hex
        self._run = self._comet.start(
            workspace=self._workspace,
            project=self._project,
            experiment_key=key,
            mode="get" if run_id else "create",
            online=self._mode == "online",
            experiment_config=self._configuration(directory),
        )
        self._run.set_name(directory.name)
        self._run.log_parameters(dict(started.settings))
        self._run.log_others({**dict(started.rows), "recipe": started.name, "directory": str(directory.resolve())})
        self._run.log_asset(str(directory / "recipe.yaml"), copy_to_tmp=False)
        return key

    def _configuration(self, directory: Path) -> Any:
        automatic = ("log_code", "log_graph", "auto_param_logging", "auto_metric_logging", "parse_args",
                     "auto_output_logging", "log_env_details", "log_git_metadata", "log_git_patch",
                     "auto_log_co2")  # fmt: skip
        (directory / "comet").mkdir(exist_ok=True)
        return self._comet.ExperimentConfig(
            offline_directory=str(directory / "comet"),
            display_summary_level=0,
            **dict.fromkeys(automatic, False),
        )

    def _log(self, moment: Moment, values: dict[str, float]) -> None:
        self._run.log_metrics(values, step=moment.step, epoch=moment.epoch)

    def _show(self, moment: Moment, name: str, image: "Image") -> None:
        self._run.log_image(image, name=name, step=moment.step)

    def _end(self, ended: Ended) -> None:
        self._run.log_other("status", ended.status)
