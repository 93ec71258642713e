"""After the directory of a run was moved or deleted under a training: save the state where people find it."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from isoscale.engine.state.checkpoint import State
from isoscale.engine.state.host_snapshot import HostSnapshot, Snapshot
from isoscale.engine.trainer import Trainer
from isoscale.errors import UserError
from isoscale.observe.metric_log import MetricLog
from isoscale.runs.directory import RunDirectory
from isoscale.runs.lock import RunLock
from isoscale.runs.open import OpenedRun

Saved = tuple[int, Snapshot, bool]


def rescue(
    run: OpenedRun, trainer: Trainer | None, lock: RunLock, metric_log: MetricLog | None, begun_with: State | None
) -> str:
    """Save the last state in the directory that was moved, or in a new one; the run goes on there.

    Returns in words what was saved. `begun_with` is the state that this start went on from.
    """
    assert run.directory is not None and lock.place is not None
    saved = trainer.last_saved if trainer is not None else None
    if (
        saved is None and begun_with is not None and not (trainer is not None and trainer.started)
    ):  # training changes it
        saved = _staged(begun_with)
    moved = lock.place.moved_to()
    if metric_log is None or (saved is None and moved is None):
        return "nothing was saved since this start; start the same command again"
    if moved is not None:
        lock.follow(moved)
    found = RunDirectory(moved or _new_directory(run.directory.path, lock.place.first))
    found.guard = lock.check if moved is not None else found.guard
    _fill(found, run, metric_log, saved)
    best = trainer.best if trainer is not None else None
    has_lost_best = best is not None and best.step is not None and found.checkpoints().pointed("best") is None
    run.directory = found
    where = f"the state of step {saved[0]} is saved in {found.path}" if saved else f"the run is in {found.path}"
    return f"{where}{', without the best checkpoint, which is lost' if has_lost_best else ''}"


def _staged(state: State) -> Saved:
    return state[1]["progress"]["step"], HostSnapshot().take(*state), False


def _fill(found: RunDirectory, run: OpenedRun, metric_log: MetricLog, saved: Saved | None) -> None:
    """Whatever makes a run and is not there; the recipe last, from where on it is one."""
    assert run.directory is not None
    run.directory.continue_in(found)
    if not metric_log.is_at(found.metrics):
        metric_log.copy_to(found.metrics)
    if saved is not None:
        step, snapshot, best = saved
        snapshot.wait()
        found.checkpoints(run.recipe.checkpoint.keep).write(step, snapshot, best)
    found.create(run.loaded.to_yaml())


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
