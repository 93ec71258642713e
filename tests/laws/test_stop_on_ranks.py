"""Law 2 on several ranks: a run that stops and goes on, on as many ranks or on others, ends as if it had not."""

import os
from pathlib import Path
from typing import Any

import pytest

import isoscale
from tests.helpers import QUIET, first_step, sha, timeless
from tests.laws.test_any_number_of_ranks import ODD, small_network, without_norm
from tests.laws.test_stop_is_invisible import continued_at
from tests.ranks import fit_on, on_ranks

pytestmark = pytest.mark.slow

EVERY_STEP = {**ODD, "checkpoint__every": "1 steps", "checkpoint__keep": 100, "observe__every": 3, "train__ema": 0.9}
STEPS = 8


def assert_continued(whole: isoscale.Run, into: Path, worlds: dict[int, int], make: Any, **options: Any) -> None:
    """Continue a copy of a run at some steps, each on so many ranks."""
    for step, world in worlds.items():
        again = fit_on(world, continued_at(step, whole.path, into / f"{step}-{world}"), make, **options)
        assert first_step(again) == step
        assert sha(again) == sha(whole), f"continued at step {step} on {world} ranks"
        assert timeless(again) == timeless(whole), f"continued at step {step} on {world} ranks"


def test_a_tree_goes_on_from_any_step_on_any_number_of_ranks(tmp_path: Path) -> None:
    options = {**EVERY_STEP, "parallel__reduce": "tree"}
    whole = fit_on(2, tmp_path / "whole", small_network, **options)
    worlds = {step: (1, 2, 4)[step % 3] for step in range(1, STEPS)}
    assert_continued(whole, tmp_path, worlds, small_network, **options)


def test_flat_goes_on_from_any_step_on_as_many_ranks(tmp_path: Path) -> None:
    options = {**EVERY_STEP, "parallel__reduce": "flat", "train__accumulate": 2}
    whole = fit_on(2, tmp_path / "whole", small_network, **options)
    assert_continued(whole, tmp_path, dict.fromkeys(range(1, STEPS, 2), 2), small_network, **options)


@pytest.mark.parametrize("reduce", ["tree", "flat"])
def test_a_run_goes_on_at_a_batch_that_does_not_reach_all_ranks(reduce: str, tmp_path: Path) -> None:
    options = {**EVERY_STEP, "parallel__reduce": reduce, "data__batch_size": 82}  # 411 = 5 * 82 + 1
    whole = fit_on(2, tmp_path / "whole", without_norm, **options)
    assert_continued(whole, tmp_path, {5: 2}, without_norm, **options)


def fit_where_others_see_nothing(path: str, keys: dict[str, Any]) -> None:
    """Ranks but the first are given a folder that is not there."""
    isoscale.Trainer(run=path if os.environ["RANK"] == "0" else f"{path}-unseen", **keys).fit(*small_network())


def test_only_the_first_rank_needs_to_see_the_run(tmp_path: Path) -> None:
    options = {**EVERY_STEP, "parallel__reduce": "tree"}
    whole = fit_on(2, tmp_path / "whole", small_network, **options)
    again = continued_at(3, whole.path, tmp_path / "again")
    keys = {key.replace("__", "."): value for key, value in options.items()}
    on_ranks(2, fit_where_others_see_nothing, str(again), {**QUIET, "train.threads": 1, **keys})
    assert first_step(again) == 3 and sha(again) == sha(whole)
    assert not Path(f"{again}-unseen").exists()
