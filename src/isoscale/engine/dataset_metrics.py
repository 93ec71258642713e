"""A look at all data of a stage together, for metrics that are no means over samples.

An energy that follows from a sum over space is one. The task goes through the data as often as it wants, adds up what
it needs, and gets the same sums on every rank.
"""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from isoscale.data import rng
from isoscale.data.batches import Batch
from isoscale.data.files import sweep
from isoscale.data.formats.hdf5 import allocate, has_attribute
from isoscale.data.sources import Source
from isoscale.engine.lightning.overrides import overrides
from isoscale.engine.splits import Split
from isoscale.engine.step.step import Forward
from isoscale.engine.target_units import TargetUnits
from isoscale.errors import UserError
from isoscale.observe.figures import Figure
from isoscale.parallel.collectives import ALONE, Ranks
from isoscale.parallel.reduction import Reducer
from isoscale.system.files import failures_in_words, sync_file, sync_folder

Sums = list[Tensor]
Asked = Callable[[], bool]


ASIDE = ".predicting-"


def never() -> bool:
    """Nobody interrupts."""
    return False


class Interrupted(Exception):
    """A stop was asked for in the middle of an evaluation, which will be done again."""


class Seen(NamedTuple):
    """Some samples of a shard."""

    shard: int
    samples: Tensor
    """Their places in the source."""
    batch: Batch
    """As they are stored, on the device."""
    output: Any
    """What `predict_step` returned; a tensor is in the units of the stored target."""


@dataclass(frozen=True)
class Occasion:
    """When a dataset is evaluated, and what for; by default, apart from a training, for all that can be known."""

    epoch: int = 0
    """Epochs that were trained."""
    epoch_before: int = 0
    """Epochs that were trained at the evaluation before this one."""
    is_first: bool = False
    """Before the first step."""
    is_last: bool = True
    """After the last one."""
    is_rehearsal: bool = False
    """Only a few samples are shown, to see that it works; all names must be there, their values do not count."""
    is_full: bool = True
    """Whatever can be measured is wanted, and not only what the recipe asks for."""
    shows: bool = True
    """Whether somebody looks at figures."""

    def is_due(self, every: int, before: bool, after: bool) -> bool:
        """Whether to measure now what is measured every so many epochs, before the first step and after the last."""
        if self.is_rehearsal:
            return True
        if self.is_first:
            return before
        return self.epoch // every > self.epoch_before // every or (self.is_last and after)


@dataclass
class EvaluatedDataset:
    """All data of a stage, as a task evaluates it: samples with predictions, sums over ranks, figures in turn."""

    stage: str
    """val, test or predict."""
    note: Callable[[str], None]
    """Tells the user something."""
    forward: Forward
    data: Split
    occasion: Occasion = Occasion()
    make_reducer: Callable[[], Reducer | None] = lambda: None
    interrupted: Asked = never
    figures: dict[str, Figure] = field(default_factory=dict)

    @property
    def source(self) -> Source:
        """All samples of the stage."""
        return self.data.source

    @property
    def device(self) -> torch.device:
        """Where the samples are."""
        return self.forward.context.recorder.buffer.device

    def look(self, steps: Iterable[int] | None = None) -> Iterator[Seen]:
        """This rank's samples with their predictions, in order, or those of some batches; once for every call."""
        forward, split = self.forward, self.data
        forward.context.enter()
        try:
            with torch.no_grad(), rng.use(None):
                for batch_idx in range(split.plan.steps_per_epoch) if steps is None else steps:
                    if self.interrupted():
                        raise Interrupted
                    for shard, parts in enumerate(split.feed.parts(batch_idx)):
                        for part in parts:
                            output = forward(part, batch_idx)
                            if isinstance(output, Tensor):
                                output = forward.context.units.stored(output)
                            yield Seen(shard, part.samples, part.batch, output)
        finally:
            forward.context.leave()

    def add(self, sums: Mapping[int, Sums], like: Callable[[], Sums]) -> Sums:
        """The sums over all shards of all ranks, from this rank's by shard; `like` makes a list of zeros."""
        reducer = self.make_reducer()
        if reducer is None:
            return sums.get(0) or like()
        for shard in sorted(sums):
            reducer.add(shard, sums[shard])
        return reducer.total(like)

    def largest(self, values: Tensor) -> Tensor:
        """The largest of all ranks, element by element."""
        reducer = self.make_reducer()
        if reducer is None or reducer.ranks.alone:
            return values
        return (
            torch.stack(reducer.ranks.all_gather(values.cpu(), "the largest values of all ranks"))
            .amax(0)
            .to(values.device)
        )

    def scaled(self, values: Tensor) -> Tensor:
        """Values in the units of the stored target, in those that the network is trained in."""
        return self.forward.context.units.learned(values)

    def show(self, name: str, figure: Figure) -> None:
        """Let people see something, under the name of the stage."""
        self.figures[name] = figure

    def metrics(self) -> dict[str, float]:
        """What the task measures, by full names; what it shows is in `figures`."""
        found = self.forward.task.evaluate_dataset(self)
        return {f"{self.stage}/{name}": value for name, value in found.items()}

    def shown(self) -> dict[str, Figure]:
        """The figures by full names."""
        return {f"{self.stage}/{name}": figure for name, figure in self.figures.items()}


