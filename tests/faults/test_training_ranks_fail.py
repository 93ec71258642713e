"""A training on several ranks of which one goes wrong: all end, the user reads once why, and nothing earned is lost."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isoscale.engine.state.checkpoint import Checkpoints
from isoscale.runs.lock import NAME as LOCK
from tests.disks import Disk, mounted
from tests.faults.test_disk import checkpoint_bytes
from tests.helpers import first_of, first_step, newest_step, sha, timeless
from tests.parallel.processes import Ended
from tests.ranks import command_on

pytestmark = pytest.mark.slow

TASK = """
import os, time
from pathlib import Path
import isoscale
from isoscale.errors import UserError
from isoscale.science.images import Classifier

class Faulty(Classifier):
    def training_step(self, batch, batch_idx):
        if os.environ.get("FAULTY") == os.environ.get("RANK", "0") and Path("run/checkpoints/step_00000005").exists():
            if batch_idx == 1:
                Path("faulted").touch()
                self.fail(os.environ["FAULT"])
        return super().training_step(batch, batch_idx)

    def fail(self, fault):
        if fault == "raise":
            raise RuntimeError("the sky has fallen")
        if fault == "user error":
            raise UserError("the file sky.npy is missing; run `get sky`")
        if fault == "exit":
            os._exit(0)
        time.sleep(1000)
