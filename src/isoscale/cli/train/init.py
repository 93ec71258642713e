"""`isoscale init`: a project of one's own."""

import keyword
import os
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from isoscale.errors import UserError
from isoscale.system.printing import echo

WHAT = {
    "README.md": "what to type",
    "recipe.yaml": "everything about a run, explained",
    "data.py": "your samples",
    "model.py": "your network",
    "test_train.py": "does it learn?",
}
NAME = "my-project"
PACKAGE = "my_project"
"""How the template calls the project and its package; both stand for the user's."""
HIDDEN = "dot_"
"""In the template, before the name of a file that is hidden in the project."""
TAKEN = ("data", "runs", "tests")
"""Folders that a project has, or will have, beside its package."""


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the project and of its new folder.")],
    path: Annotated[
        Path, typer.Option("--path", metavar="DIR", help="Where the folder is made; by default here.")
    ] = Path(),
) -> None:
    """Make a small project of your own: data, network, recipe and test, ready to train."""
    made = make_project(name, path)
    folder = path / name
    paths = [path.relative_to(folder) for path in made]
    width = max(len(str(path)) for path in paths)
    echo(f"made {folder}", *(f"  {path!s:<{width}}  {WHAT.get(path.name, '')}".rstrip() for path in paths), sep="\n")
    echo(f"\nnext:\n  cd {shlex.quote(str(folder))}\n  isoscale train recipe.yaml\n  python -m pytest")


def make_project(name: str, where: Path) -> list[Path]:
    """Make the project in the new folder `where / name`; returns its files, all of it or nothing."""
    package, folder = package_name(name), where / name
    if not where.is_dir():
        raise UserError(f"there is no folder {where}: make it, or choose another place with --path DIR")
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another name, or another place with --path DIR")
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; choose another name, or another place with --path DIR")
    aside = where / f".{name}-{os.getpid()}"
    try:
        for path, text in _filled(name, package):
            (aside / path).parent.mkdir(parents=True, exist_ok=True)
            (aside / path).write_text(text, encoding="utf-8")
        aside.rename(folder)
    except OSError as error:
        raise UserError(
            f"cannot make {folder}: {error.strerror or error}; choose another place: isoscale init {name} --path DIR"
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return sorted(path for path in folder.rglob("*") if path.is_file())


def package_name(name: str) -> str:
    """The package of a project: `my_project` for My-Project; refuses what Python could not import, or would confuse."""
    package = re.sub(r"[-. ]", "_", name).lower()
    if re.search(r"[/\\]", name):
        raise UserError(f"{name} is a path; type: isoscale init {Path(name).name} --path {Path(name).parent}")
    if not re.sub(r"\W", "", name):
        raise UserError(f'"{name}" is not a name; type: isoscale init {NAME}')
    reason = _reason_against(package)
    if reason:
        better = "my-" + re.sub(r"\W+", "-", name.lower()).strip("-")
        raise UserError(f'a package cannot be called "{package}": {reason}; type: isoscale init {better}')
    return package


def _reason_against(package: str) -> str | None:
    if package[0].isdigit():
        return "a name in Python does not begin with a digit"
    if not package.isidentifier():
        return "a name in Python is made of letters, digits and _"
    if keyword.iskeyword(package):
        return "it is a word of Python's own"
    if package in TAKEN:
        return "a project has a folder of that name for something else"
    return "there is a module of that name already" if _is_installed(package) else None


def _is_installed(package: str) -> bool:
    """Whether Python knows the name, otherwise than from the folder in which the command is typed."""
    try:
        spec = find_spec(package)
    except ValueError:  # a module that Python has made itself
        return True
    here = Path.cwd() / package
    own = {str(here), str(here / "__init__.py"), f"{here}.py"}
    return spec is not None and own.isdisjoint([str(spec.origin), *(spec.submodule_search_locations or ())])


def _filled(name: str, package: str) -> Iterator[tuple[Path, str]]:
    """The files of the template, with the user's names in their paths and texts."""
    for path, file in _walk(files("isoscale") / "templates" / "project", Path()):
        parts = [package if part == PACKAGE else re.sub(f"^{HIDDEN}", ".", part) for part in path.parts]
        yield Path(*parts), file.read_text(encoding="utf-8").replace(PACKAGE, package).replace(NAME, name)


def _walk(folder: Traversable, path: Path) -> Iterator[tuple[Path, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_file():
            yield path / entry.name, entry
        elif entry.name != "__pycache__":
            yield from _walk(entry, path / entry.name)
