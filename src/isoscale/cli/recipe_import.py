"""`isoscale recipe import`: a recipe from the parameter file of another program."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.recipe.importing.imported import Imported, Remark

INPUTS = (".json", ".yaml", ".yml")


def import_parameters(
    parameters: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="An input of DeePMD-kit (.json, .yaml), or a parameter file of MALA (.params.json), or the folder or "
            ".zip of a run.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Keys of an input of DeePMD-kit: training.numb_steps=240."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RECIPE", help="The file to write; by default it is printed.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FOLDER", help="Where the snapshots or systems are now."),
    ] = None,
) -> None:
    """Translate the input of DeePMD-kit, or the parameters of MALA, into a recipe."""
    from isoscale.recipe.load import load_recipe

    imported, weights = _imported(parameters, overrides or [], data)
    load_recipe(imported.values)
    if out is None:
        echo(imported.to_yaml(), end="")
    else:
        _write(out, imported.to_yaml())
    echo("\n".join(_report(imported, out, weights)), err=out is None)


def _imported(path: Path, words: list[str], data: str | None) -> "tuple[Imported, Path | None]":
    """The recipe of a file, and the weights that were saved with it."""
    from isoscale.errors import UserError
    from isoscale.recipe.importing.files import SUFFIX, read_parameters
    from isoscale.recipe.importing.mala import translate
    from isoscale.recipe.importing.reading import import_input

    if path.suffix in INPUTS and not path.name.endswith(SUFFIX) and path.is_file():
        imported = import_input(path, words, Path(data) if data else None)
        if imported is not None:
            return imported, None
    if words:
        raise UserError(f"{words[0]} can only stand beside an input of DeePMD-kit: change the recipe instead")
    found = read_parameters(path)
    return translate(found, data), found.weights


def _write(path: Path, text: str) -> None:
    from isoscale.errors import UserError
    from isoscale.system.files import failures_in_words, write_aside

    if path.exists():
        raise UserError(f"{path} is there already, and stays as it is: give another name to --out")
    with failures_in_words(path):
        write_aside(path, text)


def _report(imported: "Imported", out: Path | None, weights: Path | None) -> list[str]:
    """What a recipe cannot say, and what to type next."""
    lines = [f"wrote {out}"] if out is not None else []
    lines += _section("not needed in a recipe:", imported.needless) + _section("to do by hand:", imported.by_hand)
    train = f"isoscale train {shlex.quote(str(out or 'RECIPE'))}"
    lines += ["next:", f"  {train}"]
    return lines + ([f"  {train} task.init_from={shlex.quote(str(weights))}"] if weights is not None else [])


def _section(title: str, remarks: "list[Remark]") -> list[str]:
    return [title, *(f"  {remark}" for remark in remarks)] if remarks else []
