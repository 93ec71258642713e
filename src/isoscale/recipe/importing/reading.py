"""A file of another program in the place of a recipe: overrides in its own words, then its translation."""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from isoscale.errors import UNKNOWN_KEY, KeyPath, Problem, UserError, nearest
from isoscale.parallel.environments import find as environment
from isoscale.recipe.formats.tree import COMMAND_LINE, PYTHON_CALL, Node, Origin, flat, origins, plain
from isoscale.recipe.formats.yaml_writer import write_yaml
from isoscale.recipe.importing.registered import importers
from isoscale.recipe.overrides import Overrides, apply_overrides
from isoscale.recipe.presets import SUFFIXES, locate, read_location
from isoscale.recipe.problems import RecipeError
from isoscale.recipe.schema import Recipe
from isoscale.recipe.validation import section_keys
from isoscale.science.domain import Importer, load
from isoscale.science.importing import Imported, PeerFile


class Translated(NamedTuple):
    """The recipe of an input file."""

    node: Node
    rest: list[Overrides]
    """The overrides that are about the recipe."""
    notes: list[str]
    """What there is to know about how the file was understood."""


def input_of(node: Node) -> Importer | None:
    """The program whose input a file is, which may stand in the place of a recipe."""
    return next((each for each in _recognising(node) if each.sections), None)


def _recognising(node: Node) -> Iterable[Importer]:
    values = plain(node)
    return (each for each in importers() if each.recognises(values))


def translated(
    importer: Importer, node: Node, label: str, folder: Path, overrides: Sequence[Overrides], world: int | None,
    problems: list[Problem],
) -> Translated:  # fmt: skip
    """Change an input file in its own words, and translate it; raises RecipeError with all that is wrong with it.

    `world` is the number of ranks of the first start; None for the ranks of this one.
    """
    if importer.holds_configs:
        raise UserError(
            f"{label} is {importer.title}, of which a recipe has to be made first, for one of its configurations "
            f"({', '.join(_configs(node))}): isoscale recipe import {label} --config NAME --out RECIPE.yaml"
        )
    parts = [split(each, importer.sections) for each in overrides]
    problems += [problem for _, rest in parts for problem in _misspelt(rest, importer.sections)]
    for own, _ in parts:
        node = apply_overrides(node, _as_spelled(own, node, importer), problems)
    ranks = environment.find().world if world is None else world
    imported = load(importer.translate)(PeerFile(label, plain(node), origins(node), folder, ranks), problems)
    if problems:
        raise RecipeError(problems)
    notes = [f"{label}: {remark}" for remark in imported.needless]
    recipe = _node(imported.values, (), imported.origins, Origin(imported.source))
    return Translated(recipe, [rest for _, rest in parts], notes)


def import_file(path: Path, words: Sequence[str], moved: Path | None, config: str | None = None) -> Imported:
    """The recipe of a file of another program for one rank; `moved` is where the data that it names is now.

    `config` is the one that is meant of several configurations in the file.
    """
    importer, problems = _importer(path), list[Problem]()
    if config is not None and not importer.holds_configs:
        raise UserError(f"{path} is {importer.title}, which has no configurations to choose from: leave out --config")
    sections = importer.sections or importer.changes
    if words and not sections:
        inputs = ", or ".join(each.title for each in importers() if each.sections)
        raise UserError(f"{words[0]} can only stand beside {inputs}: change the recipe instead")
    if importer.opens:
        file = load(importer.opens)(path)
    else:
        location = locate(path, Path())
        node, label = read_location(location, problems, merge_keys=True), location.label
        if importer.holds_configs:
            node, label = _config(node, config, label)
        own, rest = split(words, sections)
        problems += _misspelt(rest, sections)
        for word in rest if not problems else ():
            raise UserError(f"{word} is not a key of {path}: put it into the recipe that is made of it")
        node = apply_overrides(node, _as_spelled(own, node, importer), problems)
        file = PeerFile(label, plain(node), origins(node), location.folder)
    imported: Imported = load(importer.translate)(file._replace(moved=moved), problems)
    if problems:
        raise RecipeError(problems)
    imported.origins = {key: where.removeprefix(f"{file.source}: ") for key, where in imported.origins.items()}
    return imported


def _configs(node: Node) -> list[str]:
    return [name for name, child in node.value.items() if isinstance(child.value, dict)]


