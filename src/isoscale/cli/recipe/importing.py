"""`isoscale recipe import`: a recipe from the parameter file of another program."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isoscale.recipe.importing.registered import importers
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.science.importing import Imported, Remark

FILES = ", or ".join(importer.files for importer in importers())
KEYS = ", or of ".join(f"{each.title}: {each.example}" for each in importers() if each.sections or each.changes)


def import_parameters(
    parameters: Annotated[
        Path,
        typer.Argument(metavar="FILE", help=f"{FILES[0].upper()}{FILES[1:]}."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help=f"Keys of {KEYS}."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="NAME", help="Which configuration, of a file that holds several."),
    ] = None,
    num_epochs: Annotated[
        int | None,
        typer.Option("--num_epochs", metavar="N", help="The same as the key num_epochs=N of such a file."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="RECIPE", help="The file to write; by default it is printed.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FOLDER", help="Where the snapshots, systems or boxes are now."),
    ] = None,
) -> None:
    """Translate the input or the parameters of another program into a recipe."""
    from isoscale.recipe.importing.reading import import_file, to_yaml
    from isoscale.recipe.load import load_recipe

    words = [*(overrides or []), *([] if num_epochs is None else [f"num_epochs={num_epochs}"])]
    imported = import_file(parameters, words, Path(data) if data else None, config)
    load_recipe(imported.values)
    if out is None:
        echo(to_yaml(imported), end="")
    else:
        _write(out, to_yaml(imported))
    echo("\n".join(_report(imported, out)), err=out is None)


def _write(path: Path, text: str) -> None:
    from isoscale.errors import UserError
    from isoscale.system.files import failures_in_words, write_aside

    if path.exists():
        raise UserError(f"{path} is there already, and stays as it is: give another name to --out")
    with failures_in_words(path):
        write_aside(path, text)


def _report(imported: "Imported", out: Path | None) -> list[str]:
    """What a recipe cannot say, and what to type next."""
    lines = [f"wrote {out}"] if out is not None else []
    lines += _section("not needed in a recipe:", imported.needless) + _section("to do by hand:", imported.by_hand)
    train = f"isoscale train {shlex.quote(str(out or 'RECIPE'))}"
    lines += ["next:", f"  {train}"]
    weights = imported.weights
    return lines + ([f"  {train} task.init_from={shlex.quote(str(weights))}"] if weights is not None else [])


def _section(title: str, remarks: "list[Remark]") -> list[str]:
    return [title, *(f"  {remark}" for remark in remarks)] if remarks else []
