"""A trained potential for use: in molecular dynamics, or wherever atoms have energies and forces."""

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from isoscale.errors import UserError
from isoscale.science.potentials.deepmd import checkpoint as deepmd_checkpoint
from isoscale.science.potentials.deploy import Deployed
from isoscale.science.potentials.model import DeepPotential
from isoscale.system.devices import Cuda

if TYPE_CHECKING:
    from isoscale.science.potentials.ase_calculator import PotentialCalculator

SKIN = 1.0
"""Å beyond the cutoff, up to which neighbours are listed: the list serves until an atom has moved half of that."""


class Usable(NamedTuple):
    """A potential that can be called with any atoms."""

    module: Any
    types: list[str]
    cutoff: float


def calculator(
    potential: Any, device: str = "auto", skin: float = SKIN, *, trust: bool = False
) -> "PotentialCalculator":
    """A calculator for ASE: `atoms.calc = calculator("runs/water-…")`.

    `potential` is the directory or the name of a run, a `Run`, a file that `isoscale export` wrote (.pt, .safetensors),
    a checkpoint of DeePMD-kit (.pt), or a model. Neighbours are listed up to `skin` Å beyond the cutoff, so that a list
    serves for many steps. What a run or a `.safetensors` file of somebody else names is built only where it is known to
    be harmless, or with `trust`.
    """
    try:
        import ase  # noqa: F401
    except ImportError as error:
        raise UserError(f"molecular dynamics are done with ASE: pip install 'isoscale[potentials]' ({error})") from None
    from isoscale.science.potentials.ase_calculator import PotentialCalculator

    if skin < 0:
        raise UserError(f"skin is {skin}: expected 0 or more, in Å")
    found = usable(potential, trust)
    return PotentialCalculator(found.module, found.types, found.cutoff, _device(device), skin)


def usable(potential: Any, trust: bool = False) -> Usable:
    """The potential in a run, a file or a model."""
    if isinstance(potential, str | Path):
        path = Path(potential)
        if path.suffix in (".pt", ".safetensors") and not path.exists():
            raise UserError(f"there is no file {path}")
        if path.suffix == ".pt" and path.is_file():
            return _from_script(path)
        potential = _task(path, trust)
    elif not isinstance(potential, nn.Module) and hasattr(potential, "task"):
        potential = potential.task()
    return _from_module(potential)


def _task(path: Path, trust: bool) -> nn.Module:
    """The task of a run, or in a file of weights."""
    # Whoever uses a finished run stands above the engine, as commands do; to train, nothing here is needed.
    from isoscale.runs.export import load_task
    from isoscale.runs.run import Run

    return load_task(path, trust) if path.suffix == ".safetensors" else Run.find(str(path), trust=trust).task()


def _from_module(found: Any) -> Usable:
    if isinstance(found, DeepPotential):
        found = Deployed(found)
    elif hasattr(found, "deployed"):
        found = found.deployed()
    if not isinstance(found, Deployed):
        raise UserError(
            f"a {type(found).__name__} is not a potential; expected a run of the task `potential`, a file that "
            "`isoscale export` wrote of one, or its model"
        )
    return Usable(found.eval(), found.types, found.cutoff)


def _saved_by_deepmd(path: Path) -> DeepPotential | None:
    try:
        found = torch.load(path, "cpu", weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError):  # another file, or a damaged one
        return None
    return deepmd_checkpoint.potential(found)


def _from_script(path: Path) -> Usable:
    said = {"types": "", "cutoff": ""}
    try:
        module = torch.jit.load(path, "cpu", said)
    except RuntimeError as error:
        saved = _saved_by_deepmd(path)
        if saved is not None:
            return _from_module(saved)
        raise UserError(f"{path} cannot be read as TorchScript: {str(error).splitlines()[0]}") from None
    if not all(said.values()):
        raise UserError(f"{path} is not a potential that `isoscale export` wrote: it names no types and no cutoff")
    return Usable(module, json.loads(said["types"]), float(said["cutoff"]))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device(Cuda.kind if Cuda.is_available() else "cpu")
    return torch.device(name)
