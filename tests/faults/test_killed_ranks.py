"""A rank that is killed, wherever it is: the others end by themselves, and a restart on any ranks leaves no trace."""

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import first_of, first_step, newest_step, sha, timeless
from tests.ranks import Command, command_on

pytestmark = pytest.mark.slow

RECIPE = ["train", "--run", "run", "train.epochs=4", "data.subset=300", "observe.every=2", "observe.level=error",
          "observe.tensorboard=1", "train.threads=1"]  # fmt: skip
"""Five steps per epoch, a checkpoint after each: of the steps 5, 10, 15 and 20."""
KILLED = -signal.SIGKILL


def killed_in(moment: str, rank: int, at: int) -> None:
    """Have a rank killed once, at a moment of a step; the first rank also in a phase of its checkpoint writer."""
    if int(os.environ.get("RANK", "0")) == rank:
        owner, name, around = MOMENTS[moment]()
        plain = getattr(owner, name)
        setattr(owner, name, lambda *words, **options: around(partial(_kill, at), plain, *words, **options))


def _kill(at: int, step: int) -> None:
    marker = Path("killed")
    if step == at and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)


Around = tuple[Any, str, Callable[..., Any]]
_now = {"step": 0, "saved": 0, "batches": 0}
"""What the patched rank does at present."""


def in_a_step() -> Around:
    from isoscale.engine.step.step import Step

    def around(kill: Callable[[int], None], plain: Any, step: Any, part: Any, number: int, *words: Any) -> Any:
        kill(number + 1)
        return plain(step, part, number, *words)

    return Step, "terms", around


def _in_a_call_within_a_step(owner: Any, name: str) -> Around:
    """Before a call that does not know the number of the step."""
    from isoscale.engine.step.step import Step

    whole = Step.__call__

    def noting(step: Any, shards: Any, number: int, *words: Any) -> None:
        _now["step"] = number + 1
        whole(step, shards, number, *words)

    def around(kill: Callable[[int], None], plain: Any, *words: Any) -> Any:
        kill(_now["step"])
        return plain(*words)

    Step.__call__ = noting  # type: ignore[method-assign]
    return owner, name, around


def in_a_reduction() -> Around:
    from isoscale.parallel.collectives import Ranks

    return _in_a_call_within_a_step(Ranks, "exchange" if "parallel.reduce=tree" in sys.argv else "all_reduce")


def in_an_update() -> Around:
    from isoscale.engine.step.step import Step

    return _in_a_call_within_a_step(Step, "_update")


def in_an_evaluation() -> Around:
    """In the second batch of the evaluation after a step."""
    from isoscale.engine.evaluation import Evaluations
    from isoscale.science.images import Classifier

    whole = Evaluations.validate

    def noting(evaluations: Any, split: Any) -> Any:
        _now.update(step=evaluations.progress.step, batches=0)
        return whole(evaluations, split)

    def around(kill: Callable[[int], None], plain: Any, *words: Any) -> Any:
        _now["batches"] += 1
        if _now["batches"] == 2:
            kill(_now["step"])
        return plain(*words)

    Evaluations.validate = noting  # type: ignore[method-assign]
    return Classifier, "validation_step", around


def _in_a_phase(name: str, around: Callable[..., Any], in_class: bool = True) -> Around:
    """In a phase of writing the checkpoint of a step."""
    from isoscale.engine.state import checkpoint

    whole = checkpoint.Checkpoints.write

    def noting(checkpoints: Any, step: int, *words: Any) -> Any:
        _now["saved"] = step
        return whole(checkpoints, step, *words)

    checkpoint.Checkpoints.write = noting  # type: ignore[method-assign]
    return checkpoint.Checkpoints if in_class else checkpoint, name, around


def _before(kill: Callable[[int], None], plain: Any, *words: Any) -> Any:
    kill(_now["saved"])
    return plain(*words)


def _after(kill: Callable[[int], None], plain: Any, *words: Any) -> Any:
    found = plain(*words)
    kill(_now["saved"])
    return found


