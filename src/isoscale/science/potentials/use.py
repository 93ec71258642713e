"""A trained Deep Potential as a calculator of ASE."""

import json
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from isoscale.science.atoms.use import Saved, Script
from isoscale.science.potentials.deepmd import checkpoint as deepmd_checkpoint
from isoscale.science.potentials.deploy import Deployed
from isoscale.science.potentials.model import DeepPotential

if TYPE_CHECKING:
    from isoscale.science.potentials.ase_calculator import PotentialCalculator


class Usable(NamedTuple):
    """A potential that can be called with any atoms."""

    module: Any
    types: list[str]
    cutoff: float


def make_calculator(found: Any, device: torch.device, skin: float) -> "PotentialCalculator | None":
    """The calculator of what `isoscale.calculator` has opened; None where that is no Deep Potential."""
    from isoscale.science.potentials.ase_calculator import PotentialCalculator

    usable = _usable(found)
    return usable and PotentialCalculator(usable.module, usable.types, usable.cutoff, device, skin)


def _usable(found: Any) -> Usable | None:
    if isinstance(found, Script):
        types, cutoff = found.said["types"], found.said["cutoff"]
        return Usable(found.module, json.loads(types), float(cutoff)) if types and cutoff else None
    if isinstance(found, Saved):
        found = deepmd_checkpoint.potential(found.content)
    if isinstance(found, DeepPotential):
        found = Deployed(found)
    elif isinstance(getattr(found, "model", None), DeepPotential):  # a task
        found = found.deployed()
    return Usable(found.eval(), found.types, found.cutoff) if isinstance(found, Deployed) else None
