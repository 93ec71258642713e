"""The scheduler of a cluster: the script of a job, its way into the queue, its state and its end.

Another scheduler is one module beside this one, with a child of `Scheduler`: `find` looks through the folder.
"""

import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from isoscale.errors import START_AGAIN, UserError
from isoscale.launch import quoting
from isoscale.launch.config import MAX_REQUEUES
from isoscale.launch.job import POINTS, Job
from isoscale.observe.doctor.finding import Finding
from isoscale.parallel import secret
from isoscale.parallel.environments.batch import BatchSystem
from isoscale.recipe.launch import Launch
from isoscale.system.files import own_folder, write_aside

PATIENCE = 60
"""Seconds for a busy scheduler to answer."""
SECRET = f"export {secret.VARIABLE}=$(od -An -N{secret.NUM_BYTES} -tx1 /dev/urandom | tr -d ' \\n')"
"""New at each start, and in no file."""


@dataclass(frozen=True)
class Queued:
    """What the scheduler says of a job."""

    state: str
    """RUNNING while it runs; before and after that, in the scheduler's own words."""
    reason: str = ""
    """Why it waits, or which nodes it runs on."""
    elapsed: str = ""
    limit: str = ""
    start: str = ""
    """When it has started, or is expected to."""
    is_active: bool = True
    """Whether it runs or will run."""


