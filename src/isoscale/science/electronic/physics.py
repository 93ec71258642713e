"""Physical errors of a predicted local density of states, snapshot by snapshot."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from isoscale.engine.dataset_metrics import EvaluatedDataset, Seen
from isoscale.errors import UserError
from isoscale.science.electronic.integrals import EnergyGrid
from isoscale.science.electronic.snapshot_source import SnapshotSource
from isoscale.science.electronic.states import Filling, fill
from isoscale.science.electronic.systems import Systems, calculation_of

METRICS = {
    "band_energy": "meV/atom",
    "band_energy_true_fermi": "meV/atom",
    "fermi_energy": "meV",
    "entropy": "meV/atom",
    "electrons": "electrons",
    "dos": "1/(eV atom)",
    "dos_relative": "%",
    "density": "1/Å³",
    "density_relative": "%",
    "ldos": "1/(eV Å³)²",
    "ldos_mae": "1/(eV Å³)",
    "ldos_scaled": "scaled²",
}
"""What can be measured, and in which units."""
NEED_NO_CALCULATION = ("ldos", "ldos_mae", "ldos_scaled")
NEED_DENSITY = ("density", "density_relative")
NUM_BINS = 160
MEV = 1000.0
PERCENT = 100.0


@dataclass(frozen=True)
class Levels:
    """The states of all systems, as they are and as they were predicted."""

    true: Filling
    predicted: Filling
    at_true_fermi: Filling
    """The predicted states, filled up to the true Fermi level."""


class Histogram(NamedTuple):
    """How many points of how many energies were predicted how."""

    counts: Tensor
    """(true, predicted)."""
    low: float
    high: float


def check_calculations(source: SnapshotSource, metrics: Sequence[str]) -> None:
    """Name the snapshot whose calculation a metric needs and nobody gives, before training starts."""
    needed = [metric for metric in metrics if metric not in NEED_NO_CALCULATION]
    for snapshot in source.snapshots if needed else ():
        if snapshot.calculation is None:
            raise UserError(
                f"{needed[0]} needs the calculation of snapshot {snapshot.name}: put {snapshot.name}.info.json, or the "
                f"output of Quantum ESPRESSO as {snapshot.name}.out, beside {snapshot.input}"
            )


class Measurement:
    """The physics of a stage's snapshots: every metric that there is, and those of the density where asked for."""

    def __init__(self, dataset: EvaluatedDataset, grid: EnergyGrid, clamp: bool, metrics: Sequence[str]) -> None:
        """Look at all samples once, and once more where the density or a picture of all points needs it."""
        assert isinstance(dataset.source, SnapshotSource)
        self.grid, self.snapshots = grid, dataset.source.snapshots
        self._looks = looks = _Looks(dataset, dataset.source, grid, clamp)
        sums = looks.sums()
        self.is_whole = sums.num_points == looks.column([each.num_rows for each in self.snapshots])
        points = sums.num_points * grid.size
        self._found = {
            "ldos": sums.square / points, "ldos_mae": sums.absolute / points, "ldos_scaled": sums.scaled / points,
        }  # fmt: skip
        self._knowable = {name: sums.num_points > 0 for name in self._found}
        self.systems: Systems | None = None
        if any(calculation_of(each) is not None for each in self.snapshots):
            self.systems = Systems(self.snapshots, grid, dataset.device)
            self._fill(self.systems, sums)
        needs_density = self.systems is not None and not set(NEED_DENSITY).isdisjoint(metrics)
        self.histogram: Histogram | None = None
        if needs_density or dataset.occasion.shows:
            self._look_again(dataset.occasion.shows)

    def named(self, metric: str) -> list[tuple[str, float]]:
        """A metric of all snapshots together, and of each.

        The first is the mean of the absolute errors of those snapshots whose data allow to know it. It is NaN where a
        prediction leaves one of them unknown: a network that fails there would look better than one that does not.
        """
        values = self._found.get(metric, torch.full((len(self.snapshots),), torch.nan))
        mean = float(values[self._knowable[metric]].abs().mean()) if metric in self._found else torch.nan
        each = zip(self.snapshots, values.tolist(), strict=True)
        return [(metric, mean), *((f"{metric}/{snapshot.name}", value) for snapshot, value in each)]

    def _fill(self, systems: Systems, sums: "_Sums") -> None:
        true, predicted = (systems.filled(each[systems.numbers]) for each in (sums.true, sums.predicted))
        self.levels = levels = Levels(true, predicted, fill(predicted.dos, true.fermi, systems.quadrature))
        whole = self.is_whole[systems.numbers]
        apart = (predicted.dos - true.dos).abs().sum(1)
        self._keep(whole, {
            "dos": apart / self.grid.size / systems.num_atoms,
            "dos_relative": PERCENT * apart / true.dos.abs().sum(1),
        })  # fmt: skip
        self._keep(whole & ~true.fermi.isnan(), {
            "band_energy": MEV * (predicted.band_energy - true.band_energy) / systems.num_atoms,
            "band_energy_true_fermi": MEV * (levels.at_true_fermi.band_energy - true.band_energy) / systems.num_atoms,
            "fermi_energy": MEV * (predicted.fermi - true.fermi),
            "entropy": MEV * (predicted.entropy - true.entropy) / systems.num_atoms,
            "electrons": levels.at_true_fermi.num_electrons - systems.num_electrons,
        })  # fmt: skip

    def _keep(self, knowable: Tensor, found: dict[str, Tensor]) -> None:
        """Errors of the systems as errors of the snapshots."""
        assert self.systems is not None
        numbers, everywhere = self.systems.numbers, torch.zeros_like(self.is_whole)
        everywhere[numbers] = knowable
        for name, values in found.items():
            self._knowable[name] = everywhere
            self._found[name] = torch.full_like(everywhere, torch.nan, dtype=torch.float64)
            self._found[name][numbers] = torch.where(knowable, values, torch.nan)

    def _look_again(self, counts: bool) -> None:
        """The density, which is known once the Fermi levels are, and the picture, once its range is."""
        systems = self.systems
        weights = [each.weights.electrons for each in (self.levels.predicted, self.levels.true)] if systems else []
        apart, self.histogram = self._looks.again([self._everywhere(each) for each in weights], counts)
        if systems is None:
            return
        apart = apart[systems.numbers]
        points = self._looks.column([self.snapshots[number].num_rows for number in systems.numbers])
        unknown = torch.where(self.levels.predicted.fermi.isnan(), torch.nan, 0.0)
        self._keep(self.is_whole[systems.numbers] & ~self.levels.true.fermi.isnan(), {
            "density": apart / points + unknown,
            "density_relative": PERCENT * apart * systems.voxels / systems.num_electrons + unknown,
        })  # fmt: skip

    def _everywhere(self, weights: Tensor) -> Tensor:
        """Weights of systems as weights of snapshots; 0 where they are not known."""
        assert self.systems is not None
        found = weights.new_zeros(len(self.snapshots), self.grid.size)
        found[self.systems.numbers] = weights.nan_to_num(0.0)
        return found

    def notes(self) -> list[str]:
        """What could not be measured, and why."""
        names = [each.name for each, whole in zip(self.snapshots, self.is_whole.tolist(), strict=True) if not whole]
        said = [f"only a part of {', '.join(names)} is looked at, so that no energies follow from it"] if names else []
        said += [each.obstacle for each in self.snapshots if each.obstacle]
        unknown = [each.name for each in self.snapshots if each.known is None]
        if unknown:
            said.append(f"there is no file with the calculation of {', '.join(unknown)}: only ldos errors are measured")
        if self.systems is not None:
            whole = self.is_whole[self.systems.numbers]
            fillings = {"true": self.levels.true, "predicted": self.levels.predicted}
            unfilled = [self.systems.unfilled(filling, whose, whole) for whose, filling in fillings.items()]
            said += [f"{words}. What follows from a Fermi level is left out here" for words in unfilled if words]
        return said


