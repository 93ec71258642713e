"""The script of a job: what a person would write, one `srun` line and what has to stand around it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isoscale.errors import START_AGAIN
from isoscale.launch import quoting
from isoscale.launch.config import MAX_REQUEUES, Resources, notice
from isoscale.parallel import secret
from isoscale.recipe.schema import Launch

SECRET = f"export {secret.VARIABLE}=$(od -An -N{secret.NUM_BYTES} -tx1 /dev/urandom | tr -d ' \\n')"
"""New at each start, and in no file."""
JOB = "$SLURM_JOB_ID"
ARRAY = "$SLURM_ARRAY_JOB_ID"
TASK = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
"""One task of an array; its own number alone may be that of the whole array."""
POINTS = "points.txt"
"""The directories that the tasks of an array train in, one per line, below the folder of the array."""
ENGINES = {
    "apptainer": ["apptainer", "exec"],
    "shifter": ["shifter"],
    "podman": ["podman", "run", "--rm", "--network=host", "--ipc=host", "--env-host", '--volume="$PWD:$PWD"',
               '--workdir="$PWD"'],
}  # fmt: skip
"""How a program is run inside an image, in the folder and with the environment of the job."""
GPUS = {"apptainer": ["--nv"], "podman": ["--device=nvidia.com/gpu=all"]}


@dataclass(frozen=True)
class Array:
    """Many trainings in one job."""

    tasks: Sequence[int]
    """The lines of points.txt that are trained, counted from 0."""
    at_once: int | None = None
    """How many of them at the same time; None: as many as there is room for."""

    def __str__(self) -> str:
        ranges: list[list[int]] = []
        for task in self.tasks:
            if ranges and ranges[-1][-1] == task - 1:
                ranges[-1][1:] = [task]
            else:
                ranges.append([task])
        text = ",".join("-".join(map(str, ends)) for ends in ranges)
        return text if self.at_once is None else f"{text}%{self.at_once}"


@dataclass(frozen=True)
class Job:
    """A training that Slurm is to run, or an array of them."""

    name: str
    folder: str
    """The run directory, or that of all runs of an array, or how it begins."""
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
    array: Array | None = None

    def folder_of(self, job: str) -> Path:
        """The run directory of the job with that number."""
        return Path(f"{self.folder}-{job}" if self.is_numbered else self.folder)

    def script(self) -> str:
        """job.sh."""
        return "\n".join([*self.beginning(), *_training(self), *_requeue(self), ""])

    def beginning(self) -> list[str]:
        """The lines before anything is started: what is asked for, and the environment."""
        return [_head(self), *_directives(self), "", *_environment(self.launch)]

    @property
    def called(self) -> str:
        """How isoscale is called in the script: in its container, if there is one."""
        return " ".join(_inside(self))


def _head(job: Job) -> str:
    what = "What is trained is in recipe.yaml, in the run directory."
    if job.array is not None:
        what = f"Each task trains one point of the sweep; its directory is a line of {POINTS}."
    return f"#!/bin/bash\n# {quoting.comment(job.submitted_as)}\n# {what}"


def _directives(job: Job) -> list[str]:
    launch, counts = job.launch, job.resources
    number, output = ("%j", "%j") if job.array is None else ("%A", "%A_%a")
    folder = job.folder.replace("%", "%%") + f"-{number}" * job.is_numbered
    asked: dict[str, object] = {
        "job-name": job.name, "array": job.array, "nodes": counts.nodes, "ntasks-per-node": counts.tasks_per_node,
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
        f"#SBATCH --output={quoting.value(f'{folder}/slurm/{output}.out')}",
        f"#SBATCH --error={quoting.value(f'{folder}/slurm/{output}.err')}",
        "#SBATCH --open-mode=append  # when the job starts again, it writes on in the same files",
        "#SBATCH --requeue           # start again when a node fails, or when others go first",
        f"#SBATCH --signal=USR1@{notice(launch)}   # so many seconds before the time limit, training saves and ends",
    ]


def _environment(launch: Launch) -> list[str]:
    lines = [f"{SECRET}  # by which ranks know each other"]
    lines += [f"module load {' '.join(quoting.word(name) for name in launch.modules)}"] if launch.modules else []
    lines += [quoting.line(launch.activate)] if launch.activate else []
    lines += [f"export {name}={quoting.word(str(value))}" for name, value in launch.env.items()]
    if launch.cpus_per_task is not None:
        lines.append("export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it over by itself")
        if "OMP_NUM_THREADS" not in launch.env:
            lines.append("export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}")
    return [*lines, ""]


def _training(job: Job) -> list[str]:
    folder = quoting.word(job.folder) + f"-{JOB if job.array is None else ARRAY}" * job.is_numbered
    before: list[str] = []
    if job.array is not None:
        line = f'$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" "$sweep/{POINTS}")'
        before, folder = [f"sweep={folder}", f"point={line}"], '"$sweep/$point"'
    words = [*_inside(job), "train", *(quoting.word(word) for word in job.words), "--run", folder]
    return [*before, f"srun {' '.join(words)}", "code=$?", ""]


def _inside(job: Job) -> list[str]:
    """The program, in its container if there is one."""
    if job.launch.container is None:
        return [quoting.word(job.program)]
    engine, _, image = job.launch.container.partition(":")
    gpus = GPUS.get(engine, []) if job.resources.gpus_per_node else []
    named = f"--image={quoting.word(image)}" if engine == "shifter" else quoting.word(image)
    return [*ENGINES[engine], *gpus, named, "isoscale"]


def _requeue(job: Job) -> list[str]:
    most = MAX_REQUEUES if job.launch.max_requeues is None else job.launch.max_requeues
    if most == 0:
        return [f"exit $code  # {START_AGAIN}: it was told to stop and has saved; submit it again with --run"]
    return [
        f"# {START_AGAIN}: training was told to stop and has saved. The same job starts again, up to {most} times, and "
        "goes on.",
        f'if [ "$code" -eq {START_AGAIN} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {most} ]; then',
        f'  scontrol requeue "{JOB if job.array is None else TASK}" && exit 0',
        "fi",
        "exit $code",
    ]
