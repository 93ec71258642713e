"""A recipe that was loaded: its values, checked, and where each of them was written."""

from dataclasses import dataclass, field, replace
from typing import Any

from isoscale.errors import KeyPath
from isoscale.recipe.schema import Recipe
from isoscale.recipe.sweep import SECTION


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that passed its checks, with the origin of every value."""

    recipe: Recipe
    values: dict[str, Any]
    """Everything the recipe says of one training, defaults filled in, as plain JSON values; `extends` is resolved and
    gone, and so is `sweep`."""
    origins: dict[KeyPath, str]
    """For each value: `images/digits.yaml:12`, `my.yaml:3`, `command line`, `Python call` or `default`; in front of the
    key of another program's file, which the value was translated from, as in `input.json: training.numb_steps`."""
    name: str
    """What runs of this recipe are called."""
    notes: list[str] = field(default_factory=list)
    """What there is to know where another program's file was read."""
    files: list[str] = field(default_factory=list)
    """What it was read from: its own file, and those that it extends."""

    @property
    def sweep_note(self) -> str | None:
        """What to know where a recipe with a sweep is trained once."""
        if not self.recipe.sweep.arguments:
            return None
        return "the recipe has a sweep; this trains its own values alone, `isoscale sweep` trains all points"

    def with_sweep(self) -> "LoadedRecipe":
        """The recipe with its sweep among the values, for those who show or keep all that it says."""
        section = self.recipe.sweep.model_dump(exclude_defaults=True)
        return replace(self, values={**self.values, SECTION: section}) if section else self

    def as_dict(self) -> dict[str, Any]:
        """In plain values, for other ranks."""
        told = {name: getattr(self, name) for name in ("origins", "name", "notes", "files")}
        return {"values": self.with_sweep().values, **told}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> "LoadedRecipe":
        """As rank 0 told it."""
        values = {key: value for key, value in told["values"].items() if key != SECTION}
        return cls(**{**told, "values": values}, recipe=Recipe.model_validate(told["values"]))

    def to_yaml(self) -> str:
        """The resolved recipe, each value with its origin behind it; reads back as the same recipe."""
        from isoscale.recipe.formats.yaml_writer import write_yaml

        return write_yaml(self.values, self.origins)
