"""Opening a run: a new one, or one that is continued, also where several ranks open it together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isoscale.data.hashing import derive_key
from isoscale.engine.build import build
from isoscale.engine.config import AnyOptimizer, AnySchedule, OptimizerClass, ScheduleClass
from isoscale.engine.settings import Decisions, Settings, threads_asked
from isoscale.engine.state.checkpoint import State
from isoscale.engine.trainer import Trainer
from isoscale.errors import UserError
from isoscale.observe.observers import Observers
from isoscale.parallel import world
from isoscale.parallel.collectives import ALONE, Ranks
from isoscale.parallel.environments import find as environment
from isoscale.parallel.environments.batch import batch_job
from isoscale.parallel.health import preflight
from isoscale.recipe.compare import describe, differences, harmful
from isoscale.recipe.components import data_spec, instantiate, own_weights, prepared, task_spec
from isoscale.recipe.importing.reading import split
from isoscale.recipe.load import load_recipe, load_resolved, to_train
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.schema import InitFrom, Recipe
from isoscale.recipe.trust import Trust
from isoscale.runs import attempts
from isoscale.runs.directory import REBUILT, ROOT, RunDirectory
from isoscale.runs.init_from import start_from
from isoscale.system import devices as accelerators


@dataclass
class Given:
    """Task and data that were made in Python instead of by the recipe."""

    task: nn.Module
    data: Any
    callbacks: Sequence[Any] = ()
    """Those of the recipe come after them."""
    root: Path = ROOT
    """Where directories of new runs are made."""
    notes: Sequence[str] = ()
    """What to tell the user when it starts."""

    @property
    def callback_names(self) -> list[str]:
        """What the callbacks are, for the record of the run."""
        return [f"{type(each).__module__}.{type(each).__qualname__}" for each in self.callbacks]


@dataclass
class OpenedRun:
    """What a start of a training is about."""

    loaded: LoadedRecipe
    directory: RunDirectory | None = None
    """None: nothing is saved, or another rank does it."""
    notes: list[str] = field(default_factory=list)
    """What to tell the user when it starts."""
    given: Given | None = None
    profile: bool = False
    """Whether to measure where the time goes."""
    ranks: Ranks = ALONE
    where: Path | None = None
    """The directory of the run, also on ranks that do not write to it; None: nothing is saved."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self.loaded.recipe

    @property
    def settings(self) -> Settings:
        """The recipe's sections for the engine."""
        recipe = self.recipe
        return Settings(
            recipe.seed, recipe.optimizer, recipe.schedule, recipe.train, recipe.data, recipe.parallel,
            recipe.checkpoint, recipe.observe, _prepared(recipe.optimizer), _prepared(recipe.schedule),
            own_weights=own_weights(recipe.train), callbacks=self.callbacks, folder=self.where,
        )  # fmt: skip

    @cached_property
    def callbacks(self) -> tuple[Any, ...]:
        """The callbacks given in Python, then those of the recipe; built once, because they remember things."""
        given = () if self.given is None else tuple(self.given.callbacks)
        return (*given, *(instantiate(spec) for spec in self.recipe.train.callbacks))

    def components(self) -> tuple[nn.Module, Any, Sequence[Any]]:
        """Task, data and transforms; the initial weights are a function of the seed."""
        torch.manual_seed(derive_key(self.recipe.seed, "initial weights")[0])
        transforms = [instantiate(transform) for transform in self.recipe.data.transforms]
        if self.given is not None:
            return self.given.task, self.given.data, transforms
        return instantiate(task_spec(self.recipe.task)), instantiate(data_spec(self.recipe.data)), transforms

    def another_trainer(
        self, settings: Settings, decided: Decisions, observers: Observers, state: State | None = None,
        ranks: Ranks = ALONE, begin: Callable[[nn.Module], None] | None = None,
    ) -> Trainer:  # fmt: skip
        """A trainer like the run's own that writes nothing: in a given state, or at the beginning.

        There, `begin` sets the weights where not the recipe says them.
        """
        task, data, transforms = self.components()
        begin = begin or (lambda task: self.load_initial_weights(task, observers.note))
        built = build(task, data, transforms, settings, decided, observers, ranks, begin=None if state else begin)
        trainer = Trainer(built, settings, decided, observers, ranks=ranks, saving=False)
        if state is not None:
            trainer.restore(state)
        return trainer

    def data(self) -> Any:
        """The data alone."""
        return self.given.data if self.given else instantiate(data_spec(self.recipe.data))

    def load_initial_weights(self, task: nn.Module, say: Callable[[str], None]) -> None:
        """Give a task the weights that the recipe lets it begin with."""
        init = self.recipe.task.init_from
        if init is not None:
            start_from(InitFrom(run=init) if isinstance(init, str) else init, task, say)