"""
RECIPE = ["train", "--run", "run", "task.class=faulty.Faulty", "train.epochs=4", "data.subset=300", "observe.every=2",
          "observe.tensorboard=0", "train.threads=1", "parallel.reduce=tree"]  # fmt: skip
"""Five steps per epoch; a fault shows in the seventh step, or in the twelfth where the disk was slow."""
GO_ON = "isoscale train --run run"


def folder_with_task(folder: Path) -> Path:
    (folder / "faulty.py").write_text(TASK)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = folder_with_task(tmp_path_factory.mktemp("uninterrupted"))
    (ended,) = command_on(1, folder, *RECIPE)
    assert ended.code == 0, ended
    return folder / "run"


def record(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "run.json").read_text())


def failed(folder: Path, fault: str, rank: int, *words: str, world: int = 2) -> list[Ended]:
    ended = command_on(world, folder_with_task(folder), *RECIPE, *words, FAULT=fault, FAULTY=str(rank))
    later = time.time() - (folder / "faulted").stat().st_mtime
    print(f"{fault} on rank {rank}: codes {[end.code for end in ended]}, {later:.1f} s later")
    return ended


def assert_only_told_by_the_first(ended: list[Ended]) -> None:
    assert not any(end.out or end.err for end in ended[1:]), ended


def assert_nothing_lost(folder: Path, uninterrupted: Path) -> None:
    assert record(folder)["status"] == "failed"
    assert not (folder / "run" / LOCK).exists()
    found = Checkpoints(folder / "run" / "checkpoints").newest(lambda text: pytest.fail(text))
    assert found is not None and found[1][1]["progress"]["step"] in (5, 10)
    newest = newest_step(folder / "run")
    ended = command_on(2, folder, *RECIPE)
    assert [end.code for end in ended] == [0, 0], ended
    assert first_step(folder / "run") == newest
    assert sha(folder / "run") == sha(uninterrupted) and timeless(folder / "run") == timeless(uninterrupted)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_in_the_users_code_on_one_rank_is_told_once_with_its_line(
    rank: int, uninterrupted: Path, tmp_path: Path
) -> None:
    ended = failed(tmp_path, "raise", rank)
    assert [end.code for end in ended] == [1, 1], ended
    assert_only_told_by_the_first(ended)
    line = 1 + TASK.splitlines().index('            raise RuntimeError("the sky has fallen")')
    err = ended[0].err
    assert err.startswith("error: ") and f"in fail, {tmp_path}/faulty.py:{line}: raise RuntimeError(" in err
    assert err.count("error: ") == 1 and err.count("Traceback") == rank, "its traceback can be seen nowhere else"
    assert (f"rank {rank} on " in err) == bool(rank) and GO_ON in err, err
    assert "the sky has fallen" in record(tmp_path)["message"]
    assert_nothing_lost(tmp_path, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_user_can_fix_on_one_rank_ends_all_with_its_message(
    rank: int, uninterrupted: Path, tmp_path: Path
) -> None:
    ended = failed(tmp_path, "user error", rank)
    assert [end.code for end in ended] == [2, 2], ended
    assert_only_told_by_the_first(ended)
    assert "Traceback" not in ended[0].err and ended[0].err.count("the file sky.npy is missing; run `get sky`") == 1
    assert "sky.npy" in record(tmp_path)["message"]
    assert_nothing_lost(tmp_path, uninterrupted)


@pytest.mark.slow
def test_data_that_is_missing_on_one_rank_is_named(tmp_path: Path) -> None:
    (tmp_path / "local.py").write_text(
        "import os\nfrom isoscale.errors import UserError\nfrom isoscale.science.images import Digits\n"
        "def load(**options):\n"
        "    if os.environ.get('RANK') == '1':\n        raise UserError('there is no /scratch/digits.npy here')\n"
        "    return Digits(**options)\n"
    )
    ended = command_on(2, tmp_path, *RECIPE[:3], "data.class=local.load")
    assert [end.code for end in ended] == [2, 2], ended
    assert_only_told_by_the_first(ended)
    assert "rank 1 on " in ended[0].err and "there is no /scratch/digits.npy here" in ended[0].err
    assert not (tmp_path / "run").exists(), "nothing was earned yet"


@pytest.mark.slow
@pytest.mark.parametrize("rank", first_of([0, 1], 1))
def test_a_rank_that_never_comes_back_from_a_step_is_named(rank: int, uninterrupted: Path, tmp_path: Path) -> None:
    ended = failed(tmp_path, "sleep", rank, "parallel.timeout=5")
    assert [end.code for end in ended] == [1, 1], ended
    assert_only_told_by_the_first(ended)
    assert ended[0].err.count("error: ") == 1 and f"rank {rank} on " in ended[0].err
    assert "hangs: others have waited" in ended[0].err and "in fail, " in ended[0].err
    assert "faulty.py:" in ended[0].err and "parallel.timeout" in ended[0].err
    assert "hangs" in record(tmp_path)["message"]
    assert [attempt["status"] for attempt in record(tmp_path)["stretches"]] == ["failed"]
    ended = command_on(2, tmp_path, *RECIPE)
    assert [end.code for end in ended] == [0, 0], ended
    assert sha(tmp_path / "run") == sha(uninterrupted) and timeless(tmp_path / "run") == timeless(uninterrupted)


@pytest.mark.slow
def test_a_rank_that_leaves_without_a_word_is_named(uninterrupted: Path, tmp_path: Path) -> None:
    ended = failed(tmp_path, "exit", 1)
    assert ended[0].code == 1 and "rank 1 on " in ended[0].err and "is gone" in ended[0].err, ended
    assert_nothing_lost(tmp_path, uninterrupted)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(tmp_path / "disk") as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["in the middle", "at the stop"])
def test_a_disk_that_is_full_ends_all_ranks_with_a_clear_message(
    moment: str, disk: Disk, uninterrupted: Path, tmp_path: Path
) -> None:
    folder_with_task(tmp_path)
    stop = ["train.stop_after=1"]
    (first,) = command_on(1, tmp_path, *RECIPE, *stop)
    assert first.code == 75, first
    disk.take(tmp_path / "run" / "checkpoints")
    disk.leave(checkpoint_bytes(tmp_path / "run") // 2)
    longer = ["train.stop_after=86400"] if moment == "in the middle" else []
    ended = command_on(2, tmp_path, *RECIPE, *longer)
    assert [end.code for end in ended] == [2, 2], ended
    assert_only_told_by_the_first(ended)
    assert "Traceback" not in ended[0].err and ended[0].err.count("error: ") == 1
    assert "cannot save the checkpoint of step" in ended[0].err and "No space left" in ended[0].err
    assert record(tmp_path)["status"] == "failed"
    disk.make_room()
    ended = command_on(2, tmp_path, *RECIPE, "train.stop_after=86400")
    assert [end.code for end in ended] == [0, 0], ended
    assert sha(tmp_path / "run") == sha(uninterrupted) and timeless(tmp_path / "run") == timeless(uninterrupted)


NUMBERS = """
task: {class: supervised, model: {class: net.Net}, loss: mse}
data:
  class: isoscale.data.file_sources.Files
  columns: {input: input.npy, target: target.npy}
  split: {train: 0.9, val: 0.1}
  on_nan: keep
  batch_size: 16
