"""The script of a job: what a person would write, one `srun` line and what has to stand around it."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isoscale.errors import START_AGAIN
from isoscale.launch.config import MAX_REQUEUES, Resources, notice
from isoscale.recipe.schema import Launch

JOB = "$SLURM_JOB_ID"
ENGINES = {
    "apptainer": ["apptainer", "exec"],
    "shifter": ["shifter"],
    "podman": ["podman", "run", "--rm", "--network=host", "--ipc=host", "--env-host", '--volume="$PWD:$PWD"',
               '--workdir="$PWD"'],
}  # fmt: skip
"""How a program is run inside an image, in the folder and with the environment of the job."""
GPUS = {"apptainer": ["--nv"], "podman": ["--device=nvidia.com/gpu=all"]}


@dataclass(frozen=True)
class Job:
    """A training that Slurm is to run."""

    name: str
    folder: str
    """The run directory, or how it begins."""
    is_numbered: bool
    """Whether the number of the job is the end of its name."""
    words: Sequence[str]
    """What `isoscale train` is called with, besides the directory."""
    program: str
    """How isoscale is called."""
    launch: Launch
    resources: Resources
    submitted_as: str
    """The command that was typed."""

    def folder_of(self, job: str) -> Path:
        """The run directory of the job with that number."""
        return Path(f"{self.folder}-{job}" if self.is_numbered else self.folder)

    def script(self) -> str:
        """job.sh."""
        parts = [_head(self), *_directives(self), "", *_environment(self.launch), *_training(self), *_requeue(self)]
        return "\n".join([*parts, ""])


def _head(job: Job) -> str:
    what = "What is trained is in recipe.yaml, in the run directory."
    return f"#!/bin/bash\n# {job.submitted_as}\n# {what}"


def _directives(job: Job) -> list[str]:
    launch, counts = job.launch, job.resources
    folder = job.folder.replace("%", "%%") + "-%j" * job.is_numbered
    asked = {"job-name": job.name, "nodes": counts.nodes, "ntasks-per-node": counts.tasks_per_node}
    if launch.gres is None and counts.gpus_per_node:
        asked["gpus-per-node"] = counts.gpus_per_node
    names = ("gres", "cpus_per_task", "mem", "time", "partition", "account", "qos", "constraint", "reservation",
             "mail_user", "mail_type")  # fmt: skip
    asked |= {name.replace("_", "-"): getattr(launch, name) for name in names}
    lines = [f"#SBATCH --{name}={_quoted(str(value))}" for name, value in asked.items() if value is not None]
    lines += [f"#SBATCH {directive}" for directive in launch.directives]
    return [
        *lines,
        f"#SBATCH --output={_quoted(f'{folder}/slurm/%j.out')}",
        f"#SBATCH --error={_quoted(f'{folder}/slurm/%j.err')}",
        "#SBATCH --open-mode=append  # when the job starts again, it writes on in the same files",
        "#SBATCH --requeue           # start again when a node fails, or when others go first",
        f"#SBATCH --signal=USR1@{notice(launch)}   # so many seconds before the time limit, training saves and ends",
    ]


def _quoted(text: str) -> str:
    """A value behind #SBATCH, where `#` begins a comment and blanks separate."""
    return f'"{text}"' if any(sign in text for sign in " #'\t") else text


def _environment(launch: Launch) -> list[str]:
    lines = [f"module load {' '.join(shlex.quote(name) for name in launch.modules)}"] if launch.modules else []
    lines += [launch.activate] if launch.activate else []
    lines += [f"export {name}={shlex.quote(str(value))}" for name, value in launch.env.items()]
    if launch.cpus_per_task is not None:
        lines.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it over by itself")
        if "OMP_NUM_THREADS" not in launch.env:
            lines.append("export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}")
    return [*lines, ""] if lines else []


def _training(job: Job) -> list[str]:
    folder = shlex.quote(job.folder) + f"-{JOB}" * job.is_numbered
    words = [*_inside(job), "train", *(shlex.quote(word) for word in job.words), "--run", folder]
    return [f"srun {' '.join(words)}", "code=$?", ""]


def _inside(job: Job) -> list[str]:
    """The program, in its container if there is one."""
    if job.launch.container is None:
        return [shlex.quote(job.program)]
    engine, _, image = job.launch.container.partition(":")
    gpus = GPUS.get(engine, []) if job.resources.gpus_per_node else []
    named = f"--image={shlex.quote(image)}" if engine == "shifter" else shlex.quote(image)
    return [*ENGINES[engine], *gpus, named, "isoscale"]


def _requeue(job: Job) -> list[str]:
    most = MAX_REQUEUES if job.launch.max_requeues is None else job.launch.max_requeues
    if most == 0:
        return [f"exit $code  # {START_AGAIN}: it was told to stop and has saved; submit it again with --run"]
    return [
        f"# {START_AGAIN}: training was told to stop and has saved. The same job starts again, up to {most} times, and "
        "goes on.",
        f'if [ "$code" -eq {START_AGAIN} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {most} ]; then',
        f'  scontrol requeue "{JOB}" && exit 0',
        "fi",
        "exit $code",
    ]
