"""A scaling study as one job: the largest allocation, in which every measurement is a step.

All numbers of ranks run on the same nodes, wait in the queue once and can take turns; a job for each number would wait
several times and measure other nodes. The price is that most of the allocation rests while few ranks are measured.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isoscale.errors import UserError
from isoscale.launch.config import Resources, resources
from isoscale.launch.job import Job, Measurements
from isoscale.launch.schedulers.base import Queued
from isoscale.launch.schedulers.find import AUTO, find
from isoscale.launch.submission import asked, job_for, scheduler_of, send
from isoscale.recipe.launch import Launch
from isoscale.study.scale.study import Study, lines

LOOK_EVERY = 2.0
"""Seconds between two looks at the queue."""


@dataclass(frozen=True)
class Request:
    """What a study asks for."""

    launch: Launch
    resources: Resources

    @classmethod
    def make(cls, of_recipe: Launch, cluster: str | None, options: Mapping[str, Any], most_ranks: int) -> "Request":
        """The recipe's `launch` section, a cluster profile over it, options over both, with room for all ranks."""
        return cls.of(asked(of_recipe, options, cluster), most_ranks)

    @classmethod
    def of(cls, launch: Launch, most_ranks: int) -> "Request":
        """Count out nodes and tasks, and say where these do not suffice."""
        per_node = launch.tasks_per_node or launch.gpus_per_node
        nodes = launch.nodes or (math.ceil(most_ranks / per_node) if per_node else 1)
        per_node = per_node or math.ceil(most_ranks / nodes)
        counts = resources(launch.model_copy(update={"nodes": nodes, "tasks_per_node": per_node}))
        if counts.num_tasks < most_ranks:
            raise UserError(
                f"{counts} are {counts.num_tasks} ranks, and {most_ranks} are to be measured; use --nodes "
                f"{math.ceil(most_ranks / per_node)}, or fewer --ranks"
            )
        return cls(_with_threads(launch), counts)

    def job(self, study: Study) -> Job:
        """The job that measures what a study asks."""
        return job_for(
            f"{study.name}-scale", study.path, self.launch, self.resources, study.record["command"],
            measurements=Measurements(study.ranks, study.repeats),
        )  # fmt: skip


def _with_threads(launch: Launch) -> Launch:
    """As many threads for a rank whatever the number of ranks: a step of few ranks could use the cores of all."""
    if launch.cpus_per_task is not None or "OMP_NUM_THREADS" in launch.env:
        return launch
    return launch.model_copy(update={"env": {**launch.env, "OMP_NUM_THREADS": 1}})


def submit(study: Study, request: Request) -> Study:
    """Put the job into the queue; the study knows its number then."""
    job = request.job(study)

    def prepare(path: Path, number: str) -> None:
        scheduler_of(job).keep_script(path, job)
        replace(study, job={"id": number, "launch": request.launch.model_dump(mode="json")}).write()

    try:
        send(job, prepare)
    except UserError:
        if not study.measurements:
            study.remove()  # nothing was earned yet: leave no litter
        raise
    return Study.read(study.path)


def standing(study: Study) -> Queued | None:
    """How the job of a study stands; None where the scheduler does not know it any more."""
    asked = study.job or {}
    scheduler = find(asked.get("launch", {}).get("scheduler", AUTO))
    number = scheduler.as_number(asked.get("id"))
    return scheduler.state(number) if number else None


def wait(study: Study, say: Callable[[str], None]) -> Study:
    """Wait for the end of the job, and tell each measurement as it comes."""
    told = len(study.measurements)
    while True:
        found = standing(study)
        study = Study.read(study.path)
        for line in lines(study, told):
            say(line)
        told = len(study.measurements)
        if found is None or not found.is_active:
            return study
        time.sleep(LOOK_EVERY)
