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
from isoscale.launch import quoting, slurm
from isoscale.launch.config import Resources, merged, notice, resources
from isoscale.launch.job_script import Job
from isoscale.launch.profiles import read_profile
from isoscale.recipe.load import load_recipe, to_submit
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.schema import Launch
from isoscale.recipe.trust import Trust
from isoscale.runs.directory import SUBMITTED
from isoscale.system.files import own_folder, write_aside


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
            from isoscale.runs.directory import RunDirectory

            RunDirectory(path).adopt()
        claim(path, number)
        write_script(path, self.job)


def send(job: Job, prepare_for: Callable[[Path, str], None]) -> tuple[str, Path]:
    """Put a job into the queue; its number and its folder.

    Slurm keeps the job until the folder, which may be named after the job, is prepared.
    """
    number = slurm.submit_held(job.script())
    folder = job.folder_of(number)
    try:
        prepare_for(folder, number)
        slurm.release(number)
    except BaseException:
        with suppress(UserError):
            slurm.cancel(number)
        raise
    return number, folder


def prepare(path: Path, loaded: LoadedRecipe) -> None:
    """A run directory that has its recipe, and waits for its first start."""
    from isoscale.runs.directory import RunDirectory

    directory = RunDirectory(path)
    directory.create(loaded.to_yaml())
    directory.update(status=SUBMITTED, name=loaded.name)


def claim(path: Path, job: str) -> None:
    """Write down which job is going to train in a run directory."""
    from isoscale.runs.directory import RunDirectory

    RunDirectory(path).update(job={"id": job, "submitted": time.strftime("%Y-%m-%dT%H:%M:%S%z")})


def write_script(path: Path, job: Job) -> None:
    """Keep the script in the folder of the job, where its output goes as well."""
    write_aside(own_folder(path / "slurm") / "job.sh", job.script())


def plan(
    recipe: str | None, overrides: Sequence[str], options: Mapping[str, Any], *, num_gpus: int | None = None,
    cluster: str | None = None, run: Path | None = None, words: Sequence[str] = (), command: Sequence[str] = (),
    trust: Trust = Trust.NAMED,
) -> Submission:  # fmt: skip
    """What would be submitted: nothing has happened yet.

    `options` are keys of the `launch` section; `words` are passed on to `isoscale train`; `trust` says whose choice of
    classes is followed.
    """
    from isoscale.runs.directory import RunDirectory

    is_new = run is None or not RunDirectory(run).exists
    if run is not None:
        _check_run(run, is_new)
    source = recipe if is_new or recipe is not None else str(run and run / "recipe.yaml")
    launch, counts = asked(load_recipe(source, overrides).recipe.launch, options, num_gpus, cluster)
    loaded = load_recipe(
        source, overrides, check_components=is_own_environment(launch), world=counts.num_tasks, trust=trust
    )  # fmt: skip
    if trust is not Trust.CHECKED:
        to_submit(loaded, trust)
    folder = folder_word(loaded.name, run)
    # A new run has its recipe in its directory, so that a file that is changed while the job waits changes nothing.
    passed = [*([recipe] if recipe is not None else []), *overrides] if not is_new else []
    job = Job(
        loaded.name, folder, run is None, [*passed, *words], program(launch), launch, counts,
        shown(command),
    )  # fmt: skip
    return Submission(job, loaded, is_new, trust is Trust.ALL)


def asked(
    of_recipe: Launch, options: Mapping[str, Any], num_gpus: int | None, cluster: str | None
) -> tuple[Launch, Resources]:
    """What a job asks for, and how many processes and GPUs that are."""
    profile = read_profile(cluster) if cluster is not None else {}
    launch = merged(of_recipe.model_dump(), profile, options)
    counts = resources(launch, num_gpus)
    notice(launch)  # or says that it is too long
    return launch, counts


def shown(command: Sequence[str]) -> str:
    """A command on one line."""
    return quoting.comment(shlex.join(command))


def folder_word(name: str, run: Path | None) -> str:
    """The folder of a job as its script says it: the one that was chosen, or how one below `runs` begins."""
    folder = f"runs/{name.replace('/', '-')}" if run is None else str(run)
    try:
        quoting.value(folder)
    except UserError as error:
        raise UserError(f"{error}; choose another directory with --run DIR") from None
    return folder


def _check_run(run: Path, is_new: bool) -> None:
    """Refuse a directory that another job is about to train in, or that is something else."""
    if is_new:
        if run.exists() and (not run.is_dir() or any(run.iterdir())):
            raise UserError(f"{run} is there and holds no run; choose another directory with --run DIR")
        return
    job = job_of(run)
    found = slurm.queued(job) if job else None
    if found is not None and found.is_active:
        raise UserError(
            f"job {job} is {found.state} and trains in {run}; wait for its end, or end it: isoscale cancel "
            f"{shlex.quote(str(run))}"
        )


def job_of(run: Path) -> str | None:
    """The number of the last job of a run, if it was submitted."""
    from isoscale.runs.directory import RunDirectory

    try:
        return slurm.as_number(RunDirectory(run).read()["job"]["id"])
    except (ValueError, KeyError, TypeError):
        return None


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
