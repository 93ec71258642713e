"""`isoscale doctor`: is this machine, or are all machines of this job, ready to train?"""

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

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
    if devices is not None and devices > 1:
        _become_a_rank_or_start_them(devices)
    findings = []
    for finding in _findings():
        findings.append(finding)
        if not as_json:
            echo(_line(finding))
    num_problems = sum(finding.verdict == "problem" for finding in findings)
    if as_json and findings:
        print_json({"ok": num_problems == 0, "findings": [finding.shown() for finding in findings]})
    if num_problems:
        raise typer.Exit(USER_CAN_FIX)


def _become_a_rank_or_start_them(num_ranks: int) -> None:
    from isoscale.launch.local import is_rank, launch

    if not is_rank():
        raise typer.Exit(launch(num_ranks, sys.argv))


def _findings() -> Iterator["Finding"]:
    """What this process has to say: of several ranks, one speaks for all."""
    from isoscale.parallel.environments.find import find

    try:
        environment = find()
    except UserError as error:
        yield _contradiction(error)
        yield from _of_one()
        return
    if environment.world > 1:
        # What torch says of its connections would stand between the findings; it must know before it is imported.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        from isoscale.cli.doctor_ranks import of_ranks

        yield from of_ranks(environment)
    else:
        yield from _of_one()
        yield _alone(environment.launcher, environment.note)


def _of_one() -> Iterator["Finding"]:
    from isoscale.cli.doctor_host import of_host
    from isoscale.launch.schedulers.find import schedulers

    yield from of_host()
    for scheduler in schedulers().values():
        yield from scheduler.findings()


def _contradiction(error: UserError) -> "Finding":
    from isoscale.observe.doctor.finding import Finding

    return Finding("launcher", "problem", str(error))


def _alone(launcher: str, note: str) -> "Finding":
    from isoscale.observe.doctor.finding import Finding

    if note:
        text, _, advice = note.partition("; ")
        return Finding("launcher", "warning", text, advice)
    text = "one process, which trains alone" if launcher == "nobody" else f"{launcher}: one rank"
    return Finding("launcher", "ok", text)


def _line(finding: "Finding") -> str:
    advice = f": {finding.advice}" if finding.advice else ""
    host = f"{finding.host}: " if finding.host else ""
    return f"{finding.verdict:<8} {finding.subject:<14} {host}{finding.complete().text}{advice}"
