"""`isoscale submit`."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from isoscale.cli.arguments import OptionalRecipe, Overrides, sort_out
from isoscale.cli.arguments import Trust as TrustOption
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.cli.jobs.job_options import JobOptions
    from isoscale.launch.job import Job


def submit(
    context: typer.Context,
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="DIR", help="Directory of the run; by default runs/RECIPE-JOB. Continued if there."
        ),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="As for train: show where the time went.")] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option("--log-level", help="As for train.")
    ] = None,
    log_format: Annotated[Literal["text", "json"] | None, typer.Option("--log-format", help="As for train.")] = None,
    log: Annotated[
        Literal["main", "collect", "workers"] | None, typer.Option("--log", help="As for train: whose lines are kept.")
    ] = None,
    log_file: Annotated[Path | None, typer.Option("--log-file", metavar="PATH", help="As for train.")] = None,
    trust: TrustOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script of the job, and submit nothing.")
    ] = False,
) -> None:
    """Train a recipe as a job, on Slurm say, or continue a run; a job that reaches its time limit goes on by itself."""
    from isoscale.launch.submission import plan, scheduler_of
    from isoscale.recipe.trust import Trust

    job: JobOptions = context.obj
    recipe, changes = sort_out(recipe, overrides)
    said = {"--log-level": log_level, "--log-format": log_format, "--log": log, "--log-file": log_file}
    words = ["--profile"] * profile + ["--trust"] * trust
    words += [word for name, value in said.items() if value is not None for word in (name, str(value))]
    submission = plan(
        recipe, changes, job.keys, num_gpus=job.num_gpus, cluster=job.cluster, run=run, words=words,
        command=["isoscale", *sys.argv[1:]], trust=Trust.CHECKED if dry_run else Trust.of(trust),
    )  # fmt: skip
    if submission.loaded.sweep_note is not None:
        echo(submission.loaded.sweep_note, err=True)
    if dry_run:
        echo(scheduler_of(submission.job).script(submission.job), end="")
        return
    number, folder = submission.send()
    path = shlex.quote(str(folder))
    commands = {"how it is": "status", "follow it": "logs -f", "end it": "cancel"}
    say_sent(submission.job, number, folder, [(what, f"isoscale {word} {path}") for what, word in commands.items()])


def say_sent(job: "Job", number: str, folder: Path, commands: list[tuple[str, str]]) -> None:
    """Tell what was submitted, where it will be found, and by which commands one looks after it."""
    from isoscale.launch.submission import scheduler_of
    from isoscale.observe.text import clock, table
    from isoscale.recipe.launch import time_seconds

    scheduler, tasks = scheduler_of(job), job.array.tasks if job.array is not None else ()
    start = scheduler.expected_start(number)
    points = f"{len(tasks)} point{'s' * (len(tasks) > 1)}, each " if tasks else ""
    limit = job.launch.time
    each = f", at most {clock(time_seconds(limit))} per start" if limit is not None else ""
    output = scheduler.outputs(folder, scheduler.task_number(number, tasks[0]) if tasks else number)["out"]
    rows = [
        ("sweep" if tasks else "run", str(folder)),
        ("script", str(scheduler.script_in(folder))),
        ("output", str(output) + " …" * (len(tasks) > 1)),
        *([("start", f"expected at {start}")] if start else []),
        *commands,
    ]
    echo("\n".join([f"submitted job {number}: {points}{job.resources}{each}", *table(rows)]))
