"""A trained model of atoms for use: in relaxations, molecular dynamics, wherever atoms have energies and forces."""

from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from isoscale.errors import UserError
from isoscale.science import registry
from isoscale.system.devices import Cuda

if TYPE_CHECKING:
    from ase.calculators.calculator import Calculator

SKIN = 1.0
"""Å beyond the cutoff, up to which neighbours are listed: the list serves until an atom has moved half of that."""


class Script(NamedTuple):
    """A TorchScript file that `isoscale export` wrote, read."""

    module: Any
    said: dict[str, str]
    """What it says about itself; nothing for what it does not say."""
    path: Path


class Saved(NamedTuple):
    """A .pt file that is not TorchScript: what somebody saved there, tensors and plain values alone."""

    content: Any
    path: Path


def calculator(model: Any, device: str = "auto", skin: float = SKIN, *, trust: bool = False) -> "Calculator":
    """A calculator for ASE: `atoms.calc = calculator("runs/water-…")`.

    `model` is the directory or the name of a run, a `Run`, a file that `isoscale export` wrote (.pt, .safetensors),
    a checkpoint of DeePMD-kit (.pt), or a model. Neighbours are listed up to `skin` Å beyond the cutoff, so that a list
    serves for many steps. What a run or a `.safetensors` file of somebody else names is built only where it is known to
    be harmless, or with `trust`.
    """
    try:
        import ase  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"molecular dynamics need ASE: pip install 'isoscale[potentials]' or 'isoscale[crystals]' ({error})"
        ) from None
    if skin < 0:
        raise UserError(f"skin is {skin}: expected 0 or more, in Å")
    found = opened(model, trust)
    for make in registry.calculators():
        made: Calculator | None = make(found, _device(device), skin)
        if made is not None:
            return made
    raise UserError(_no_potential(found))


def opened(model: Any, trust: bool = False) -> Any:
    """What a path or a run stands for: a task or a model, a `Script`, or something `Saved`."""
    if isinstance(model, str | Path):
        path = Path(model)
        if path.suffix in (".pt", ".safetensors") and not path.exists():
            raise UserError(f"there is no file {path}")
        return _from_file(path) if path.suffix == ".pt" and path.is_file() else _task(path, trust)
    if not isinstance(model, nn.Module) and hasattr(model, "task"):
        return model.task()
    return model


def _task(path: Path, trust: bool) -> nn.Module:
    """The task of a run, or in a file of weights."""
    # Whoever uses a finished run stands above the engine, as commands do; to train, nothing here is needed.
    from isoscale.runs.export import load_task
    from isoscale.runs.run import Run

    return load_task(path, trust) if path.suffix == ".safetensors" else Run.find(str(path), trust=trust).task()


def _from_file(path: Path) -> Script | Saved:
    said: dict[str, Any] = dict.fromkeys(("kind", "types", "elements", "cutoff", "edges", "outputs"), "")
    try:
        module = torch.jit.load(path, "cpu", said)  # writes into `said`
    except RuntimeError as error:
        try:
            return Saved(torch.load(path, "cpu", weights_only=True), path)
        except (RuntimeError, EOFError, UnpicklingError):  # another file, or a damaged one
            raise UserError(f"{path} cannot be read as TorchScript: {str(error).splitlines()[0]}") from None
    texts = {name: text.decode() if isinstance(text, bytes) else text for name, text in said.items()}
    return Script(module, texts, path)


def _no_potential(found: Any) -> str:
    if isinstance(found, Script):
        return f"{found.path} is not a potential that `isoscale export` wrote: it names no types and no cutoff"
    if isinstance(found, Saved):
        return f"{found.path} is neither TorchScript that `isoscale export` wrote nor a checkpoint of DeePMD-kit"
    return (
        f"a {type(found).__name__} is not a potential; expected a run of the task `potential` or `crystal`, a file "
        "that `isoscale export` wrote of one, or its model"
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device(Cuda.kind if Cuda.is_available() else "cpu")
    return torch.device(name)
