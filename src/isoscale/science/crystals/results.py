"""What people look at of a trained network: errors by element, size and system, predictions in pictures and files."""

from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from isoscale.data.sources import Subset
from isoscale.engine.dataset_metrics import EvaluatedDataset, Seen, Store
from isoscale.observe.figures import Matrix, Parity
from isoscale.science.atoms.parity import NUM_BINS, Counts, counted, error_sums, measures, words
from isoscale.science.crystals.labels import Labels
from isoscale.science.crystals.reading.elements import SYMBOLS
from isoscale.science.crystals.targets import KNOWN, NUM_ELEMENTS, Learned, learned

MEV = 1000.0
"""In an eV."""
OF_ATOMS = frozenset(("forces", "energies"))
"""What is predicted of atoms, whatever is learned."""
NUM_SIZES = 32
"""Bins of sizes: from one power of two to the next."""
MOST_SYSTEMS = 200
"""Systems with errors of their own: of more, nobody reads them."""


def units(targets: Sequence[Learned]) -> dict[str, str]:
    """Of errors by name, of what is learned and of what follows from energies."""
    every = {target.name: target.unit for target in (*_known(), *targets)}
    return {f"{name}_{error}": unit for name, unit in every.items() if unit for error in ("mae", "rmse")}


def _known() -> list[Learned]:
    return learned(list(KNOWN), "mse", 1.0)


class _Atoms(NamedTuple):
    """Which atoms of a batch belong to which structure, without padding."""

    is_atom: Tensor
    structure: Tensor
    """Of each real atom."""
    num_atoms: Tensor
    """Of each structure."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> "_Atoms":
        """Of a batch."""
        num_structures = len(batch["cell"])
        is_atom = batch["batch"] < num_structures
        structure = batch["batch"][is_atom]
        return cls(is_atom, structure, torch.bincount(structure, minlength=num_structures))


def evaluate_dataset(dataset: EvaluatedDataset, targets: Sequence[Learned]) -> dict[str, float]:
    """Errors of all structures, and of parts of them; and pictures where somebody looks."""
    occasion = dataset.occasion
    if not occasion.is_full and not occasion.shows:
        return {}
    looked = _Looked(dataset, targets)
    if occasion.shows:
        looked.show()
    return looked.errors() if occasion.is_full else {}


class Groups:
    """Parts of the data that have errors of their own: elements, sizes and systems, numbered one after the other."""

    def __init__(self, labels: Labels) -> None:
        """Systems are those that the source names."""
        names = names_of(labels.source)
        systems = list(dict.fromkeys(names))
        self.systems = systems if len(systems) <= MOST_SYSTEMS else []
        self.left_out = len(systems) - len(self.systems)
        """Systems, where there are too many to list."""
        numbers = {name: number for number, name in enumerate(self.systems)}
        self._system_of = torch.tensor([numbers[name] for name in names] if self.systems else [], dtype=torch.int64)
        self.count = 1 + NUM_ELEMENTS + NUM_SIZES + len(self.systems)

    def of_structures(self, num_atoms: Tensor, samples: Tensor) -> list[Tensor]:
        """The groups of each structure: all, its size, its system."""
        sizes = (num_atoms.clamp(min=1).double().log2().ceil()).long().clamp(max=NUM_SIZES - 1)
        found = [torch.zeros_like(sizes), 1 + NUM_ELEMENTS + sizes]
        if self.systems:
            own = self._system_of[samples.cpu()].to(sizes.device)
            found.append(1 + NUM_ELEMENTS + NUM_SIZES + own)
        return found

    def of_elements(self, z: Tensor) -> Tensor:
        """The group of each atom's element."""
        return 1 + z

    def names(self, counts: Tensor) -> dict[int, str]:
        """What groups that have `counts` of anything are called; parts that are all there is are left out."""
        found: dict[int, str] = {}
        starts = {"elements": 1, "sizes": 1 + NUM_ELEMENTS, "systems": 1 + NUM_ELEMENTS + NUM_SIZES}
        stops = {"elements": starts["sizes"], "sizes": starts["systems"], "systems": self.count}
        for kind, start in starts.items():
            there = [number for number in range(start, stops[kind]) if counts[number] > 0]
            for number in there if len(there) > 1 else ():
                found[number] = self._name(kind, number - start)
        return found

    def _name(self, kind: str, number: int) -> str:
        if kind == "elements":
            return f"{SYMBOLS[number]} atoms"
        if kind == "systems":
            return self.systems[number] or "without a name"
        if number == 0:
            return "1 atom"
        low, high = 2 ** (number - 1) + 1, 2**number
        return f"{high} atoms" if low == high else f"{low}-{high} atoms"


