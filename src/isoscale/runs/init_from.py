"""Weights to start from: read from a run, a checkpoint or a file from elsewhere, and fitted to a task by name."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from isoscale.engine.state.checkpoint import read_weights
from isoscale.engine.state.registry import DifferentWeights, ModuleState, copy_weights
from isoscale.errors import UserError, nearest
from isoscale.recipe.schema import InitFrom

Translate = Callable[[Any], Mapping[str, Tensor] | None]
"""From what a file holds to weights by the names of a task; None where it is not known."""
KEYS = ("state_dict", "model_state_dict", "model")
"""Where files that hold more than weights keep them."""
COUNTER = ".num_batches_tracked"
"""Of a batch norm: old files do not have it, and only a momentum of None reads it."""
MOST_PATTERNS = 2
"""Of layers that an error proposes to leave out; where more differ, it is another network."""


def start_from(init: InitFrom, task: nn.Module, say: Callable[[str], None]) -> None:
    """Copy weights into a task, leaving out what is excluded; `say` is told where names had to be changed."""
    own, _ = ModuleState(task).state()
    saved = task.state_dict().keys()
    weights = load_weights(init.run, getattr(task, "weights_from", None))
    _check_patterns(init.exclude, own.keys() | weights.keys())
    wanted = {name for name in own if not _matches(name, init.exclude)}
    given = {name: tensor for name, tensor in weights.items() if not _matches(name, init.exclude)}
    renaming = _best_renaming(given, wanted)
    renamed = {renaming(name): tensor for name, tensor in given.items()}
    shared = saved - own.keys()  # a tensor that stands under two names in a file of torch
    fitting = {
        name: tensor for name, tensor in renamed.items() if name not in shared and not _matches(name, init.exclude)
    }
    not_in_files = {name for name in wanted - fitting.keys() if name not in saved or name.endswith(COUNTER)}
    _copy(task, fitting, frozenset(own.keys() - wanted | not_in_files), init)
    if renaming.changes:
        say(f"weights of {init.run}: {renaming}")


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _check_patterns(patterns: Iterable[str], names: Iterable[str]) -> None:
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            close = nearest(pattern, {_layer_pattern(name) for name in names})
            meant = f'; did you mean "{close}"?' if close else ""
            raise UserError(f'task.init_from.exclude: no weight is called "{pattern}"{meant}')


def _layer_pattern(name: str) -> str:
    """All weights of the layer that a weight belongs to: `model.fc.*` for `model.fc.bias`."""
    layer, point, _ = name.rpartition(".")
    return f"{layer}.*" if point else name


@dataclass(frozen=True)
class Renaming:
    """What to put in the place of how names begin."""

    old: str = ""
    new: str = ""

    @property
    def changes(self) -> bool:
        """Whether any name becomes another one."""
        return self.old != self.new

    def __call__(self, name: str) -> str:
        """The name as the task has it; one that begins otherwise stays."""
        return self.new + name.removeprefix(self.old) if name.startswith(self.old) else name

    def __str__(self) -> str:
        if not self.old:
            return f'"{self.new}" is put before their names'
        change = f'becomes "{self.new}"' if self.new else "is left out"
        return f'"{self.old}", with which their names begin, {change}'


def _best_renaming(given: Iterable[str], wanted: set[str]) -> Renaming:
    """The one with which most names fit; a plain network's lack `model.`, a parallel one's begin with `module.`."""
    names = list(given)
    candidates = [Renaming(old, new) for old in _beginnings(names) for new in _beginnings(wanted)]
    return max([Renaming(), *candidates], key=lambda renaming: sum(renaming(name) in wanted for name in names))


def _beginnings(names: Iterable[str]) -> list[str]:
    """How most of the names begin: nothing, `model.`, `model.layers.`, …"""
    counts: dict[str, int] = {"": 0}
    for name in names:
        for part in range(name.count(".") + 1):
            beginning = "".join(f"{word}." for word in name.split(".")[:part])
            counts[beginning] = counts.get(beginning, 0) + 1
    return [beginning for beginning, count in counts.items() if 2 * count > counts[""]]


def _copy(task: nn.Module, weights: Mapping[str, Tensor], exclude: frozenset[str], init: InitFrom) -> None:
    if not weights:
        raise UserError(f"task.init_from: of {init.run} nothing is left to start from; exclude less")
    try:
        copy_weights(task, weights, exclude)
    except DifferentWeights as error:
        patterns = list(dict.fromkeys(map(_layer_pattern, error.names)))
        if len(patterns) > MOST_PATTERNS:
            raise UserError(f"task.init_from: {init.run}: {error}") from None
        changed = f"task.init_from={{run: {init.run}, exclude: [{', '.join([*init.exclude, *patterns])}]}}"
        raise UserError(
            f"task.init_from: {init.run}: {error}\nto take the rest and leave {' and '.join(patterns)} as initialised: "
            f"{shlex.quote(changed)}"
        ) from None


def load_weights(where: str, translate: Translate | None = None) -> dict[str, Tensor]:
    """Weights of a run, a checkpoint, a .safetensors file, or a file of torch (read without running code from it).

    `translate` gets at those of other programs, where it knows what a file of torch holds.
    """
    from isoscale.runs.run import Run

    path = Path(where)
    if Run.exists(path):
        return read_weights(Run.load(path).checkpoint())
    if (path / "manifest.json").exists():
        return read_weights(path)
    if not path.is_file():
        raise UserError(f"task.init_from: there is no run, checkpoint or file of weights at {where}")
    found = _read(path)
    try:
        translated = translate(found) if translate is not None else None
    except UserError as error:
        raise UserError(f"task.init_from: {where}: {error}") from None
    return dict(translated) if translated is not None else _by_name(found, where)


def _read(path: Path) -> Any:
    from safetensors.torch import load_file

    try:
        return load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = _refusal(path, refused[1]) if isinstance(error, UnpicklingError) and refused else _damage(error)
    raise UserError(f"task.init_from: cannot read weights from {path}: {reason}")


def _damage(error: Exception) -> str:
    words = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"it is damaged, or no file of torch or safetensors ({words[:100]}{'…' * (len(words) > 100)})"


def _refusal(path: Path, name: str) -> str:
    """Why torch does not read a file in which the class `name` is called for, and how to get at its weights."""
    code = (
        f'import torch; found = torch.load({json.dumps(str(path))}, "cpu", weights_only=False); '
        'torch.save(getattr(found, "state_dict", lambda: found.get("state_dict", found))(), "weights.pt")'
    )
    return (
        f"it holds more than weights ({name}), and to read that could run code hidden in the file.\n"
        f"If you trust who made it, write its weights alone to a file,\n  python -c {shlex.quote(code)}\n"
        "and start from that: task.init_from=weights.pt"
    )


def _by_name(loaded: Any, where: str) -> dict[str, Tensor]:
    """The weights among what a file holds."""
    found = loaded
    if isinstance(loaded, Mapping):
        found = next((loaded[key] for key in KEYS if isinstance(loaded.get(key), Mapping)), loaded)
    if not isinstance(found, Mapping):
        raise UserError(f"task.init_from: {where} holds no weights by name, but a {type(found).__name__}")
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise UserError(
                f"task.init_from: {where} holds no weights by name: {name} is not a tensor ({type(value).__name__}); "
                f"expected names and tensors, or these below one of {', '.join(KEYS)}"
            )
    return {str(name): tensor for name, tensor in found.items()}
