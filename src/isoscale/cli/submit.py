"""`isoscale submit`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from isoscale.cli import complete

if TYPE_CHECKING:
    from isoscale.launch.submission import Submission

RESOURCES = "Resources"
CLUSTER = "Cluster"
ENVIRONMENT = "Environment of the job"


def submit(
    recipe: Annotated[
        str | None,
        typer.Argument(
            metavar="RECIPE", help="Preset or file; by default images/digits.", autocompletion=complete.recipes
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Such as optimizer.lr=3e-4; ~schedule deletes. As many as you like.",
            autocompletion=complete.overrides,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", metavar="DIR", help="Directory of the run; by default runs/RECIPE-JOB. Continued if there."
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, metavar="N", rich_help_panel=RESOURCES, help="Nodes.")] = None,
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=0, metavar="G", rich_help_panel=RESOURCES, help="GPUs on each node, with one process each."),
    ] = None,
    num_gpus: Annotated[
        int | None,
        typer.Option("-n", min=1, metavar="TOTAL", rich_help_panel=RESOURCES, help="GPUs in total, instead of nodes."),
    ] = None,
    tasks_per_node: Annotated[
        int | None,
        typer.Option(min=1, metavar="T", rich_help_panel=RESOURCES, help="Processes on each node, without GPUs."),
    ] = None,
    cpus_per_task: Annotated[
        int | None, typer.Option(min=1, metavar="C", rich_help_panel=RESOURCES, help="Cores of each process.")
    ] = None,
    mem: Annotated[
        str | None, typer.Option(metavar="SIZE", rich_help_panel=RESOURCES, help="Memory of a node, such as 64G.")
    ] = None,
    gres: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=RESOURCES, help="GPUs in other words: gpu:a100:4.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="TIME", rich_help_panel=RESOURCES, help="Limit of one start: 90, 01:30:00, 1-12."),
    ] = None,
    max_requeues: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", rich_help_panel=RESOURCES, help="How often it may start again; default 100."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=CLUSTER, help="A profile with values for a cluster.")
    ] = None,
    partition: Annotated[str | None, typer.Option(metavar="NAME", rich_help_panel=CLUSTER, help="Partition.")] = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", rich_help_panel=CLUSTER, help="Who pays.")] = None,
    qos: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=CLUSTER, help="Quality of service.")
    ] = None,
    constraint: Annotated[
        str | None, typer.Option(metavar="LIST", rich_help_panel=CLUSTER, help="Features of nodes.")
    ] = None,
    reservation: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=CLUSTER, help="Reservation.")
    ] = None,
    mail_user: Annotated[
        str | None, typer.Option(metavar="ADDRESS", rich_help_panel=CLUSTER, help="Who gets mail.")
    ] = None,
    mail_type: Annotated[
        str | None, typer.Option(metavar="TYPE", rich_help_panel=CLUSTER, help="About what: END, FAIL, ALL …")
    ] = None,
    directive: Annotated[
        list[str] | None,
        typer.Option(metavar='"--x=y"', rich_help_panel=CLUSTER, help="A further option of sbatch; may be repeated."),
    ] = None,
    module: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", rich_help_panel=ENVIRONMENT, help="A module to load; may be repeated."),
    ] = None,
    activate: Annotated[
        str | None,
        typer.Option(metavar="LINE", rich_help_panel=ENVIRONMENT, help='Such as "conda activate science".'),
    ] = None,
    container: Annotated[
        str | None,
        typer.Option(metavar="KIND:IMAGE", rich_help_panel=ENVIRONMENT, help="apptainer:, shifter: or podman:IMAGE."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", rich_help_panel=ENVIRONMENT, help="A variable of the job; may be repeated."),
    ] = None,
    profile: Annotated[bool, typer.Option("--profile", help="As for train: show where the time went.")] = False,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, typer.Option("--log-level", help="As for train.")
    ] = None,
    log_format: Annotated[Literal["text", "json"] | None, typer.Option("--log-format", help="As for train.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script of the job, and submit nothing.")
    ] = False,
) -> None:
    """Train a recipe as a Slurm job, or continue a run; a job that reaches its time limit goes on by itself."""
    from isoscale.launch.submission import plan

    changes = list(overrides or [])
    if recipe is not None and ("=" in recipe or recipe.startswith("~")):
        changes.insert(0, recipe)
        recipe = None
    options: dict[str, Any] = {
        "nodes": nodes, "gpus_per_node": gpus_per_node, "tasks_per_node": tasks_per_node, "mem": mem, "gres": gres,
        "cpus_per_task": cpus_per_task, "time": time, "max_requeues": max_requeues, "partition": partition,
        "account": account, "qos": qos, "constraint": constraint, "reservation": reservation, "mail_user": mail_user,
        "mail_type": mail_type, "directives": directive, "modules": module, "activate": activate,
        "container": container, "env": _variables(env or []),
    }  # fmt: skip
    words = ["--profile"] * profile
    words += [word for name, value in (("--log-level", log_level), ("--log-format", log_format)) if value
              for word in (name, value)]  # fmt: skip
    submission = plan(
        recipe, changes, options, num_gpus=num_gpus, cluster=cluster, run=run, words=words,
        command=["isoscale", *sys.argv[1:]],
    )  # fmt: skip
    if dry_run:
        print(submission.job.script(), end="")
        return
    _send(submission)


def _variables(pairs: list[str]) -> dict[str, str]:
    from isoscale.errors import UserError

    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise UserError(f"--env {wrong[0]}: write a name and a value, such as --env OMP_NUM_THREADS=8")
    return dict(pair.split("=", 1) for pair in pairs)


def _send(submission: "Submission") -> None:
    import shlex

    from isoscale.launch import slurm
    from isoscale.observe.text import clock, table
    from isoscale.recipe.schema import slurm_seconds

    number, folder = submission.send()
    start = slurm.expected_start(number)
    path = shlex.quote(str(folder))
    limit = submission.job.launch.time
    each = f", at most {clock(slurm_seconds(limit))} a start" if limit is not None else ""
    rows = [
        ("run", str(folder)),
        ("script", str(folder / "slurm" / "job.sh")),
        ("output", str(folder / "slurm" / f"{number}.out")),
        *([("start", f"expected at {start}")] if start else []),
        ("how it is", f"isoscale status {path}"),
        ("follow it", f"isoscale logs -f {path}"),
        ("end it", f"isoscale cancel {path}"),
    ]
    print("\n".join([f"submitted job {number}: {submission.job.resources}{each}", *table(rows)]))
