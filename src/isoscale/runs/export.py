"""A trained network as one file for use elsewhere: weights, TorchScript, torch.export's program, Lightning's .ckpt."""

import io
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from isoscale._version import __version__
from isoscale.engine.state.checkpoint import read_weights
from isoscale.engine.state.registry import copy_weights
from isoscale.engine.state.tensor_files import save_tensors
from isoscale.errors import UserError
from isoscale.recipe.components import instantiate, task_spec
from isoscale.recipe.load import load_recipe
from isoscale.recipe.problems import RecipeError
from isoscale.recipe.seal import is_sealed, seal
from isoscale.recipe.trust import problems_of_foreign
from isoscale.runs.ckpt import write_ckpt
from isoscale.runs.inference import example
from isoscale.runs.run import Run
from isoscale.system.files import failures_in_words, write_aside, written_aside
from isoscale.system.printing import visible

NUM_EXAMPLES = 2
"""Samples that a network is seen at work on; with a single one, torch.export would take the batch to be one sample."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of an exported network's outputs against the network's own, relative to the largest."""


@dataclass(frozen=True)
class Exported:
    """A file that was written."""

    path: Path
    metadata: dict[str, str]
    """What the file says about itself."""
    notes: list[str] = field(default_factory=list)
    """What its user should know."""


@dataclass(frozen=True)
class _Network:
    """A network ready to be written."""

    module: nn.Module
    inputs: tuple[Tensor, ...] | None
    """What it takes, where that has to be seen; None for a module that TorchScript can read as it is."""
    metadata: dict[str, str]
    notes: list[str]


def export(run: str | Path | Run, path: str | Path, checkpoint: str | None = None) -> Exported:
    """Write the best weights of a run (or those of another checkpoint) to a file.

    By the ending of its name: `.safetensors` has the weights; `.pt` is TorchScript and `.pt2` a program of
    torch.export, and both run where isoscale is not installed; `.ckpt` is what `load_from_checkpoint` of Lightning
    reads. A task or its model may have a method `deployed`, which
    returns the module to be written as TorchScript, with a method `described` for what the file says about itself.
    """
    found, target = run if isinstance(run, Run) else Run.find(str(run)), Path(path)
    writer = WRITERS.get(target.suffix)
    if writer is None:
        raise UserError(f"{target}: a network is written as {', '.join(WRITERS)}; choose one of these endings")
    if not target.parent.is_dir():
        raise UserError(f"{target}: there is no folder {target.parent}")
    return writer(found, target, checkpoint)


def load_task(path: Path, trust: bool = False) -> nn.Module:
    """The task in a .safetensors file that `export` wrote, with its weights, on the CPU.

    A file that this user has not written may name only what is known to be harmless, unless it is to be trusted.
    """
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    recipe = metadata.get("recipe")
    if recipe is None:
        raise UserError(f"{path} does not say what network its weights belong to: `isoscale export` did not write it")
    loaded = load_recipe(json.loads(recipe))
    if not trust and not is_sealed(recipe, metadata.get("seal", "")):
        problems = problems_of_foreign(loaded.values, [path])
        if problems:
            raise RecipeError([replace(problem, origin=str(path)) for problem in problems])
    return with_weights(instantiate(task_spec(loaded.recipe.task)), weights)


