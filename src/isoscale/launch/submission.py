"""From a recipe to a job in the queue: what to ask for, the script, and a run directory that waits for it."""

import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoscale.errors import UserError
from isoscale.launch import quoting
from isoscale.launch.config import Resources, merged, notice, read_profile, resources
from isoscale.launch.job import Array, Job, Measurements
from isoscale.launch.schedulers.base import Scheduler
from isoscale.launch.schedulers.find import find
from isoscale.launch.status import Standing
from isoscale.recipe.launch import Launch
from isoscale.recipe.load import load_recipe, to_submit
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.trust import Trust
from isoscale.runs.directory import SUBMITTED, RunDirectory
from isoscale.runs.run import Run


@dataclass(frozen=True)
class Submission:
    """A job, and the run that it is to train."""

    job: Job
    loaded: LoadedRecipe
    is_new: bool
    """Whether the run has not been started yet."""
    is_trusted: bool = False
    """Whether it is to be trained whoever has begun it."""

    def send(self) -> tuple[str, Path]:
        """Put the job into the queue; its number and the run directory."""
        return send(self.job, self._prepare)

    def _prepare(self, path: Path, number: str) -> None:
        if self.is_new:
            prepare(path, self.loaded)
        elif self.is_trusted:
            RunDirectory(path).adopt()
        claim(path, self.job, number)
        scheduler_of(self.job).keep_script(path, self.job)


def send(job: Job, prepare_for: Callable[[Path, str], None]) -> tuple[str, Path]:
    """Put a job into the queue; its number and its folder.

    The scheduler keeps the job until the folder, which may be named after the job, is prepared.
    """
    scheduler = scheduler_of(job)
    number = scheduler.submit_held(scheduler.script(job))
    folder = job.folder_of(number)
    try:
        prepare_for(folder, number)
        scheduler.release(number)
    except BaseException:
        with suppress(UserError):
            scheduler.cancel(number)
        raise
    return number, folder


def scheduler_of(job: Job) -> Scheduler:
    """The scheduler that a job is for."""
    return find(job.launch.scheduler)


def prepare(path: Path, loaded: LoadedRecipe) -> None:
    """A run directory that has its recipe, and waits for its first start."""
    directory = RunDirectory(path)
    directory.create(loaded.to_yaml())
    directory.update(status=SUBMITTED, name=loaded.name)


def claim(path: Path, job: Job, number: str) -> None:
    """Write down which job is going to train in a run directory."""
    submitted = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    RunDirectory(path).update(job={"id": number, "submitted": submitted, "scheduler": scheduler_of(job).name})


def plan(
    recipe: str | None, overrides: Sequence[str], options: Mapping[str, Any], *, num_gpus: int | None = None,
    cluster: str | None = None, run: Path | None = None, words: Sequence[str] = (), command: Sequence[str] = (),
    trust: Trust = Trust.NAMED,
) -> Submission:  # fmt: skip
    """What would be submitted: nothing has happened yet.

    `options` are keys of the `launch` section; `words` are passed on to `isoscale train`; `trust` says whose choice of
    classes is followed.
    """
    is_new = run is None or not RunDirectory(run).exists
    if run is not None:
        _check_run(run, is_new)
    source = recipe if is_new or recipe is not None else str(run and run / "recipe.yaml")
    launch = asked(load_recipe(source, overrides).recipe.launch, options, cluster)
    counts = resources(launch, num_gpus)
    loaded = load_recipe(
        source, overrides, check_components=is_own_environment(launch), world=counts.num_tasks, trust=trust
    )  # fmt: skip
    if trust is not Trust.CHECKED:
        to_submit(loaded, trust)
    # A new run has its recipe in its directory, so that a file that is changed while the job waits changes nothing.
    passed = [*([recipe] if recipe is not None else []), *overrides] if not is_new else []
    job = job_for(loaded.name, run, launch, counts, command, [*passed, *words])
    return Submission(job, loaded, is_new, trust is Trust.ALL)


def asked(of_recipe: Launch, options: Mapping[str, Any], cluster: str | None) -> Launch:
    """What a job asks for: the recipe's section, a cluster profile over it, options over both."""
    launch = merged(of_recipe.model_dump(), read_profile(cluster) if cluster is not None else {}, options)
    find(launch.scheduler)  # or says that there is none
    notice(launch)  # or says that it is too long
    return launch


def job_for(
    name: str, run: Path | None, launch: Launch, counts: Resources, command: Sequence[str], words: Sequence[str] = (),
    array: Array | None = None, measurements: Measurements | None = None,
) -> Job:  # fmt: skip
    """A job in the folder that was chosen, or in one below `runs` that has the number of the job in its name."""
    folder = f"runs/{name.replace('/', '-')}" if run is None else str(run)
    try:
        quoting.value(folder)
    except UserError as error:
        raise UserError(f"{error}; choose another directory with --run DIR") from None
    called = quoting.comment(shlex.join(command))
    return Job(name, folder, run is None, words, program(launch), launch, counts, called, array, measurements)


def _check_run(run: Path, is_new: bool) -> None:
    """Refuse a directory that another job is about to train in, or that is something else."""
    if is_new:
        if run.exists() and (not run.is_dir() or any(run.iterdir())):
            raise UserError(f"{run} is there and holds no run; choose another directory with --run DIR")
        return
    standing = Standing.of(Run(run))
    if standing.queued is not None and standing.is_queued:
        raise UserError(
            f"job {standing.job} is {standing.queued.state} and trains in {run}; wait for its end, or end it: isoscale "
            f"cancel {shlex.quote(str(run))}"
        )


def is_own_environment(launch: Launch) -> bool:
    """Whether the job runs in the environment of this process, so that components can be looked at here."""
    return not (launch.container or launch.activate or launch.modules)


def program(launch: Launch) -> str:
    """How the job calls isoscale: by its name where the job's environment has it, else by the path of this one."""
    beside = Path(sys.executable).parent / "isoscale"
    found = shutil.which("isoscale")
    if not is_own_environment(launch) or not beside.exists() or (found and Path(found).samefile(beside)):
        return "isoscale"
    return str(beside)
