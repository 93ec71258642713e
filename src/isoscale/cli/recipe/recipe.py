"""`isoscale recipe`: look at presets, see what a recipe resolves to, and check it before a job waits for it."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isoscale.cli import complete
from isoscale.cli.arguments import Trust as TrustOption
from isoscale.cli.output import print_json
from isoscale.cli.recipe.importing import import_parameters
from isoscale.science.registry import DEFAULT_PRESET
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.runs.layers import Described

app = typer.Typer(help="List, show, check and import recipes, and look at their models.", no_args_is_help=True)

MOST_ROWS = 50
"""Of the table of a model's layers: about what fits on a screen."""


def _recipes_and_runs(incomplete: str) -> list[str]:
    return [*complete.runs(incomplete), *complete.recipes(incomplete)]


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help=f"A preset such as {DEFAULT_PRESET}, or a file.", autocompletion=complete.recipes
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
        echo(f"{name:<{width}}  {preset_description(name)}")


@app.command()
def show(
    recipe: RecipeArgument,
    overrides: OverridesArgument = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the values alone, as JSON.")] = False,
) -> None:
    """Print a recipe with all defaults filled in, and where each value comes from."""
    from isoscale.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or ()).with_sweep()
    text = json.dumps(loaded.values, indent=2, ensure_ascii=False) + "\n" if as_json else loaded.to_yaml()
    echo(text, end="")


@app.command()
def check(recipe: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Check a recipe, its classes and their arguments, without training; code of the recipe's own is read, not run."""
    from isoscale.recipe.load import load_recipe
    from isoscale.recipe.trust import Trust

    loaded = load_recipe(recipe, overrides or (), check_components=True, trust=Trust.CHECKED)
    echo(f"{loaded.name}: ok")


@app.command()
def model(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A preset, a file, or a run.", autocompletion=_recipes_and_runs),
    ],
    overrides: OverridesArgument = None,
    depth: Annotated[
        int | None,
        typer.Option("--depth", min=1, metavar="N", help="Layers inside layers, N levels; by default what fits."),
    ] = None,
    trust: TrustOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every layer as JSON.")] = False,
) -> None:
    """Show the layers of a recipe's model: type, output, parameters and size."""
    from dataclasses import replace

    described = _described(recipe, overrides or [], trust)
    if depth is not None:
        described = replace(described, layers=[layer for layer in described.layers if layer.depth <= depth])
    if as_json:
        print_json(_as_json(described))
    else:
        _print_layers(described, MOST_ROWS if depth is None else len(described.layers))


def _described(recipe: str, overrides: list[str], is_trusted: bool) -> "Described":
    from isoscale.recipe.load import load_recipe
    from isoscale.recipe.trust import Trust
    from isoscale.runs.directory import ROOT
    from isoscale.runs.layers import layers_of_recipe, layers_of_run
    from isoscale.runs.run import Run

    trust = Trust.ALL if is_trusted else Trust.PROJECT
    if Run.exists(recipe) or Run.exists(Path(ROOT) / recipe):
        return layers_of_run(Run.find(recipe), overrides, trust)
    return layers_of_recipe(load_recipe(recipe, overrides, check_components=True, trust=trust))


def _as_json(described: "Described") -> dict[str, Any]:
    from dataclasses import asdict

    whole = described.layers[0]
    return {
        "name": described.name,
        "num_parameters": whole.num_parameters,
        "num_trainable": whole.num_trainable,
        "num_bytes": whole.num_bytes,
        "without_shapes": described.without_shapes or None,
        "layers": [asdict(layer) for layer in described.layers],
    }


def _print_layers(described: "Described", most: int) -> None:
    from isoscale.observe.tables import layer_lines, visible_layers

    layers = described.layers
    echo(f"{described.name}: {layers[0].kind}")
    echo("\n".join(layer_lines(layers, most)))
    if described.without_shapes:
        echo(f"no shapes: {described.without_shapes}")
    deepest = max((layer.depth for layer in layers if layer.num_parameters), default=0)
    if deepest > max((layer.depth for layer in visible_layers(layers, most)), default=0):
        echo(f"--depth {deepest} shows what these layers are made of")


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, with which editors complete and explain keys."""
    from isoscale.recipe.schema import Recipe

    echo(json.dumps(Recipe.model_json_schema(), indent=2, ensure_ascii=False))


app.command("import")(import_parameters)
