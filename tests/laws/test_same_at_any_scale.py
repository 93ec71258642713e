"""Law 1 on one rank: where the data lives and how many steps a launch has do not change a bit."""

from pathlib import Path

import pytest

from tests.helpers import first_of, sha, timeless, train

SHORT = {"train__epochs": 3, "observe__every": 7}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reduce", "accumulate"), first_of([("flat", 1), ("tree", 3), ("flat", 3), ("tree", 1)], ("flat", 1), ("tree", 3))
)
def test_residency_does_not_change_a_bit(reduce: str, accumulate: int, tmp_path: Path) -> None:
    options = {**SHORT, "parallel__reduce": reduce, "train__accumulate": accumulate}
    on_device = train(tmp_path / "device", data__residency="device", **options)
    on_host = train(tmp_path / "host", data__residency="host", **options)
    assert sha(on_device) == sha(on_host)
    assert timeless(on_device) == timeless(on_host)


def test_the_number_of_steps_a_launch_does_not_change_a_bit(tmp_path: Path) -> None:
    runs = [train(tmp_path / str(count), train__steps_per_launch=count, **SHORT) for count in (1, 10)]
    assert sha(runs[0]) == sha(runs[1])
    assert timeless(runs[0]) == timeless(runs[1])


def test_logging_checkpoints_and_evaluation_do_not_change_the_weights(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", train__epochs=3, checkpoint__every="never", train__evaluate="never")
    busy = train(tmp_path / "busy", train__epochs=3, checkpoint__every="2 steps", observe__every=1)
    assert sha(plain) == sha(busy)


def test_accumulation_agrees_with_the_whole_batch_to_rounding(tmp_path: Path) -> None:
    options = {"train__epochs": 2, "train__precision": "64"}
    whole = train(tmp_path / "whole", **options).history("train/loss")
    cut = train(tmp_path / "cut", train__accumulate=4, **options).history("train/loss")
    shards = train(tmp_path / "tree", parallel__reduce="tree", **options).history("train/loss")
    assert [value for _, value in cut] == pytest.approx([value for _, value in whole], rel=1e-9)
    assert [value for _, value in shards] == pytest.approx([value for _, value in whole], rel=1e-9)


def test_the_seed_changes_everything_and_the_same_seed_nothing(tmp_path: Path) -> None:
    runs = [train(tmp_path / str(number), seed=seed, **SHORT) for number, seed in enumerate((0, 0, 1))]
    assert sha(runs[0]) == sha(runs[1])
    assert sha(runs[0]) != sha(runs[2])