def _prepared(section: AnyOptimizer | AnySchedule) -> "partial[Any] | None":
    """What a section names by its class path; None where it goes by a name."""
    if not isinstance(section, OptimizerClass | ScheduleClass):
        return None
    return prepared({"class": section.class_, **section.arguments})


SOURCE_TYPES = str | Path | dict[str, Any] | None


def open_run(
    source: SOURCE_TYPES, overrides: Any, run: str | Path | None, given: Given | None = None, save: bool = True,
    profile: bool = False, trust: bool = False,
) -> OpenedRun:  # fmt: skip
    """Find the run that is meant, or plan a new one; where several ranks train together, the first one does it.

    It is also the first one that looks who has chosen the classes to be built; `trust` says that it may be anybody.
    """
    ranks = world.join(accelerators.find().kind)
    if ranks.alone:
        opened = _opened(source, overrides, run, given, save, profile, trust)
        opened.notes += [note] if (note := environment.find().note) else []
        opened.where = opened.directory.path if opened.directory else None
        return opened
    with world.guarded():
        asked = [*["--profile"] * profile, *([type(given.task).__qualname__] if given else [])]
        preflight.check_words(ranks, source, overrides, asked)
        found = _opened(source, overrides, run, given, save, profile, trust) if ranks.is_main else None
        told = found and (found.loaded.as_dict(), found.directory and found.directory.path, _num_threads(found))
        values, where, threads = ranks.broadcast(told, "the recipe")
        loaded = found.loaded if found else LoadedRecipe.from_dict(values)
        if loaded.recipe.train.device == "cpu":
            ranks = ranks.on_cpu()
        ranks = world.share_cores(ranks, loaded.recipe.parallel.pin == "auto", threads)
        opened = found or OpenedRun(loaded, None, given=given, profile=profile)
        opened.ranks, opened.where = ranks, where
    return opened


def _num_threads(opened: OpenedRun) -> int | None:
    """How many threads a rank computes with, where that is decided before its cores are known."""
    record = opened.directory.read() if opened.directory else {}
    decided = record.get("decided", {}).get("threads")
    return threads_asked(opened.settings) if decided is None else int(decided)


def _opened(
    source: SOURCE_TYPES, overrides: Any, run: str | Path | None, given: Given | None, save: bool, profile: bool,
    trust: bool,
) -> OpenedRun:  # fmt: skip
    opened = _found(source, overrides, run, given, save, profile, Trust.of(trust))
    opened.notes += given.notes if given else []
    opened.notes += [note] if (note := opened.loaded.sweep_note) else []
    opened.notes += opened.loaded.notes
    return opened


