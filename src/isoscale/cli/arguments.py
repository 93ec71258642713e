"""The arguments that say what to train, which several commands have in common."""

import sys
from typing import Annotated

import typer

from isoscale.cli import complete
from isoscale.science.registry import DEFAULT_PRESET

OptionalRecipe = Annotated[
    str | None,
    typer.Argument(
        metavar="RECIPE", help=f"Preset or file; by default {DEFAULT_PRESET}.", autocompletion=complete.recipes
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Such as optimizer.lr=3e-4; ~schedule deletes. As many as you like.",
        autocompletion=complete.overrides,
    ),
]

Trust = Annotated[
    bool, typer.Option("--trust", help="Build whatever a run of somebody else names: it may run any code.")
]


def sort_out(recipe: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """Recipe and overrides, where the first word may be either."""
    words = list(overrides or [])
    if recipe is not None and ("=" in recipe or recipe.startswith("~")):
        return None, [recipe, *words]
    return recipe, words


def start_ranks(devices: int | None) -> None:
    """Start so many ranks with the words of this command, and end with them; a rank itself goes on."""
    if devices is None or devices == 1:
        return
    from isoscale.launch.local import is_rank, launch

    if not is_rank():
        raise typer.Exit(launch(devices, sys.argv))