class Scheduler(ABC):
    """One way to submit jobs. The script is put together here; a child says what is its own in it, and its commands."""

    name: ClassVar[str]
    """In recipes, and the folder of scripts and outputs in a run directory."""
    batch: ClassVar[BatchSystem]
    """The same scheduler as the processes of its jobs see it."""
    command: ClassVar[str]
    """The program that takes a script."""
    numbers: ClassVar[str] = r"[0-9]+(_[0-9]+)?"
    """What the number of a job looks like, that of an array's task too: nothing that could be an option."""
    job: ClassVar[str]
    """The number of the job in the shell of its script, as with those that follow."""
    array: ClassVar[str]
    """That of the whole array."""
    task: ClassVar[str]
    """The variable with the number of an array's task, counted from 0."""
    restarts: ClassVar[str]
    """How often the job was started again."""

    @abstractmethod
    def directives(self, job: Job) -> list[str]:
        """The lines that say what a job asks for, where its output goes, and when it is told that its time ends."""

    @abstractmethod
    def start(self, words: Sequence[str], ranks: int | None = None, per_node: int = 1) -> str:
        """The line that starts all processes of a job, or so many of them with at most so many on a node."""

    @abstractmethod
    def requeue(self, job: Job) -> str:
        """The command by which a job puts itself back into the queue."""

    @abstractmethod
    def submit_held(self, script: str) -> str:
        """Hand a script to the scheduler, which keeps it until it is released; returns the number of the job."""

    @abstractmethod
    def release(self, number: str) -> None:
        """Let a job that is kept take its place in the queue."""

    @abstractmethod
    def state(self, number: str) -> Queued | None:
        """How a job stands, or how it ended; None where the scheduler does not know it."""

    @abstractmethod
    def active_tasks(self, arrays: Iterable[str]) -> set[str]:
        """The tasks of job arrays that run or wait, as `claim` has numbered them."""

    def expected_start(self, number: str) -> str | None:
        """When the scheduler thinks that a waiting job starts, in local time; None where it does not know."""
        return None

    def cores(self, launch: Launch) -> list[str]:
        """The lines by which the processes of a job get `cpus_per_task` cores each."""
        threads = f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-{launch.cpus_per_task}}}"
        return [] if "OMP_NUM_THREADS" in launch.env else [threads]

    def findings(self) -> Iterator[Finding]:
        """What `isoscale doctor` says: whether jobs can be submitted from here, and the job of this process."""
        yield Finding(self.name, "ok", "found" if self.is_here() else "not on this machine")

    def is_here(self) -> bool:
        """Whether jobs can be submitted from this machine."""
        return shutil.which(self.command) is not None

    def as_number(self, job: object) -> str | None:
        """The number of a job as a run has written it down; None for what could be an option."""
        return str(job) if re.fullmatch(self.numbers, str(job)) else None

    def task_number(self, number: str, task: int) -> str:
        """The number of a task of an array."""
        return f"{number}_{task}"

    def array_of(self, number: str) -> str | None:
        """The number of the array that a task belongs to; None for a job of its own."""
        array, is_task, _ = number.partition("_")
        return array if is_task else None

    def cancel(self, number: str) -> None:
        """End a job, waiting or running."""
        self.ask(self.batch.cancel, number, refusal=f"does not cancel job {number}")

    # ------------------------------------------------------------------------------------------- files of a job

    def outputs(self, folder: Path, number: str) -> dict[str, Path]:
        """The files that the job with that number writes."""
        return {kind: folder / self.name / f"{number}.{kind}" for kind in ("out", "err")}

    def script_in(self, folder: Path) -> Path:
        """Where the script of a job is kept, beside its output."""
        return folder / self.name / "job.sh"

    def keep_script(self, folder: Path, job: Job) -> None:
        """Write the script into the folder of the job."""
        own_folder(folder / self.name)
        write_aside(self.script_in(folder), self.script(job))

    # ------------------------------------------------------------------------------------------- script of a job

    def script(self, job: Job) -> str:
        """job.sh: what a person would write, one line that starts all processes and what has to stand around it."""
        what = "What is trained is in recipe.yaml, in the run directory."
        if job.array is not None:
            what = f"Each task trains one point of the sweep; its directory is a line of {POINTS}."
        head = ["#!/bin/bash", f"# {quoting.comment(job.submitted_as)}", f"# {what}"]
        body = self._measuring(job) if job.measurements is not None else [*self._training(job), *self._again(job)]
        return "\n".join([*head, *self.directives(job), "", *self._environment(job.launch), "", *body, ""])

    def _environment(self, launch: Launch) -> list[str]:
        lines = [f"{SECRET}  # by which ranks know each other"]
        lines += [f"module load {' '.join(quoting.word(name) for name in launch.modules)}"] if launch.modules else []
        lines += [quoting.line(launch.activate)] if launch.activate else []
        lines += [f"export {name}={quoting.word(str(value))}" for name, value in launch.env.items()]
        return lines + (self.cores(launch) if launch.cpus_per_task is not None else [])

    def _training(self, job: Job) -> list[str]:
        folder = quoting.word(job.folder) + f"-{self.job if job.array is None else self.array}" * job.is_numbered
        before: list[str] = []
        if job.array is not None:
            line = f'$(sed -n "$(({self.task} + 1))p" "$sweep/{POINTS}")'
            before, folder = [f"sweep={folder}", f"point={line}"], '"$sweep/$point"'
        words = [*job.called, "train", *(quoting.word(word) for word in job.words), "--run", folder]
        return [*before, self.start(words), "code=$?", ""]

    def _measuring(self, job: Job) -> list[str]:
        """A loop over the repeats, in which the numbers of ranks take turns."""
        assert job.measurements is not None
        words = [*job.called, "scale", "--run", quoting.word(job.folder), "--measure"]
        per_node = job.resources.tasks_per_node
        steps = [
            f"  {self.start([*words, f'{ranks}:$repeat'], ranks, per_node)} || exit" for ranks in job.measurements.ranks
        ]
        repeats = " ".join(str(repeat) for repeat in range(1, job.measurements.repeats + 1))
        return [f"for repeat in {repeats}; do", *steps, "done"]

    def _again(self, job: Job) -> list[str]:
        most = MAX_REQUEUES if job.launch.max_requeues is None else job.launch.max_requeues
        if most == 0:
            return [f"exit $code  # {START_AGAIN}: it was told to stop and has saved; submit it again with --run"]
        return [
            f"# {START_AGAIN}: training was told to stop and has saved. The same job starts again, up to {most} times, "
            "and goes on.",
            f'if [ "$code" -eq {START_AGAIN} ] && [ "{self.restarts}" -lt {most} ]; then',
            f"  {self.requeue(job)} && exit 0",
            "fi",
            "exit $code",
        ]

    # ------------------------------------------------------------------------------------------- its own commands

    def ask(
        self, *words: str, refusal: str | None = None, given: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Call a command of the scheduler; a UserError with its own words where it fails and `refusal` is said."""
        try:
            done = subprocess.run(words, input=given, capture_output=True, text=True, timeout=PATIENCE)
        except FileNotFoundError:
            raise UserError(
                f"there is no {self.batch.name} on this machine: the command {words[0]} was not found. Submit on a "
                "login node of the cluster; `isoscale submit --dry-run` shows the script here"
            ) from None
        except subprocess.TimeoutExpired:
            raise UserError(f"{self.batch.name} did not answer within {PATIENCE} s: {' '.join(words)}") from None
        if refusal is not None and done.returncode != 0:
            raise UserError(f"{self.batch.name} {refusal}:\n{words_of(done)}")
        return done


def words_of(done: subprocess.CompletedProcess[str]) -> str:
    """What a command has said, indented."""
    text = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
    return "\n".join(f"  {line}" for line in text)
