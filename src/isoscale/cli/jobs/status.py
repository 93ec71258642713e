"""`isoscale status`, `isoscale cancel` and `isoscale logs`: what runs and jobs do now."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isoscale.cli import complete
from isoscale.cli.output import print_columns, print_json
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.launch.status import Standing, Tail

LOOK_EVERY = 1.0
TITLES = ("start", "job", "hosts", "ranks", "steps", "status", "device hours")
SomeRun = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN", help="Directory or name of a run; by default the newest.", autocompletion=complete.runs
    ),
]


def status(
    run: SomeRun = None, as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False
) -> None:
    """Show how a run stands: its job, its step, and every start with what it cost."""
    standing = _standing(run)
    if as_json:
        print_json(standing.as_dict())
        return
    from isoscale.observe.text import table

    record = standing.run.record
    of = f", step {standing.step} of {record['num_steps']}" if standing.step is not None else ""
    rows = [
        *([("job", _job(standing))] if standing.job else []),
        ("training", standing.run.status + of),
        *([("message", standing.run.message)] if standing.run.message else []),
    ]
    echo("\n".join([str(standing.run.path), *table(rows)]))
    attempts = record.get("stretches", [])
    if attempts:
        echo()
        print_columns([TITLES, *(_row(attempt) for attempt in attempts)])


def cancel(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Directory or name.", autocompletion=complete.runs)],
) -> None:
    """End the job of a run, or ask a training on this machine to stop; either saves first."""
    import shlex

    standing = _standing(run)
    how = "submit" if standing.is_queued else "train"
    echo(standing.cancel())
    echo(f"go on later with: isoscale {how} --run {shlex.quote(str(standing.run.path))}")


def logs(
    run: SomeRun = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Show what comes, until the end.")] = False,
) -> None:
    """Show what a run has written: the output of its last job, or its log."""
    from isoscale.launch.status import Tail

    standing = _standing(run)
    tails = {name: Tail(path) for name, path in standing.logs().items()}
    shown = _show(tails)
    if follow:
        while _standing(str(standing.run.path)).is_active:
            time.sleep(LOOK_EVERY)
            shown = _show(tails) or shown
        _show(tails)
    elif not shown:
        echo(f"nothing was written yet; {_job(standing) if standing.job else standing.run.status}", err=True)


def _standing(run: str | None) -> "Standing":
    from isoscale.launch.status import Standing
    from isoscale.runs.run import Run

    return Standing.of(Run.find(run))


def _show(tails: "dict[str, Tail]") -> bool:
    """Print what is new, errors where errors go; whether there was something."""
    found = [(name, text) for name, tail in tails.items() for text in tail.more()]
    for name, text in found:
        echo(text.replace("\r\n", "\n").replace("\r", "\n"), end="", err=name == "err")
    return bool(found)


def _job(standing: "Standing") -> str:
    found = standing.queued
    if found is None:
        return f"{standing.job}, no longer known to {standing.scheduler.batch.name}"
    words = f"{standing.job}, {found.state}"
    if found.state == "RUNNING":
        return f"{words} on {found.reason} for {found.elapsed} of {found.limit}"
    if not found.is_active:
        return f"{words} after {found.elapsed}"
    start = f", expected to start at {found.start.replace('T', ' ')}" if found.start not in ("", "N/A") else ""
    return f"{words} ({found.reason}){start}"


def _row(attempt: dict[str, Any]) -> tuple[str, ...]:
    restart = f" (restart {attempt['restart']})" if attempt["restart"] else ""
    last = "…" if attempt["last_step"] is None else attempt["last_step"]
    hours = attempt["device_hours"]
    return (
        attempt["started"][:16].replace("T", " "), f"{attempt['job'] or '-'}{restart}", ",".join(attempt["hosts"]),
        str(attempt["ranks"]), f"{attempt['first_step']}–{last}", attempt["status"],
        "" if hours is None else f"{hours:.3g}",
    )  # fmt: skip
