"""Which run a command means: a new one, or one that is continued, also where several ranks open it together."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from isoscale.engine import accelerator as accelerators
from isoscale.engine.run_directory import RunDirectory
from isoscale.errors import UserError
from isoscale.parallel import environment, world
from isoscale.recipe.compare import describe, differences, harmful
from isoscale.recipe.load import LoadedRecipe, load_recipe, load_resolved
from isoscale.session import Given, Session

SOURCE_TYPES = str | Path | dict[str, Any] | None


def open_session(
    source: SOURCE_TYPES, overrides: Any, run: str | Path | None, given: Given | None = None, save: bool = True,
    profile: bool = False,
) -> Session:  # fmt: skip
    """Find the run that is meant, or plan a new one; where several ranks train together, the first one does it."""
    ranks = world.join(accelerators.find().kind)
    if ranks.alone:
        session = _opened(source, overrides, run, given, save, profile)
        session.notes += [note] if (note := environment.find().note) else []
        session.where = session.directory.path if session.directory else None
        return session
    with world.guarded():
        found = _opened(source, overrides, run, given, save, profile) if ranks.is_first else None
        loaded, where = ranks.tell(found and (found.loaded, found.directory and found.directory.path), "the recipe")
        if loaded.recipe.train.device == "cpu":
            ranks = replace(ranks, backend="gloo")
        session = found or Session(loaded, None, given=given, profile=profile)
        session.ranks, session.where = ranks, where
    return session


def _opened(
    source: SOURCE_TYPES, overrides: Any, run: str | Path | None, given: Given | None, save: bool, profile: bool
) -> Session:
    directory = RunDirectory(Path(run)) if run is not None else None
    check = given is None
    if directory is not None and directory.exists:
        return _continued(source, overrides, directory, given, profile)
    if directory is not None and directory.path.exists() and not directory.path.is_dir():
        raise UserError(f"{directory.path} is a file, and a run needs a directory; choose another one with --run DIR")
    if directory is not None and directory.path.exists() and not directory.is_free:
        raise UserError(f"{directory.path} is not empty and holds no run; choose another directory with --run DIR")
    loaded = load_recipe(source, overrides, check_components=check)
    if not save:
        return Session(loaded, None, given=given, profile=profile)
    return Session(loaded, directory or RunDirectory.fresh(loaded.name), given=given, profile=profile)


def _continued(
    source: SOURCE_TYPES, overrides: Any, directory: RunDirectory, given: Given | None, profile: bool
) -> Session:
    """Continue a run, refusing changes that would make it another one."""
    made_in_python = directory.read().get("given")
    if made_in_python and given is None:
        raise UserError(
            f"the task of this run, {made_in_python}, was given in Python; go on there: "
            f"isoscale.Trainer(recipe, run={str(directory.path)!r}).fit(task, data)"
        )
    stored = load_resolved(directory.recipe)
    wanted = load_recipe(directory.recipe if source is None else source, overrides, check_components=given is None)
    changes = [change for change in differences(stored.values, wanted.values) if change.path != ("name",)]
    refused = harmful(changes)
    if refused:
        raise UserError(
            f"{directory.path} holds a run of another recipe:\n{describe(refused)}\n"
            "start a new run (leave out --run, or name another directory), or take these changes back"
        )
    notes = [f"continues the run in {directory.path}"]
    if changes:
        notes.append(f"changed since the last start:\n{describe(changes)}")
    own = str(directory.recipe)
    origins = {  # what was read from the run's own recipe keeps the origin that it has there
        path: stored.origins.get(path, where) if where.startswith(own) else where
        for path, where in wanted.origins.items()
    }
    loaded = LoadedRecipe(wanted.recipe, wanted.values, origins, directory.read().get("name") or stored.name)
    return Session(loaded, directory, notes, given, profile=profile)
