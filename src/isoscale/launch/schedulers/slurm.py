"""Slurm: `#SBATCH` lines and srun, sbatch, squeue, sacct, scontrol and scancel."""

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from isoscale.errors import UserError
from isoscale.launch import quoting
from isoscale.launch.config import notice
from isoscale.launch.job import Job
from isoscale.launch.schedulers.base import Queued, Scheduler, words_of
from isoscale.observe.doctor.finding import Finding
from isoscale.parallel.environments import batch
from isoscale.recipe.launch import Launch

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
         "PREEMPTED")  # fmt: skip
ANSWER = 10.0
"""Seconds for a command to answer `isoscale doctor`."""
JOB_COUNTS = {
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "tasks",
    "SLURM_CPUS_PER_TASK": "cores a task",
    "SLURM_GPUS_ON_NODE": "GPUs on this node",
}


class Slurm(Scheduler):
    """Slurm's own words for what a job asks for, and its commands."""

    name = "slurm"
    batch = batch.SLURM
    command = "sbatch"
    job = "$SLURM_JOB_ID"
    array = "$SLURM_ARRAY_JOB_ID"
    task = "SLURM_ARRAY_TASK_ID"
    restarts = "${SLURM_RESTART_COUNT:-0}"

    def directives(self, job: Job) -> list[str]:
        """`#SBATCH` lines."""
        launch, counts = job.launch, job.resources
        number, output = ("%j", "%j") if job.array is None else ("%A", "%A_%a")
        folder = job.folder.replace("%", "%%") + f"-{number}" * job.is_numbered
        at_once = f"%{job.array.at_once}" if job.array is not None and job.array.at_once is not None else ""
        asked: dict[str, object] = {
            "job-name": job.name, "array": None if job.array is None else job.array.ranges + at_once,
            "nodes": counts.nodes, "ntasks-per-node": counts.tasks_per_node,
        }  # fmt: skip
        if launch.gres is None and counts.gpus_per_node:
            asked["gpus-per-node"] = counts.gpus_per_node
        names = ("gres", "cpus_per_task", "mem", "time", "partition", "account", "qos", "constraint", "reservation",
                 "mail_user", "mail_type")  # fmt: skip
        asked |= {name.replace("_", "-"): getattr(launch, name) for name in names}
        lines = [f"#SBATCH --{name}={quoting.value(str(value))}" for name, value in asked.items() if value is not None]
        lines += [f"#SBATCH {quoting.options(directive)}" for directive in launch.directives]
        return [
            *lines,
            f"#SBATCH --output={quoting.value(f'{folder}/{self.name}/{output}.out')}",
            f"#SBATCH --error={quoting.value(f'{folder}/{self.name}/{output}.err')}",
            "#SBATCH --open-mode=append  # when the job starts again, it writes on in the same files",
            "#SBATCH --requeue           # start again when a node fails, or when others go first",
            f"#SBATCH --signal=USR1@{notice(launch)}   # so many seconds before the time limit, training saves and "
            "ends",
        ]

    def cores(self, launch: Launch) -> list[str]:
        """`--cpus-per-task` again, for srun."""
        lines = ["export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it over by itself"]
        if "OMP_NUM_THREADS" not in launch.env:
            lines.append("export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}")
        return lines

    def start(self, words: Sequence[str], ranks: int | None = None, per_node: int = 1) -> str:
        """A step of the job."""
        where = []
        if ranks is not None:
            nodes = math.ceil(ranks / per_node)
            where = [f"--nodes={nodes}", f"--ntasks={ranks}", f"--ntasks-per-node={min(ranks, per_node)}"]
        return " ".join(["srun", *where, *words])

    def requeue(self, job: Job) -> str:
        """The number of an array's task alone may be that of the whole array."""
        number = self.job if job.array is None else "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
        return f'scontrol requeue "{number}"'

    def submit_held(self, script: str) -> str:
        """`sbatch --hold`."""
        done = self.ask("sbatch", "--parsable", "--hold", given=script, refusal="does not take the job")
        found = re.search(r"^(\d+)(;|$)", done.stdout, re.MULTILINE)  # `7`, or `7;cluster`; a site may say more
        if found is None:
            raise UserError(f"Slurm took the job, but did not tell its number:\n{words_of(done)}")
        return found[1]

    def release(self, number: str) -> None:
        """`scontrol release`."""
        self.ask("scontrol", "release", number, refusal=f"does not release job {number}")

    def state(self, number: str) -> Queued | None:
        """From the queue, or from the accounting where the job is long over."""
        found = self._fields("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T|%r|%N|%M|%l|%S")
        if found:
            state, reason, nodes, elapsed, limit, start = found[0]
            return Queued(state, nodes or reason, elapsed, limit, start, state not in ENDED)
        found = self._fields("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={number}",
                             "--format=State,NodeList,Elapsed,Timelimit,Start")  # fmt: skip
        if not found:
            return None
        state, nodes, elapsed, limit, start = found[-1]
        state = state.partition(" ")[0]
        return Queued(state, nodes, elapsed, limit, start, state not in ENDED)

    def _fields(self, *words: str) -> list[list[str]]:
        """The lines that a command prints, in fields; none where it is not there or fails."""
        if shutil.which(words[0]) is None:
            return []
        done = self.ask(*words)
        return [line.split("|") for line in done.stdout.strip().splitlines()] if done.returncode == 0 else []

    def active_tasks(self, arrays: Iterable[str]) -> set[str]:
        """Such as 7_2."""
        numbers = ",".join(sorted(set(arrays)))
        if not numbers:
            return set()
        words = self._fields("squeue", "--noheader", "--array", f"--jobs={numbers}", "--format=%i")
        return {word.strip() for (word,) in words}

    def expected_start(self, number: str) -> str | None:
        """As the backfill scheduler plans it."""
        found = self.ask("squeue", "--noheader", "--start", f"--jobs={number}", "--format=%S").stdout.split()
        times = sorted(text for text in found if text != "N/A")
        return times[0].replace("T", " ") if times else None

    def findings(self) -> Iterator[Finding]:
        """Whether the controller answers, with partitions and accounting, and the job of this process."""
        yield self._controller() if self.is_here() else Finding(self.name, "ok", "not on this machine")
        number = os.environ.get(self.batch.job)
        if number:
            counts = [f"{what} {count}" for variable, what in JOB_COUNTS.items() if (count := os.environ.get(variable))]
            left = _text("squeue", "--noheader", f"--jobs={number}", "--format=%L")
            told = [number, *counts, *([f"time left {left}"] if left else [])]
            yield Finding(f"{self.name} job", "ok", ", ".join(told))

    def _controller(self) -> Finding:
        ping = _answer("scontrol", "ping")
        said = "" if ping is None else ping.stdout + ping.stderr
        if " UP" not in said:
            reason = said.strip().splitlines()[-1] if said.strip() else f"no answer within {ANSWER:g} s"
            advice = "`isoscale submit` does not work here: ask where the login node is, or who keeps the cluster"
            return Finding(self.name, "warning", f"installed, but its controller does not answer: {reason}", advice)
        lines = [line.split() for line in _text("sinfo", "--noheader", "--summarize", "--format=%P %D").splitlines()]
        partitions = ", ".join(f"{words[0]} ({words[1]} nodes)" for words in lines if len(words) == 2) or "unknown"
        accounting = _answer("sacct", "--noheader", "--allocations", "--starttime=now")
        is_on = accounting is not None and accounting.returncode == 0
        return Finding(
            self.name,
            "ok",
            f"{_text('sbatch', '--version')}, the controller answers, partitions {partitions}, accounting is "
            f"{'on' if is_on else 'off'}",
        )


def _text(*words: str) -> str:
    """What a command prints; nothing where it fails."""
    done = _answer(*words)
    return done.stdout.strip() if done is not None and done.returncode == 0 else ""


def _answer(*words: str) -> subprocess.CompletedProcess[str] | None:
    """What a command says soon; None where it is not there or does not answer."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=ANSWER, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
