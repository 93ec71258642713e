"""Law 2 at random moments: ranks killed again and again, each time continued on another number of ranks."""

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import sha, timeless
from tests.laws.test_any_number_of_ranks import ODD, small_network
from tests.ranks import Command, command_on, fit_on, train_on

pytestmark = [pytest.mark.nightly, pytest.mark.slow]

NUM_KILLS = 30
WORLDS = (1, 2, 4, 8)
RECIPE = ["train", "--run", "run", "train.epochs=12", "checkpoint.every=13 steps", "observe.every=7",
          "observe.level=error", "observe.tensorboard=0", "parallel.reduce=tree", "train.threads=1"]  # fmt: skip


def seed() -> int:
    """One of today, or the one that ISOSCALE_TEST_SEED names, to see a failure again."""
    return int(os.environ.get("ISOSCALE_TEST_SEED") or time.time())


def test_random_kills_of_random_ranks_leave_no_trace(tmp_path: Path) -> None:
    chosen = seed()
    print(f"ISOSCALE_TEST_SEED={chosen}")
    rng = random.Random(chosen)
    whole = tmp_path / "whole"
    whole.mkdir()
    assert [end.code for end in command_on(1, whole, *RECIPE)] == [0]
    folder = tmp_path / "killed"
    folder.mkdir()
    num_kills = num_ends = 0
    while num_kills < NUM_KILLS:
        if was_killed(folder, rng, f"kill {num_kills + 1}"):
            num_kills += 1
        else:
            num_ends += 1
            assert_equal(folder / "run", whole / "run")
            shutil.rmtree(folder / "run")
    ended = command_on(rng.choice(WORLDS), folder, *RECIPE)
    assert all(end.code == 0 for end in ended), ended
    assert_equal(folder / "run", whole / "run")
    print(f"{num_kills} kills over {num_ends + 1} runs")


def was_killed(folder: Path, rng: random.Random, name: str) -> bool:
    """Go on, on some ranks, and kill one of them after a while; False when they were done before."""
    world = rng.choice(WORLDS)
    rank, delay = rng.randrange(world), rng.uniform(0.1, 0.6 + 0.4 * world)
    command = Command(world, folder, RECIPE)
    until = time.monotonic() + delay
    while command.running and time.monotonic() < until:
        time.sleep(0.005)
    command.tell(signal.SIGKILL, rank)
    began = time.monotonic()
    codes = [end.code for end in command.ended(120)]
    saved = os.path.basename(os.path.realpath(folder / "run/checkpoints/last"))
    later = time.monotonic() - began
    print(f"{name}: rank {rank} of {world} after {delay:.2f} s, codes {codes} {later:.2f} s later, {saved}")
    if not any(codes):
        return False
    assert codes[rank] == -signal.SIGKILL, "nobody else was the reason"
    assert all(code in (0, 1) for other, code in enumerate(codes) if other != rank), codes
    return True


def assert_equal(run: Path, whole: Path) -> None:
    assert sha(run) == sha(whole)
    assert timeless(run) == timeless(whole)
    assert not list((run / "checkpoints").glob(".*"))


def test_eight_ranks_are_one(tmp_path: Path) -> None:
    options = {**ODD, "train__ema": 0.9, "train__accumulate": 2, "parallel__reduce": "tree"}
    alone, together = (fit_on(world, tmp_path / f"small{world}", small_network, **options) for world in (1, 8))
    assert sha(together) == sha(alone) and timeless(together) == timeless(alone)
    alone, together = (
        train_on(world, tmp_path / f"digits{world}", train__epochs=5, parallel__reduce="tree") for world in (1, 8)
    )
    assert sha(together) == sha(alone) and timeless(together) == timeless(alone)
