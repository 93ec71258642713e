"""What people look at of a trained potential: errors by system, predictions against labels, and files."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoscale.data.files import short_names
from isoscale.data.sources import Source
from isoscale.engine.dataset_metrics import EvaluatedDataset, Seen, Store
from isoscale.observe.figures import Parity
from isoscale.science.atoms.parity import NUM_BINS, Counts, counted, error_sums, measures, words
from isoscale.science.potentials.model import Prediction
from isoscale.science.potentials.statistics import systems_of
from isoscale.science.potentials.systems import LABELS

OF_ATOMS = ("force", "atom_energy")
PER_ATOM = ("energy", "virial")
"""Labels whose errors are shown divided by the number of atoms."""
MEV = 1000.0
"""In an eV."""


def in_stored_order(found: Prediction, places: Tensor) -> dict[str, Tensor]:
    """A prediction by name, with atoms where the stored frame has them; what is no atom there is 0."""
    return _stored(found._asdict(), places)


def _stored(values: Mapping[str, Tensor], places: Tensor) -> dict[str, Tensor]:
    """Atoms (frames, places, …) moved to `places` (frames, places), of which -1 are none."""
    width = max(places.shape[1], int(places.max()) + 1)
    # those that are none go to a place past the end, which is cut off
    index = torch.where(places < 0, width, places).long()
    found = dict(values)
    for name in OF_ATOMS:
        if name in values:
            own = values[name]
            empty = own.new_zeros(len(own), width + 1, *own.shape[2:])
            where = index.view(*index.shape, *[1] * (own.dim() - 2)).expand_as(own)
            found[name] = empty.scatter(1, where, own)[:, :width]
    return found


def evaluate_dataset(dataset: EvaluatedDataset) -> dict[str, float]:
    """Errors of all frames and of each system, and pictures where somebody looks."""
    occasion = dataset.occasion
    if not occasion.is_full and not occasion.shows:
        return {}
    looked = _Looked(dataset)
    if occasion.shows:
        looked.show()
    return looked.errors() if occasion.is_full else {}


def write_predictions(dataset: EvaluatedDataset, store: Store) -> None:
    """Write energies, forces and virials, under the name of each system and with atoms as they are stored."""
    systems = Systems(dataset.source)
    tables = [_tables(store, name, system) for name, system in zip(systems.names, systems.sources, strict=True)]
    for seen in dataset.look():
        numbers, frames = systems.whose(seen.samples.cpu())
        for place, (number, frame) in enumerate(zip(numbers.tolist(), frames.tolist(), strict=True)):
            for name, table in tables[number].items():
                row = seen.output[name][place].cpu().numpy()
                table[frame] = row[: table.shape[1]] if name in OF_ATOMS else row


def _tables(store: Store, name: str, system: Any) -> dict[str, Any]:
    """Arrays for all frames of a system; what is never predicted stays without a value."""
    frames, atoms = len(system), system.num_atoms
    shapes = {
        "energy": (frames,), "force": (frames, atoms, 3), "virial": (frames, 3, 3), "atom_energy": (frames, atoms)
    }  # fmt: skip
    tables = {label: store.new(f"{name}.{label}", shape, np.float64) for label, shape in shapes.items()}
    for table in tables.values():
        table[...] = np.nan
    return tables


class Systems:
    """The systems of a source, and which of them a frame belongs to."""

    def __init__(self, source: Source) -> None:
        """Frames are numbered one system after the other, also where batches mix them."""
        self.sources: list[Any] = systems_of(source)
        self.names = short_names([each.name for each in self.sources])
        self._starts = torch.tensor([0, *np.cumsum([len(each) for each in self.sources])])

    def counts(self) -> dict[str, int]:
        """Frames of each, by name."""
        return {name: len(each) for name, each in zip(self.names, self.sources, strict=True)}

    def whose(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """The number of each frame's system, and the number of the frame there."""
        numbers = torch.searchsorted(self._starts, samples, right=True) - 1
        return numbers, samples - self._starts[numbers]


