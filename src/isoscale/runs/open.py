"""Which run a command means: a new one, or one that is continued, also where several ranks open it together."""

from pathlib import Path
from typing import Any

from isoscale.engine import device as accelerators
from isoscale.engine.settings import threads_asked
from isoscale.errors import UserError
from isoscale.parallel import world
from isoscale.parallel.environments import find as environment
from isoscale.parallel.health import preflight
from isoscale.recipe.compare import describe, differences, harmful
from isoscale.recipe.importing.reading import split
from isoscale.recipe.load import load_recipe, load_resolved, to_train
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.trust import Trust
from isoscale.runs import attempts as attempts
from isoscale.runs.directory import REBUILT, RunDirectory
from isoscale.runs.opened import Given, OpenedRun

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
    job = attempts.slurm_job()
    interrupted = _interrupted(source, overrides, loaded.name, job, given) if directory is None and job else None
    if interrupted is not None:
        return _continued(source, overrides, interrupted, given, profile, trust)
    return OpenedRun(loaded, directory or RunDirectory.fresh(loaded.name, job), given=given, profile=profile)


def _interrupted(
    source: SOURCE_TYPES, overrides: Any, name: str, job: str, given: Given | None
) -> RunDirectory | None:  # fmt: skip
    """The run that a job trained with this recipe before it was put back into the queue."""
    task = type(given.task).__qualname__ if given else None
    for directory in RunDirectory.of_job(name, job):
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
    if changes:
        notes.append(f"changed since the last start:\n{describe(changes)}")
    own = str(directory.recipe)
    origins = {  # what was read from the run's own recipe keeps the origin that it has there
        path: stored.origins.get(path, where) if where.startswith(own) else where
        for path, where in wanted.origins.items()
    }
    loaded = LoadedRecipe(wanted.recipe, wanted.values, origins, record.get("name") or stored.name)
    return OpenedRun(loaded, directory, notes, given, profile=profile)