train: {epochs: 4, threads: 1}
parallel: {reduce: tree}
observe: {every: 5, tensorboard: 0}
"""
NET = """
import os, time
from torch import nn

class Net(nn.Sequential):
    made = 0
    def __init__(self):
        super().__init__(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        Net.made += 1
        self.seconds = float(os.environ.get("SEARCH_SECONDS", "0")) if Net.made > 1 else 0
    def forward(self, batch):
        time.sleep(self.seconds)
        self.seconds = 0
        return super().forward(batch)
"""
ROW = 160
"""Of the training samples."""


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """Data of which one sample holds a NaN."""
    inputs = np.random.default_rng(0).uniform(0.1, 1, size=(200, 4)).astype("float32")
    np.save(tmp_path / "target.npy", inputs.sum(1, keepdims=True))
    inputs[ROW, 2] = np.nan
    np.save(tmp_path / "input.npy", inputs)
    (tmp_path / "recipe.yaml").write_text(NUMBERS)
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["tree", "flat"])
def test_a_nan_on_several_ranks_is_named_once_with_step_and_sample(reduce: str, numbers: Path) -> None:
    words = ["train", "recipe.yaml", "--run", "run", f"parallel.reduce={reduce}"]
    ended = command_on(2, numbers, *words)
    print(f"a NaN on two ranks: ended after {ended[0].seconds:.1f} and {ended[1].seconds:.1f} s")
    assert [end.code for end in ended] == [2, 2], ended
    assert_only_told_by_the_first(ended)
    err = ended[0].err
    assert "Traceback" not in err and err.count("error: ") == 1
    assert err.count("a loss or gradient became NaN or infinite between step ") == 1
    assert f"input.npy, row {ROW}" in err and "the data itself holds NaN, in input" in err, err
    assert record(numbers)["status"] == "failed" and f"row {ROW}" in record(numbers)["message"]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["skip", "zero", "rollback"])
def test_what_is_done_about_a_nan_is_the_same_on_any_number_of_ranks(policy: str, numbers: Path) -> None:
    for world in (1, 2, 4):
        ended = command_on(world, numbers, "train", "recipe.yaml", "--run", f"on{world}", f"train.nan={policy}")
        assert [end.code for end in ended] == [0] * world, ended
        assert_only_told_by_the_first(ended)
        assert sha(numbers / f"on{world}") == sha(numbers / "on1"), world
        assert timeless(numbers / f"on{world}") == timeless(numbers / "on1"), world
    assert any(line["name"] == "train/not_finite" for line in timeless(numbers / "on1"))


@pytest.mark.full
def test_a_search_for_the_cause_may_take_longer_than_a_rank_may_hang(numbers: Path) -> None:
    words = ["train", "recipe.yaml", "--run", "run", "parallel.timeout=5"]
    ended = command_on(2, numbers, *words, SEARCH_SECONDS="12")
    assert [end.code for end in ended] == [2, 2], ended
    assert f"input.npy, row {ROW}" in ended[0].err and "hangs" not in ended[0].err
