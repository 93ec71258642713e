"""One rank of a scaling study: trains as the recipe says, and times steps once they are steady."""

import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isoscale.engine.config import Schedule
from isoscale.engine.settings import Decisions
from isoscale.engine.step.cuda_graph import GraphedProgram
from isoscale.engine.step.programs import Program
from isoscale.engine.trainer import Trainer
from isoscale.errors import UserError
from isoscale.observe.observers import Observers
from isoscale.parallel import world
from isoscale.parallel.collectives import Ranks
from isoscale.recipe.load import load_recipe
from isoscale.recipe.schema import Recipe
from isoscale.runs.open import OpenedRun, open_run
from isoscale.study.scale.study import Measurement, Study, global_batch
from isoscale.system import devices as accelerators

TIMED_SECONDS = 2.0
"""How long the steps that count take together, where nobody says how many they are."""
FEWEST_STEPS = 10
WARM_SECONDS = 1.0
"""How long steps are run before any counts, after the first of them, which compile, capture and fill caches."""
WARM_WINDOWS = 3
"""Launches before any counts: one runs eagerly, one captures, one is compared with it."""
STEPS_TO_SPARE = 1_000_000
"""The training is planned so much longer than what is measured, and never gets there."""


def measure(path: Path, num_ranks: int, repeat: int) -> None:
    """Be one of `num_ranks` that measure once; the first one adds the result to the study in `path`.

    What is there already is not measured again, so that a job that starts anew goes on where it was.
    """
    ranks = world.join(accelerators.find().kind)
    with world.guarded():
        asked = Study.read(path).as_dict() if ranks.is_main else None
        study = Study.from_dict(path, ranks.broadcast(asked, "the study"))
    if (repeat, num_ranks) not in study.missing:
        return
    recipe = load_recipe(study.recipe).recipe
    opened = open_run(study.recipe, _keys(study, recipe, num_ranks), None, save=False)
    if opened.ranks.world_size != num_ranks:
        raise UserError(f"{num_ranks} ranks are to be measured, and {opened.ranks.world_size} were started")
    with world.guarded(timeout=opened.recipe.parallel.timeout):
        found = _measured(opened, study.steps, num_ranks, repeat)
        if opened.ranks.is_main:
            Study.read(path).with_measurement(found).write()
        opened.ranks.any(False, "the end of all ranks")


def _keys(study: Study, recipe: Recipe, num_ranks: int) -> dict[str, Any]:
    """The recipe's training, without what is no step: evaluation, checkpoints, loggers; every batch a full one."""
    keys = {
        "data.batch_size": global_batch(recipe, study.mode, num_ranks), "data.drop_last": True,
        "train.epochs": None, "train.steps": STEPS_TO_SPARE + (study.steps or 0), "train.evaluate": "never",
        "train.early_stopping": None, "train.stop_after": None, "checkpoint.every": "never", "parallel.verify": 0,
        "observe.tensorboard": 0, "observe.loggers": [],
    }  # fmt: skip
    if recipe.train.nan == "rollback":
        keys["train.nan"] = "stop"  # there is no checkpoint to go back to
    if isinstance(recipe.schedule, Schedule) and recipe.schedule.name == "plateau":
        keys["schedule.name"] = "constant"  # it would wait for an evaluation
    return keys


def _measured(opened: OpenedRun, steps: int | None, num_ranks: int, repeat: int) -> Measurement:
    ranks = opened.ranks
    trainer = _trainer(opened)
    watch = Stopwatch(trainer.parts.program, ranks, trainer.parts.accelerator.synchronize, steps)
    trainer.parts.program = watch
    with suppress(_Enough):
        trainer.fit()
    plan = trainer.train.plan
    seconds = ranks.all_gather(watch.seconds, "how long every rank took")
    startups = ranks.all_gather(watch.startup, "how long every rank took to start")
    return Measurement(
        ranks=num_ranks,
        repeat=repeat,
        batch_size=plan.batch_size,
        steps=watch.last - watch.first,
        samples=plan.samples_before(watch.last) - plan.samples_before(watch.first),
        seconds=seconds,
        startup=startups if None not in startups else None,
        warmup=watch.warmup,
        hosts=[os.uname().nodename] if ranks.alone else list(ranks.hosts),
        device=trainer.parts.accelerator.description,
        decided=trainer.decided.as_dict(),
        measured=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    )


def _trainer(opened: OpenedRun) -> Trainer:
    """A trainer among several ranks that writes nothing, at the beginning of its training."""
    ranks = opened.ranks
    mine = Decisions.make(opened.settings, ranks.world_size).as_dict() if ranks.is_main else None
    decided = Decisions.from_dict(ranks.broadcast(mine, "what was decided"))
    return opened.another_trainer(opened.settings, decided, Observers([]), ranks=ranks, begin=lambda task: None)


class _Enough(Exception):
    """All that was asked for is measured."""


@dataclass
class Stopwatch:
    """A step program that runs another one, and ends the training once it has timed enough steady steps of it."""

    program: Program
    ranks: Ranks
    synchronize: Callable[[], None]
    steps: int | None
    """How many count; None for as many as fill some seconds."""
    profile: Any = None
    startup: float | None = field(default=None, init=False)
    first: int = field(default=0, init=False)
    """The first step that counts."""
    last: int = field(default=0, init=False)
    """The first that does not any more; 0 during warm-up."""
    warmup: float = field(default=0.0, init=False)
    seconds: float = field(default=0.0, init=False)
    _began: float = field(default=0.0, init=False)
    _warm_since: float = field(default=0.0, init=False)
    _windows: int = field(default=0, init=False)

    def run(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """Run steps, in few pieces while it warms up and as they come while it times."""
        if not self._began:
            self.startup, self._began = process_age(), time.perf_counter()
        while start < stop:
            end = self._end(start, stop)
            begin = time.perf_counter()
            reached = self.program.run(start, end, interrupted)
            if reached != end:
                return reached
            if self.last == 0:
                self._warm(end, end - start, begin)
            elif end == self.last:
                self._stop()
            start = end
        return stop

    run_visibly = run_eagerly = run

    def _end(self, start: int, stop: int) -> int:
        if self.last:
            return min(stop, self.last)
        if isinstance(self.program, GraphedProgram):  # a cut launch would capture other graphs
            return stop
        return min(stop, start + 2**self._windows)

    def _warm(self, step: int, count: int, begin: float) -> None:
        """Look whether steps are steady by now, and from the speed of the last ones, how many to time."""
        self.synchronize()
        now = time.perf_counter()
        self._windows += 1
        if self._windows == 1:
            self._warm_since = now
        steps = None
        if self._windows > WARM_WINDOWS and now - self._warm_since >= WARM_SECONDS:
            steps = self.steps or max(FEWEST_STEPS, math.ceil(TIMED_SECONDS * count / (now - begin)))
        steps = self.ranks.broadcast(steps, "whether steps are steady")
        if steps is None:
            return
        self.first, self.last, self.warmup = step, step + steps, now - self._began
        self.ranks.any(False, "the first step that counts")
        self._began = time.perf_counter()

    def _stop(self) -> None:
        self.synchronize()
        self.seconds = time.perf_counter() - self._began
        raise _Enough


def process_age() -> float | None:
    """Seconds since this process was started; None where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError, IndexError, ValueError):
        return None
