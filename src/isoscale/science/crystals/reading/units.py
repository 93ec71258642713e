"""Units of targets: what people write, and the factors to eV, Å and what is made of them.

Written out rather than taken from ase, because files that need no ase are read without it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from isoscale.errors import UserError, nearest

ENERGIES = {
    "eV": 1.0, "meV": 1e-3, "kcal/mol": 4.184 * 0.010364269656262175, "kJ/mol": 0.010364269656262175,
    "Hartree": 27.211386245988, "Rydberg": 13.605693122994,
}  # fmt: skip
"""In eV."""
LENGTHS = {"Å": 1.0, "Bohr": 0.529177210903, "nm": 10.0}
"""In Å."""
PRESSURES = {"GPa": 1 / 160.21766208, "kbar": 1 / 1602.1766208, "bar": 1 / 1602176.6208, "Pa": 1 / 160.21766208e9}
"""In eV/Å³."""

_SPELLINGS = {
    "ev": "eV", "electronvolt": "eV", "mev": "meV", "kcal/mol": "kcal/mol", "kcalmol": "kcal/mol",
    "kj/mol": "kJ/mol", "hartree": "Hartree", "ha": "Hartree", "eh": "Hartree", "a.u.": "Hartree", "au": "Hartree",
    "rydberg": "Rydberg", "ry": "Rydberg", "å": "Å", "a": "Å", "ang": "Å", "angstrom": "Å", "ångström": "Å",
    "bohr": "Bohr", "nm": "nm", "gpa": "GPa", "kbar": "kbar", "kb": "kbar", "bar": "bar", "pa": "Pa",
}  # fmt: skip
"""What people write, in small letters."""
DEFAULTS = {"energy": "eV", "forces": "eV/Å", "stress": "eV/Å^3", "length": "Å"}
"""ASE's."""
EXAMPLES = {
    "energy": ("eV", "eV/atom", "meV/atom", "kcal/mol", "kJ/mol", "Hartree", "Rydberg"),
    "forces": ("eV/Å", "meV/Å", "kcal/mol/Å", "Hartree/Bohr", "Rydberg/Bohr", "-eV/Å (a gradient)"),
    "stress": ("eV/Å^3", "GPa", "kbar", "-kbar (as VASP prints it)", "Hartree/Bohr^3"),
    "length": ("Å", "Bohr", "nm"),
}
"""What may be declared of each."""


@dataclass(frozen=True)
class Unit:
    """A unit, as a factor to ASE's."""

    name: str
    """As we write it."""
    factor: float
    per_atom: bool = False
    """Whether values are to be multiplied by the number of atoms."""

    @property
    def is_usual(self) -> bool:
        """Whether values need no change."""
        return self.factor == 1.0 and not self.per_atom


def parse(text: str, target: str, where: str = "") -> Unit:
    """The unit that `text` means of energy, forces, stress or length; `where` it was said is for the error."""
    found = _parsed(text, target) if isinstance(text, str) else None
    if found is None:
        listed = ", ".join(EXAMPLES[target])
        meant = nearest(str(text), [each.partition(" ")[0] for each in EXAMPLES[target]])
        suggestion = f'; did you mean "{meant}"?' if meant else ""
        raise UserError(f"{where or f'units.{target}'} is {text!r}, expected one of {listed}{suggestion}")
    return found


def _parsed(text: str, target: str) -> Unit | None:
    plain = text.strip().lower().replace(" ", "").replace("**", "^").replace("³", "^3")
    sign = -1.0 if plain.startswith("-") else 1.0
    plain = plain.removeprefix("-").removeprefix("+")
    prefix = "-" if sign < 0 else ""
    if target == "length":
        name = _SPELLINGS.get(plain, "")
        return Unit(name, LENGTHS[name]) if name in LENGTHS and sign > 0 else None
    if target == "energy":
        energy, slash, atom = plain.partition("/atom")
        name = _SPELLINGS.get(energy, "")
        if name not in ENERGIES or atom not in ("", "s") or sign < 0:
            return None
        return Unit(name + slash, ENERGIES[name], bool(slash))
    name = _SPELLINGS.get(plain, "")
    if target == "stress" and name in PRESSURES:
        return Unit(prefix + name, sign * PRESSURES[name])
    return _ratio(plain, 3 if target == "stress" else 1, prefix)


def _ratio(plain: str, power: int, prefix: str) -> Unit | None:
    """An energy over a length to a power: `eV/Å^3`."""
    matched = re.fullmatch(r"(.+)/([^/^]+?)(?:\^?(\d))?", plain)
    if matched is None:
        return None
    energy, length = (_SPELLINGS.get(matched[part], "") for part in (1, 2))
    if energy not in ENERGIES or length not in LENGTHS or int(matched[3] or 1) != power:
        return None
    factor = ENERGIES[energy] / LENGTHS[length] ** power * (-1.0 if prefix else 1.0)
    return Unit(f"{prefix}{energy}/{length}{f'^{power}' if power > 1 else ''}", factor)


def declared(units: Mapping[str, str] | None) -> dict[str, Unit]:
    """The units of a recipe; keys and values that nobody knows are refused."""
    for key in units or {}:
        if key not in DEFAULTS:
            meant = nearest(key, [*DEFAULTS, "force"])
            meant = "forces" if meant == "force" else meant
            suggestion = f'; did you mean "{meant}"?' if meant else f"; there is {', '.join(DEFAULTS)}"
            raise UserError(f'units has the unknown key "{key}" (other targets keep their own units){suggestion}')
    return {target: parse(text, target) for target, text in (units or {}).items()}
