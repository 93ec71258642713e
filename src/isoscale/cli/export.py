"""`isoscale export`."""

from pathlib import Path
from typing import Annotated

import typer

from isoscale.cli.apply import CHECKPOINT, RUN
from isoscale.cli.arguments import Trust
from isoscale.system.printing import echo


def export(
    out: Annotated[
        Path,
        typer.Option(help="The file to write: .safetensors (weights), .pt (TorchScript) or .pt2 (torch.export)."),
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
