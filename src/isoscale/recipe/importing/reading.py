"""An input file of another program in the place of a recipe: overrides in its own words, then its translation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from isoscale.errors import UserError
from isoscale.parallel.environments import find as environment
from isoscale.recipe.formats.tree import COMMAND_LINE, PYTHON_CALL, Node, flat, plain
from isoscale.recipe.importing.deepmd import is_input, translate
from isoscale.recipe.importing.deepmd_words import ALIASES, SECTIONS
from isoscale.recipe.importing.imported import Imported, Remark
from isoscale.recipe.overrides import Overrides, apply_overrides
from isoscale.recipe.presets import locate, read_location
from isoscale.recipe.problems import Problem, RecipeError, nearest
from isoscale.recipe.validation import section_keys
from isoscale.recipe.wording import UNKNOWN_KEY

__all__ = ["Translated", "import_input", "is_input", "split", "translated"]

FOR_ONE = "is that of each worker there and of all ranks together here: for 4 ranks, four times as much"


class Translated(NamedTuple):
    """The recipe of an input file."""

    node: Node
    rest: list[Overrides]
    """The overrides that are about the recipe."""
    notes: list[str]
    """What there is to know about how the file was understood."""


def translated(
    node: Node, label: str, folder: Path, overrides: Sequence[Overrides], world: int | None, problems: list[Problem]
) -> Translated:
    """Change an input file in its own words, and translate it; raises RecipeError with all that is wrong with it.

    `world` is the number of ranks of the first start; None for the ranks of this one.
    """
    parts = [split(each) for each in overrides]
    problems += [problem for _, rest in parts for problem in _misspelt(rest)]
    for own, _ in parts:
        node = apply_overrides(node, _as_spelled(own, node), problems)
    imported = translate(node, label, folder, environment.find().world if world is None else world, problems)
    if problems:
        raise RecipeError(problems)
    notes = [f"{label}: {remark}" for remark in imported.needless]
    return Translated(imported.to_node(), [rest for _, rest in parts], notes)


def import_input(path: Path, words: Sequence[str], moved: Path | None) -> Imported | None:
    """The recipe of an input file for one rank; None if it is no such file. `moved` is where its systems are now."""
    problems: list[Problem] = []
    location = locate(path, Path())
    node = read_location(location, problems)
    if not is_input(node):
        return None
    own, rest = split(words)
    for word in rest:
        raise UserError(f"{word} is not a key of {path}: put it into the recipe that is made of it")
    node = apply_overrides(node, _as_spelled(own, node), problems)
    imported = translate(node, location.label, location.folder, 1, problems, moved)
    if problems:
        raise RecipeError(problems)
    imported.origins = {path: where.removeprefix(f"{location.label}: ") for path, where in imported.origins.items()}
    imported.needless.append(Remark("training.training_data.batch_size", FOR_ONE))
    return imported


def split(overrides: Overrides) -> tuple[Overrides, Overrides]:
    """Overrides that speak the file's own keys, and those that speak a recipe's."""
    if isinstance(overrides, Mapping):
        own = {key: value for key, value in overrides.items() if _is_own(str(key))}
        return own, {key: value for key, value in overrides.items() if key not in own}
    words = [overrides] if isinstance(overrides, str) else list(overrides)
    return [word for word in words if _is_own(word)], [word for word in words if not _is_own(word)]


def _misspelt(rest: Overrides) -> list[Problem]:
    """Keys that are no words of a recipe, and look like the file's own."""
    origin, words = (PYTHON_CALL, map(str, rest)) if isinstance(rest, Mapping) else (COMMAND_LINE, rest)
    known = section_keys(())
    firsts = [_key(word).partition(".")[0] for word in words]
    found = {first: nearest(first, [*SECTIONS, *known]) for first in firsts if first not in known}
    return [Problem((first,), UNKNOWN_KEY, str(origin), meant) for first, meant in found.items() if meant in SECTIONS]


def _is_own(word: str) -> bool:
    return _key(word).partition(".")[0] in SECTIONS


def _key(word: str) -> str:
    return word.partition("=")[0].strip().removeprefix("~")


def _as_spelled(own: Overrides, node: Node) -> Overrides:
    """Overrides with the names that the file has for their keys, such as stop_batch for numb_steps."""
    spelled = {ALIASES[key]: key for key in flat(plain(node)) if key in ALIASES}

    def name(key: str) -> str:
        known = ALIASES.get(key, key)
        return spelled.get(known, known)

    if isinstance(own, Mapping):
        return {name(str(key)): value for key, value in own.items()}
    return [word.replace(_key(word), name(_key(word)), 1) for word in own]
