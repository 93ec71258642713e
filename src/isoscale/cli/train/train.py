"""`isoscale train` and `export`."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from isoscale.cli.arguments import OptionalRecipe, Overrides, Trust, sort_out, start_ranks
from isoscale.cli.train.apply import CHECKPOINT, RUN
from isoscale.system import early_stop
from isoscale.system.printing import echo


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
    start_ranks(devices)
    recipe, words = sort_out(recipe, overrides)
    words += [f"observe.level={log_level}"] * (log_level is not None)
    words += [f"observe.format={log_format}"] * (log_format is not None)
    words += [f"observe.log={log}"] * (log is not None)
    words += [f"observe.log_file={json.dumps(str(log_file))}"] * (log_file is not None)  # 1.0 is a name here
    if dev is not None:
        from isoscale.api import develop
        from isoscale.errors import UserError

        if run is not None:
            raise UserError("--dev saves nothing, so that --run has no meaning beside it; leave one of them out")
        develop(recipe, words, dev, profile, trust)
        return
    from isoscale.runs.open import open_run
    from isoscale.runs.session import Session

    Session(open_run(recipe, words, run, profile=profile, trust=trust)).train()


def export(
    out: Annotated[
        Path,
        typer.Option(
            help="The file to write: .safetensors (weights), .pt (TorchScript), .pt2 (torch.export), .ckpt (Lightning)."
        ),
    ],
    run: RUN = None,
    checkpoint: CHECKPOINT = None,
    trust: Trust = False,
) -> None:
    """Write a run's network to one file, for use elsewhere."""
    from isoscale.runs.export import export as write
    from isoscale.runs.run import Run

    found = Run.find(run, trust=trust)
    caution = found.caution(checkpoint)
    if caution is not None:
        echo(caution, err=True)
    written = write(found, out, checkpoint)
    echo(f"{found.path}, {found.checkpoint_words(checkpoint)}: written to {out}")
    facts = {name: text for name, text in written.metadata.items() if name not in ("recipe", "run", "step", "seal")}
    for name, text in facts.items():
        echo(f"  {name}: {text}")
    for note in written.notes:
        echo(f"  {note}")
