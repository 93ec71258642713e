"""metrics.jsonl: every logged value of a run, one JSON object per line."""

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any, BinaryIO

from isoscale.errors import UserError
from isoscale.observe.events import EpochEnded, Event, Logged, LoggedByTask
from isoscale.system.files import failures_in_words, open_own


class MetricLog:
    """Appends every value to `path`; a continued run first cuts off what its checkpoint does not know."""

    def __init__(self, path: str | os.PathLike[str], start_bytes: int | None = None) -> None:
        """Go on after the first `start_bytes` bytes, or after the last whole line when that is None."""
        self._path = Path(path)
        with failures_in_words(self._path):
            if start_bytes is not None:
                _check_length(self._path, start_bytes)
            self._file: BinaryIO = open_own(self._path, "a+b")
            os.ftruncate(self._file.fileno(), _whole_lines(self._path) if start_bytes is None else start_bytes)

    def notify(self, event: Event) -> None:
        """Write the values of the event, if it has any, and hand them to the operating system."""
        if isinstance(event, Logged | LoggedByTask | EpochEnded):
            with failures_in_words(self._path):
                self._file.write(_lines(event, round(time.time(), 3)))
                self._file.flush()

    def position(self) -> int:
        """The length in bytes of what was handed to the operating system."""
        with failures_in_words(self._path):
            self._file.flush()
            return os.fstat(self._file.fileno()).st_size

    def copy_to(self, path: Path) -> None:
        """Write all of it to another file; it need not have a name any more."""
        with failures_in_words(path), path.open("wb") as file:
            self._file.seek(0)
            shutil.copyfileobj(self._file, file)
            file.flush()
            os.fsync(file.fileno())

    def is_at(self, path: Path) -> bool:
        """Whether a file of that name is the one that is written."""
        return path.exists() and os.path.samestat(path.stat(), os.fstat(self._file.fileno()))

    def sync(self) -> None:
        """Bring all that was handed to the operating system to the disk; may be called from any thread."""
        with failures_in_words(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write what is left and close the file."""
        with failures_in_words(self._path):
            self._file.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All values in the order written; empty when nothing was logged yet, without a torn last line."""
    path = Path(path)
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_parsed(line))
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            # The writer was killed in the middle of the last line; a continued run logs that value again.
            if number < len(lines):
                raise UserError(
                    f"{path}, line {number}: expected a logged value such as "
                    f'{{"step": 50, "epoch": 0, "name": "train/loss", "value": 0.51}}, found {line[:80]!r}'
                ) from error
    return rows


def last_values(path: str | os.PathLike[str]) -> dict[str, float]:
    """The newest value of every name."""
    return {row["name"]: row["value"] for row in read_metrics(path)}


def history(path: str | os.PathLike[str], name: str) -> list[tuple[int, float]]:
    """Step and value of everything logged as `name`."""
    return [(row["step"], row["value"]) for row in read_metrics(path) if row["name"] == name]


def _lines(event: Logged | LoggedByTask | EpochEnded, now: float) -> bytes:
    rows = (_row(event, name, float(value), now) for name, value in event.values.items())
    return "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()


def _row(event: Logged | LoggedByTask | EpochEnded, name: str, value: float, now: float) -> dict[str, Any]:
    row = {"step": event.step, "epoch": event.epoch, "name": name, "value": value, "time": now}
    # JSON has no word for values that are not finite.
    return row if math.isfinite(value) else {**row, "value": None, "text": str(value)}


def _parsed(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    text = row.pop("text", None)
    value = float(row["value"] if text is None else text)
    when = {key: kind(row[key]) for key, kind in (("epoch", int), ("time", float)) if row.get(key) is not None}
    return {**row, **when, "step": int(row["step"]), "name": str(row["name"]), "value": value}


def _whole_lines(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1


def _check_length(path: Path, num_bytes: int) -> None:
    size = path.lstat().st_size if path.exists() else 0
    if size < num_bytes and not path.is_symlink():
        raise UserError(
            f"{path} has {size} bytes, but the checkpoint was written when it had {num_bytes}: values that were "
            f"logged are missing. Restore the file from a copy, or start a new run."
        )
