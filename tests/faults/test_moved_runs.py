"""The directory of a run is moved, deleted or replaced while it is trained in: it is noticed, and the state saved."""

import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from isoscale import Run
from tests import warm
from tests.helpers import cli, command, first_of, newest_step, sha, timeless
from tests.ranks import Command

pytestmark = pytest.mark.slow

RECIPE = ["train", "train.epochs=3", "data.subset=300", "observe.every=2", "observe.level=error",
          "observe.tensorboard=1", "train.threads=1", "parallel.reduce=tree"]  # fmt: skip
"""Five steps per epoch, a checkpoint after each: of the steps 5, 10 and 15."""
TRAIN = [*RECIPE, "--run", "run"]


def moved() -> None:
    """By somebody who tidies up."""
    Path("run").rename("elsewhere")


def deleted() -> None:
    """By somebody who takes it for an old one."""
    while Path("run").exists():  # a lock may be made again in between
        shutil.rmtree("run", ignore_errors=True)


def replaced() -> None:
    """The name is used for something else."""
    deleted()
    _others()


def moved_and_replaced() -> None:
    """The name is used for something else."""
    moved()
    _others()


def emptied() -> None:
    """As `rm -rf run/*` does."""
    for path in Path("run").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _others() -> None:
    Path("run/checkpoints").mkdir(parents=True)
    Path("run/notes.txt").write_text("mine")


WHAT = [moved, deleted, replaced, moved_and_replaced, emptied]
MOMENTS = ["before the first save", "between saves", "while a save is written", "at the end", "as soon as it begins"]


def disturb(what: Callable[[], None], moment: str) -> None:
    """Have something happen to the directory, once."""
    if os.environ.get("RANK", "0") != "0":
        return
    owner, name, is_now = _place(moment)
    plain = getattr(owner, name)

    def around(*words: Any, **options: Any) -> Any:
        if is_now(*words) and not Path("disturbed").exists():
            Path("disturbed").touch()
            for thread in threading.enumerate():
                if thread.name == "isoscale-saver" and thread is not threading.current_thread():
                    thread.join()  # or else it would make files while they are deleted
            what()
        return plain(*words, **options)

    setattr(owner, name, around)


def _place(moment: str) -> tuple[Any, str, Callable[..., bool]]:
    from isoscale.engine.state import checkpoint
    from isoscale.engine.step.step import Step
    from isoscale.runs.session import Session

    if moment == "at the end":
        return Session, "_end", lambda session, outputs, decided, status, message: status == "done"
    if moment == "while a save is written":
        return checkpoint, "_write_manifest", lambda folder, step, *words: step == 10
    if moment == "as soon as it begins":
        return Session, "_begin", lambda *words: True
    at = {"before the first save": 3, "between saves": 8}[moment]
    return Step, "terms", lambda step, part, number, *words: number + 1 == at


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert cli(*TRAIN, cwd=folder).returncode == 0
    return folder / "run"


def train_disturbed(folder: Path, what: Callable[[], None], moment: str, world: int, words: list[str]) -> str:
    """What is said by ranks that end because of it."""
    ended = Command(world, folder, words, partial(disturb, what, moment)).ended(60)
    assert [end.code for end in ended] == [2] * world, ended
    said = "".join(end.err for end in ended)
    assert said.startswith("error: ") and said.count("error: ") == 1 and "Traceback" not in said, said
    if what in (replaced, moved_and_replaced):
        left = sorted(str(path.relative_to(folder)) for path in (folder / "run").rglob("*"))
        assert left == ["run/checkpoints", "run/notes.txt"], "nothing of ours where others are"
    return said


CASES = list(product(WHAT, MOMENTS[:4], (1, 2)))


