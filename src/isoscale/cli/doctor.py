"""`isoscale doctor`: is this machine, or are all machines of this job, ready to train?"""

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from isoscale.cli.arguments import start_ranks
from isoscale.cli.output import print_json
from isoscale.errors import USER_CAN_FIX, UserError
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.observe.doctor.finding import Finding


def doctor(
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, metavar="N", help="Check N processes on this machine, and between them."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check what training needs on this machine, or on all of a job, and say what to do where something is missing.

    Several ranks, as srun, mpirun or torchrun start them, give one report, with the network between their hosts.
    """
    start_ranks(devices)
    findings = []
    for finding in _findings():
        findings.append(finding)
        if not as_json:
            advice = f": {finding.advice}" if finding.advice else ""
            host = f"{finding.host}: " if finding.host else ""
            echo(f"{finding.verdict:<8} {finding.subject:<14} {host}{finding.complete().text}{advice}")
    num_problems = sum(finding.verdict == "problem" for finding in findings)
    if as_json and findings:
        print_json({"ok": num_problems == 0, "findings": [finding.shown() for finding in findings]})
    if num_problems:
        raise typer.Exit(USER_CAN_FIX)


def _findings() -> Iterator["Finding"]:
    """What this process has to say: of several ranks, one speaks for all."""
    from isoscale.observe.doctor.finding import Finding
    from isoscale.parallel.environments.find import find

    try:
        environment = find()
    except UserError as error:
        yield Finding("launcher", "problem", str(error))
        yield from _of_one()
        return
    if environment.world > 1:
        # What torch says of its connections would stand between the findings; it must know before it is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from isoscale.cli.doctor_findings import of_ranks

        yield from of_ranks(environment)
    else:
        yield from _of_one()
        if environment.note:
            text, _, advice = environment.note.partition("; ")
            yield Finding("launcher", "warning", text, advice)
        else:
            alone = environment.launcher == "nobody"
            text = "one process, which trains alone" if alone else f"{environment.launcher}: one rank"
            yield Finding("launcher", "ok", text)


def _of_one() -> Iterator["Finding"]:
    from isoscale.cli.doctor_findings import of_host
    from isoscale.launch.schedulers.find import schedulers

    yield from of_host()
    for scheduler in schedulers().values():
        yield from scheduler.findings()
