"""A sweep as one job: an array with a task for each point."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoscale.launch import submission
from isoscale.launch.config import resources
from isoscale.launch.job import Array, Job
from isoscale.recipe.launch import Launch
from isoscale.recipe.load import load_recipe
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.study.sweep.plan import RECIPE, Plan, Point, Sweep, write_points
from isoscale.system.files import own_folder


@dataclass(frozen=True)
class Request:
    """What is asked for each point."""

    options: Mapping[str, Any]
    """Keys of the `launch` section, over those of the recipe."""
    num_gpus: int | None = None
    cluster: str | None = None
    at_once: int | None = None
    command: Sequence[str] = ()
    is_trusted: bool = False
    """Whether the points may name any class, also where the user's secret cannot be read."""

    def checks_components(self, loaded: LoadedRecipe) -> bool:
        """Whether the tasks run in the environment of this process, so that components can be looked at here."""
        return submission.is_own_environment(self._launch(loaded))

    def num_ranks(self, loaded: LoadedRecipe) -> int:
        """Processes that train each point."""
        return resources(self._launch(loaded), self.num_gpus).num_tasks

    def _launch(self, loaded: LoadedRecipe) -> Launch:
        return submission.asked(loaded.recipe.launch, self.options, self.cluster)

    def job(self, loaded: LoadedRecipe, name: str, run: Path | None, tasks: Sequence[int], words: Sequence[str]) -> Job:
        """An array of those points, counted in the order of the sweep."""
        launch = self._launch(loaded)
        return submission.job_for(
            f"{name}-sweep", run, launch, resources(launch, self.num_gpus), self.command,
            [*words, *["--trust"] * self.is_trusted], Array(list(tasks), self.at_once),
        )  # fmt: skip


def new_job(plan: Plan, request: Request, run: Path | None) -> Job:
    """The array of a sweep that is not there yet."""
    return request.job(plan.loaded, plan.loaded.name, run, range(len(plan.points)), ())


def next_job(sweep: Sweep, points: Sequence[Point], request: Request) -> Job:
    """An array that goes on with some points of a sweep."""
    tasks = [number for number, point in enumerate(sweep.points) if point in points]
    return request.job(load_recipe(sweep.path / RECIPE), sweep.record["name"], sweep.path, tasks, sweep.changes)


def send_new(plan: Plan, job: Job) -> tuple[str, Sweep]:
    """Put the array of a new sweep into the queue; its number and the sweep."""
    number, folder = submission.send(job, lambda path, number: _prepare(plan.write(path), job, number))
    return number, Sweep.read(folder)


def send_next(sweep: Sweep, job: Job) -> str:
    """Put an array that goes on with a sweep into the queue; its number."""
    return submission.send(job, lambda path, number: _prepare(sweep, job, number))[0]


def _prepare(sweep: Sweep, job: Job, number: str) -> None:
    assert job.array is not None
    points = [sweep.points[task] for task in job.array.tasks]
    sweep.restore(points)
    write_points(sweep.path, sweep.points)  # what a sweep that came from elsewhere says there is not to be followed
    scheduler = submission.scheduler_of(job)
    scheduler.keep_script(sweep.path, job)
    for task, point in zip(job.array.tasks, points, strict=True):
        folder, mine = sweep.folder(point), scheduler.task_number(number, task)
        submission.claim(folder, job, mine)
        # The output of all tasks is in one folder; each run finds its own as that of a job of its own.
        for link in scheduler.outputs(folder, mine).values():
            own_folder(link.parent)
            link.symlink_to(Path("..", "..", link.parent.name, link.name))