class _Sums(NamedTuple):
    """Over the points of every snapshot, as they add up over ranks."""

    predicted: Tensor
    """(snapshots, energies), as `true`."""
    true: Tensor
    square: Tensor
    """(snapshots,), as all that follow; over energies too."""
    absolute: Tensor
    scaled: Tensor
    """The squared error in the units that the network is trained in."""
    num_points: Tensor


class _Points(NamedTuple):
    """Some points, with the snapshots that they belong to."""

    seen: Seen
    numbers: Tensor
    which: Tensor
    """(snapshots, points): 1 where a point belongs to a snapshot."""
    predicted: Tensor
    true: Tensor


class _Looks:
    """Goes through all points of a dataset, and adds up."""

    def __init__(self, dataset: EvaluatedDataset, source: SnapshotSource, grid: EnergyGrid, clamp: bool) -> None:
        self._dataset, self._source, self._grid, self._clamp = dataset, source, grid, clamp
        self._num = len(source.snapshots)
        self._largest = self.column([-torch.inf, -torch.inf])
        """Of the negative and of the plain values: minus the smallest, and the largest."""

    def column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._dataset.device)

    def sums(self) -> _Sums:
        matrix, column = (self._num, self._grid.size), (self._num,)
        return _Sums(*self._added(self._sum, [matrix, matrix, column, column, column, column]))

    def _sum(self, points: _Points) -> list[Tensor]:
        apart = points.predicted - points.true
        scaled = self._dataset.scaled(points.seen.output) - self._dataset.scaled(points.seen.batch["target"])
        if self._dataset.occasion.shows:
            both = torch.stack([points.predicted, points.true])
            self._largest = torch.maximum(self._largest, torch.stack([-both.amin(), both.amax()]))
        per_point = [apart.square().sum(1), apart.abs().sum(1), scaled.double().square().sum(1)]
        which = points.which
        return [which @ points.predicted, which @ points.true, *(which @ each for each in per_point), which.sum(1)]

    def again(self, weights: Sequence[Tensor], counts: bool) -> tuple[Tensor, Histogram | None]:
        """How far apart the densities are that weights of predicted and of true states give; and a histogram."""
        low, high = (-self._dataset.largest(self._largest) * self.column([1, -1])).tolist() if counts else (0.0, 0.0)
        step = max(high - low, torch.finfo(torch.float64).tiny) / NUM_BINS

        def look(points: _Points) -> list[Tensor]:
            found = [points.which @ self._densities_apart(points, weights)]
            return [*found, _counted(points, low, step)] if counts else found

        apart, *rest = self._added(look, [(self._num,), *([(NUM_BINS**2,)] if counts else [])])
        return apart, Histogram(rest[0].view(NUM_BINS, NUM_BINS), low, high) if rest else None

    def _densities_apart(self, points: _Points, weights: Sequence[Tensor]) -> Tensor:
        if not weights:
            return torch.zeros_like(points.which[0])
        predicted, true = (each[points.numbers] for each in weights)
        return (points.predicted * predicted - points.true * true).sum(1).abs()

    def _added(self, look: Callable[[_Points], list[Tensor]], shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        sums: dict[int, list[Tensor]] = {}
        for points in self._points():
            found, before = look(points), sums.get(points.seen.shard)
            if before is None:
                sums[points.seen.shard] = found
            else:
                torch._foreach_add_(before, found)
        zeros = [torch.zeros(shape, dtype=torch.float64, device=self._dataset.device) for shape in shapes]
        return self._dataset.add(sums, lambda: zeros)

    def _points(self) -> Iterator[_Points]:
        for seen in self._dataset.look():
            predicted, true = seen.output.double(), seen.batch["target"].double()
            numbers = self._source.snapshot_of(seen.samples.to(predicted.device))
            which = torch.nn.functional.one_hot(numbers, self._num).T.double()
            yield _Points(seen, numbers, which, predicted.clamp(min=0) if self._clamp else predicted, true)


def _counted(points: _Points, low: float, step: float) -> Tensor:
    """How many of the points' values are in each bin; whole numbers, which add up to the same in any order."""
    true, predicted = (((each - low) / step).long().clamp(0, NUM_BINS - 1) for each in (points.true, points.predicted))
    return torch.bincount((true * NUM_BINS + predicted).flatten(), minlength=NUM_BINS**2).double()
