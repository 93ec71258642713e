"""A scaling study on this machine: every measurement is a training of its own, with as many ranks as it is about."""

import os
import sys
from collections.abc import Callable

from isoscale.errors import FAILED, START_AGAIN
from isoscale.launch.local import num_cores
from isoscale.recipe.schema import Recipe
from isoscale.study import runner
from isoscale.study.scale.study import Study, lines

THREADS = "OMP_NUM_THREADS"


def threads(most_ranks: int) -> int:
    """Threads of each rank, the same on any number of ranks, or else one rank would have all cores already."""
    asked = os.environ.get(THREADS, "")
    return int(asked) if asked.isdigit() and int(asked) else max(1, num_cores() // most_ranks)


def warning(recipe: Recipe, most_ranks: int) -> str | None:
    """What to know where ranks share cores or GPUs."""

    from isoscale.system import devices as accelerators

    found = accelerators.find(recipe.train.device)
    count, what = (num_cores(), "core") if found.backend is None else (found.count(), "GPU")
    if most_ranks <= count:
        return None
    return f"{most_ranks} ranks share {count} {what}{'s' * (count > 1)}: more ranks than that cannot be faster here"


class LocalScale(runner.Study[tuple[int, int]]):
    """The measurements of a study, one after the other."""

    command = "scale"
    stopping = "the measurement ends"

    def __init__(self, study: Study, say: Callable[[str], None]) -> None:
        """Nothing is measured yet."""
        self.path, self.study, self._say = study.path, study, say
        self.code = 0
        """The exit code of a measurement that failed, or 0."""

    def start(self, point: tuple[int, int], slot: int) -> runner.Process:
        """Start the ranks of a measurement."""
        repeat, ranks = point
        words = [sys.argv[0], "scale", "--run", str(self.path), "--measure", f"{ranks}:{repeat}"]
        return runner.Process(words, {} if self.study.threads is None else {THREADS: str(self.study.threads)})

    def end(self, point: tuple[int, int], process: runner.Process) -> bool:
        """Say what was measured; where something went wrong, it would again."""
        before, self.study = len(self.study.measurements), Study.read(self.path)
        if process.code != 0:
            self.code = START_AGAIN if process.was_told else max(process.code, FAILED)
        for line in lines(self.study, before) if self.code == 0 else ():
            self._say(line)
        return self.code == 0

    def show(self) -> None:
        """Each measurement is told when it ends."""

    def say(self, text: str) -> None:
        """As the measurements are told."""
        self._say(text)


def complete(study: Study, say: Callable[[str], None]) -> tuple[Study, int]:
    """Measure what is missing; the study as it is then, and an exit code that is not 0 where something is missing."""
    local = LocalScale(study, say)
    running = runner.Runner(local, study.missing)
    running.run()
    return local.study, local.code or (START_AGAIN if running.was_stopped and local.study.missing else 0)
