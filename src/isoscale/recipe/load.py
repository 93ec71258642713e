"""Load a recipe: find it, lay it over what it extends, apply overrides, check it, and keep every origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isoscale.recipe.overrides import Overrides, apply_overrides
from isoscale.recipe.presets import DEFAULT_PRESET, locate, read_location
from isoscale.recipe.problems import DEFAULT, KeyPath, Problem, RecipeError, with_origin
from isoscale.recipe.schema import Recipe
from isoscale.recipe.sweep import SECTION, sweep_problems, with_nested_keys
from isoscale.recipe.tree import PYTHON_CALL, Node, children, from_plain, merge, origins, plain, with_class_keys
from isoscale.recipe.validation import validate


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that passed its checks, with the origin of every value."""

    recipe: Recipe
    values: dict[str, Any]
    """Everything the recipe says of one training, defaults filled in, as plain JSON values; `extends` is resolved and
    gone, and so is `sweep`."""
    origins: dict[KeyPath, str]
    """For each value: `images/digits.yaml:12`, `my.yaml:3`, `command line`, `Python call` or `default`."""
    name: str
    """What runs of this recipe are called."""

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

    def to_yaml(self) -> str:
        """The resolved recipe, each value with its origin behind it; reads back as the same recipe."""
        from isoscale.recipe.yaml_writer import write_yaml

        return write_yaml(self.values, self.origins)


def load_resolved(path: Path) -> LoadedRecipe:
    """Load a recipe that was written by `to_yaml`, with the origins that its values had then."""
    from isoscale.recipe.yaml_writer import read_origins

    loaded = load_recipe(path)
    return replace(loaded, origins=read_origins(path.read_text(encoding="utf-8"), loaded.origins))


def load_recipe(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides = (),
    *,
    check_components: bool = False,
) -> LoadedRecipe:
    """Load a preset, a file or a mapping; raises RecipeError with every problem that was found.

    With `check_components`, the classes that the recipe names are imported and their arguments checked as well.
    """
    problems: list[Problem] = []
    node, name = _read(DEFAULT_PRESET if source is None else source, problems)
    return _checked(node, name, overrides, problems, check_components)


def load_variants(
    source: str | Path | None, overrides: Overrides, variants: Mapping[str, Mapping[str, Any]], *,
    check_components: bool = False,
) -> dict[str, LoadedRecipe]:  # fmt: skip
    """The same recipe with other values, several times by name, read only once.

    Raises RecipeError with every problem that was found, each with the first variant that has it.
    """
    problems: list[Problem] = []
    node, name = _read(DEFAULT_PRESET if source is None else source, problems)
    node = apply_overrides(node, overrides, problems)
    written = origins(node)
    found: dict[str, LoadedRecipe] = {}
    wrong: dict[str, Problem] = {}
    for variant, values in variants.items():
        try:
            found[variant] = _of_sweep(_checked(node, name, values, list(problems), check_components), values)
        except RecipeError as error:
            for problem in error.problems:
                wrong.setdefault(str(replace(problem, origin=None)), _in_variant(problem, variant, values, written))
    if wrong:
        raise RecipeError(list(wrong.values()))
    return found


def _of_sweep(loaded: LoadedRecipe, values: Mapping[str, Any]) -> LoadedRecipe:
    """With the sweep as the origin of its values."""
    swept = [tuple(key.split(".")) for key in values]
    inside = {path: SECTION for path in loaded.origins if any(_begins(path, key) for key in swept)}
    return replace(loaded, origins=loaded.origins | inside)


def _begins(path: KeyPath, start: KeyPath) -> bool:
    return tuple(map(str, path[: len(start)])) == start


