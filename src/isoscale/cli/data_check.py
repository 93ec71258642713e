"""`isoscale data check`."""

from typing import Annotated

import typer

from isoscale.cli.apply import RUN
from isoscale.cli.arguments import Trust
from isoscale.cli.output import print_json
from isoscale.system.printing import echo


def check(
    run: RUN = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Read all data of a run and compare it with what it was when the run began.

    Exit code 0: nothing has changed. 1: something has, or may have. 2: cannot be done.
    """
    from isoscale.runs.run import Run
    from isoscale.study.data_check import check_data

    found = check_data(Run.find(run, trust=trust))
    if as_json:
        print_json(found.as_dict())
    else:
        echo("\n".join(found.lines))
    if not found.equal:
        raise typer.Exit(1)
