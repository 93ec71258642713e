"""`isoscale report`."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from isoscale.cli import complete
from isoscale.cli.arguments import Trust
from isoscale.system.printing import echo


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Directory or name of a run; by default the newest.", autocompletion=complete.runs
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="An .html file; default RUN/report.html.")] = None,
    split: Annotated[
        Literal["val", "test"],
        typer.Option("--split", "--role", help="Which part of the data the figures are made from."),
    ] = "val",
    figures: Annotated[
        bool, typer.Option("--figures/--no-figures", help="Apply the best weights to the data and show the results.")
    ] = True,
    trust: Trust = False,
    diff: Annotated[
        bool, typer.Option("--diff/--no-diff", help="Show the changes of your code that were not committed to git.")
    ] = True,
    open_page: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write one page about a run: curves, figures, settings, environment, how to reproduce it."""
    import webbrowser

    from isoscale.errors import UserError
    from isoscale.runs.git import changes_in_words
    from isoscale.runs.run import Run
    from isoscale.study.report import write_report

    if runs and len(runs) > 1:
        names = shlex.join(runs)
        raise UserError(f"a report is about one run; to see several side by side: isoscale compare {names}")
    found = Run.find(runs[0] if runs else None, trust=trust)
    target = out or found.path / "report.html"
    write_report(found, target, split if figures else None, diff)
    echo(f"written to {target}")
    changes = (found.record.get("code") or {}).get("diff")
    if diff and changes:
        echo(f"note: it shows {changes_in_words(changes)}; to leave them out: --no-diff", err=True)
    if open_page and not webbrowser.open(target.resolve().as_uri()):
        raise UserError(f"no browser could be started here; open {target.resolve()} in yours")
