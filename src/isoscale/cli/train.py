"""`isoscale train`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from isoscale.cli.arguments import OptionalRecipe, Overrides, Trust, sort_out
from isoscale.system import early_stop


def train(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Directory of the run; continued if there is one already."),
    ] = None,
    dev: Annotated[
        int | None,
        typer.Option("--dev", min=1, metavar="N", help="Only N batches of everything, and nothing saved."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, metavar="N", help="Train with N processes on this machine, one per GPU."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time went, and write a trace of some steps.")
    ] = False,
    trust: Trust = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None,
        typer.Option("--log-level", help="How much to say: observe.level of the recipe."),
    ] = None,
    log_format: Annotated[
        Literal["text", "json"] | None,
        typer.Option("--log-format", help="For people, or one JSON object per line: observe.format of the recipe."),
    ] = None,
    log: Annotated[
        Literal["main", "collect", "workers"] | None,
        typer.Option(
            "--log", help="Rank 0 alone, all ranks together, or a file for each rank: observe.log of the recipe."
        ),
    ] = None,
    log_file: Annotated[
        Path | None,
        typer.Option("--log-file", metavar="PATH", help="Write log.txt here too: observe.log_file of the recipe."),
    ] = None,
) -> None:
    """Train a recipe, or continue a run."""
    early_stop.listen()
    if devices is not None and devices > 1:
        _become_a_rank_or_start_them(devices)
    recipe, words = sort_out(recipe, overrides)
    words += [f"observe.level={log_level}"] * (log_level is not None)
    words += [f"observe.format={log_format}"] * (log_format is not None)
    words += [f"observe.log={log}"] * (log is not None)
    words += [f"observe.log_file={json.dumps(str(log_file))}"] * (log_file is not None)  # 1.0 is a name here
    if dev is not None:
        _develop(recipe, words, dev, run, profile, trust)
        return
    from isoscale.runs.open import open_run
    from isoscale.runs.session import Session

    Session(open_run(recipe, words, run, profile=profile, trust=trust)).train()


def _develop(
    recipe: str | None, words: list[str], num_batches: int, run: Path | None, profile: bool, trust: bool
) -> None:
    from isoscale.api import develop
    from isoscale.errors import UserError

    if run is not None:
        raise UserError("--dev saves nothing, so that --run has no meaning beside it; leave one of them out")
    develop(recipe, words, num_batches, profile, trust)


def _become_a_rank_or_start_them(num_ranks: int) -> None:
    """The ranks are started with the same words, and then this is one of them; the first process ends with them."""
    from isoscale.launch.local import is_rank, launch

    if not is_rank():
        raise typer.Exit(launch(num_ranks, sys.argv))
