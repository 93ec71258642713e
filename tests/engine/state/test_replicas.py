"""Ranks that do not hold the same weights are found out, and named with the tensor."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import isoscale
from tests.helpers import QUIET
from tests.ranks import on_ranks, train_on

pytestmark = pytest.mark.slow

ROWS = {"input": torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), "target": torch.ones(64, 1)}
KEYS = {**QUIET, "data.batch_size": 8, "train.epochs": 4, "observe.every": 4, "parallel.verify": 10}


class Drifting(isoscale.Supervised):
    """Moves a weight of its second rank a little in step 12."""

    def training_step(self, batch, batch_idx):
        """As others do, and more."""
        if os.environ.get("RANK") == "1" and self.training and batch_idx == 4:
            with torch.no_grad():
                self.model.weight[0, 1] += 1e-7
        return super().training_step(batch, batch_idx)


def drift(path: str) -> str:
    torch.manual_seed(0)
    try:
        isoscale.Trainer(run=path, **KEYS).fit(Drifting(nn.Linear(3, 1), loss="mse"), ROWS)
    except Exception as error:
        return str(error)
    return "went on"


def start_apart(path: str) -> str:
    torch.manual_seed(int(os.environ["RANK"]))
    try:
        isoscale.Trainer(run=path, **KEYS).fit(isoscale.Supervised(nn.Linear(3, 1), loss="mse"), ROWS)
    except Exception as error:
        return str(error)
    return "went on"


def test_weights_that_drift_apart_are_named(tmp_path: Path) -> None:
    words = on_ranks(2, drift, str(tmp_path / "run"))
    assert all("model.weight" in each and "rank 1 on" in each and "step 12" in each for each in words), words


def test_weights_that_differ_at_the_start_are_named(tmp_path: Path) -> None:
    words = on_ranks(2, start_apart, str(tmp_path / "run"))
    assert all("starts with another model" in each and "rank 1" in each for each in words), words
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(("world", "nearest"), [(3, "use 2 or 4")])
def test_a_number_of_ranks_that_a_tree_cannot_take_is_refused(world: int, nearest: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=f"cannot run on {world} ranks.*{nearest}, or parallel.reduce=flat"):
        train_on(world, tmp_path / "run", train__epochs=1, parallel__reduce="tree")
    assert not (tmp_path / "run").exists()