def names_of(source: Any) -> list[str]:
    """The system that each structure of a source belongs to; empty where it does not say, or all are of one."""
    names = _named(source)
    return names if len(set(names)) > 1 else []


def _named(source: Any) -> list[str]:
    if isinstance(source, Subset):
        names = _named(source.source)
        return [names[index] for index in source.indices.tolist()] if names else []
    return list(getattr(source, "names", None) or ())


class _Looked:
    """All structures of a dataset, looked at once."""

    def __init__(self, dataset: EvaluatedDataset, targets: Sequence[Learned]) -> None:
        self._dataset = dataset
        labels = Labels(dataset.source)
        own = {target.name for target in targets}
        known = [each for each in _known() if each.name not in own] if own & KNOWN.keys() else []
        self._targets = [target for target in (*targets, *known) if target.name in labels]
        self._groups = Groups(labels)
        if self._groups.left_out and dataset.occasion.is_full:
            dataset.note(f"errors by system are left out: there are {self._groups.left_out:,} systems")
        self._counts = {target.name: Counts(dataset.device) for target in self._targets if _around_zero(target)}
        sums: dict[int, list[Tensor]] = {}
        for seen in dataset.look():
            self._add(seen, *sums.setdefault(seen.shard, self._zeros()))
        self._merge(sums)
        self._errors, self._rows, *confusions = dataset.add(sums, self._zeros)
        self._confusions = dict(zip(self._of_kind("classes"), confusions, strict=False))
        for name, counts in zip(self._counts, confusions[len(self._confusions) :], strict=True):
            self._counts[name].counts = counts

    def _of_kind(self, kind: str) -> list[str]:
        return [target.name for target in self._targets if target.kind == kind]

    def _zeros(self) -> list[Tensor]:
        """Sums of errors (targets, groups, 3), values (targets, 3, structures), matrices of classes, and counts."""
        count = len(self._targets)
        classes = [(target.classes, target.classes) for target in self._targets if target.kind == "classes"]
        pictures = [(NUM_BINS, NUM_BINS)] * len(self._counts)
        shapes = [(count, self._groups.count, 3), (count, 3, len(self._dataset.source)), *classes, *pictures]
        return [torch.zeros(shape, dtype=torch.float64, device=self._dataset.device) for shape in shapes]

    def _merge(self, sums: Mapping[int, list[Tensor]]) -> None:
        """Bring what this rank counted for pictures to the range of all ranks, and into one of its sums."""
        if not self._counts:
            return
        sizes = self._dataset.largest(torch.stack([counts.size for counts in self._counts.values()]))
        first = next(iter(sums.values()), None)
        for place, (counts, size) in enumerate(zip(self._counts.values(), sizes.tolist(), strict=True)):
            counts.grow_to(int(size))
            if first is not None:
                first[place - len(self._counts)].copy_(counts.counts)

    def _add(self, seen: Seen, errors: Tensor, values: Tensor, *others: Tensor) -> None:
        layout, batch = _Atoms.of(seen.batch), seen.batch
        of_structures = self._groups.of_structures(layout.num_atoms, seen.samples)
        of_element = self._groups.of_elements(batch["z"][layout.is_atom])
        confusions = dict(zip(self._of_kind("classes"), others, strict=False))
        for place, target in enumerate(self._targets):
            true, found = batch[target.name], seen.output.get(target.name)
            if found is None:
                continue
            has = batch.get(f"has_{target.name}")
            has = torch.ones_like(layout.num_atoms, dtype=torch.float64) if has is None else has.double()
            groups = of_structures
            if target.of == "atom":
                true, found, has = true[layout.is_atom], found[layout.is_atom], has[layout.structure]
                groups = [*(each[layout.structure] for each in of_structures), of_element]
            if target.kind == "classes":
                right = (found == true.flatten()).double().unsqueeze(1) * has.unsqueeze(1)
                sums = error_sums(right, has)
                cells = true.flatten().long() * target.classes + found
                confusions[target.name].view(-1).index_add_(0, cells, has)
            else:
                true, found = (each.double().reshape(len(each), -1) for each in (true, found))
                if target.kind == "energy":
                    true, found = (each / layout.num_atoms.unsqueeze(1) for each in (true, found))
                counted = (has > 0).unsqueeze(1)
                sums = error_sums(torch.where(counted, found - true, 0.0) * target.shown, has * true.shape[1])
                if target.name in self._counts:
                    real = counted.flatten()
                    self._counts[target.name].add(true[real] * target.shown, found[real] * target.shown)
                elif true.shape[1] == 1:
                    rows = torch.stack([true[:, 0], found[:, 0], has])
                    values[place][:, seen.samples.to(values.device)] = rows
            for group in groups:
                errors[place].index_add_(0, group, sums)

    def errors(self) -> dict[str, float]:
        """Errors of all structures together, and where there are several elements, sizes or systems, of each."""
        found: dict[str, float] = {}
        parts = self._groups.names(self._errors[:, :, 2].sum(0)) if len(self._targets) else {}
        for group, name in [*parts.items(), (0, "")]:
            end = f"/{name}" if name else ""
            for target, sums in zip(self._targets, self._errors[:, group], strict=True):
                if not sums[2] > 0:
                    continue
                if target.kind == "classes":
                    found[f"{target.name}_accuracy{end}"] = float(sums[1] / sums[2])
                else:
                    found[f"{target.name}_rmse{end}"], found[f"{target.name}_mae{end}"] = measures(sums)
        return found

    def show(self) -> None:
        """Predictions against true values; of classes, which was taken for which."""
        for place, target in enumerate(self._targets):
            sums = self._errors[place, 0]
            if not sums[2] > 0:
                continue
            if target.kind == "classes":
                counts = self._confusions[target.name].cpu().numpy().astype(np.int64)
                names = [str(number) for number in range(target.classes)]
                self._dataset.show(f"{target.name}_confusion", Matrix(counts, names))
            elif target.name in self._counts:
                what = f"{target.name} ({target.unit})" if target.unit else target.name
                self._dataset.show(f"{target.name}_parity", Parity(*self._counts[target.name].cut(), what, words(sums)))
            else:
                self._dataset.show(f"{target.name}_parity", _of_structures(target, self._rows[place], sums))


