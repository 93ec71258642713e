"""RUN/loggers.json: which run of a logger belongs to this run, and what it was sent already."""

import json
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Any

from isoscale.system.files import write_aside

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
