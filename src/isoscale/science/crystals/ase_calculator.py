"""What ASE asks a trained crystal model for: energies, forces, stress and properties, of one structure or of many."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
from ase.data import chemical_symbols
from ase.stress import full_3x3_to_voigt_6_stress
from numpy.typing import NDArray
from torch import Tensor

from isoscale.errors import UserError
from isoscale.science.atoms.neighbour_lists import Neighbours
from isoscale.science.crystals.edges import Edges, GraphSettings, find_edges

MAX_ATOMS = 2048
"""How many atoms `calculate_many` puts into one batch where nobody says."""
Results = dict[str, Any]


class Usable(NamedTuple):
    """A model that can be called with any atoms."""

    module: Any
    """(pos, z, cell, batch, edge_source, edge_target, edge_shift) -> what it says, by name; see `deploy.py`."""
    edges: GraphSettings
    """The edges that it was trained with."""
    elements: list[int]
    """Atomic numbers that it was trained for."""
    outputs: dict[str, str]
    """What it says, and whether each is of a structure or of an atom."""


class CrystalCalculator(Calculator):
    """A model of crystals as a calculator of ASE, in its units: eV, Å, and for stress eV/Å³."""

    implemented_properties = ["energy", "free_energy", "forces", "stress"]

    def __init__(self, usable: Usable, device: torch.device, skin: float) -> None:
        """`skin` is what lists of neighbours hold beyond the cutoff, in Å; 0 where edges depend on more than that."""
        super().__init__()
        self.elements = [chemical_symbols[number] for number in usable.elements]
        self.cutoff = usable.edges.cutoff
        self._usable, self._device = usable, device
        self._module = usable.module.to(device)
        self._edges = usable.edges._replace(allow_isolated=True)
        is_plain = not usable.edges.adaptive_cutoff and usable.edges.max_neighbors is None
        self._skin = skin if is_plain else 0.0
        self._neighbours = Neighbours(self._search, self._skin)
        self.implemented_properties = _offered(usable.outputs)

    @property
    def num_lists(self) -> int:
        """How often neighbours have been looked for, for one structure at a time."""
        return self._neighbours.num_lists

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """Everything at once: forces cost little more than the energy."""
        super().calculate(atoms, properties, system_changes)
        assert self.atoms is not None
        self._check_elements(self.atoms, "the atoms hold")
        (self.results,) = self._evaluate([self.atoms], self._neighbours.of(self.atoms), ["the atoms"])
        if "stress" in properties and "stress" not in self.results:
            raise PropertyNotImplementedError("atoms without a cell, or that are not periodic, have no stress")

    def calculate_many(
        self, structures: Sequence[Atoms], batch_size: int | None = None, max_atoms: int | None = None
    ) -> list[Results]:
        """What `calculate` finds for each of many structures, a batch of them at a time.

        A batch holds `batch_size` structures, or as many as have at most `max_atoms` atoms together; a larger one
        stands alone.
        """
        for name, value in (("batch_size", batch_size), ("max_atoms", max_atoms)):
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}: expected 1 or more")
        for number, atoms in enumerate(structures):
            self._check_elements(atoms, f"structure {number} (counted from 0) holds")
        if batch_size is None and max_atoms is None:
            max_atoms = MAX_ATOMS
        found: list[Results] = []
        for start, end in _batches([len(atoms) for atoms in structures], batch_size, max_atoms):
            names = [f"structure {number} (counted from 0)" for number in range(start, end)]
            edges = [_edges(atoms, self._edges, name) for atoms, name in zip(structures[start:end], names, strict=True)]
            found += self._evaluate(
                structures[start:end], self._on_device(_joined(edges, structures[start:end])), names
            )
        return found

    def _search(self, atoms: Atoms) -> list[Tensor]:
        found = _edges(atoms, self._edges._replace(cutoff=self.cutoff + self._skin), "the atoms")
        return self._on_device(_joined([found], [atoms]))

    def _on_device(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        return [torch.from_numpy(array).to(self._device) for array in arrays]

    def _evaluate(self, structures: Sequence[Atoms], edges: Sequence[Tensor], names: Sequence[str]) -> list[Results]:
        said: dict[str, Tensor] = self._module(*self._on_device(_packed(structures)), *edges)
        arrays = {name: tensor.detach().cpu().double().numpy() for name, tensor in said.items()}
        ends = np.cumsum([len(atoms) for atoms in structures])
        found = []
        for number, (atoms, name) in enumerate(zip(structures, names, strict=True)):
            places: dict[str, Any] = {
                "structure": number, "atom": slice(ends[number] - len(atoms), ends[number])
            }  # fmt: skip
            own = {key: values[places[self._usable.outputs[key]]] for key, values in arrays.items()}
            found.append(_results(own, atoms, name))
        return found

    def _check_elements(self, atoms: Atoms, words: str) -> None:
        unknown = sorted(set(atoms.get_chemical_symbols()) - set(self.elements))
        if unknown:
            raise UserError(f"{words} {', '.join(unknown)}, and the model was trained for {', '.join(self.elements)}")


def _offered(outputs: dict[str, str]) -> list[str]:
    """Names of properties as ASE has them."""
    return [*outputs, *(["free_energy"] if "energy" in outputs else [])]


def _edges(atoms: Atoms, settings: GraphSettings, name: str) -> Edges:
    return find_edges(atoms.positions, np.array(atoms.cell), atoms.pbc, settings, lambda: name)


def _packed(structures: Sequence[Atoms]) -> list[NDArray[Any]]:
    """Structures behind each other, as PyG has them: positions, numbers, cells, and the structure of each atom."""
    return [
        np.concatenate([atoms.positions for atoms in structures]),
        np.concatenate([atoms.numbers for atoms in structures]).astype(np.int64),
        np.stack([np.array(atoms.cell) for atoms in structures]),
        np.repeat(np.arange(len(structures)), [len(atoms) for atoms in structures]),
    ]


def _joined(edges: Sequence[Edges], structures: Sequence[Atoms]) -> list[NDArray[Any]]:
    """The edges of structures behind each other: sources, targets and shifts."""
    before = np.cumsum([0, *(len(atoms) for atoms in structures)])[:-1]
    return [
        np.concatenate([each.source + first for each, first in zip(edges, before, strict=True)]),
        np.concatenate([each.target + first for each, first in zip(edges, before, strict=True)]),
        np.concatenate([each.shift for each in edges]),
    ]


def _results(said: dict[str, NDArray[np.float64]], atoms: Atoms, name: str) -> Results:
    """What a model says of one structure, as ASE has it."""
    found: Results = {key: values if values.ndim else float(values) for key, values in said.items()}
    for key in ("energy", "forces"):
        if key in found and not np.isfinite(found[key]).all():
            raise UserError(f"{name}: the {key} are not finite numbers; are two atoms almost at the same place?")
    if "energy" in found:
        found["free_energy"] = found["energy"]
    if "stress" in found:
        stress = found.pop("stress")
        if atoms.cell.rank == 3 and atoms.pbc.any():
            found["stress"] = full_3x3_to_voigt_6_stress(stress)
    return found


def _batches(counts: Sequence[int], batch_size: int | None, max_atoms: int | None) -> Iterator[tuple[int, int]]:
    """Where batches of structures begin and end."""
    start = atoms = 0
    for number, count in enumerate(counts):
        is_full = batch_size is not None and number - start == batch_size
        if number > start and (is_full or (max_atoms is not None and atoms + count > max_atoms)):
            yield start, number
            start, atoms = number, 0
        atoms += count
    if counts:
        yield start, len(counts)
