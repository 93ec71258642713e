"""Results: what is written of predictions, and pictures of the physics beside the truth."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoscale.engine.dataset_metrics import EvaluatedDataset, Store
from isoscale.observe.figures import Curves, Parity, ParityPoints
from isoscale.science.electronic.integrals import EnergyGrid
from isoscale.science.electronic.physics import Measurement
from isoscale.science.electronic.snapshot_source import Snapshot, SnapshotSource
from isoscale.science.electronic.states import Filling
from isoscale.science.electronic.systems import Systems, calculation_of

ROWS_AT_ONCE = 1 << 16
MOST_SNAPSHOTS = 4
"""Whose states are drawn during a training, where each figure costs time; afterwards all are."""
LDOS = "LDOS (1/(eV Å³))"


class Results:
    """The predictions of all snapshots of a dataset; the true states, which may not exist, are not looked at."""

    def __init__(self, dataset: EvaluatedDataset, grid: EnergyGrid, clamp: bool) -> None:
        """With `clamp`, nothing is below zero."""
        assert isinstance(dataset.source, SnapshotSource)
        self._dataset, self._source, self._grid, self._clamp = dataset, dataset.source, grid, clamp

    def write(self, store: Store) -> None:
        """All of it: what needs no calculation of every snapshot, the rest of those that have one."""
        snapshots = self._source.snapshots
        store.put("energies", self._grid.energies().numpy())
        tables = [self._table(snapshot, store) for snapshot in snapshots]
        sums = self._fill(tables)
        if all(calculation_of(each) is None for each in snapshots):
            self._dataset.note("no snapshot has a calculation beside it: only the LDOS is written")
            return
        systems = Systems(snapshots, self._grid, self._dataset.device)
        filling = systems.filled(sums[systems.numbers])
        for place, number in enumerate(systems.numbers):
            self._write_states(store, snapshots[number], filling, place, tables[number])
        unfilled = systems.unfilled(filling, "predicted", torch.ones_like(filling.fermi, dtype=torch.bool))
        if unfilled:
            self._dataset.note(f"{unfilled}. What follows from a Fermi level is not written")

    def _table(self, snapshot: Snapshot, store: Store) -> NDArray[np.float32]:
        """One row a point, to be filled, of an array that has the shape of the grid."""
        whole = store.new(f"{snapshot.name}.ldos", (*snapshot.grid, self._grid.size), np.float32)
        return whole.reshape(-1, self._grid.size)

    def _fill(self, tables: list[NDArray[np.float32]]) -> Tensor:
        """Write predictions as they come; returns their sums over the points of each snapshot."""
        sums = torch.zeros(len(tables), self._grid.size, dtype=torch.float64, device=self._dataset.device)
        for seen in self._dataset.look():
            predicted = seen.output.clamp(min=0) if self._clamp else seen.output
            numbers = self._source.snapshot_of(seen.samples)
            for number in numbers.unique().tolist():
                own = (numbers == number).to(predicted.device)
                first = int(self._source.ends[number]) - self._source.snapshots[number].num_rows
                rows = seen.samples.cpu()[own.cpu()] - first
                tables[number][rows.numpy()] = predicted[own].float().cpu().numpy()
                sums[number] += predicted[own].double().sum(0)
        return sums

    def _write_states(
        self, store: Store, snapshot: Snapshot, filling: Filling, place: int, table: NDArray[np.float32]
    ) -> None:
        store.put(f"{snapshot.name}.dos", filling.dos[place].cpu().numpy())
        if math.isnan(filling.fermi[place].item()):
            return
        density = store.new(f"{snapshot.name}.density", snapshot.grid, np.float64).reshape(-1)
        weights = filling.weights.electrons[place].cpu().numpy()
        for start in range(0, len(table), ROWS_AT_ONCE):
            density[start : start + ROWS_AT_ONCE] = table[start : start + ROWS_AT_ONCE] @ weights
        values = {
            "fermi_energy": filling.fermi, "band_energy": filling.band_energy, "entropy": filling.entropy,
            "electrons": filling.num_electrons,
        }  # fmt: skip
        for name, value in values.items():
            store.put(f"{snapshot.name}.{name}", value[place].item())


def show(measurement: Measurement, dataset: EvaluatedDataset) -> None:
    """Show all that there is, where somebody looks."""
    if not dataset.occasion.shows:
        return
    _show_parity(measurement, dataset)
    if measurement.systems is not None:
        _show_energies(measurement, dataset)
        _show_states(measurement, dataset)


def _show_parity(measurement: Measurement, dataset: EvaluatedDataset) -> None:
    found = measurement.histogram
    if found is not None and found.high > found.low:
        absolute, square = (dict(measurement.named(name))[name] for name in ("ldos_mae", "ldos"))
        words = [f"mean absolute error {absolute:.3g}", f"root mean square error {np.sqrt(square):.3g}"]
        dataset.show("ldos_parity", Parity(found.counts.cpu().numpy(), found.low, found.high, LDOS, words))


def _show_energies(measurement: Measurement, dataset: EvaluatedDataset) -> None:
    """The band energies of those snapshots that have them, where they are several."""
    systems, levels = measurement.systems, measurement.levels
    assert systems is not None
    true, predicted = (each.band_energy / systems.num_atoms for each in (levels.true, levels.predicted))
    whole = measurement.is_whole[systems.numbers] & ~true.isnan() & ~predicted.isnan()
    names = [name for name, is_there in zip(systems.names, whole.tolist(), strict=True) if is_there]
    if len(names) > 1:
        found = [each[whole].cpu().numpy() for each in (true, predicted)]
        dataset.show("band_energy_parity", ParityPoints(names, found[0], found[1], "band energy (eV/atom)"))


def _show_states(measurement: Measurement, dataset: EvaluatedDataset) -> None:
    systems, levels = measurement.systems, measurement.levels
    assert systems is not None
    energies = measurement.grid.energies().numpy()
    whole = measurement.is_whole[systems.numbers].tolist()
    shown = [number for number, is_there in enumerate(whole) if is_there]
    for number in shown if dataset.occasion.is_full else shown[:MOST_SNAPSHOTS]:
        fillings = {"true": levels.true, "predicted": levels.predicted}
        values = {name: filling.dos[number].cpu().numpy() for name, filling in fillings.items()}
        marks = {name: mark for name, filling in fillings.items() if (mark := _fermi_level(filling, number))}
        name = systems.names[number]
        dataset.show(f"dos/{name}", Curves(energies, values, "energy (eV)", "density of states (1/eV)", marks))


def _fermi_level(filling: Filling, number: int) -> tuple[str, float] | None:
    fermi = filling.fermi[number].item()
    return None if np.isnan(fermi) else (f"Fermi level {fermi:.3f} eV", fermi)
