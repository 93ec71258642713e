"""After the directory of a run was moved or deleted under a training: save the state where people find it."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from isoscale.engine.checkpoint import State
from isoscale.engine.lock import RunLock
from isoscale.engine.run_directory import RunDirectory
from isoscale.engine.staging import Staged, Staging
from isoscale.errors import UserError
from isoscale.observe.metric_log import MetricLog

if TYPE_CHECKING:
    from isoscale.session import Session

Saved = tuple[int, Staged, bool]


def rescue(session: "Session", lock: RunLock, metric_log: MetricLog | None, begun_with: State | None) -> str:
    """Save the last state in the directory that was moved, or in a new one; the session goes on there.

    Returns in words what was saved. `begun_with` is the state that this start went on from.
    """
    assert session.directory is not None and lock.place is not None
    saved = session.engine.last_saved
    if saved is None and begun_with is not None and not session.engine.started:  # training changes it
        saved = _staged(begun_with)
    moved = lock.place.moved_to()
    if metric_log is None or (saved is None and moved is None):
        return "nothing was saved since this start; start the same command again"
    if moved is not None:
        lock.follow(moved)
    found = RunDirectory(moved or _new_directory(session.directory.path, lock.place.first))
    found.guard = lock.check if moved is not None else found.guard
    _fill(found, session, metric_log, saved)
    best = getattr(session.engine, "best", None)
    has_lost_best = best is not None and best.step is not None and found.checkpoints().pointed("best") is None
    session.directory = found
    where = f"the state of step {saved[0]} is saved in {found.path}" if saved else f"the run is in {found.path}"
    return f"{where}{', without the best checkpoint, which is lost' if has_lost_best else ''}"


def _staged(state: State) -> Saved:
    return state[1]["progress"]["step"], Staging().stage(*state), False


def _fill(found: RunDirectory, session: "Session", metric_log: MetricLog, saved: Saved | None) -> None:
    """Whatever makes a run and is not there; the recipe last, from where on it is one."""
    assert session.directory is not None
    session.directory.continue_in(found)
    if not metric_log.is_at(found.metrics):
        metric_log.copy_to(found.metrics)
    if saved is not None:
        step, staged, best = saved
        staged.wait()
        found.checkpoints(session.recipe.checkpoint.keep).write(step, staged, best)
    found.create(session.loaded.to_yaml())


def _new_directory(path: Path, place: Path) -> Path:
    """A directory beside one that is gone, or where one can be made."""
    for candidate in _candidates(path, place):
        with suppress(OSError):
            candidate.mkdir(parents=True)
            return candidate
    raise UserError(f"no directory could be made beside {place}, in the working directory or at home: nothing is saved")


def _candidates(path: Path, place: Path) -> Iterator[Path]:
    """Names that do not exist yet."""
    for folder in (path.parent, place.parent, Path(), Path.home()):
        names = (f"{place.name}-rescued{f'-{number}' if number > 1 else ''}" for number in count(1))
        yield next(folder / name for name in names if not (folder / name).exists())
