"""The recipes that ship with the package, and how a recipe is found by name or path."""

import os
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from isoscale.errors import Problem, nearest
from isoscale.recipe.formats.json_reader import read_json
from isoscale.recipe.formats.tree import Node
from isoscale.recipe.formats.yaml_reader import read_yaml
from isoscale.recipe.problems import RecipeError
from isoscale.science import registry

SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Location:
    """A recipe that was found: a preset inside the package, or a file."""

    label: str
    """How messages call it: `images/digits.yaml`, or the path as it was written."""
    name: str
    """The last part of its name, without the suffix."""
    file: Traversable
    folder: Path
    """What relative paths in its `extends` are relative to."""

    @property
    def identity(self) -> str:
        """The same for two ways of writing the same file."""
        return str(self.file.resolve()) if isinstance(self.file, Path) else str(self.file)


def preset_names() -> list[str]:
    """The names of all presets, sorted."""
    return sorted(_presets())


def preset_description(name: str) -> str:
    """What the first line of a preset says about it."""
    first_line, _, _ = _presets()[name].read_text(encoding="utf-8").partition("\n")
    return first_line.lstrip("# ").strip() if first_line.startswith("#") else ""


def _presets() -> dict[str, Traversable]:
    found: dict[str, Traversable] = {}
    for domain in registry.domains():
        package, _, folder = domain.presets.partition("/")
        found |= _walk(files(package).joinpath(folder), f"{domain.name}/") if folder else ()
    return found


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir():
            found += _walk(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".yaml"):
            found.append((prefix + entry.name.removesuffix(".yaml"), entry))
    return found


def locate(source: str | Path, folder: Path, origin: str | None = None) -> Location:
    """Find a preset by its name or a file by its path, relative to `folder`."""
    presets = _presets()
    if isinstance(source, str) and source in presets:
        return Location(f"{source}.yaml", source.rpartition("/")[2], presets[source], folder)
    path = Path(os.path.normpath(folder / source))
    if not path.exists():  # a folder may well be called ~x
        path = Path(os.path.normpath(folder / os.path.expanduser(source)))
    if str(source).strip() and path.suffix.lower() in SUFFIXES and path.is_file():
        return Location(str(path), path.stem, path, path.parent)
    raise RecipeError([_not_found(str(source), path, list(presets), origin)])


def _not_found(source: str, path: Path, presets: list[str], origin: str | None) -> Problem:
    accepted = f"a recipe is a file that ends in {', '.join(SUFFIXES)}, or a preset"
    if source.strip() and path.is_dir():
        inside = [str(path / name) for name in ("recipe.yaml",) if (path / name).is_file()]
        return Problem((), f'"{source}" is a folder; {accepted}', origin, next(iter(inside), None))
    if source.strip() and path.exists():
        return Problem((), f'"{source}" is not a recipe: {accepted}', origin)
    message = f'there is no preset or file "{source}" (`isoscale recipe list` shows the presets)'
    return Problem((), message, origin, nearest(source, [*presets, *_beside(source, path)]))


def _beside(source: str, path: Path) -> list[str]:
    """The recipes and input files in the folder of a path, as its writer would name them."""
    try:
        return [str(Path(source).with_name(file.name)) for file in path.parent.iterdir() if file.suffix in SUFFIXES]
    except (OSError, ValueError):  # no such folder, or a path without a name
        return []


def read_location(location: Location, problems: list[Problem], merge_keys: bool = False) -> Node:
    """Read the file of a location; its top level must be a mapping. `merge_keys` as for `read_yaml`."""
    try:
        text = location.file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = f"not UTF-8 text (byte {error.start}); save it as UTF-8"
        raise RecipeError([Problem((), message, location.label)]) from None
    except OSError as error:
        raise RecipeError([Problem((), f"cannot be read: {error.strerror or error}", location.label)]) from None
    if location.label.lower().endswith(".json"):
        node = read_json(text, location.label, problems)
    else:
        node = read_yaml(text, location.label, problems, merge_keys)
    if not isinstance(node.value, dict):
        kind = "list" if isinstance(node.value, list) else "single value"
        found = "is empty" if node.value is None else f"holds a {kind} at its top level"
        raise RecipeError([Problem((), f"the file {found}; a recipe is made of `key: value` lines", location.label)])
    return node