class Store:
    """Arrays under names: held in memory, or in a folder, where they need no memory while they grow.

    A context: what is in the folder gets its name when all is there, and else is removed. Several ranks share one
    folder, where each writes its planes of files; the first one makes and names them.
    """

    def __init__(self, folder: Path | None = None, ranks: Ranks = ALONE, only: str | None = None) -> None:
        """With a folder, each array is a .npy file there, and single numbers are together in numbers.json.

        `only` is the name of the one file of planes that there may be.
        """
        self.arrays: dict[str, NDArray[Any]] = {}
        self.ranks = ranks
        self.written: list[Path] = []
        """Files of planes, once all is there."""
        self._folder, self._only = folder, only
        self._aside: Path | None = None
        self._planes: dict[str, PlaneFile] = {}

    def __enter__(self) -> "Store":
        if self._folder is None:
            return self
        if self.ranks.is_main:
            sweep(self._folder, ASIDE)
            with failures_in_words(self._folder):
                self._aside = Path(tempfile.mkdtemp(prefix=ASIDE, dir=self._folder))
        self._aside = Path(self.ranks.broadcast(str(self._aside), "the folder of predictions"))
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._planes.values():
            file.close()
        if self._aside is not None and self.ranks.is_main:
            shutil.rmtree(self._aside, ignore_errors=True)

    def new(self, name: str, shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
        """An array to be filled."""
        if self._folder is None or self._aside is None:
            self.arrays[name] = np.empty(shape, dtype)
        else:
            path = self._aside / f"{name}.npy"
            with failures_in_words(self._folder / f"{name}.npy"):
                path.parent.mkdir(parents=True, exist_ok=True)
                self.arrays[name] = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), tuple(shape))
                _reserve(path)
        return self.arrays[name]

    def put(self, name: str, values: Any) -> None:
        """An array, or a number, as it is."""
        found = np.asarray(values)
        if self._folder is None or not found.ndim:
            self.arrays[name] = found
        else:
            self.new(name, found.shape, found.dtype)[...] = found

    def planes(
        self, name: str, dataset: str, shape: Sequence[int], dtype: DTypeLike, attributes: Mapping[str, Any],
        of_dataset: Mapping[str, Any], mark: str,
    ) -> "PlaneArray | PlaneFile":  # fmt: skip
        """A dataset (fields, planes, …) of an HDF5 file of its own, which all ranks together write plane by plane.

        It has the shape and the attributes that rank 0 says. A file in its place is replaced if it has the attribute
        `mark`, and else refused.
        """
        if self._folder is None or self._aside is None:
            self.arrays[name] = np.empty(shape, dtype)
            return PlaneArray(self.arrays[name])
        if self._only is not None and self._planes:
            raise UserError(
                f"--out {self._folder / self._only} is one file, and there are several boxes: name a folder"
            )
        where = self._only or f"{name}.h5"
        aside, final, offset = self._aside / where, self._folder / where, 0
        if self.ranks.is_main:
            if final.exists() and not has_attribute(final, mark):
                raise UserError(f"{final} is there already, and no prediction: choose another folder, or remove it")
            with failures_in_words(final):
                aside.parent.mkdir(parents=True, exist_ok=True)
                offset = allocate(aside, dataset, shape, dtype, attributes, of_dataset)
                _reserve(aside)
        shape, offset = self.ranks.broadcast((list(shape), offset), "the file of predictions")
        self._planes[where] = PlaneFile(aside, final, tuple(shape), np.dtype(dtype), offset)
        return self._planes[where]

    def finish(self) -> dict[str, Tensor]:
        """Everything, once it is all there."""
        numbers = {name: array.item() for name, array in self.arrays.items() if not array.ndim}
        for array in self.arrays.values():
            if isinstance(array, np.memmap):
                array.flush()
        for file in self._planes.values():
            file.close()
        self.ranks.any(False, "the planes of all ranks")
        if self._folder is not None and self._aside is not None and self.ranks.is_main:
            with failures_in_words(self._folder):
                if numbers:
                    (self._aside / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n")
                _name_files(self._aside, self._folder)
        self.ranks.any(False, "the names of files")
        self.written = [file.final for file in self._planes.values()]
        mapped = {where.removesuffix(".h5"): file.mapped() for where, file in self._planes.items()}
        return {name: torch.from_numpy(array) for name, array in {**self.arrays, **mapped}.items()}


@dataclass(frozen=True)
class PlaneArray:
    """Planes in memory."""

    array: NDArray[Any]

    def write(self, first: int, planes: NDArray[Any]) -> None:
        """Planes (fields, planes, …) from `first` on."""
        self.array[:, first : first + planes.shape[1]] = planes


class PlaneFile:
    """Planes of a dataset that lies in a file as it is: each rank writes its own, at their place among the bytes.

    Written and not mapped: where a network has the file, a mapped page at a border belongs to two ranks, one of which
    would overwrite what the other wrote; and a full disk is an error, and not the end of the process.
    """

    def __init__(self, path: Path, final: Path, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> None:
        """The dataset begins at the byte `offset` of `path`, which will be called `final`."""
        self.final = final
        self._shape, self._dtype, self._offset = shape, dtype, offset
        with failures_in_words(final):
            self._file = path.open("r+b", buffering=0)

    def write(self, first: int, planes: NDArray[Any]) -> None:
        """Planes (fields, planes, …) from `first` on."""
        per_plane = math.prod(self._shape[2:]) * self._dtype.itemsize
        with failures_in_words(self.final):
            for field, values in enumerate(planes):
                self._file.seek(self._offset + (field * self._shape[1] + first) * per_plane)
                left = np.ascontiguousarray(values, self._dtype).data.cast("B")
                while left:
                    left = left[self._file.write(left) :]

    def close(self) -> None:
        """Bring what was written to the disk, where other ranks find it."""
        if not self._file.closed:
            with failures_in_words(self.final):
                os.fsync(self._file.fileno())
                self._file.close()

    def mapped(self) -> NDArray[Any]:
        """All planes, read as they are looked at; changes stay in memory."""
        return np.memmap(self.final, self._dtype, "c", self._offset, self._shape)


def _name_files(aside: Path, folder: Path) -> None:
    """Bring files to the disk, and then to where they belong."""
    written = sorted(path for path in aside.rglob("*") if path.is_file())
    for path in written:
        sync_file(path)
    for path in written:
        final = folder / path.relative_to(aside)
        final.parent.mkdir(parents=True, exist_ok=True)
        path.replace(final)
        sync_folder(final.parent)


def _reserve(path: Path) -> None:
    """Take the room on the disk now: a mapped file that finds none later ends the process without a word."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def stored(task: Any, transforms: Sequence[Any], values: Any) -> Any:
    """A prediction in the units of the stored targets, where these are scaled for training."""
    return TargetUnits(task, transforms).stored(values) if isinstance(values, Tensor) else values


def evaluates_dataset(task: Any) -> bool:
    """Whether a task has metrics of all data together."""
    return overrides(task, "evaluate_dataset")


def writes_predictions(task: Any) -> bool:
    """Whether a task has its own way to write predictions."""
    return overrides(task, "write_predictions")
