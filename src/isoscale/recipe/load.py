"""Load a recipe: find it, lay it over what it extends, apply overrides, check it, and keep every origin."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from isoscale.errors import KeyPath, Problem
from isoscale.recipe.formats.tree import PYTHON_CALL, Node, children, from_plain, merge, origins, plain, with_class_keys
from isoscale.recipe.importing.reading import input_of, translated
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.overrides import Overrides, apply_overrides
from isoscale.recipe.presets import Location, locate, read_location
from isoscale.recipe.problems import DEFAULT, RecipeError, with_origin
from isoscale.recipe.sweep import SECTION, sweep_problems, with_nested_keys
from isoscale.recipe.trust import Trust, job_problems, trust_problems, writing_problems
from isoscale.recipe.validation import validate
from isoscale.science.domain import Importer
from isoscale.science.registry import DEFAULT_PRESET


def load_resolved(path: Path) -> LoadedRecipe:
    """Load a recipe that was written by `to_yaml`, with the origins that its values had then."""
    from isoscale.recipe.formats.yaml_writer import read_origins

    loaded = load_recipe(path)
    return replace(loaded, origins=read_origins(path.read_text(encoding="utf-8"), loaded.origins))


def load_recipe(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Overrides = (),
    *,
    check_components: bool = False,
    world: int | None = None,
    trust: Trust = Trust.NAMED,
) -> LoadedRecipe:
    """Load a preset, a file or a mapping; raises RecipeError with every problem that was found.

    With `check_components`, the classes that the recipe names are imported and their arguments checked as well, if
    whoever chose them is trusted. `world` is the number of ranks that an input file of another program speaks of; by
    default those of this start.
    """
    problems: list[Problem] = []
    read = _read(DEFAULT_PRESET if source is None else source, problems)
    node, notes = _applied(read, [overrides], world, problems)
    return replace(_checked(node, read, problems, trust if check_components else None), notes=notes)


def to_build(loaded: LoadedRecipe, trust: Trust = Trust.NAMED) -> LoadedRecipe:
    """The recipe, if all that it names may be built; else a RecipeError says what was chosen by somebody else."""
    _refuse(loaded, trust_problems(loaded.values, loaded.files, trust))
    return loaded


def to_train(loaded: LoadedRecipe, trust: Trust = Trust.NAMED) -> LoadedRecipe:
    """The recipe, if all that it names may be built and written; else a RecipeError."""
    _refuse(loaded, writing_problems(loaded.values, loaded.files, trust))
    return to_build(loaded, trust)


def to_submit(loaded: LoadedRecipe, trust: Trust = Trust.NAMED) -> LoadedRecipe:
    """The recipe, if a job may do all that it says; else a RecipeError says what was chosen by somebody else."""
    _refuse(loaded, job_problems(loaded.values, loaded.files, trust))
    return to_train(loaded, trust)


def _refuse(loaded: LoadedRecipe, problems: list[Problem]) -> None:
    if problems:
        raise RecipeError([with_origin(problem, loaded.origins) for problem in problems])


def load_variants(
    source: str | Path | None, overrides: Overrides, variants: Mapping[str, Mapping[str, Any]], *,
    check_components: bool = False, world: int | None = None, trust: Trust = Trust.NAMED,
) -> dict[str, LoadedRecipe]:  # fmt: skip
    """The same recipe with other values, several times by name, read only once; `world` as for `load_recipe`.

    Raises RecipeError with every problem that was found, each with the first variant that has it.
    """
    problems: list[Problem] = []
    read = _read(DEFAULT_PRESET if source is None else source, problems)
    written = origins(_applied(read, [overrides], world, list(problems))[0])
    found: dict[str, LoadedRecipe] = {}
    wrong: dict[str, Problem] = {}
    for variant, values in variants.items():
        try:
            here = list(problems)
            node, _ = _applied(read, [overrides, values], world, here)
            loaded = _checked(node, read, here, trust if check_components else None)
            swept = [tuple(key.split(".")) for key in values]
            translated_from = {f"{PYTHON_CALL}: {key}": f"{SECTION}: {key}" for key in values}
            inside = {path: translated_from[at] for path, at in loaded.origins.items() if at in translated_from}
            inside |= {path: SECTION for path in loaded.origins if any(_begins(path, key) for key in swept)}
            found[variant] = replace(loaded, origins=loaded.origins | inside)
        except RecipeError as error:
            for problem in error.problems:
                wrong.setdefault(str(replace(problem, origin=None)), _in_variant(problem, variant, values, written))
    if wrong:
        raise RecipeError(list(wrong.values()))
    return found


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


def _checked(node: Node, read: "_Read", problems: list[Problem], trust: Trust | None) -> LoadedRecipe:
    """A recipe that is right; its classes are looked at where it is said whose choice is trusted."""
    values = plain(node)
    recipe, schema_problems = validate(values)
    schema_problems += sweep_problems(values.get(SECTION))
    if trust is not None:
        from isoscale.recipe.check import component_problems

        imported = trust is not Trust.CHECKED
        refused = trust_problems(values, read.files, trust) if imported else []
        schema_problems += refused or component_problems(values, schema_problems, imported)
    # Leave out what follows from a key that could not even be read.
    unreadable = {problem.path for problem in problems} - {()}
    problems += [problem for problem in schema_problems if problem.path not in unreadable]
    written = origins(node)
    if problems or recipe is None:
        raise RecipeError([with_origin(problem, written) for problem in problems])
    filled = recipe.model_dump(by_alias=True, exclude={"extends", SECTION})
    swept = recipe.model_dump(include={SECTION}, exclude_defaults=True)
    of_leaves = {path: written.get(path, DEFAULT) for path in _leaves({**filled, **swept})}
    return LoadedRecipe(recipe, filled, of_leaves, recipe.name or read.name, files=list(read.files))


def _leaves(value: Any, path: KeyPath = ()) -> list[KeyPath]:
    """The paths of all scalars and empty containers."""
    entries = children(value)
    if not entries:
        return [path] if path else []
    return [leaf for key, child in entries for leaf in _leaves(child, (*path, key))]


class _Read(NamedTuple):
    """What stands in a file or a mapping, laid over what it extends."""

    node: Node
    name: str
    importer: Importer | None = None
    """The program whose input it is, as it was written."""
    label: str = ""
    folder: Path = Path()
    files: Sequence[str] = ()


def _applied(
    read: _Read, overrides: Sequence[Overrides], world: int | None, problems: list[Problem]
) -> tuple[Node, list[str]]:
    """The recipe with its overrides, in their order, and what there is to know about its translation."""
    node, notes, rest = read.node, list[str](), list(overrides)
    if read.importer is not None:
        node, rest, notes = translated(read.importer, node, read.label, read.folder, overrides, world, problems)
    for each in rest:
        node = apply_overrides(node, each, problems)
    return node, notes


def _read(source: str | Path | Mapping[str, Any], problems: list[Problem]) -> _Read:
    if isinstance(source, Mapping):
        node = from_plain(source, PYTHON_CALL, problems)
        if (importer := input_of(node)) is not None:
            return _Read(node, "input", importer, str(PYTHON_CALL))
        node = with_nested_keys(with_class_keys(node, problems))
        files: list[str] = []
        return _Read(_extended(node, Path(), (), problems, files), "recipe", files=files)
    location = locate(source, Path())
    node, files = read_location(location, problems), [location.identity]
    if (importer := input_of(node)) is not None:
        return _Read(node, location.name, importer, location.label, location.folder, files)
    return _Read(_over_bases(node, location, (), problems, files), location.name, files=files)


def _over_bases(
    node: Node, location: Location, chain: Sequence[tuple[str, str]], problems: list[Problem], files: list[str]
) -> Node:
    """A file laid over what it extends; `chain` is who extends whom on the way here."""
    node = with_nested_keys(with_class_keys(node, problems))
    return _extended(node, location.folder, (*chain, (location.identity, location.label)), problems, files)


def _read_extended(
    source: str, folder: Path, chain: Sequence[tuple[str, str]], problems: list[Problem], files: list[str], origin: str
) -> Node:
    """Read a recipe that another one extends, and lay it over what it extends itself; `files` gets its files."""
    location = locate(source, folder, origin)
    if location.identity in [identity for identity, _ in chain]:
        names = " → ".join(label for label in (*(label for _, label in chain), location.label))
        raise RecipeError([Problem(("extends",), f"recipes extend each other in a circle: {names}", origin)])
    node = read_location(location, problems)
    if (importer := input_of(node)) is not None:
        message = f"{source} is {importer.title}; `isoscale recipe import` makes a recipe of it, to be extended"
        raise RecipeError([Problem(("extends",), message, origin)])
    files.append(location.identity)
    return _over_bases(node, location, chain, problems, files)


def _extended(
    node: Node, folder: Path, chain: Sequence[tuple[str, str]], problems: list[Problem], files: list[str]
) -> Node:
    extends = node.value.get("extends")
    own = Node({key: child for key, child in node.value.items() if key != "extends"}, node.origin)
    base: Node | None = None
    for entry in _bases(extends, problems):
        read = _read_extended(entry.value, folder, chain, problems, files, str(entry.origin))
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