def with_weights(task: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """A task with weights, in their precision."""
    for name, own in (*task.named_parameters(), *task.named_buffers()):
        if name in weights:
            own.data = own.data.to(weights[name].dtype)
    copy_weights(task, weights)
    return task.eval()


def _write_weights(run: Run, path: Path, checkpoint: str | None) -> Exported:
    task = run.task(checkpoint)
    metadata = {**_metadata(run, checkpoint), **(_described(task) or _described(_deployable(task)))}
    weights = {name: tensor.contiguous() for name, tensor in read_weights(run.checkpoint(checkpoint)).items()}
    with failures_in_words(path), written_aside(path) as file:
        save_tensors(weights, file.name, metadata)
    return Exported(path, metadata)


def _write_script(run: Run, path: Path, checkpoint: str | None) -> Exported:
    network = _network(run, checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # there is nothing yet that C++ codes read instead
        warnings.simplefilter("ignore", torch.jit._trace.TracerWarning)  # what came out is compared
        script = _attempt("TorchScript", lambda: _scripted(network))
        said = {name: text.encode() for name, text in network.metadata.items()}
        written = io.BytesIO()  # torch, where it writes to a full disk itself, aborts the process
        torch.jit.save(script, written, said)
    with failures_in_words(path):
        write_aside(path, written.getvalue())
    return Exported(path, network.metadata, network.notes)


def _scripted(network: _Network) -> Any:
    if network.inputs is None:
        return torch.jit.script(network.module)
    traced = torch.jit.trace(network.module, network.inputs, check_trace=False)
    _compare(network, traced)
    return traced


def _write_program(run: Run, path: Path, checkpoint: str | None) -> Exported:
    network = _network(run, checkpoint)
    if network.inputs is None:
        raise UserError(f"{path}: this network is written as .pt (TorchScript) or .safetensors, not as .pt2")
    program = _attempt("torch.export", lambda: _exported_program(network))
    written = io.BytesIO()
    torch.export.save(program, written, extra_files=network.metadata)
    with failures_in_words(path):
        write_aside(path, written.getvalue())
    return Exported(path, network.metadata, network.notes)


def _exported_program(network: _Network) -> Any:
    assert network.inputs is not None
    sizes = tuple({0: torch.export.Dim.DYNAMIC} for _ in network.inputs)
    program = torch.export.export(network.module, network.inputs, dynamic_shapes=sizes)
    _compare(network, program.module())
    return program


def _write_ckpt(run: Run, path: Path, checkpoint: str | None) -> Exported:
    return Exported(path, *write_ckpt(run, path, checkpoint))


WRITERS: dict[str, Callable[[Run, Path, str | None], Exported]] = {
    ".safetensors": _write_weights, ".pt": _write_script, ".pt2": _write_program, ".ckpt": _write_ckpt
}  # fmt: skip


def _metadata(run: Run, checkpoint: str | None) -> dict[str, str]:
    """What every file says about itself."""
    loaded = run.to_build()
    step = int(run.checkpoint(checkpoint).name.removeprefix("step_"))
    values = {key: value for key, value in loaded.values.items() if key != "sweep"}
    recipe = json.dumps(values)
    return {
        "isoscale": __version__, "run": visible(run.path.name), "step": str(step), "recipe": recipe,
        "seal": seal(recipe),
    }  # fmt: skip


def _network(run: Run, checkpoint: str | None) -> _Network:
    """The module of a run that is written, with an example of its inputs where that has to be seen."""
    task, metadata = run.task(checkpoint), _metadata(run, checkpoint)
    deployable = _deployable(task)
    if deployable is not None:
        return _Network(deployable, None, {**metadata, **_described(deployable)}, [])
    if not hasattr(task, "split"):
        raise UserError(
            f"{type(task).__name__} does not say what it is without its training: give it a method `deployed` that "
            "returns the nn.Module to write, or write the weights alone: --out FILE.safetensors"
        )
    batch, transforms = example(run, checkpoint, NUM_EXAMPLES)
    split: Callable[..., Any] = task.split  # type: ignore[assignment]
    inputs, note = split(batch)[0], []
    if transforms:
        note = [f"its input is what comes out of data.transforms of the recipe: {', '.join(transforms)}"]
    shape = {"input_shape": json.dumps(["batch", *inputs.shape[1:]]), "input_dtype": str(inputs.dtype)}
    return _Network(run.model(checkpoint), (inputs,), {**metadata, **shape}, note)


def _deployable(task: nn.Module) -> nn.Module | None:
    """The module that a task or its model gives for use elsewhere, where they do."""
    for owner in (task, getattr(task, "model", None)):
        deployed = getattr(owner, "deployed", None)
        if callable(deployed):
            found: nn.Module = deployed()
            return found.eval()
    return None


def _described(module: nn.Module | None) -> dict[str, str]:
    described = getattr(module, "described", None)
    return described() if callable(described) else {}


def _attempt(format: str, write: Callable[[], Any]) -> Any:
    try:
        return write()
    except UserError:
        raise
    except Exception as error:
        words = str(error).strip().splitlines() or [""]
        raise UserError(
            f"this network cannot be written as {format}: {type(error).__name__}: {words[0][:200]}\n"
            "the weights alone can: --out FILE.safetensors"
        ) from error


def _compare(network: _Network, written: Callable[..., Any]) -> None:
    """Refuse what gives other outputs than the network itself, on another number of samples too."""
    assert network.inputs is not None
    for repeats in (1, 2):
        inputs = [values.repeat(repeats, *[1] * (values.dim() - 1)) for values in network.inputs]
        with torch.no_grad():
            wanted, found = network.module(*inputs), written(*inputs)
        for one, other in zip(_tensors(wanted), _tensors(found), strict=True):
            room = TOLERANCE.get(one.dtype, 1e-2) * float(one.abs().max()) if one.is_floating_point() else 0.0
            if one.shape != other.shape or float((one - other).abs().max()) > room:
                raise UserError(
                    "this network does other things in the file than here: what it does depends on more than its input "
                    "(its batch size, or random numbers)\nthe weights alone can be written: --out FILE.safetensors"
                )


def _tensors(outputs: Any) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    values = outputs.values() if isinstance(outputs, dict) else outputs
    return [tensor for value in values for tensor in _tensors(value)]