@pytest.mark.parametrize(
    ("what", "moment", "world"),
    first_of(CASES, (moved, "between saves", 1), (replaced, "at the end", 1),
             (moved_and_replaced, "while a save is written", 2)),
)  # fmt: skip
def test_the_state_is_saved_where_it_is_said_and_goes_on_from_there(
    what: Callable[[], None], moment: str, world: int, undisturbed: Path, tmp_path: Path
) -> None:
    said = train_disturbed(tmp_path, what, moment, world, TRAIN)
    step = {"before the first save": 5, "between saves": 10, "while a save is written": 10, "at the end": 15}[moment]
    found = re.search(r"the state of step (\d+) is saved in ([^\s,]+)", said)
    assert found is not None and int(found[1]) == step, said
    where = {moved: "elsewhere", moved_and_replaced: "elsewhere", emptied: "run"}.get(what, "run-rescued")
    place = tmp_path / where
    assert (tmp_path / found[2]).resolve() == place.resolve(), said
    assert f"isoscale train --run {found[2]}" in said
    run = Run(place)
    assert run.status == "failed" and run.record["step"] >= step and "run directory" in str(run.message)
    done = cli(*RECIPE, "--run", where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert run.status == "done"
    assert sha(place) == sha(undisturbed)
    assert timeless(place) == timeless(undisturbed)


@pytest.mark.parametrize("what", first_of(WHAT, deleted, replaced))
def test_before_anything_is_trained_it_is_said_and_nothing_of_others_removed(
    what: Callable[[], None], tmp_path: Path
) -> None:
    said = train_disturbed(tmp_path, what, "as soon as it begins", 1, TRAIN)
    assert "the run directory run was " in said or "what was in the run directory run was deleted" in said
    assert not list(tmp_path.glob("*rescued*"))


def test_a_continued_run_that_is_deleted_before_it_goes_on_is_saved_as_it_was(
    undisturbed: Path, tmp_path: Path
) -> None:
    shutil.copytree(undisturbed, tmp_path / "run", symlinks=True)
    longer = [*TRAIN, "train.epochs=4"]
    said = train_disturbed(tmp_path, deleted, "as soon as it begins", 1, longer)
    assert "the state of step 15 is saved in run-rescued" in said
    assert sha(tmp_path / "run-rescued") == sha(undisturbed)


def test_a_rescue_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "run-rescued").mkdir()
    said = train_disturbed(tmp_path, deleted, "between saves", 1, TRAIN)
    assert "is saved in run-rescued-2" in said
    assert not list((tmp_path / "run-rescued").iterdir())


def test_a_sweep_that_is_moved_ends_with_its_trainings_saved_and_leaves_the_old_name_alone(tmp_path: Path) -> None:
    words = ["sweep", "optimizer.lr=0.001,0.002", "train.epochs=5000", "observe.tensorboard=0", "--run", "sweep"]
    process = warm.Popen(command(*words), cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "sweep/lr=0.001/checkpoints/last").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (tmp_path / "sweep").rename(tmp_path / "elsewhere")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"the folder of the sweep sweep was moved to {tmp_path}/elsewhere" in said
    assert f"isoscale sweep --run {tmp_path}/elsewhere" in said
    assert not (tmp_path / "sweep").exists()
    point = tmp_path / "elsewhere/lr=0.001"
    assert 0 < newest_step(point) <= Run(point).record["step"] and Run(point).status == "failed"


def deleted_and_broken() -> None:
    """An error of the user's code comes before the next save."""
    deleted()
    raise RuntimeError("division by cucumber")


def test_an_error_that_comes_first_is_told_first_and_the_state_saved_all_the_same(tmp_path: Path) -> None:
    ended = Command(1, tmp_path, TRAIN, partial(disturb, deleted_and_broken, "between saves")).ended(60)[0]
    assert ended.code == 1 and ended.err.startswith("error: RuntimeError: division by cucumber"), ended
    assert "the run directory run was deleted" in ended.err
    assert "the state of step 5 is saved in run-rescued" in ended.err
    assert newest_step(tmp_path / "run-rescued") == 5
