"""Load a recipe: find it, lay it over what it extends, apply overrides, check it, and keep every origin."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isoscale.recipe.overrides import Overrides, apply_overrides
from isoscale.recipe.presets import DEFAULT_PRESET, locate, read_location
from isoscale.recipe.problems import DEFAULT, KeyPath, Problem, RecipeError, with_origin
from isoscale.recipe.schema import Recipe
from isoscale.recipe.tree import PYTHON_CALL, Node, children, from_plain, merge, origins, plain, with_class_keys
from isoscale.recipe.validation import validate


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that passed its checks, with the origin of every value."""

    recipe: Recipe
    values: dict[str, Any]
    """Everything the recipe says, defaults filled in, as plain JSON values; `extends` is resolved and gone."""
    origins: dict[KeyPath, str]
    """For each value: `images/digits.yaml:12`, `my.yaml:3`, `command line`, `Python call` or `default`."""
    name: str
    """What runs of this recipe are called."""

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
    node = apply_overrides(node, overrides, problems)
    values = plain(node)
    recipe, schema_problems = validate(values)
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
    values = recipe.model_dump(by_alias=True, exclude={"extends"})
    written = origins(node)
    return LoadedRecipe(
        recipe=recipe,
        values=values,
        origins={path: written.get(path, DEFAULT) for path in _leaves(values)},
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
        node = with_class_keys(from_plain(source, PYTHON_CALL, problems), problems)
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
    node = with_class_keys(read_location(location, problems), problems)
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
