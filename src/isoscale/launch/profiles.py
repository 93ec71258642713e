"""Cluster profiles: what is the same for all jobs on a machine, in a file of the user's own."""

import os
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from isoscale.errors import UserError
from isoscale.launch.config import checked
from isoscale.recipe.formats.tree import plain
from isoscale.recipe.formats.yaml_reader import read_yaml
from isoscale.recipe.problems import Problem, RecipeError, nearest


def folder() -> Path:
    """Where a user's profiles are."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "isoscale" / "clusters"


def own() -> dict[str, Path]:
    """The user's profiles, by name."""
    return {path.stem: path for path in sorted(folder().glob("*.yaml"))}


def examples() -> dict[str, Traversable]:
    """The profiles that come with the package, to be copied and changed."""
    found = files("isoscale").joinpath("launch", "clusters").iterdir()
    return {entry.name.removesuffix(".yaml"): entry for entry in sorted(found, key=lambda entry: entry.name)}


def read_profile(name: str) -> dict[str, Any]:
    """The values of a user's profile, checked; a UserError says what there is where there is no such one."""
    path = own().get(name)
    if path is None:
        raise UserError(_unknown(name))
    problems: list[Problem] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the profile {path}: {error}") from None
    node = read_yaml(text, str(path), problems)
    if problems:
        raise RecipeError(problems)
    if not isinstance(node.value, dict):
        raise UserError(f"{path} must be made of `key: value` lines, such as `partition: gpu`")
    values = plain(node)
    checked(values, str(path), {key: str(child.origin) for key, child in node.value.items()})
    return values


def _unknown(name: str) -> str:
    mine, shipped = own(), examples()
    lines = [f'there is no cluster profile "{name}"']
    guess = nearest(name, mine)
    lines[0] += f'; did you mean "{guess}"?' if guess else ""
    lines.append(f"yours, in {folder()}: {', '.join(mine) or 'none yet'}")
    lines.append("to start from one of the examples, copy it there and change it:")
    lines += [f"  mkdir -p {folder()} && cp {path} {folder()}/{example}.yaml" for example, path in shipped.items()]
    return "\n".join(lines)
