"""MLflow: in a database of the run's own, or on a server."""

import os
import re
import shlex
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isoscale.observe.events import Ended, Started
from isoscale.observe.loggers.logger import Logger, Moment, hush, require
from isoscale.system.files import refuse_links_out_of

if TYPE_CHECKING:
    from PIL.Image import Image

_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MOST_PARAMETERS = 100
"""That MLflow takes in one request."""
_LONGEST_VALUE = 6000
"""Of a parameter, in characters; MLflow cuts what is longer."""


class MLflow(Logger):
    """Hands a run on to MLflow: by default to a database in the run's directory, or to a server."""

    name = "mlflow"

    def __init__(self, tracking_uri: str | None = None, experiment: str = "isoscale") -> None:
        """Write to `tracking_uri`, such as http://host:5000; the run becomes one of the experiment's."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        # MLflow's own patience with a server that does not answer is a quarter of an hour.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        self._mlflow = require("mlflow", self.name)
        if tracking_uri is None:
            require("sqlalchemy", self.name)
            require("alembic", self.name)
        hush("mlflow", "alembic")
        self._tracking_uri = tracking_uri
        self._experiment = experiment

    @property
    def destination(self) -> str:
        """The server and the experiment; nothing more for the run's own database, which moves with the run."""
        return f"{self.name} {self._tracking_uri} {self._experiment}" if self._tracking_uri else self.name

    def commands(self, directory: Path) -> list[tuple[str, str]]:
        """How to look at the run's own database."""
        if self._tracking_uri is not None:
            return []
        return [("mlflow", f"mlflow ui --backend-store-uri {shlex.quote(_address(directory))}")]

    def close(self) -> None:
        """Everything is handed over at once, so that nothing is left."""

    def _open(self, started: Started, run_id: str | None) -> str:
        directory = Path(started.directory)
        if self._tracking_uri is None:
            self._create_database(directory / "mlflow" / "mlflow.db")
        self._client = self._mlflow.MlflowClient(self._tracking_uri or _address(directory.resolve()))
        self._id: str = run_id or self._create(started, directory)
        self._client.update_run(self._id, status="RUNNING")
        for label, text in [*started.rows, ("directory", str(directory.resolve()))]:
            self._client.set_tag(self._id, label, text)
        self._set_parameters({key: str(value) for key, value in started.settings.items()})
        self._client.log_artifact(self._id, str(directory / "recipe.yaml"))
        return self._id

    def _create_database(self, path: Path) -> None:
        """MLflow takes seconds to make an empty database, so that one is kept to copy for every run."""
        refuse_links_out_of(path.parent)
        if path.exists():
            return
        path.parent.mkdir(exist_ok=True)
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        empty = cache / "isoscale" / f"mlflow-{self._mlflow.__version__}.db"
        if empty.exists():
            shutil.copyfile(empty, path)
            return
        self._mlflow.MlflowClient(f"sqlite:///{path.resolve()}")
        with suppress(OSError):  # a home that cannot be written costs the seconds again, and nothing else
            empty.parent.mkdir(parents=True, exist_ok=True)
            aside = empty.with_name(f".{empty.name}-{os.getpid()}")
            shutil.copyfile(path, aside)
            aside.replace(empty)

    def _create(self, started: Started, directory: Path) -> str:
        found = self._client.get_experiment_by_name(self._experiment)
        own = None if self._tracking_uri else (directory.resolve() / "mlflow" / "artifacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment, own)
        name = f"{started.name} {directory.name}"
        return str(self._client.create_run(experiment, run_name=name).info.run_id)

    def _set_parameters(self, wanted: dict[str, str]) -> None:
        """A parameter never changes in MLflow: what a continued run changed becomes a tag of that name."""
        known = self._client.get_run(self._id).data.params
        new = [
            self._mlflow.entities.Param(_allowed(key), value)
            for key, value in wanted.items()
            if _allowed(key) not in known
        ]
        for start in range(0, len(new), _MOST_PARAMETERS):
            self._client.log_batch(self._id, params=new[start : start + _MOST_PARAMETERS])
        for key, value in wanted.items():
            if known.get(_allowed(key), value[:_LONGEST_VALUE]) != value[:_LONGEST_VALUE]:
                self._client.set_tag(self._id, key, value)

    def _log(self, moment: Moment, values: dict[str, float]) -> None:
        milliseconds = int(1000 * moment.time)
        metrics: list[Any] = [
            self._mlflow.entities.Metric(_allowed(name), value, milliseconds, moment.step)
            for name, value in {"epoch": float(moment.epoch), **values}.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def _show(self, moment: Moment, name: str, image: "Image") -> None:
        self._client.log_image(self._id, image, key=_allowed(name), step=moment.step)

    def _end(self, ended: Ended) -> None:
        self._client.set_terminated(self._id, _STATUS[ended.status])


def _address(directory: Path) -> str:
    return f"sqlite:///{directory / 'mlflow' / 'mlflow.db'}"


def _allowed(name: str) -> str:
    return re.sub(r"[^\w\-. /:]", "_", name, flags=re.ASCII)