def _half_written(kill: Callable[[int], None], plain: Any, path: Path, tensors: Any) -> None:
    plain(path, tensors)
    os.truncate(path, path.stat().st_size // 2)
    kill(_now["saved"])
    plain(path, tensors)


def _at_best(kill: Callable[[int], None], plain: Any, checkpoints: Any, name: str, target: Path) -> None:
    if name == "best":
        kill(_now["saved"])
    plain(checkpoints, name, target)


def _half_dropped(kill: Callable[[int], None], plain: Any, checkpoints: Any, path: Path) -> None:
    (path / "state.json").unlink()
    path.rename(checkpoints.folder / f".dropped-{path.name}-{os.getpid()}")
    kill(_now["saved"])


def starting() -> Around:
    """Before a file of the run directory gets its name."""
    files = [0]

    def around(kill: Callable[[int], None], plain: Any, path: Path, target: Path) -> Any:
        if Path(target).name in ("recipe.yaml", "run.json"):
            files[0] += 1
            kill(files[0])
        return plain(path, target)

    return Path, "replace", around


MOMENTS: dict[str, Callable[[], Around]] = {
    "the start": starting,
    "a step": in_a_step,
    "a reduction": in_a_reduction,
    "an update": in_an_update,
    "an evaluation": in_an_evaluation,
    "writing: begun": lambda: _in_a_phase("_sweep", _before),
    "writing: half a tensor file": lambda: _in_a_phase("_write_tensors", _half_written, in_class=False),
    "writing: before the manifest": lambda: _in_a_phase("_write_manifest", _before, in_class=False),
    "writing: before all is synced": lambda: _in_a_phase("_sync_files", _before, in_class=False),
    "writing: before its name": lambda: _in_a_phase("_name", _before),
    "writing: after its name": lambda: _in_a_phase("_name", _after),
    "writing: between the pointers": lambda: _in_a_phase("_point", _at_best),
    "writing: before dropping": lambda: _in_a_phase("_drop_old", _before),
    "writing: while dropping": lambda: _in_a_phase("_drop", _half_dropped),
}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run on two ranks that nobody disturbed, by reduction."""
    return {reduce: _whole(tmp_path_factory.mktemp(reduce), reduce) for reduce in ("tree", "flat")}


def _whole(folder: Path, reduce: str) -> Path:
    ended = command_on(2, folder, *RECIPE, f"parallel.reduce={reduce}")
    assert [end.code for end in ended] == [0, 0], ended
    return folder / "run"


def killed(folder: Path, moment: str, rank: int, at: int, reduce: str, world: int = 2) -> list[Any]:
    """A run of which a rank was killed, and how the ranks ended: all by themselves, none of the others well."""
    before = partial(killed_in, moment, rank, at)
    command = Command(world, folder, [*RECIPE, f"parallel.reduce={reduce}"], before)
    ended, ends = command.ended(60), time.time()
    codes = [end.code for end in ended]
    assert codes == [KILLED if each == rank else 1 for each in range(world)], ended
    speaker = 0 if rank else 1
    assert f"rank {rank} on " in ended[speaker].err, ended
    assert "the same command goes on from it" in ended[speaker].err
    assert all(not end.err for each, end in enumerate(ended) if each not in (speaker, rank)), ended
    later = ends - (folder / "killed").stat().st_mtime
    print(f"rank {rank} killed in {moment} of step {at}, {reduce}: all had ended {later:.1f} s later")
    return ended


def assert_goes_on(folder: Path, world: int, reduce: str, whole: Path) -> None:
    """Start a copy of a folder again on so many ranks; it must end as if nothing had been."""
    again = folder.with_name(f"{folder.name}-on-{world}")
    shutil.copytree(folder, again, symlinks=True)
    newest = newest_step(again / "run")
    ended = command_on(world, again, *RECIPE, f"parallel.reduce={reduce}")
    assert [end.code for end in ended] == [0] * world, ended
    assert "damaged" not in ended[0].out
    run = again / "run"
    assert first_step(run) == newest
    assert sha(run) == sha(whole)
    assert timeless(run) == timeless(whole)
    assert scalars(run) == scalars(whole)
    for name in ("last", "best"):
        assert os.readlink(run / "checkpoints" / name) == os.readlink(whole / "checkpoints" / name)
    assert not list((run / "checkpoints").glob(".*"))


def scalars(run: Path) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """What TensorBoard shows: each value and its step, none twice; wall-clock values by step alone."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for folder in sorted({path.parent for path in (run / "tensorboard").rglob("events.out.*")}):
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            if "saving" not in tag:
                values = [(event.step, 0.0 if "time" in tag else event.value) for event in events.Scalars(tag)]
                found[folder.name, tag] = values
    assert found
    return found


QUICK = [("an update", 1, 7), ("a step", 0, 8)]
TREE = [
    ("a step", 1, 1), ("a step", 1, 7), ("a step", 0, 10), ("a reduction", 1, 12), ("a reduction", 0, 7),
    ("an update", 0, 11), ("an update", 1, 20), ("an evaluation", 0, 10), ("an evaluation", 1, 10),
    ("an evaluation", 0, 20), ("an evaluation", 1, 20),
]  # fmt: skip
FLAT = [
    (moment, at, rank)
    for moment, at in (("a reduction", 8), ("an update", 12), ("an evaluation", 20))
    for rank in (0, 1)
]
PHASES = [moment for moment in MOMENTS if moment.startswith("writing")]


@pytest.mark.parametrize(("moment", "rank", "at"), QUICK)
def test_a_killed_rank_ends_all_and_leaves_no_trace(
    moment: str, rank: int, at: int, uninterrupted: dict[str, Path], tmp_path: Path
) -> None:
    killed(tmp_path, moment, rank, at, "tree")
    assert_goes_on(tmp_path, 2, "tree", uninterrupted["tree"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "rank", "at"), first_of(TREE, ("a reduction", 1, 12), ("an update", 0, 11), ("an evaluation", 1, 20))
)
def test_a_tree_goes_on_from_a_kill_on_any_number_of_ranks(
    moment: str, rank: int, at: int, uninterrupted: dict[str, Path], tmp_path: Path
) -> None:
    killed(tmp_path, moment, rank, at, "tree")
    for world in (2, 4 if at % 2 else 1):
        assert_goes_on(tmp_path, world, "tree", uninterrupted["tree"])


@pytest.mark.slow
@pytest.mark.parametrize("phase", first_of(PHASES, *PHASES[1:3]))
def test_a_first_rank_killed_in_a_phase_of_its_writer_leaves_no_trace(
    phase: str, uninterrupted: dict[str, Path], tmp_path: Path
) -> None:
    killed(tmp_path, phase, 0, 15, "tree")
    for world in (1, 2, 4) if phase == PHASES[0] else (2,):
        assert_goes_on(tmp_path, world, "tree", uninterrupted["tree"])


@pytest.mark.slow
@pytest.mark.parametrize("file", first_of([1, 2, 4], 2))
def test_a_first_rank_killed_while_it_makes_the_run_directory_leaves_no_trace(
    file: int, uninterrupted: dict[str, Path], tmp_path: Path
) -> None:
    killed(tmp_path, "the start", 0, file, "tree")
    assert_goes_on(tmp_path, 2, "tree", uninterrupted["tree"])


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "at", "rank"), first_of(FLAT, ("a reduction", 8, 1), ("an update", 12, 0)))
def test_flat_goes_on_from_a_kill_on_as_many_ranks(
    moment: str, at: int, rank: int, uninterrupted: dict[str, Path], tmp_path: Path
) -> None:
    killed(tmp_path, moment, rank, at, "flat")
    assert_goes_on(tmp_path, 2, "flat", uninterrupted["flat"])


@pytest.mark.slow
def test_of_four_ranks_all_end_when_one_is_killed_between_two_levels_of_the_tree(
    uninterrupted: dict[str, Path], tmp_path: Path
) -> None:
    killed(tmp_path, "a reduction", 2, 9, "tree", world=4)
    assert_goes_on(tmp_path, 2, "tree", uninterrupted["tree"])
