"""What a reader finds in a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from isoscale.errors import UserError
from isoscale.science.crystals.reading.structure import Structure

NAMES_OF_SYSTEMS = ("config_type", "system", "system_name", "name", "group", "label")
"""Keys whose text says what a structure belongs to."""
_UNIT_ENDINGS = ("_unit", "_units", "-unit", "-units")
_TARGETS = {"energy": "energy", "force": "forces", "forces": "forces", "stress": "stress", "length": "length",
            "position": "length", "positions": "length"}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Structures of one file, with the names and units that are there."""

    where: str
    structures: list[Structure]
    units: Mapping[str, list[str]] = field(default_factory=dict)
    """What the file itself says of the units of energy, forces, stress and length."""
    known: bool = False
    """Whether the format fixes the units, so that they are ASE's for sure."""

    def unit_of(self, target: str) -> str | None:
        """The unit that the file says; one that changes inside it is refused."""
        said = self.units.get(target, [])
        if len(said) > 1:
            raise UserError(f"{self.where} says several units of {target}: {', '.join(said)}; cut it into a file each")
        return said[0] if said else None


def said_units(values: Mapping[str, Any]) -> dict[str, str]:
    """Units among the values of a header: `energy_unit=eV`."""
    found = {}
    for key, value in values.items():
        for ending in _UNIT_ENDINGS:
            target = _TARGETS.get(key.lower().removesuffix(ending)) if key.lower().endswith(ending) else None
            if target is not None and isinstance(value, str):
                found[target] = value
    return found
