"""`isoscale reproduce`."""

from typing import Annotated

import typer

from isoscale.cli import complete
from isoscale.cli.arguments import Trust
from isoscale.cli.output import print_json
from isoscale.system.printing import echo


def reproduce(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="Directory or name of a run; by default the newest.", autocompletion=complete.runs
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Number of steps; by default up to the run's second log.")
    ] = None,
    trust: Trust = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Train the first steps of a run again and compare what it logged.

    Exit code 0: equal. 1: not equal. 2: cannot be done, because the data or a package is not there.
    """
    from isoscale.runs.run import Run
    from isoscale.study.reproduce import reproduce as train_again
    from isoscale.study.reproduce import text

    found = train_again(Run.find(run, trust=trust), steps)
    if as_json:
        print_json(found.as_dict())
    else:
        echo(text(found))
    if not found.equal:
        raise typer.Exit(1)
