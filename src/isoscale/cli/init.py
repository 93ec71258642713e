"""`isoscale init`: a project of one's own."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from isoscale.system.printing import echo

WHAT = {
    "README.md": "what to type",
    "recipe.yaml": "everything about a run, explained",
    "data.py": "your samples",
    "model.py": "your network",
    "test_train.py": "does it learn?",
}


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the project and of its new folder.")],
    path: Annotated[
        Path, typer.Option("--path", metavar="DIR", help="Where the folder is made; by default here.")
    ] = Path(),
) -> None:
    """Make a small project of your own: data, network, recipe and test, ready to train."""
    from isoscale.cli.project import make_project

    made = make_project(name, path)
    folder = path / name
    echo("\n".join([f"made {folder}", *_tree(made, folder)]))
    echo(f"\nnext:\n  cd {shlex.quote(str(folder))}\n  isoscale train recipe.yaml\n  python -m pytest")


def _tree(made: list[Path], folder: Path) -> list[str]:
    paths = [path.relative_to(folder) for path in made]
    width = max(len(str(path)) for path in paths)
    return [f"  {path!s:<{width}}  {WHAT.get(path.name, '')}".rstrip() for path in paths]
