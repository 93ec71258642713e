"""`isoscale recipe`: look at presets, see what a recipe resolves to, and check it before a job waits for it."""

import json
from typing import Annotated

import typer

from isoscale.cli import complete

app = typer.Typer(help="List, show and check recipes.", no_args_is_help=True)

RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A preset such as images/digits, or a file.", autocompletion=complete.recipes
    ),
]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE", help="optimizer.lr=3e-4 sets, ~schedule deletes.", autocompletion=complete.overrides
    ),
]


@app.command("list")
def list_presets() -> None:
    """List the recipes that come with isoscale."""
    from isoscale.recipe.presets import preset_description, preset_names

    names = preset_names()
    width = max(map(len, names), default=0)
    for name in names:
        typer.echo(f"{name:<{width}}  {preset_description(name)}")


@app.command()
def show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the values alone, as JSON.")] = False,
) -> None:
    """Print a recipe with all defaults filled in, and where each value comes from."""
    from isoscale.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    text = json.dumps(loaded.values, indent=2, ensure_ascii=False) + "\n" if as_json else loaded.to_yaml()
    typer.echo(text, nl=False)


@app.command()
def check(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Check a recipe, its classes and their arguments, without training."""
    from isoscale.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or (), check_components=True)
    typer.echo(f"{loaded.name}: ok")


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, with which editors complete and explain keys."""
    from isoscale.recipe.schema import Recipe

    typer.echo(json.dumps(Recipe.model_json_schema(), indent=2, ensure_ascii=False))