def _found(
    source: SOURCE_TYPES, overrides: Any, run: str | Path | None, given: Given | None, save: bool, profile: bool,
    trust: Trust,
) -> OpenedRun:  # fmt: skip
    directory = RunDirectory(Path(run)) if run is not None else None
    check = given is None
    if directory is not None and directory.exists:
        return _continued(source, overrides, directory, given, profile, trust)
    if directory is not None and directory.path.exists() and not directory.path.is_dir():
        raise UserError(f"{directory.path} is a file, and a run needs a directory; choose another one with --run DIR")
    if directory is not None and directory.path.exists() and not directory.is_free:
        raise UserError(f"{directory.path} is not empty and holds no run; choose another directory with --run DIR")
    loaded = to_train(load_recipe(source, overrides, check_components=check, trust=trust), trust)
    if not save:
        return OpenedRun(loaded, None, given=given, profile=profile)
    job = found.number if (found := batch_job()) else ""
    interrupted = _interrupted(source, overrides, loaded.name, job, given) if directory is None and job else None
    if interrupted is not None:
        return _continued(source, overrides, interrupted, given, profile, trust)
    root = given.root if given else ROOT
    return OpenedRun(loaded, directory or RunDirectory.fresh(loaded.name, job, root), given=given, profile=profile)


def _interrupted(
    source: SOURCE_TYPES, overrides: Any, name: str, job: str, given: Given | None
) -> RunDirectory | None:  # fmt: skip
    """The run that a job trained with this recipe before it was put back into the queue."""
    task = type(given.task).__qualname__ if given else None
    for directory in RunDirectory.of_job(name, job, given.root if given else ROOT):
        record = directory.read() if directory.exists else {}
        if not attempts.is_from_before(record.get("stretches", [])) or record.get("given") != task:
            continue
        wanted = load_recipe(source, overrides, world=_first_world(record))
        if not harmful(differences(load_resolved(directory.recipe).values, wanted.values)):
            return directory
    return None


def _first_world(record: dict[str, Any]) -> int | None:
    """The ranks with which a run was started first, if it was: another program's file gives each of them a batch."""
    world = record.get("decided", {}).get("first_world")
    return None if world is None else int(world)


def _continued(
    source: SOURCE_TYPES, overrides: Any, directory: RunDirectory, given: Given | None, profile: bool, trust: Trust
) -> OpenedRun:
    """Continue a run, refusing changes that would make it another one."""
    record = directory.read()
    made_in_python = record.get("given")
    if made_in_python and given is None:
        raise UserError(
            f"the task of this run, {made_in_python}, was given in Python; go on there: "
            f"isoscale.Trainer(recipe, run={str(directory.path)!r}).fit(task, data)"
        )
    foreign = list(split(overrides)[0]) if source is None else []
    if foreign:
        raise UserError(
            f"{foreign[0]} is a word of an input file of another program: name the file as well, as in "
            f"isoscale train --run {directory.path} input.json {foreign[0]}"
        )
    stored = load_resolved(directory.recipe)
    wanted = load_recipe(
        directory.recipe if source is None else source, overrides, check_components=given is None,
        world=_first_world(record), trust=trust,
    )  # fmt: skip
    to_train(wanted, trust)
    changes = [change for change in differences(stored.values, wanted.values) if change.path != ("name",)]
    refused = harmful(changes)
    if refused:
        raise UserError(
            f"{directory.path} holds a run of another recipe:\n{describe(refused)}\n"
            "start a new run (leave out --run, or name another directory), or take these changes back"
        )
    notes = [f"continues the run in {directory.path}", *([record[REBUILT]] if REBUILT in record else [])]
    before, now = record.get("callbacks", []), given.callback_names if given else []
    if before != now:
        notes.append(
            f"other callbacks than at the last start: {', '.join(before) or 'none'} → {', '.join(now) or 'none'}"
        )
    if changes:
        notes.append(f"changed since the last start:\n{describe(changes)}")
    own = str(directory.recipe)
    origins = {  # what was read from the run's own recipe keeps the origin that it has there
        path: stored.origins.get(path, where) if where.startswith(own) else where
        for path, where in wanted.origins.items()
    }
    loaded = LoadedRecipe(wanted.recipe, wanted.values, origins, record.get("name") or stored.name)
    return OpenedRun(loaded, directory, notes, given, profile=profile)
