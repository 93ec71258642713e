"""A job that a scheduler is to run: a training, an array of them, or the measurements of a scaling study."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from isoscale.launch import quoting
from isoscale.launch.config import Resources
from isoscale.recipe.launch import Launch

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
    """A job array: many trainings in one job."""

    tasks: Sequence[int]
    """The lines of points.txt that are trained, counted from 0."""
    at_once: int | None = None
    """How many of them at the same time; None: as many as there is room for."""

    @property
    def ranges(self) -> str:
        """The tasks as `0-3,7`."""
        ranges: list[list[int]] = []
        for task in self.tasks:
            if ranges and ranges[-1][-1] == task - 1:
                ranges[-1][1:] = [task]
            else:
                ranges.append([task])
        return ",".join("-".join(map(str, ends)) for ends in ranges)


@dataclass(frozen=True)
class Measurements:
    """The measurements of a scaling study, one after the other in one job."""

    ranks: Sequence[int]
    repeats: int


@dataclass(frozen=True)
class Job:
    """A training that a scheduler is to run, or an array of them, or the measurements of a study."""

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
    measurements: Measurements | None = None

    def folder_of(self, number: str) -> Path:
        """The run directory of the job with that number."""
        return Path(f"{self.folder}-{number}" if self.is_numbered else self.folder)

    @property
    def called(self) -> list[str]:
        """How isoscale is called in the script: in its container, if there is one."""
        if self.launch.container is None:
            return [quoting.word(self.program)]
        engine, _, image = self.launch.container.partition(":")
        gpus = GPUS.get(engine, []) if self.resources.gpus_per_node else []
        named = f"--image={quoting.word(image)}" if engine == "shifter" else quoting.word(image)
        return [*ENGINES[engine], *gpus, named, "isoscale"]