def _around_zero(target: Learned) -> bool:
    """Whether a picture of a target counts entries about 0, and is not one of single values of structures."""
    return target.kind != "classes" and (target.of == "atom" or target.num_entries > 1)


def _of_structures(target: Learned, rows: Tensor, sums: Tensor) -> Parity:
    """A picture of true and predicted values, and whether each is there: (3, structures)."""
    true_and_found = rows[:2, rows[2] > 0]
    if target.kind != "energy":
        what = f"{target.name} ({target.unit})" if target.unit else target.name
        return Parity(*counted(true_and_found), what, words(sums))
    middle = float(true_and_found[0].mean())
    what = f"energy above {middle:.3f} eV/atom (meV/atom)"
    return Parity(*counted(MEV * (true_and_found - middle)), what, words(sums, MEV))


def write_predictions(dataset: EvaluatedDataset, store: Store, targets: Sequence[Learned]) -> None:
    """Write what is predicted: of structures one row each, of atoms those of structure i from `ptr[i]` to `ptr[i + 1]`.

    Several ranks share the batches; the first one writes.
    """
    own = {target.name for target in targets if target.of == "atom"}
    per_atom = own | OF_ATOMS | {f"{name}_probability" for name in own}
    counts = Labels(dataset.source).counts
    ptr = np.concatenate([[0], np.cumsum(counts)])
    tables: dict[str, Any] = {}
    ranks, num_steps = store.ranks, dataset.data.plan.steps_per_epoch
    for first in range(0, num_steps, ranks.world_size):
        own_steps = range(first + ranks.rank, min(first + ranks.rank + 1, num_steps))
        mine = [_rows(seen, per_atom) for seen in dataset.look(own_steps)]
        every = [mine] if ranks.alone else ranks.all_gather(mine, "predictions of structures")
        for samples, of_structures, of_atoms in (each for one in every for each in one) if ranks.is_main else ():
            for name, values in of_structures.items():
                table = _table(store, tables, name, (len(counts), *values.shape[1:]), values.dtype)
                table[samples] = values
            places = np.concatenate([np.arange(ptr[sample], ptr[sample + 1]) for sample in samples])
            for name, values in of_atoms.items():
                table = _table(store, tables, name, (int(ptr[-1]), *values.shape[1:]), values.dtype)
                table[places] = values
    if ranks.is_main:
        store.put("ptr", ptr)


def _rows(seen: Seen, per_atom: Set[str]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """The samples of a batch, and what is predicted of structures and of atoms, without padding."""
    layout = _Atoms.of(seen.batch)
    of_structures, of_atoms = {}, {}
    for name, values in seen.output.items():
        if name in per_atom:
            of_atoms[name] = values[layout.is_atom].cpu().numpy()
        else:
            of_structures[name] = values.cpu().numpy()
    return seen.samples.cpu().numpy(), of_structures, of_atoms


def _table(store: Store, tables: dict[str, Any], name: str, shape: tuple[int, ...], dtype: Any) -> Any:
    if name not in tables:
        tables[name] = store.new(name, shape, dtype)
        tables[name][...] = np.nan if np.issubdtype(dtype, np.floating) else 0
    return tables[name]