class _Looked:
    """All frames of a dataset, looked at once."""

    def __init__(self, dataset: EvaluatedDataset) -> None:
        self._dataset, self._systems = dataset, Systems(dataset.source)
        self._forces = Counts(dataset.device)
        sums: dict[int, list[Tensor]] = {}
        for seen in dataset.look():
            found = sums.setdefault(seen.shard, self._zeros())
            self._add(seen, *found)
        sizes = dataset.largest(self._forces.size.view(1))
        self._forces.grow_to(int(sizes[0]))
        for found in sums.values():
            found[-1].zero_()
        if sums:
            next(iter(sums.values()))[-1].copy_(self._forces.counts)
        self._errors, energies, counts = dataset.add(sums, self._zeros)
        self._energies = energies[:, energies[2] > 0]
        self._forces.counts = counts

    def _zeros(self) -> list[Tensor]:
        """Sums of errors (systems, labels, 3), energies (3, frames), and counts of forces."""
        shapes = (len(self._systems.sources), len(LABELS), 3), (3, len(self._dataset.source)), (NUM_BINS, NUM_BINS)
        return [torch.zeros(shape, dtype=torch.float64, device=self._dataset.device) for shape in shapes]

    def _add(self, seen: Seen, errors: Tensor, energies: Tensor, counts: Tensor) -> None:
        true = _stored({label: seen.batch[label] for label in LABELS if label in seen.batch}, seen.batch["places"])
        is_atom = _stored({"atom_energy": (seen.batch["places"] >= 0).double()}, seen.batch["places"])["atom_energy"]
        num_atoms = is_atom.sum(1)
        numbers = self._systems.whose(seen.samples.cpu())[0].to(is_atom.device)
        for place, label in enumerate(LABELS):
            if label in true:
                has = seen.batch.get(f"has_{label}", torch.ones_like(num_atoms)).double()
                apart = _apart(label, seen.output[label], true[label], num_atoms) * has.unsqueeze(1)
                count = has * (num_atoms if label in OF_ATOMS else 1) * {"force": 3, "virial": 9}.get(label, 1)
                errors[:, place].index_add_(0, numbers, error_sums(apart, count))
        if "energy" in true:
            has = seen.batch.get("has_energy", torch.ones_like(num_atoms)).double()
            rows = torch.stack([true["energy"].double() / num_atoms, seen.output["energy"] / num_atoms, has])
            energies[:, seen.samples.to(energies.device)] = rows
        if "force" in true:
            has = seen.batch.get("has_force", torch.ones_like(num_atoms)).double()
            real = (is_atom * has.unsqueeze(1)).bool()
            self._forces.add(true["force"][real].double(), seen.output["force"][real].double())

    def errors(self) -> dict[str, float]:
        """Errors in every label, learned or not; and where there are several systems, those and the frames of each."""
        found: dict[str, float] = {}
        parts = list(zip(self._systems.names, self._errors, strict=True))
        for name, errors in [*(parts if len(parts) > 1 else []), ("", self._errors.sum(0))]:
            end = f"/{name}" if name else ""
            for label, sums in zip(LABELS, errors, strict=True):
                if sums[2] > 0:
                    found[f"{label}_rmse{end}"], found[f"{label}_mae{end}"] = measures(sums)
        if len(parts) > 1:
            counts = self._systems.counts()
            found |= {"frames": sum(counts.values()), **{f"frames/{name}": count for name, count in counts.items()}}
        return found

    def show(self) -> None:
        """Energies and forces against their labels."""
        energies, forces = self._errors.sum(0)[:2]
        if energies[2] > 0:
            middle = float(self._energies[0].mean())
            apart = MEV * (self._energies[:2] - middle)
            what = f"energy above {middle:.3f} eV/atom (meV/atom)"
            self._dataset.show("energy_parity", Parity(*counted(apart), what, words(energies, MEV)))
        if forces[2] > 0:
            self._dataset.show("force_parity", Parity(*self._forces.cut(), "force (eV/Å)", words(forces)))


def _apart(label: str, predicted: Tensor, true: Tensor, num_atoms: Tensor) -> Tensor:
    """Errors (frames, entries) as people see them."""
    apart = (predicted.double() - true.double()).reshape(len(true), -1)
    return apart / num_atoms.unsqueeze(1) if label in PER_ATOM else apart
