"""Targets in units that are easy to learn: about 0, and about as large as 1. Given in a recipe, or fitted to its data.

An energy is that of the atoms' elements and of what a network adds: E = Σ reference + scale · Σ output. Its forces are
the slopes of just that, so that the scale of the energy is that of the forces too. Of everything else, a value is
mean + std · output. Errors in learned units are errors divided by `std`: means drop out of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isoscale.engine.task import Training
from isoscale.errors import UserError, nearest
from isoscale.science.crystals.labels import Labels
from isoscale.science.crystals.reading.elements import SYMBOLS
from isoscale.science.crystals.targets import NUM_ELEMENTS, Learned

AUTO = "auto"
MOST_LISTED = 4
"""Elements whose references are said."""
SMALLEST = 1e-12
"""Spread that can be divided by."""


class Unit(NamedTuple):
    """How a target is learned."""

    mean: NDArray[np.float64]
    """Of one value; where it depends on the element of an atom, one for each atomic number. Energies: of an atom."""
    scale: float
    """What an output of 1 stands for."""
    std: float
    """What an error is divided by in the loss."""


class Normalisation:
    """How targets are normalised, as a recipe says it."""

    def __init__(self, given: Any, targets: Sequence[Learned]) -> None:
        """`given` is auto, none, or a mapping of `{target}_mean` and `{target}_std`, each a number or auto.

        A mean that depends on the element is a mapping of symbols. What a mapping does not name stays as it is stored;
        the forces, and the stress, then have the std of the energy.
        """
        self.targets = targets
        if given in (None, False, "none"):
            given = {}
        self._auto = given == AUTO
        if not self._auto and not isinstance(given, Mapping):
            raise UserError(
                f"task.normalise is {given!r}; expected auto, none, or numbers, such as {{energy_mean: -3.7, "
                "energy_std: 0.5}"
            )
        self._given: dict[str, Any] = {} if self._auto else dict(given)
        keys = [f"{target.name}_{what}" for target in targets for what in _keys(target)]
        for key, value in self._given.items():
            if key not in keys:
                raise UserError(_unknown_key(str(key), keys, targets))
            _check_value(key, value, key.removesuffix("_mean") in _by_element(targets) and key.endswith("_mean"))

    def fit(self, training: Training) -> dict[str, Unit]:
        """The units of all targets by name, the same on all ranks; the first one looks at the data."""
        found: tuple[dict[str, Any], str] | None = None
        if training.ranks.rank == 0:
            table = Labels(training.source)
            units = self._units(table)
            found = {name: (unit.mean.tolist(), *unit[1:]) for name, unit in units.items()}, self._words(table, units)
        found = training.ranks.all_gather(found, "the units of targets")[0]
        assert found is not None
        if found[1]:
            training.say(found[1])
        return {name: Unit(np.asarray(mean), *others) for name, (mean, *others) in found[0].items()}

    def _wants(self, key: str) -> bool:
        """Whether a number is to be fitted."""
        return self._auto or self._given.get(key) == AUTO

    def _units(self, table: Labels) -> dict[str, Unit]:
        units: dict[str, Unit] = {}
        for target in sorted(self.targets, key=lambda each: each.kind != "energy"):
            mean = self._mean(target, table)
            scale = self._scale(target, table, mean, units.get("energy"))
            units[target.name] = Unit(mean, scale, scale)
        if "energy" not in units and "forces" in units:  # the network's energy is learned through its slopes alone
            scale = units["forces"].scale
            units["energy"] = Unit(np.zeros(NUM_ELEMENTS), scale, scale)
        return units

    def _scale(self, target: Learned, table: Labels, mean: NDArray[np.float64], energy: Unit | None) -> float:
        key = f"{target.name}_std"
        if self._wants(key) and not (self._auto and target.kind == "forces" and energy is not None):
            return self._fitted_scale(target, table, mean)
        if not self._wants(key) and key in self._given:
            return float(self._given[key])
        of_energy = energy is not None and (target.kind == "forces" or "energy_std" in self._given)
        return energy.std if energy is not None and of_energy and target.kind in ("forces", "stress") else 1.0

    def _mean(self, target: Learned, table: Labels) -> NDArray[np.float64]:
        key, shape = f"{target.name}_mean", target.shape
        by_element = target.name in _by_element(self.targets)
        if target.kind in ("forces", "stress", "classes"):
            return np.zeros(shape)
        if self._wants(key):
            return table.references(target) if target.kind == "energy" else table.means(target)
        value = self._given.get(key, 0.0)
        found = np.zeros((NUM_ELEMENTS, *shape) if by_element else shape)
        if isinstance(value, Mapping):
            for name, own in value.items():
                found[SYMBOLS.index(name)] = own
        else:
            found[...] = value
        if by_element:
            found[0] = 0  # of padding
        return found

    def _fitted_scale(self, target: Learned, table: Labels, mean: NDArray[np.float64]) -> float:
        """The spread of a target; of energies, the size of the forces, where these are learned: both share a scale."""
        if target.kind == "classes":
            return 1.0
        forces = [each for each in self.targets if each.kind == "forces"] if target.kind == "energy" else []
        found = next((found for each in forces if not (found := table.rms(each)) <= SMALLEST), 0.0)
        found = found or table.rms(target, mean)
        if not math.isfinite(found):
            raise UserError(table.not_finite([target, *forces]))
        return found if found > SMALLEST else 1.0

    def _words(self, table: Labels, units: Mapping[str, Unit]) -> str:
        """What was fitted, in one line."""
        fitted = [_in_words(target, units[target.name], self._wants, table) for target in self.targets]
        return f"targets are learned as {', '.join(filter(None, fitted))}" if any(fitted) else ""


def _in_words(target: Learned, unit: Unit, wants: Callable[[str], bool], table: Labels) -> str:
    """What was fitted to a target: (energy - Cu -3.7) / 0.78."""
    name, middle = target.name, ""
    if target.kind == "classes" or not any(wants(f"{name}_{what}") for what in ("mean", "std")):
        return ""
    if target.kind == "energy" or (target.kind == "value" and target.of == "atom"):
        few = len(table.elements) <= MOST_LISTED and unit.mean.ndim == 1
        own = ", ".join(f"{SYMBOLS[number]} {unit.mean[number]:.4g}" for number in table.elements)
        middle = f"atoms of {own}" if few else f"those of {len(table.elements)} elements"
    elif target.kind == "value":
        middle = "their mean" if unit.mean.ndim else f"{float(unit.mean):.4g}"
    return f"{f'({name} - {middle})' if middle else name} / {unit.std:.4g}"


def _by_element(targets: Sequence[Learned]) -> set[str]:
    """Names of targets whose mean may depend on the element."""
    return {each.name for each in targets if each.kind == "energy" or (each.kind == "value" and each.of == "atom")}


def _keys(target: Learned) -> tuple[str, ...]:
    return {"classes": (), "forces": ("std",), "stress": ("std",)}.get(target.kind, ("mean", "std"))


def _unknown_key(key: str, keys: Sequence[str], targets: Sequence[Learned]) -> str:
    base, _, what = key.rpartition("_")
    if what == "mean" and any(each.name == base and each.kind in ("forces", "stress") for each in targets):
        return f"task.normalise.{key}: {base} are slopes of the energy, which have no mean of their own; leave it out"
    if any(each.name == base and each.kind == "classes" for each in targets):
        return f"task.normalise.{key}: {base} are classes, which have no units; leave it out"
    close = nearest(key, keys)
    hint = f'did you mean "{close}"?' if close else f"there are {', '.join(keys) or 'none'}"
    return f"task.normalise.{key}: no target that is learned is called {base or key!r}; {hint}"


def _check_value(key: str, value: Any, by_element: bool) -> None:
    if isinstance(value, Mapping) and by_element:
        for name, own in value.items():
            if name not in SYMBOLS[1:]:
                raise UserError(f"task.normalise.{key}: {name!r} is no element; write symbols, such as {{Cu: -3.7}}")
            _check_value(f"{key}.{name}", own, False)
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if value != AUTO and not is_number:
        raise UserError(f"task.normalise.{key} is {value!r}; expected a number or auto")
    if key.endswith("_std") and is_number and value <= 0:
        raise UserError(f"task.normalise.{key} is {value}; expected a number above 0")