def _config(node: Node, name: str | None, label: str) -> tuple[Node, str]:
    """One configuration of a file that holds several, and what messages call it."""
    names = _configs(node)
    known = f"there is {', '.join(names)}"
    if name is None and len(names) > 1:
        raise UserError(f"{label} holds {len(names)} configurations: say which with --config NAME; {known}")
    if name is not None and name not in names:
        meant = nearest(name, names)
        hint = f'; did you mean "{meant}"?' if meant else ";"
        raise UserError(f'{label} has no configuration "{name}"{hint} {known}')
    chosen = name or names[0]
    return node.value[chosen], f"{label}, {chosen}"


def _importer(path: Path) -> Importer:
    """Who can make a recipe of a file or a folder, by its name or else by what is in it."""
    if not path.exists():
        raise UserError(f"cannot read {path}: {os.strerror(errno.ENOENT)}")
    for importer in importers():
        inside = path.iterdir() if path.is_dir() else [path]
        if any(file.name.endswith(importer.endings) for file in inside):
            return importer
    problems: list[Problem] = []
    is_tree = path.suffix in SUFFIXES and path.is_file()
    node = read_location(locate(path, Path()), problems, merge_keys=True) if is_tree else None
    found = None if node is None else next(iter(_recognising(node)), None)
    if found is None and problems:
        raise RecipeError(problems)
    if found is None:
        raise UserError(f"{path} is not {', nor '.join(each.files for each in importers())}")
    return found


def to_yaml(imported: Imported) -> str:
    """The recipe, with the parameter that it comes from behind each value, and what is left to do at the top."""
    ordered = {name: imported.values[name] for name in Recipe.model_fields if name in imported.values}
    return imported.heading() + "\n" + write_yaml(ordered, imported.origins)


def split(overrides: Overrides, sections: Sequence[str] | None = None) -> tuple[Overrides, Overrides]:
    """Overrides that speak the keys of an input file, by default of any program, and those that speak a recipe's."""
    if sections is None:
        sections = [name for each in importers() if not each.holds_configs for name in each.sections]

    def is_own(word: object) -> bool:
        return _key(str(word)).partition(".")[0] in sections

    if isinstance(overrides, Mapping):
        own = {key: value for key, value in overrides.items() if is_own(key)}
        return own, {key: value for key, value in overrides.items() if key not in own}
    words = [overrides] if isinstance(overrides, str) else list(overrides)
    return [word for word in words if is_own(word)], [word for word in words if not is_own(word)]


def _misspelt(rest: Overrides, sections: Sequence[str]) -> list[Problem]:
    """Keys that are no words of a recipe, and look like the file's own."""
    origin, words = (PYTHON_CALL, map(str, rest)) if isinstance(rest, Mapping) else (COMMAND_LINE, rest)
    known = section_keys(())
    firsts = [_key(word).partition(".")[0] for word in words]
    found = {first: nearest(first, [*sections, *known]) for first in firsts if first not in known}
    return [Problem((first,), UNKNOWN_KEY, str(origin), meant) for first, meant in found.items() if meant in sections]


def _key(word: str) -> str:
    return word.partition("=")[0].strip().removeprefix("~")


def _as_spelled(own: Overrides, node: Node, importer: Importer) -> Overrides:
    """Overrides with the names that the file has for their keys, such as stop_batch for numb_steps."""
    aliases = load(importer.aliases) if importer.aliases else {}
    spelled = {aliases[key]: key for key in flat(plain(node)) if key in aliases}

    def name(key: str) -> str:
        known = aliases.get(key, key)
        return spelled.get(known, known)

    if isinstance(own, Mapping):
        return {name(str(key)): value for key, value in own.items()}
    return [word.replace(_key(word), name(_key(word)), 1) for word in own]


def _node(value: Any, path: KeyPath, written: Mapping[KeyPath, str], around: Origin) -> Node:
    """Values as if they had been read from a file."""
    here = Origin(written[path]) if path in written else around
    if isinstance(value, dict):
        return Node({key: _node(child, (*path, key), written, here) for key, child in value.items()}, here)
    if isinstance(value, list):
        return Node([_node(child, (*path, number), written, here) for number, child in enumerate(value)], here)
    return Node(value, here)
