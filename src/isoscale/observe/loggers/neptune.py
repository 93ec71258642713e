"""Neptune: into files in the run's directory, or online."""

import math
import os
import shlex
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoscale.observe.events import Ended, Started
from isoscale.observe.loggers.logger import Logger, Moment, hush, require

if TYPE_CHECKING:
    from PIL.Image import Image


class Neptune(Logger):
    """Hands a run on to Neptune: by default into files in the run's directory, to be synchronised later.

    Neptune's files hold no id of one's own, so that each start of a run whose files are synchronised becomes a run
    there; online, and through `isoscale runs send`, all starts are one.
    """

    name = "neptune"

    def __init__(self, project: str | None = None, mode: Literal["offline", "online"] = "offline") -> None:
        """Write to a project, `workspace/name`; online needs the variable NEPTUNE_API_TOKEN."""
        self._neptune = require("neptune", self.name)
        hush("neptune")
        self._project = project
        self._mode = mode
        self._run: Any = None

    @property
    def destination(self) -> str:
        """The project; files are a place of their own, because nobody knows whether they were sent."""
        return " ".join(filter(None, [self.name, self._mode, self._project]))

    def commands(self, directory: Path) -> list[tuple[str, str]]:
        """How to send the files."""
        if self._mode == "online":
            return []
        project = f" --project {shlex.quote(self._project)}" if self._project else ""
        return [("neptune", f"neptune sync --path {shlex.quote(str(directory))}{project}")]

    def close(self) -> None:
        """Write or send what is left."""
        if self._run is not None:
            self._run.stop()

    def _open(self, started: Started, run_id: str | None) -> str:
        from neptune.utils import stringify_unsupported

        directory = Path(started.directory)
        run_id = run_id or uuid.uuid4().hex
        os.environ["NEPTUNE_DATA_DIRECTORY"] = str(directory / ".neptune")  # there is no argument for it
        captures = ("capture_stdout", "capture_stderr", "capture_hardware_metrics", "capture_traceback", "git_ref")
        self._run = self._neptune.init_run(
            project=self._project,
            mode="offline" if self._mode == "offline" else "async",
            custom_run_id=run_id,
            name=directory.name,
            source_files=[],
            **dict.fromkeys(captures, False),
        )
        about = {**dict(started.rows), "recipe": started.name, "directory": str(directory.resolve())}
        self._run["about"] = about
        self._run["settings"] = stringify_unsupported(dict(started.settings))
        self._run["recipe"].upload(str(directory / "recipe.yaml"))
        return run_id

    def _log(self, moment: Moment, values: dict[str, float]) -> None:
        for name, value in {"epoch": moment.epoch, **values}.items():
            if math.isfinite(value):  # Neptune has no place for others
                self._run[name].append(value, step=moment.step, timestamp=moment.time)

    def _show(self, moment: Moment, name: str, image: "Image") -> None:
        self._run[f"{name}_picture"].append(self._neptune.types.File.as_image(image), step=moment.step)

    def _end(self, ended: Ended) -> None:
        self._run["status"] = ended.status