def _in_variant(
    problem: Problem, variant: str, values: Mapping[str, Any], written: Mapping[KeyPath, str]
) -> Problem:  # fmt: skip
    """The problem where the value was written: in the sweep, if it is one of those that differ."""
    keys = [tuple(key.split(".")) for key in values]
    key = next((key for key in keys if _begins(problem.path, key) or _begins(key, tuple(map(str, problem.path)))), None)
    origin = problem.origin if key is None else written.get((SECTION, *key), problem.origin)
    return replace(problem, message=f"{problem.message} (in the point {variant})", origin=origin)


def _checked(
    node: Node, name: str, overrides: Overrides, problems: list[Problem], check_components: bool
) -> LoadedRecipe:
    node = apply_overrides(node, overrides, problems)
    values = plain(node)
    recipe, schema_problems = validate(values)
    schema_problems += sweep_problems(values.get(SECTION))
    if check_components:
        from isoscale.recipe.check import component_problems

        schema_problems += component_problems(values, schema_problems)
    problems += _not_yet_named(schema_problems, problems)
    if problems or recipe is None:
        written = origins(node)
        raise RecipeError([with_origin(problem, written) for problem in problems])
    return _loaded(recipe, node, name)


def _not_yet_named(more: list[Problem], problems: list[Problem]) -> list[Problem]:
    """Leave out what follows from a key that could not even be read."""
    unreadable = {problem.path for problem in problems} - {()}
    return [problem for problem in more if problem.path not in unreadable]


def _loaded(recipe: Recipe, node: Node, name: str) -> LoadedRecipe:
    values = recipe.model_dump(by_alias=True, exclude={"extends", SECTION})
    swept = recipe.model_dump(include={SECTION}, exclude_defaults=True)
    written = origins(node)
    return LoadedRecipe(
        recipe=recipe,
        values=values,
        origins={path: written.get(path, DEFAULT) for path in _leaves({**values, **swept})},
        name=recipe.name or name,
    )


def _leaves(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    """The paths of all scalars and empty containers."""
    entries = children(value)
    if not entries:
        return [path] if path else []
    return [leaf for key, child in entries for leaf in _leaves(child, (*path, key))]


def _read(source: str | Path | Mapping[str, Any], problems: list[Problem]) -> tuple[Node, str]:
    if isinstance(source, Mapping):
        node = with_nested_keys(with_class_keys(from_plain(source, PYTHON_CALL, problems), problems))
        return _extended(node, Path(), (), problems), "recipe"
    location = locate(source, Path())
    return _read_extended(source, Path(), (), problems), location.name


def _read_extended(
    source: str | Path,
    folder: Path,
    chain: Sequence[tuple[str, str]],
    problems: list[Problem],
    origin: str | None = None,
) -> Node:
    """Read a recipe and lay it over what it extends; `chain` is who extends whom on the way here."""
    location = locate(source, folder, origin)
    here = (location.identity, location.label)
    if here[0] in [identity for identity, _ in chain]:
        names = " → ".join(label for _, label in (*chain, here))
        raise RecipeError([Problem(("extends",), f"recipes extend each other in a circle: {names}", origin)])
    node = with_nested_keys(with_class_keys(read_location(location, problems), problems))
    return _extended(node, location.folder, (*chain, here), problems)


def _extended(node: Node, folder: Path, chain: Sequence[tuple[str, str]], problems: list[Problem]) -> Node:
    extends = node.value.get("extends")
    own = Node({key: child for key, child in node.value.items() if key != "extends"}, node.origin)
    base: Node | None = None
    for entry in _bases(extends, problems):
        read = _read_extended(entry.value, folder, chain, problems, str(entry.origin))
        base = read if base is None else merge(base, read)
    return own if base is None else merge(base, own)


def _bases(extends: Node | None, problems: list[Problem]) -> list[Node]:
    if extends is None or extends.value is None:
        return []
    entries = extends.value if isinstance(extends.value, list) else [extends]
    if any(not isinstance(entry.value, str) for entry in entries):
        message = "expected the name of a preset, the path of a file, or a list of them"
        problems.append(Problem(("extends",), message, str(extends.origin)))
    return [entry for entry in entries if isinstance(entry.value, str)]
