"""What a job asks Slurm for, as options that several commands have in common."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

RESOURCES = "Resources"
CLUSTER = "Cluster"
ENVIRONMENT = "Environment of the job"
OTHER_KEYS = {"directive": "directives", "module": "modules"}
"""Options that may be repeated, and their keys in the `launch` section."""


@dataclass(frozen=True)
class JobOptions:
    """The options; None where one was not given."""

    nodes: Annotated[int | None, typer.Option(min=1, metavar="N", rich_help_panel=RESOURCES, help="Nodes.")] = None
    gpus_per_node: Annotated[
        int | None,
        typer.Option(min=0, metavar="G", rich_help_panel=RESOURCES, help="GPUs on each node, with one process each."),
    ] = None
    num_gpus: Annotated[
        int | None,
        typer.Option("-n", min=1, metavar="TOTAL", rich_help_panel=RESOURCES, help="GPUs in total, instead of nodes."),
    ] = None
    tasks_per_node: Annotated[
        int | None,
        typer.Option(min=1, metavar="T", rich_help_panel=RESOURCES, help="Processes on each node, without GPUs."),
    ] = None
    cpus_per_task: Annotated[
        int | None, typer.Option(min=1, metavar="C", rich_help_panel=RESOURCES, help="Cores of each process.")
    ] = None
    mem: Annotated[
        str | None, typer.Option(metavar="SIZE", rich_help_panel=RESOURCES, help="Memory of a node, such as 64G.")
    ] = None
    gres: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=RESOURCES, help="GPUs in other words: gpu:a100:4.")
    ] = None
    time: Annotated[
        str | None,
        typer.Option(metavar="TIME", rich_help_panel=RESOURCES, help="Limit of one start: 90, 01:30:00, 1-12."),
    ] = None
    max_requeues: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", rich_help_panel=RESOURCES, help="How often it may start again; default 100."),
    ] = None
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=CLUSTER, help="A profile with values for a cluster.")
    ] = None
    partition: Annotated[str | None, typer.Option(metavar="NAME", rich_help_panel=CLUSTER, help="Partition.")] = None
    account: Annotated[str | None, typer.Option(metavar="NAME", rich_help_panel=CLUSTER, help="Who pays.")] = None
    qos: Annotated[str | None, typer.Option(metavar="NAME", rich_help_panel=CLUSTER, help="Quality of service.")] = None
    constraint: Annotated[
        str | None, typer.Option(metavar="LIST", rich_help_panel=CLUSTER, help="Features of nodes.")
    ] = None
    reservation: Annotated[str | None, typer.Option(metavar="NAME", rich_help_panel=CLUSTER, help="Reservation.")] = (
        None
    )
    mail_user: Annotated[
        str | None, typer.Option(metavar="ADDRESS", rich_help_panel=CLUSTER, help="Who gets mail.")
    ] = None
    mail_type: Annotated[
        str | None, typer.Option(metavar="TYPE", rich_help_panel=CLUSTER, help="About what: END, FAIL, ALL …")
    ] = None
    directive: Annotated[
        list[str] | None,
        typer.Option(metavar='"--x=y"', rich_help_panel=CLUSTER, help="A further option of sbatch; may be repeated."),
    ] = None
    module: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", rich_help_panel=ENVIRONMENT, help="A module to load; may be repeated."),
    ] = None
    activate: Annotated[
        str | None,
        typer.Option(metavar="LINE", rich_help_panel=ENVIRONMENT, help='Such as "conda activate science".'),
    ] = None
    container: Annotated[
        str | None,
        typer.Option(metavar="KIND:IMAGE", rich_help_panel=ENVIRONMENT, help="apptainer:, shifter: or podman:IMAGE."),
    ] = None
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="K=V", rich_help_panel=ENVIRONMENT, help="A variable of the job; may be repeated."),
    ] = None

    @property
    def given(self) -> list[str]:
        """The options that were given, as they were typed."""
        names = [field.name for field in fields(self) if getattr(self, field.name) not in (None, [])]
        return ["-n" if name == "num_gpus" else f"--{name.replace('_', '-')}" for name in names]

    def as_keys(self) -> dict[str, Any]:
        """The options that are keys of the `launch` section, under the names that they have there."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["env"] = _variables(self.env or [])
        return {OTHER_KEYS.get(name, name): value for name, value in values.items() if name not in _NO_KEYS}


_NO_KEYS = ("num_gpus", "cluster")


def _variables(pairs: list[str]) -> dict[str, str]:
    from isoscale.errors import UserError

    wrong = [pair for pair in pairs if "=" not in pair]
    if wrong:
        raise UserError(f"--env {wrong[0]}: write a name and a value, such as --env OMP_NUM_THREADS=8")
    return dict(pair.split("=", 1) for pair in pairs)


def with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with all job options as its own, which it gets as one argument `job`."""
    names = [field.name for field in fields(JobOptions)]

    @functools.wraps(command)
    def expanded(**given: Any) -> None:
        job = JobOptions(**{name: given.pop(name) for name in names})
        command(**given, job=job)

    own = inspect.signature(command).parameters.values()
    of_job = inspect.signature(JobOptions).parameters.values()
    parameters = [part for each in own for part in (of_job if each.name == "job" else [each])]
    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    expanded.__annotations__ = {each.name: each.annotation for each in parameters}
    return expanded
