"""Physical errors of a predicted local density of states, snapshot by snapshot."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isoscale.engine.survey import Seen, Survey
from isoscale.errors import UserError
from isoscale.science.electronic.calculation import Calculation
from isoscale.science.electronic.integrals import EnergyGrid, Quadrature
from isoscale.science.electronic.snapshots import SnapshotSource
from isoscale.science.electronic.states import Filling, fill, fill_with

METRICS = (
    "band_energy", "band_energy_true_fermi", "fermi_energy", "dos", "dos_relative", "density", "density_relative",
    "ldos",
)  # fmt: skip
"""In meV/atom: band energies; in meV: the Fermi level; relative errors are in percent."""
NEED_CALCULATION = frozenset(METRICS) - {"ldos"}
NEED_DENSITY = frozenset({"density", "density_relative"})
MEV = 1000.0
PERCENT = 100.0


@dataclass(frozen=True)
class Levels:
    """The states of all snapshots, as they are and as they were predicted."""

    true: Filling
    predicted: Filling
    at_true_fermi: Filling
    """The predicted states, filled up to the true Fermi level."""


def check_calculations(source: SnapshotSource, metrics: Sequence[str]) -> None:
    """Name the snapshot whose calculation a metric needs and nobody gives, before training starts."""
    needed = [metric for metric in metrics if metric in NEED_CALCULATION]
    for snapshot in source.snapshots if needed else ():
        if snapshot.calculation is None:
            raise UserError(
                f"{needed[0]} needs the calculation of snapshot {snapshot.name}: put {snapshot.name}.info.json, or the "
                f"output of Quantum ESPRESSO as {snapshot.name}.out, beside {snapshot.input}"
            )


class Measurement:
    """One look at the physics of a stage's snapshots."""

    def __init__(self, survey: Survey, grid: EnergyGrid, clamp: bool) -> None:
        assert isinstance(survey.source, SnapshotSource)
        self._survey, self._source, self._grid, self._clamp = survey, survey.source, grid, clamp
        self._num = len(self._source.snapshots)

    def errors(self, metrics: Sequence[str]) -> dict[str, Tensor]:
        """Each metric of every snapshot: (snapshots,), NaN where it cannot be known."""
        predicted, true, square, count = self._sums()
        found = {"ldos": square / count / self._grid.size}
        if not NEED_CALCULATION.isdisjoint(metrics):
            complete = count.round().long().cpu() == torch.tensor([each.num_rows for each in self._source.snapshots])
            found |= self._energies(predicted, true, complete, metrics)
        return {name: found[name] for name in metrics}

    def _sums(self) -> list[Tensor]:
        """Of every snapshot: the predicted and the true density of states over all points, the squared error, points."""
        sums: dict[int, list[Tensor]] = {}
        for seen, which, predicted, true in self._look():
            found = [
                which @ predicted, which @ true, which @ (predicted - true).square().sum(1), which.sum(1),
            ]  # fmt: skip
            before = sums.get(seen.shard)
            sums[seen.shard] = found if before is None else [a + b for a, b in zip(before, found, strict=True)]
        return self._survey.add(sums, self._zeros)

    def _zeros(self) -> list[Tensor]:
        shapes = ((self._num, self._grid.size),) * 2 + ((self._num,),) * 2
        return [torch.zeros(shape, dtype=torch.float64, device=self._survey.device) for shape in shapes]

    def _look(self) -> Iterator[tuple[Seen, Tensor, Tensor, Tensor]]:
        """Samples with the snapshots that they belong to (snapshots, samples), and both densities of states."""
        for seen in self._survey.look():
            predicted, true = seen.output.double(), seen.batch["target"].double()
            numbers = self._source.snapshot_of(seen.samples.to(predicted.device))
            which = torch.nn.functional.one_hot(numbers, self._num).T.double()
            yield seen, which, predicted.clamp(min=0) if self._clamp else predicted, true

    def _energies(self, predicted: Tensor, true: Tensor, complete: Tensor, metrics: Sequence[str]) -> dict[str, Tensor]:
        calculations = [each.calculation for each in self._source.snapshots]
        assert all(each is not None for each in calculations)
        known: list[Calculation] = [each for each in calculations if each is not None]
        atoms = self._column(each.num_atoms for each in known)
        electrons = self._column(each.num_electrons for each in known)
        voxels = self._column(
            each.volume / snapshot.num_rows for each, snapshot in zip(known, self._source.snapshots, strict=True)
        )
        levels = self._levels(predicted * voxels[:, None], true * voxels[:, None], electrons, known)
        if not self._survey.is_rehearsal:
            self._tell_unfilled(levels, electrons, known, complete)
        missing = torch.where(complete.to(atoms.device), 0.0, torch.nan)
        apart = (levels.predicted.dos - levels.true.dos).abs().sum(1)
        found = {
            "band_energy": MEV * (levels.predicted.band_energy - levels.true.band_energy) / atoms,
            "band_energy_true_fermi": MEV * (levels.at_true_fermi.band_energy - levels.true.band_energy) / atoms,
            "fermi_energy": MEV * (levels.predicted.fermi - levels.true.fermi),
            "dos": apart / self._grid.size / atoms,
            "dos_relative": PERCENT * apart / levels.true.dos.abs().sum(1),
        }
        if not NEED_DENSITY.isdisjoint(metrics):
            found |= self._densities(levels, voxels, electrons)
        return {name: values + missing for name, values in found.items()}

    def _column(self, values: Iterable[float]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.float64, device=self._survey.device)

    def _levels(self, predicted: Tensor, true: Tensor, electrons: Tensor, known: Sequence[Calculation]) -> Levels:
        quadrature = Quadrature(self._grid, [each.temperature for each in known], self._survey.device)
        of_truth = fill_with(true, electrons, quadrature)
        return Levels(
            of_truth, fill_with(predicted, electrons, quadrature), fill(predicted, of_truth.fermi, quadrature)
        )

    def _tell_unfilled(
        self, levels: Levels, electrons: Tensor, known: Sequence[Calculation], complete: Tensor
    ) -> None:
        """Say which states cannot be filled, and how many electrons the energy grid holds of them."""
        top = self._column([self._grid.offset + self._grid.spacing * (self._grid.size - 1)] * self._num)
        quadrature = Quadrature(self._grid, [each.temperature for each in known], self._survey.device)
        for words, filling in (("true", levels.true), ("predicted", levels.predicted)):
            held = fill(filling.dos, top, quadrature).num_electrons
            for number in (filling.fermi.isnan().cpu() & complete).nonzero().flatten().tolist():
                self._survey.note(
                    f"the {words} states of {self._source.snapshots[number].name} have no Fermi level on the energy "
                    f"grid: up to {top[number].item():g} eV they hold {held[number].item():.6g} electrons, of "
                    f"{electrons[number].item():g}"
                )

    def _densities(self, levels: Levels, voxels: Tensor, electrons: Tensor) -> dict[str, Tensor]:
        """The error of the electron density, which is known once the Fermi levels are: a second look."""
        sums: dict[int, list[Tensor]] = {}
        for seen, which, predicted, true in self._look():
            density = (predicted * (which.T @ levels.predicted.weights.electrons)).sum(1)
            expected = (true * (which.T @ levels.true.weights.electrons)).sum(1)
            found = [which @ (density - expected).abs()]
            before = sums.get(seen.shard)
            sums[seen.shard] = found if before is None else [before[0] + found[0]]
        (apart,) = self._survey.add(sums, lambda: [self._column([0.0] * self._num)])
        rows = self._column(each.num_rows for each in self._source.snapshots)
        return {"density": apart / rows, "density_relative": PERCENT * apart * voxels / electrons}
