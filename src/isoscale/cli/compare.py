"""`isoscale compare`."""

from pathlib import Path
from typing import Annotated

import typer

from isoscale.cli import complete
from isoscale.cli.output import print_json
from isoscale.system.printing import echo


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="Directories or names of runs, or a folder of runs.", autocompletion=complete.runs
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Measure the steps and the time to here; by default to what the worst run managed at its best.",
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A metric to show, such as val/loss; may be given several times."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The picture, as .png, .svg or .pdf; by default compare.png here, none beside --json."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Compare runs: how good, how fast, and what was different; with their curves in one picture."""
    from isoscale.study import charts
    from isoscale.study.compare import compare as compare_runs
    from isoscale.study.table import text

    picture = out or (None if as_json else Path("compare.png"))
    if picture is not None:
        charts.check_path(picture)
    comparison = compare_runs(runs, to, metric or ())
    drawn = picture is not None and charts.draw(comparison, picture)
    if as_json:
        print_json(comparison.as_dict())
    else:
        echo(text(comparison), f"\ncurves: {picture}" if drawn else "\nno curves: nothing was logged yet", sep="\n")
