"""A setting that somebody else decides about is not passed over in silence."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import isoscale

RECIPE: dict[str, Any] = {"train": {"steps": 2}, "observe": {"every": 1, "tensorboard": 0, "level": "error"}}


class OwnOptimizer(isoscale.Supervised):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def log_of(path: Path, recipe: dict[str, Any], task: nn.Module, data: Any) -> str:
    isoscale.Trainer({**RECIPE, **recipe}, run=path).fit(task, data)
    return (path / "log.txt").read_text()


@pytest.mark.parametrize("section", [{"optimizer": {"lr": 0.5}}, {"schedule": {"name": "cosine"}}])
def test_a_recipe_s_optimizer_beside_a_task_s_own_is_said_to_be_unused(section: Any, tmp_path: Path) -> None:
    rows = {"input": torch.randn(256, 3), "target": torch.randn(256, 1)}
    line = "the recipe's optimizer and schedule are not used"
    assert line in log_of(tmp_path / "own", section, OwnOptimizer(nn.Linear(3, 1)), rows)
    assert line not in log_of(tmp_path / "plain", section, isoscale.Supervised(nn.Linear(3, 1)), rows)
    assert line not in log_of(tmp_path / "default", {}, OwnOptimizer(nn.Linear(3, 1)), rows)


def test_a_batch_size_beside_a_loader_is_said_to_be_unused(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.randn(64, 3), torch.randn(64, 1)), batch_size=8)
    line = "data.batch_size is not used"
    assert line in log_of(tmp_path / "both", {"data": {"batch_size": 4}}, isoscale.Supervised(nn.Linear(3, 1)), loader)
    assert line not in log_of(tmp_path / "loader", {}, isoscale.Supervised(nn.Linear(3, 1)), loader)
