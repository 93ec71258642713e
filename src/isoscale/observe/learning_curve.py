"""The learning curve as a table of plain text, such as lcurve.out: what people plot while a run goes on."""

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from isoscale.observe.events import EpochEnded, Event, Logged
from isoscale.system.files import failures_in_words, open_own

WIDTH = 11
SHORT_STAGES = {"val": "val", "train": "trn"}
TOTAL = "rmse"
"""A column of this name shows the root of the loss, which is a weighted sum of squares."""
REMARK = "# If there is no available reference data, rmse_*_{val,trn} will print nan"


class LearningCurve:
    """Writes a row at the first step, every `every` steps and after every evaluation.

    It says in columns what metrics.jsonl says in lines: a continued run writes it anew from there.
    """

    def __init__(
        self, path: str | os.PathLike[str], every: int, columns: Mapping[str, str], validated: bool,
        history: Iterable[Mapping[str, Any]] = (),
    ) -> None:  # fmt: skip
        """`columns` names the metric of each column, `{"rmse_f": "force_rmse"}`; empty: one for each of the first row.

        `validated` says whether there are values on validation data, and `history` is what was logged before.
        """
        self._every = every
        self._columns = dict(columns)
        self._stages = ("val", "train") if validated else ("train",)
        self._step = self._written = 0
        self._values: dict[str, float] = {}
        self._path = Path(path)
        with failures_in_words(self._path):
            self._file: BinaryIO = open_own(self._path, "wb")
            for row in history:
                self._take(row["step"], {row["name"]: row["value"]})
            self._write_if_complete()

    def notify(self, event: Event) -> None:
        """Write the row of a step as soon as all is known of it."""
        if isinstance(event, Logged | EpochEnded):
            self._take(event.step, event.values)
            self._write_if_complete()

    def close(self) -> None:
        """Write what is left and close the file."""
        self._write()
        self._file.close()

    def _take(self, step: int, values: Mapping[str, float]) -> None:
        if step != self._step:
            self._write()
            self._step = step
        self._values.update(values)

    def _write_if_complete(self) -> None:
        if self._is_evaluated or "val" not in self._stages:
            self._write()
        self._file.flush()

    @property
    def _is_evaluated(self) -> bool:
        return any(name.startswith("val/") for name in self._values)

    def _write(self) -> None:
        """The row of the present step, if it has one."""
        due = self._step == 1 or self._step % self._every == 0 or self._is_evaluated
        if due and self._values and self._step > self._written:
            if not self._written:
                self._begin()
            self._file.write(self._row().encode())
            self._written = self._step
        self._values = {}

    def _begin(self) -> None:
        """The head of the table; where nobody has named columns, one for each metric of the first row."""
        remark = f"{REMARK}\n" if self._columns else ""
        self._columns = self._columns or {metric: metric for metric in _metrics(self._values)}
        titles = self._line(lambda title, stage: f"{title}_{SHORT_STAGES[stage]}")
        self._file.write(f"{'# step':<7}{titles}   {'lr':<8}\n{remark}".encode())

    def _row(self) -> str:
        cells = self._line(lambda title, stage: f"{self._value(title, stage):.2e}")
        return f"{self._step:7d}{cells}   {self._values.get('lr', math.nan):8.1e}\n"

    def _value(self, title: str, stage: str) -> float:
        value = self._values.get(f"{stage}/{self._columns[title]}", math.nan)
        return math.sqrt(value) if title == TOTAL and value >= 0 else value

    def _line(self, cell: Callable[[str, str], str]) -> str:
        """A cell for each stage of each column, right-aligned."""
        groups = [
            " ".join(cell(title, stage).rjust(_width(title)) for stage in self._stages) for title in self._columns
        ]
        return "".join(f"   {group}" for group in groups)


def _width(title: str) -> int:
    return max(WIDTH, len(title) + len("_val"))


def _metrics(values: Mapping[str, float]) -> list[str]:
    """The metrics of training and validation, each once, the loss first, without means over epochs."""
    names = (name.partition("/") for name in values if not name.endswith("_epoch"))
    found = dict.fromkeys(metric for stage, _, metric in names if stage in SHORT_STAGES)
    return sorted(found, key=lambda name: name != "loss")
