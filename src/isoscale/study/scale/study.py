"""How much faster training gets on more ranks: what is asked, what was measured, and what follows from it."""

import json
import shutil
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

from isoscale.data.mixture import AUTO_SIZE
from isoscale.data.shards import check_world
from isoscale.errors import UserError
from isoscale.parallel.reduction import check_shards, tree_shards
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.schema import Recipe
from isoscale.recipe.seal import is_sealed, seal
from isoscale.runs.directory import ROOT, RunDirectory, command_line, provenance
from isoscale.system.files import failures_in_words, write_aside

Mode = Literal["strong", "weak"]


@dataclass(frozen=True)
class Question:
    """What a study is about."""

    mode: Mode
    ranks: list[int]
    """In increasing order."""
    repeats: int
    steps: int | None
    """Steps of each measurement; None for as many as fill some seconds."""


@dataclass(frozen=True)
class Measurement:
    """The steady steps of one training on a number of ranks."""

    ranks: int
    repeat: int
    """From 1 on."""
    batch_size: int
    """Of the whole batch, the largest where batches differ."""
    steps: int
    samples: int
    """That these steps saw, on all ranks together."""
    seconds: list[float]
    """Of each rank."""
    startup: list[float] | None
    """Of each rank: seconds from the start of its process to its first step; None where the system does not say."""
    warmup: float
    """Seconds from the first step to the first that counts."""
    hosts: list[str]
    """Of each rank."""
    device: str
    decided: dict[str, Any]
    """What was `auto`: device, threads, precision, program, reduction …"""
    measured: str
    """When."""

    @property
    def seconds_per_100(self) -> float:
        """Seconds for 100 samples, on the slowest rank."""
        return 100 * max(self.seconds) / self.samples


@dataclass(frozen=True)
class Row:
    """All measurements of a number of ranks, in a line of the table."""

    ranks: int
    num_hosts: int
    batch_size: int
    num_repeats: int
    seconds_per_100: float
    """The median."""
    fastest: float
    slowest: float
    startup: float | None
    """Seconds to the first step, of the slowest rank; the median."""
    speedup: float | None
    """Against the smallest number of ranks; None where that was not measured."""
    efficiency: float | None

    @property
    def samples_per_second(self) -> float:
        """The rate at the median."""
        return 100 / self.seconds_per_100


