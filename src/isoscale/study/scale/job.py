"""A scaling study as one Slurm job: the largest allocation, in which every measurement is a step.

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
from isoscale.launch import quoting, slurm
from isoscale.launch.config import Resources, merged, notice, resources
from isoscale.launch.job_script import Job
from isoscale.launch.profiles import read_profile
from isoscale.launch.submission import folder_word, program, send, shown, write_script
from isoscale.recipe.schema import Launch
from isoscale.study.scale.study import Study, lines

LOOK_EVERY = 2.0
"""Seconds between two looks at the queue."""


@dataclass(frozen=True)
class _Job(Job):
    """A job whose steps are measurements."""

    ranks: tuple[int, ...] = ()
    repeats: int = 1

    def script(self) -> str:
        """job.sh: a loop over the repeats, in which the numbers of ranks take turns."""
        steps = [f"  {self._step(ranks)}" for ranks in self.ranks]
        repeats = " ".join(str(repeat) for repeat in range(1, self.repeats + 1))
        return "\n".join([*self.beginning(), f"for repeat in {repeats}; do", *steps, "done", ""])

    def _step(self, ranks: int) -> str:
        per_node = self.resources.tasks_per_node
        where = f"--nodes={math.ceil(ranks / per_node)} --ntasks={ranks} --ntasks-per-node={min(ranks, per_node)}"
        return f"srun {where} {self.called} scale --run {quoting.word(self.folder)} --measure {ranks}:$repeat || exit"


@dataclass(frozen=True)
class Request:
    """What a study asks Slurm for."""

    launch: Launch
    resources: Resources

    @classmethod
    def make(cls, of_recipe: Launch, cluster: str | None, options: Mapping[str, Any], most_ranks: int) -> "Request":
        """The recipe's `launch` section, a cluster profile over it, options over both, with room for all ranks."""
        profile = read_profile(cluster) if cluster is not None else {}
        return cls.of(merged(of_recipe.model_dump(), profile, options), most_ranks)

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
        notice(launch)  # or says that it is too long
        return cls(_with_threads(launch), counts)

    def job(self, study: Study) -> Job:
        """The job that measures what a study asks."""
        folder = folder_word(study.name, study.path)
        called = shown(study.record["command"])
        return _Job(
            f"{study.name}-scale", folder, False, [], program(self.launch), self.launch, self.resources, called,
            ranks=tuple(study.ranks), repeats=study.repeats,
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
        write_script(path, job)
        replace(study, job={"id": number, "launch": request.launch.model_dump(mode="json")}).write()

    try:
        send(job, prepare)
    except UserError:
        if not study.measurements:
            study.remove()  # nothing was earned yet: leave no litter
        raise
    return Study.read(study.path)


def standing(study: Study) -> slurm.Queued | None:
    """How the job of a study stands; None where Slurm does not know it any more."""
    number = slurm.as_number((study.job or {}).get("id"))
    return slurm.queued(number) if number else None


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
