"""`isoscale sweep`."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isoscale.cli import complete
from isoscale.cli.arguments import OptionalRecipe, sort_out
from isoscale.cli.arguments import Trust as TrustOption
from isoscale.cli.jobs.job_options import PANEL, JobOptions, Submit
from isoscale.cli.jobs.submit import say_sent
from isoscale.cli.output import print_columns
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from isoscale.launch.job import Job
    from isoscale.recipe.loaded import LoadedRecipe
    from isoscale.recipe.trust import Trust
    from isoscale.study.sweep.job import Request
    from isoscale.study.sweep.plan import Plan, Point, Sweep
    from isoscale.study.sweep.states import State


def sweep(
    context: typer.Context,
    recipe: OptionalRecipe = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="As for train; several values with commas between them are tried: optimizer.lr=1e-3,3e-4 seed=0,1,2.",
            autocompletion=complete.overrides,
        ),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run",
            metavar="DIR",
            help="Directory of the sweep; by default runs/RECIPE-sweep-TIME. Continued if there.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Points trained at a time on this machine; default 1.")
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Processes of each point on this machine, as for train.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="With --run: only the points that failed.")] = False,
    trust: TrustOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the points, or with --job the script, and start nothing.")
    ] = False,
    in_job: Submit = False,
    at_once: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", rich_help_panel=PANEL, help="At most N points of the array at a time."),
    ] = None,
) -> None:
    """Train a recipe with many settings: each point is a run, here or in a job array; or continue a sweep."""
    from isoscale.recipe.load import load_recipe
    from isoscale.recipe.trust import Trust
    from isoscale.study.sweep.job import Request
    from isoscale.study.sweep.plan import RECIPE, Sweep, check_new, reopen

    job: JobOptions = context.obj
    recipe, words = sort_out(recipe, overrides)
    _check_options(in_job, {"--workers": workers, "--devices": devices}, {"--at-once": at_once}, job)
    command = ["isoscale", *sys.argv[1:]]
    request = Request(job.keys, job.num_gpus, job.cluster, at_once, command, trust) if in_job else None
    whose = Trust.CHECKED if dry_run else Trust.of(trust)
    if run is not None and Sweep.exists(run):
        sweep = reopen(run, recipe, words, whose)
        if request is not None:
            _check_submission(load_recipe(run / RECIPE), whose)
        _continue(sweep, failed, request, workers or 1, devices or 1, dry_run, trust)
        return
    if failed:
        _refuse("--failed trains the failed points of a sweep again; say which one with --run DIR")
    if run is not None:
        check_new(run)
    _begin(
        _planned(recipe, words, command, request, devices or 1, whose),
        run,
        request,
        workers or 1,
        devices or 1,
        dry_run,
    )


def _check_options(in_job: bool, here: dict[str, int | None], there: dict[str, int | None], job: JobOptions) -> None:
    """Refuse what has no meaning on this machine, or none in a job."""
    for_machine = [name for name, value in here.items() if value is not None]
    for_job = [name for name, value in there.items() if value is not None] + job.given
    if in_job and for_machine:
        _refuse(f"{for_machine[0]} is for points on this machine; with --job, write --at-once or --tasks-per-node")
    if not in_job and for_job:
        _refuse(f"{for_job[0]} is for a job; add --job, or leave it out")


def _refuse(text: str) -> None:
    from isoscale.errors import UserError

    raise UserError(text)


def _check_submission(loaded: "LoadedRecipe", trust: "Trust") -> None:
    """Refuse what a job would do because somebody else has written it; a dry run does nothing."""
    from isoscale.recipe.load import to_submit
    from isoscale.recipe.trust import Trust

    if trust is not Trust.CHECKED:
        to_submit(loaded, trust)


def _planned(
    recipe: str | None, words: list[str], command: list[str], request: "Request | None", devices: int, trust: "Trust"
) -> "Plan":
    from isoscale.recipe.load import load_recipe
    from isoscale.study.sweep.plan import plan, with_lists

    if request is None:
        return plan(recipe, words, command, world=devices, trust=trust)
    loaded = load_recipe(recipe, with_lists(words))
    _check_submission(loaded, trust)
    return plan(recipe, words, command, request.checks_components(loaded), request.num_ranks(loaded), trust)


def _begin(
    plan: "Plan", run: Path | None, request: "Request | None", workers: int, devices: int, dry_run: bool
) -> None:
    from isoscale.launch.local import check_alone
    from isoscale.launch.submission import scheduler_of
    from isoscale.runs.directory import RunDirectory
    from isoscale.study.sweep import job as sweep_job

    if request is not None:
        job = sweep_job.new_job(plan, request, run)
        if dry_run:
            echo(scheduler_of(job).script(job), end="")
        else:
            _say_sent(*sweep_job.send_new(plan, job), job)
        return
    if dry_run:
        _print_points(plan.points)
        return
    check_alone("sweep starts the trainings")
    path = run or RunDirectory.fresh(f"{plan.loaded.name}-sweep").path
    _train(plan.write(path), plan.points, workers, devices, True)


def _continue(
    sweep: "Sweep", failed: bool, request: "Request | None", workers: int, devices: int, dry_run: bool,
    is_trusted: bool,
) -> None:  # fmt: skip
    from isoscale.launch.local import check_alone
    from isoscale.launch.submission import scheduler_of
    from isoscale.study.sweep import job as sweep_job
    from isoscale.study.sweep.states import select, states_of

    chosen = select(sweep, failed)
    if chosen.elsewhere:
        echo(f"left alone, because they train already or wait for a job: {_names(chosen.elsewhere)}", err=True)
    if not chosen.points:
        _report(sweep, states_of(sweep))
    elif request is not None:
        job = sweep_job.next_job(sweep, chosen.points, request)
        if dry_run:
            echo(scheduler_of(job).script(job), end="")
        else:
            _say_sent(sweep_job.send_next(sweep, job), sweep, job)
    elif dry_run:
        _print_points(chosen.points)
    else:
        check_alone("sweep starts the trainings")
        _train(sweep, chosen.points, workers, devices, is_trusted)


def _names(points: "Sequence[Point]", most: int = 5) -> str:
    more = f" and {len(points) - most} more" if len(points) > most else ""
    return ", ".join(point.name for point in points[:most]) + more


def _print_points(points: "Sequence[Point]") -> None:
    from isoscale.study.sweep.points import short_keys, text

    titles = (*short_keys(list(points[0].values)).values(), "run")
    print_columns([titles, *((*map(text, point.values.values()), point.name) for point in points)])


def _train(sweep: "Sweep", points: "Sequence[Point]", workers: int, devices: int, is_trusted: bool) -> None:
    from isoscale.errors import FAILED as EXIT_FAILED
    from isoscale.errors import Stopped
    from isoscale.study.runner import Runner
    from isoscale.study.sweep.display import display_on
    from isoscale.study.sweep.local import Crew, LocalSweep
    from isoscale.study.sweep.plan import command_to_go_on
    from isoscale.study.sweep.states import FAILED

    total = len(sweep.points)
    echo(f"{sweep.path}: {len(points)} of {total} point{'s' * (total > 1)} to train, {workers} at a time")
    display = display_on(sys.stdout, sweep)
    study = LocalSweep(sweep, points, Crew(workers, devices, is_trusted), display)
    runner = Runner(study, points)
    with display:
        runner.run()
    states = study.states
    _report(sweep, states)
    if not runner.was_stopped and any(state.status in FAILED for state in states):
        raise typer.Exit(EXIT_FAILED)
    if runner.was_stopped or any(state.status != "done" for state in states if state.point in points):
        echo(f"\nstopped; go on: {command_to_go_on(sweep)}")  # here, or somebody has stopped a training itself
        raise Stopped


def _report(sweep: "Sweep", states: "Sequence[State]") -> None:
    """The table, the best point, and what went wrong."""
    from isoscale.observe.text import number
    from isoscale.study.sweep.plan import command_to_go_on
    from isoscale.study.sweep.states import FAILED, best_first, counts, table

    ordered = best_first(sweep, states)
    echo()
    print_columns(table(sweep, ordered))
    echo(f"\n{counts(states)}")
    if ordered[0].best is not None:
        echo(f"best: {sweep.record['monitor']} {number(ordered[0].best)} in {sweep.folder(ordered[0].point)}")
    wrong = [state for state in states if state.status in FAILED]
    for state in wrong:
        echo(f"\n{state.point.name} {state.status}: {state.message or ''}".rstrip(), err=True)
    if wrong:
        echo(f"\nonce that is repaired: {command_to_go_on(sweep, '--failed')}", err=True)


def _say_sent(number: str, sweep: "Sweep", job: "Job") -> None:
    from isoscale.launch.submission import scheduler_of

    assert job.array is not None
    first = shlex.quote(str(sweep.folder(sweep.points[job.array.tasks[0]])))
    commands = [
        ("how it is", f"isoscale runs list {shlex.quote(str(sweep.path))}"),
        ("follow one", f"isoscale logs -f {first}"),
        ("end all", f"{scheduler_of(job).batch.cancel} {number}"),
    ]
    say_sent(job, number, sweep.path, commands)