@dataclass(frozen=True)
class Study:
    """A question about scaling, and the answers so far: scale.json."""

    path: Path
    name: str
    mode: Mode
    ranks: list[int]
    repeats: int
    steps: int | None
    """Steps of each measurement; None for as many as fill some seconds."""
    threads: int | None
    """Threads of each rank on this machine; None where a job or the recipe decides."""
    record: dict[str, Any]
    """Versions, host, hardware, command."""
    job: dict[str, Any] | None = None
    """What was asked of the scheduler, and the number of the last job; None on this machine."""
    measurements: list[Measurement] = field(default_factory=list)
    is_own: bool = True
    """Whether it was written by this user."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """The study in a directory."""
        file = path / "scale.json"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            sealed = values.pop("seal", "")
            return replace(cls.from_dict(path, values), is_own=is_sealed(json.dumps(values), sealed))
        except FileNotFoundError:
            raise UserError(
                f"there is no {file}; `isoscale scale RECIPE --ranks 1,2,4` begins a study, and says where it is"
            ) from None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{file} is damaged: {error}") from None

    def write(self) -> None:
        """Put scale.json in its directory."""
        values = self.as_dict()
        sealed = {**values, "seal": seal(json.dumps(values))}
        with failures_in_words(self.path / "scale.json"):
            write_aside(self.path / "scale.json", json.dumps(sealed, indent=1))

    def as_dict(self) -> dict[str, Any]:
        """What scale.json holds."""
        return {key: value for key, value in asdict(self).items() if key not in ("path", "is_own")}

    @classmethod
    def from_dict(cls, path: Path, values: dict[str, Any]) -> Self:
        """The study in a directory whose scale.json holds this."""
        return cls(path=path, **{**values, "measurements": [Measurement(**entry) for entry in values["measurements"]]})

    def remove(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self.path, ignore_errors=True)

    def with_measurement(self, found: Measurement) -> Self:
        """The study with one more answer."""
        return replace(self, measurements=[*self.measurements, found])

    @property
    def recipe(self) -> Path:
        """The resolved recipe that is measured."""
        return self.path / "recipe.yaml"

    @cached_property
    def missing(self) -> list[tuple[int, int]]:
        """(repeat, ranks) not measured yet; rank counts take turns, so that a busy machine harms all alike."""
        there = {(found.repeat, found.ranks) for found in self.measurements}
        wanted = [(repeat, ranks) for repeat in range(1, self.repeats + 1) for ranks in self.ranks]
        return [pair for pair in wanted if pair not in there]

    def rows(self) -> list[Row]:
        """A line for each number of ranks that was measured."""
        measured = {ranks: [found for found in self.measurements if found.ranks == ranks] for ranks in self.ranks}
        base = measured[self.ranks[0]]
        return [_row(found, base) for found in measured.values() if found]


def _row(measured: Sequence[Measurement], base: Sequence[Measurement]) -> Row:
    times = [found.seconds_per_100 for found in measured]
    startups = [max(found.startup) for found in measured if found.startup]
    first = measured[0]
    speedup = _median(base) / _median(measured) if base else None
    return Row(
        ranks=first.ranks,
        num_hosts=max(len(set(found.hosts)) for found in measured),
        batch_size=first.batch_size,
        num_repeats=len(measured),
        seconds_per_100=_median(measured),
        fastest=min(times),
        slowest=max(times),
        startup=statistics.median(startups) if startups else None,
        speedup=speedup,
        efficiency=speedup * base[0].ranks / first.ranks if speedup is not None else None,
    )


def _median(measured: Sequence[Measurement]) -> float:
    return statistics.median(found.seconds_per_100 for found in measured)


def begin(loaded: LoadedRecipe, question: Question, where: Path | None, threads: int | None = None) -> Study:
    """A study that was not begun before, in a directory of its own."""
    if where is not None and where.exists() and (not where.is_dir() or any(where.iterdir())):
        raise UserError(f"{where} is there and holds no study; choose another directory with --run DIR")
    directory = RunDirectory(where) if where is not None else RunDirectory.fresh(f"{loaded.name}-scale")
    directory.create(loaded.to_yaml())
    study = planned(loaded, question, directory.path, threads)
    study.write()
    return study


def planned(loaded: LoadedRecipe, question: Question, where: Path | None, threads: int | None = None) -> Study:
    """A study of which nothing is written yet."""
    path = where or ROOT / f"{loaded.name.replace('/', '-')}-scale"
    return Study(path, loaded.name, **vars(question), threads=threads, record=provenance(command_line()))


def check(recipe: Recipe, question: Question) -> None:
    """Refuse numbers of ranks that the recipe cannot run on, before anything starts."""
    section = recipe.parallel
    num_shards = tree_shards(section.reduce, section.shards)
    check_shards(num_shards)
    for count in question.ranks:
        if section.reduce == "tree":
            check_world(count, num_shards)
        global_batch(recipe, question.mode, count)


def times(batch: int | list[int] | str, number: int) -> int | list[int] | str:
    """A batch so many times; `auto` becomes `auto:32x4`."""
    if isinstance(batch, str):
        least, _, factor = batch.partition("x")
        least = least if ":" in least else f"{least}:{AUTO_SIZE}"
        return f"{least}x{int(factor or 1) * number}"
    return batch * number if isinstance(batch, int) else [size * number for size in batch]


def global_batch(recipe: Recipe, mode: Mode, num_ranks: int) -> int | list[int] | str:
    """`data.batch_size` on so many ranks."""
    batch = recipe.data.batch_size
    if mode == "weak":
        return times(batch, num_ranks)
    smallest = batch if isinstance(batch, int) else min(batch) if isinstance(batch, list) else None
    if smallest is not None and smallest < num_ranks:
        raise UserError(
            f"a batch of {smallest} samples does not reach {num_ranks} ranks; use fewer ranks, a larger "
            f"data.batch_size, or --weak, which gives {smallest} samples to every rank"
        )
    return batch


def lines(study: Study, first: int) -> list[str]:
    """The measurements from one on, a line each."""
    total = study.repeats * len(study.ranks)
    return [
        f"{number} of {total}: {found.ranks} rank{'s' * (found.ranks > 1)}, {found.steps:,} steps, "
        f"{100 / found.seconds_per_100:,.0f} samples/s"
        for number, found in enumerate(study.measurements[first:], start=first + 1)
    ]
