"""What the loggers of other programs have in common: every value once, pictures, and how the run ended."""

import importlib
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

from isoscale.errors import UserError
from isoscale.observe.events import Ended, EpochEnded, Event, FiguresMade, Logged, LoggedByTask, Started
from isoscale.observe.figures import Drawable, Histogram, Network
from isoscale.system.files import refuse_link, write_aside

if TYPE_CHECKING:
    from PIL.Image import Image


_LOCK = Lock()
"""Several loggers, each in a thread of its own, write the same file."""


class Ledger:
    """What one destination knows of a run: a continued run sends nothing twice."""

    def __init__(self, directory: Path, destination: str) -> None:
        """Read what is known of `destination` in the run's directory."""
        self._path = directory / "loggers.json"
        self._destination = destination
        entry = _read(self._path).get(destination, {})
        self.run_id: str | None = entry.get("id")
        self._steps: dict[str, int] = entry.get("steps", {})

    def opened(self, run_id: str) -> None:
        """Remember the run that was opened there."""
        self.run_id = run_id
        self._write()

    def unsent(self, step: int, names: Iterable[str]) -> list[str]:
        """The names that were not sent for this step or a later one; what is logged again is the same again."""
        return [name for name in names if step > self._steps.get(name, -1)]

    def sent(self, step: int, names: Iterable[str]) -> None:
        """Remember what has arrived."""
        self._steps |= dict.fromkeys(names, step)
        self._write()

    def _write(self) -> None:
        with _LOCK:
            entries = {**_read(self._path), self._destination: {"id": self.run_id, "steps": self._steps}}
            write_aside(self._path, json.dumps(entries, indent=1), synced=False)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}; remove it, and the run is sent as a new one") from None


SECONDS_BETWEEN_PICTURES = 30.0
"""Drawing takes about a second, and takes it from the training; of what is shown in between, the newest is drawn."""


@dataclass(frozen=True)
class Replayed(Logged):
    """Values that were logged earlier, at `time` (seconds since 1970)."""

    time: float = 0.0


@dataclass(frozen=True)
class Moment:
    """When values were logged."""

    step: int
    epoch: int
    time: float
    """Seconds since 1970."""


class Logger(ABC):
    """An observer that hands a run on to another program; its parts say how that program is spoken to."""

    name: ClassVar[str]
    """The short name in recipes, and the extra that brings the package."""

    def notify(self, event: Event) -> None:
        """Hand on what the other program has a place for."""
        match event:
            case Started():
                self._start(event)
            case Logged() | LoggedByTask() | EpochEnded():
                when = event.time if isinstance(event, Replayed) else time.time()
                self._log_unsent(Moment(event.step, event.epoch, when), event.values)
            case FiguresMade():
                self._figures(event)
            case Ended():
                self._finish(event)

    @property
    @abstractmethod
    def destination(self) -> str:
        """Where the run goes to; a run that comes back to the same place goes on there."""

    @abstractmethod
    def commands(self, directory: Path) -> list[tuple[str, str]]:
        """What to type to see or to send what was written: purpose and command."""

    @abstractmethod
    def close(self) -> None:
        """Hand over what is left."""

    @abstractmethod
    def _open(self, started: Started, run_id: str | None) -> str:
        """Begin a run there, or go on with the one called `run_id`; tell settings and recipe, and return its id."""

    @abstractmethod
    def _log(self, moment: Moment, values: dict[str, float]) -> None:
        """Hand on values."""

    @abstractmethod
    def _show(self, moment: Moment, name: str, image: "Image") -> None:
        """Hand on a picture."""

    @abstractmethod
    def _end(self, ended: Ended) -> None:
        """Say how the run ended."""

    def _start(self, started: Started) -> None:
        for folder in (self.name, f".{self.name}"):  # where the library writes
            refuse_link(Path(started.directory, folder))
        self._ledger = Ledger(Path(started.directory), self.destination)
        self._ledger.opened(self._open(started, self._ledger.run_id))
        self._epoch = 0
        self._waiting: dict[str, tuple[Moment, Drawable]] = {}
        self._next_pictures = 0.0

    def _log_unsent(self, moment: Moment, values: dict[str, float]) -> None:
        self._epoch = moment.epoch
        names = self._ledger.unsent(moment.step, values)
        if names:
            self._log(moment, {name: float(values[name]) for name in names})
            self._ledger.sent(moment.step, names)

    def _figures(self, event: FiguresMade) -> None:
        moment = Moment(event.step, event.epoch, time.time())
        drawable = {name: shown for name, shown in event.figures.items() if not isinstance(shown, Histogram | Network)}
        self._waiting |= {name: (moment, shown) for name, shown in drawable.items()}
        if time.monotonic() >= self._next_pictures:
            self._draw_waiting()

    def _draw_waiting(self) -> None:
        from PIL import Image

        from isoscale.observe.drawing import draw
        from isoscale.observe.style import png

        for name, (moment, shown) in self._waiting.items():
            if self._ledger.unsent(moment.step, [name]):
                self._show(moment, name, Image.open(BytesIO(png(draw(name, shown)))))
                self._ledger.sent(moment.step, [name])
        self._waiting.clear()
        self._next_pictures = time.monotonic() + SECONDS_BETWEEN_PICTURES

    def _finish(self, ended: Ended) -> None:
        self._draw_waiting()
        self._log_unsent(Moment(ended.step, self._epoch, time.time()), dict(ended.values))
        self._end(ended)


def require(package: str, extra: str) -> Any:
    """Import the package of a logger, or say which extra brings it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(
            f"the logger {extra} needs the package {package}, which cannot be imported ({error}); "
            f"install it with: pip install 'isoscale[{extra}]'"
        ) from None


def hush(*names: str) -> None:
    """Let packages that talk a lot speak of errors only."""
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
