"""What ASE asks a potential for: energies, forces and stress."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.calculator import Calculator, PropertyNotImplementedError, all_changes
from ase.stress import full_3x3_to_voigt_6_stress
from numpy.typing import NDArray

from isoscale.errors import UserError
from isoscale.science.atoms.neighbour_lists import Neighbours, list_pairs


class PotentialCalculator(Calculator):
    """A potential as a calculator of ASE, in its units: eV, Å."""

    implemented_properties = ["energy", "free_energy", "energies", "forces", "stress"]

    def __init__(self, module: Any, types: Sequence[str], cutoff: float, device: torch.device, skin: float) -> None:
        """A module as `deploy.py` makes it; `skin` is what lists of neighbours hold beyond the cutoff, in Å."""
        super().__init__()
        self.types, self.cutoff = list(types), cutoff
        self._module, self._device = module.to(device), device
        self._neighbours = Neighbours(lambda atoms: list_pairs(atoms, cutoff + skin), skin)

    @property
    def num_lists(self) -> int:
        """How often neighbours have been looked for."""
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
        found = self._evaluate(self.atoms)
        energy = float(found["energy"])
        if not np.isfinite(energy):
            raise UserError("the energy of the atoms is not a finite number: are two of them at the same place?")
        self.results = {
            "energy": energy, "free_energy": energy, "energies": found["atom_energy"], "forces": found["force"],
        }  # fmt: skip
        if self.atoms.cell.rank == 3 and self.atoms.pbc.any():
            self.results["stress"] = full_3x3_to_voigt_6_stress(-found["virial"] / self.atoms.get_volume())
        elif "stress" in properties:
            raise PropertyNotImplementedError("atoms that are not periodic have no stress")

    def _evaluate(self, atoms: Atoms) -> dict[str, NDArray[np.float64]]:
        types = self._types_of(atoms)
        pairs = self._neighbours.of(atoms)
        inputs = [torch.tensor(atoms.positions), torch.from_numpy(types), torch.tensor(np.array(atoms.cell)), *pairs]
        try:
            with torch.no_grad():
                found = self._module(*(tensor.to(self._device) for tensor in inputs))
        except (ValueError, torch.jit.Error) as error:  # more neighbours than the model has slots for
            raise UserError(_last_line(error)) from None
        return {name: tensor.cpu().numpy() for name, tensor in found.items()}

    def _types_of(self, atoms: Atoms) -> NDArray[np.int64]:
        symbols = atoms.get_chemical_symbols()
        unknown = sorted(set(symbols) - set(self.types))
        if unknown:
            raise UserError(f"the atoms hold {', '.join(unknown)}, and the potential knows {', '.join(self.types)}")
        return np.array([self.types.index(symbol) for symbol in symbols], np.int64)


def _last_line(error: Exception) -> str:
    """What was said; TorchScript puts a trace before it."""
    return str(error).strip().splitlines()[-1].rpartition("Error: ")[2]
