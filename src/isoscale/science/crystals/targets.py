"""What a task learns of crystals: which targets, of what kind, and how their errors count."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from isoscale.errors import UserError, nearest
from isoscale.science.crystals.reading.elements import SYMBOLS

Of = Literal["structure", "atom"]
Kind = Literal["energy", "forces", "stress", "value", "classes"]

NUM_ELEMENTS = len(SYMBOLS)
"""Atomic numbers, with that of padding."""
GPA = 160.21766208
"""In an eV/Å³."""
KNOWN: dict[str, tuple[Kind, Of, tuple[int, ...]]] = {
    "energy": ("energy", "structure", ()),
    "forces": ("forces", "atom", (3,)),
    "stress": ("stress", "structure", (3, 3)),
}
"""Targets that follow from the energy of a structure: kind, what each belongs to, and the shape of one."""
MEANT = {"force": "forces", "energies": "energy", "stresses": "stress"}
"""Other words for these."""
INPUTS = frozenset(("z", "pos", "batch", "cell", "pbc", "edge_source", "edge_target", "edge_shift", "by_source"))
"""Entries of a batch that are no targets."""


def _huber(apart: Tensor, delta: float) -> Tensor:
    return functional.huber_loss(apart, torch.zeros_like(apart), reduction="none", delta=delta)


LOSSES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "mse": lambda apart, delta: apart.square(),
    "mae": lambda apart, delta: apart.abs(),
    "huber": _huber,
}
"""Of errors, entry by entry; the second argument is where a Huber loss becomes linear."""


@dataclass(frozen=True)
class Learned:
    """One target that is learned."""

    name: str
    kind: Kind
    of: Of
    shape: tuple[int, ...] = ()
    """Of one value."""
    classes: int = 0
    loss: str = "mse"
    delta: float = 1.0
    """Where a Huber loss becomes linear, in the units that are learned."""
    per_atom: bool | Literal["sqrt"] = True
    """Whether an error of the energy counts divided by the number of atoms, or by its root."""
    average: Literal["atoms", "structures"] = "atoms"
    """Whether all atoms count the same in the loss, or all structures."""
    pooling: Literal["mean", "sum"] = "mean"
    """How atoms make up the value of a structure."""
    unit: str = ""
    """As errors are shown."""

    @property
    def num_entries(self) -> int:
        """Numbers in one value."""
        return int(torch.Size(self.shape).numel())

    @property
    def shown(self) -> float:
        """A stored unit in the one that errors are shown in."""
        return GPA if self.kind == "stress" else 1.0

    def penalty(self, apart: Tensor) -> Tensor:
        """The loss of errors in learned units, entry by entry."""
        return LOSSES[self.loss](apart, self.delta)


def learned(targets: Mapping[str, Any] | Sequence[str] | None, loss: str, delta: float) -> list[Learned]:
    """The targets of a recipe: names, or names with options; by default energy and forces."""
    if targets is None:
        targets = ["energy", "forces"]
    if isinstance(targets, str):
        targets = [targets]
    specs = dict(targets) if isinstance(targets, Mapping) else dict.fromkeys(targets)
    if not specs:
        raise UserError("task.targets is empty: there is nothing to learn; name targets, such as [energy, forces]")
    return [_learned(str(name), spec, {"loss": loss, "delta": delta}) for name, spec in specs.items()]


def _learned(name: str, spec: Any, defaults: Mapping[str, Any]) -> Learned:
    where = f"task.targets.{name}"
    options = {} if spec is None else spec
    if isinstance(options, str) and options in ("structure", "atom"):
        options = {"of": options}
    if not isinstance(options, Mapping):
        raise UserError(f"{where} is {spec!r}; expected options, such as {{of: atom}} or {{loss: huber, delta: 0.1}}")
    if name in MEANT and not options:
        raise UserError(f'task.targets: "{name}" is called "{MEANT[name]}" here; write that')
    if name in INPUTS or "/" in name:
        raise UserError(f'task.targets: "{name}" is no target; ' + ("give another name" if "/" in name else _IS_INPUT))
    kind, of, shape = _kind(name, options, where)
    allowed = {"loss", "delta"} - ({"loss", "delta"} if kind == "classes" else set())
    allowed |= {"energy": {"per_atom"}, "forces": {"average"}, "stress": set()}.get(kind, {"of", "classes", "unit"})
    allowed |= {"shape"} if kind == "value" else set()
    allowed |= {"pooling"} if kind in ("value", "classes") and of == "structure" else set()
    allowed |= {"average"} if of == "atom" else set()
    for key in options:
        if key not in allowed:
            close = nearest(str(key), allowed)
            hint = f'did you mean "{close}"?' if close else f"there are {', '.join(sorted(allowed))}"
            raise UserError(f"{where}.{key}: unknown option; {hint}")
    given = {key: value for key, value in {**defaults, **options}.items() if key not in ("of", "shape")}
    given.setdefault("unit", {"energy": "eV/atom", "forces": "eV/Å", "stress": "GPa"}.get(kind, ""))
    names = {field.name for field in fields(Learned)}
    found = Learned(name, kind, of, shape, **{key: value for key, value in given.items() if key in names})
    _check(found, where)
    return found


_IS_INPUT = "it is what the network sees"


def _kind(name: str, options: Mapping[str, Any], where: str) -> tuple[Kind, Of, tuple[int, ...]]:
    if name in KNOWN:
        return KNOWN[name]
    of: Of = options.get("of", "structure")
    if of not in ("structure", "atom"):
        raise UserError(f"{where}.of is {of!r}; expected structure or atom")
    if "classes" in options:
        return "classes", of, ()
    shape = options.get("shape", ())
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in shape):
        raise UserError(f"{where}.shape is {options['shape']}; expected whole numbers above 0, such as [3]")
    return "value", of, shape


def _check(target: Learned, where: str) -> None:
    if target.loss not in LOSSES:
        close = nearest(str(target.loss), LOSSES)
        hint = f'did you mean "{close}"?' if close else f"there are {', '.join(LOSSES)}"
        raise UserError(f"{where}.loss is {target.loss!r}: {hint}")
    if isinstance(target.delta, bool) or not isinstance(target.delta, int | float) or not target.delta > 0:
        raise UserError(f"{where}.delta is {target.delta!r}; expected a number above 0, in units of the target's std")
    if target.per_atom not in (True, False, "sqrt"):
        raise UserError(f"{where}.per_atom is {target.per_atom!r}; expected true, false or sqrt")
    if target.average not in ("atoms", "structures"):
        raise UserError(f"{where}.average is {target.average!r}; expected atoms or structures")
    if target.pooling not in ("mean", "sum"):
        raise UserError(f"{where}.pooling is {target.pooling!r}; expected mean or sum")
    whole = isinstance(target.classes, int) and not isinstance(target.classes, bool)
    if target.kind == "classes" and (not whole or target.classes < 2):
        raise UserError(f"{where}.classes is {target.classes!r}; expected their number, at least 2")
