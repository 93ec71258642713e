"""`isoscale submit`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from isoscale.cli.arguments import OptionalRecipe, Overrides, sort_out
from isoscale.cli.arguments import Trust as TrustOption
from isoscale.cli.job_options import JobOptions, with_job_options
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.launch.submission import Submission


@with_job_options
def submit(
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
    *,
    job: JobOptions,
) -> None:
    """Train a recipe as a Slurm job, or continue a run; a job that reaches its time limit goes on by itself."""
    from isoscale.launch.submission import plan
    from isoscale.recipe.trust import Trust

    recipe, changes = sort_out(recipe, overrides)
    said = {"--log-level": log_level, "--log-format": log_format, "--log": log, "--log-file": log_file}
    words = ["--profile"] * profile + ["--trust"] * trust
    words += [word for name, value in said.items() if value is not None for word in (name, str(value))]
    submission = plan(
        recipe, changes, job.as_keys(), num_gpus=job.num_gpus, cluster=job.cluster, run=run, words=words,
        command=["isoscale", *sys.argv[1:]], trust=Trust.CHECKED if dry_run else Trust.of(trust),
    )  # fmt: skip
    if submission.loaded.sweep_note is not None:
        echo(submission.loaded.sweep_note, err=True)
    if dry_run:
        echo(submission.job.script(), end="")
        return
    _send(submission)


def _send(submission: "Submission") -> None:
    import shlex

    from isoscale.launch import slurm
    from isoscale.observe.text import clock, table
    from isoscale.recipe.schema import slurm_seconds

    number, folder = submission.send()
    start = slurm.expected_start(number)
    path = shlex.quote(str(folder))
    limit = submission.job.launch.time
    each = f", at most {clock(slurm_seconds(limit))} per start" if limit is not None else ""
    rows = [
        ("run", str(folder)),
        ("script", str(folder / "slurm" / "job.sh")),
        ("output", str(folder / "slurm" / f"{number}.out")),
        *([("start", f"expected at {start}")] if start else []),
        ("how it is", f"isoscale status {path}"),
        ("follow it", f"isoscale logs -f {path}"),
        ("end it", f"isoscale cancel {path}"),
    ]
    echo("\n".join([f"submitted job {number}: {submission.job.resources}{each}", *table(rows)]))
