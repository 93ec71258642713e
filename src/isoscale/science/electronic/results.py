"""What is written of predictions: the local density of states on its grid, and what follows from it."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoscale.engine.dataset_metrics import EvaluatedDataset, Store
from isoscale.science.electronic.integrals import EnergyGrid
from isoscale.science.electronic.snapshot_source import Snapshot, SnapshotSource
from isoscale.science.electronic.states import Filling
from isoscale.science.electronic.systems import Systems, calculation_of

ROWS_AT_ONCE = 1 << 16


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
                rows = seen.samples.cpu()[own.cpu()] - self._first_row(number)
                tables[number][rows.numpy()] = predicted[own].float().cpu().numpy()
                sums[number] += predicted[own].double().sum(0)
        return sums

    def _first_row(self, number: int) -> int:
        return int(self._source.ends[number]) - self._source.snapshots[number].num_rows

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
