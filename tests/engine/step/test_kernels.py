"""Which kernels a run takes, decided at its first step, on a CPU that passes for a device with a choice."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoscale
from isoscale.engine.step import kernels
from isoscale.errors import UserError
from isoscale.system import devices
from tests.helpers import QUIET

KEYS = {"data.batch_size": 8, "train.threads": 1, "train.precision": "tf32", "train.device": "cpu", **QUIET}


@pytest.fixture(autouse=True)
def choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels to choose from, and one convolution that is slow."""
    monkeypatch.setattr(devices.Accelerator, "has_kernel_choice", True)
    monkeypatch.setattr(devices.Accelerator, "has_tf32", True)
    monkeypatch.setattr(kernels, "slow_convolutions", lambda task, look: (look(), ["net.0"])[1])


class Flattened(isoscale.Task):
    def __init__(self, by_view: bool = False, dims: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 4, 3) if dims == 2 else nn.Conv3d(1, 4, 2, stride=2)
        self.net = nn.Sequential(conv, nn.Tanh())
        self._by_view = by_view
        self.started: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.started.append(batch_idx)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        found = self.net(batch["input"])
        rows = found.view(len(found), -1) if self._by_view else found.flatten(1)
        return (rows.mean(1) - batch["target"]).square().mean()


def data(*shape: int) -> isoscale.Sources:
    rows = torch.randn(32, *shape, generator=torch.Generator().manual_seed(0))
    return isoscale.Sources(train={"input": rows, "target": rows.flatten(1)[:, 0]})


def fit(path: Path, task: nn.Module, given: Any, epochs: int = 2, **keys: Any) -> isoscale.Run:
    return isoscale.Trainer(run=path, **{**KEYS, "train.epochs": epochs, **keys}).fit(task, given)


@pytest.mark.parametrize("by_view", [False, True])
def test_convolutions_are_stored_channels_last_unless_the_task_takes_views(by_view: bool, tmp_path: Path) -> None:
    made = Flattened(by_view)
    run = fit(tmp_path, made, data(3, 8, 8))
    assert run.record["decided"]["memory_format"] == ("contiguous" if by_view else "channels_last")
    assert made.net[0].weight.is_contiguous() is by_view
    assert run.summary()["step"] == 8


def test_a_slow_convolution_is_a_matrix_product_for_the_time_of_training(tmp_path: Path) -> None:
    made = Flattened(dims=3)
    before = fit(tmp_path / "run", made, data(1, 4, 4, 4), epochs=1)
    assert before.record["decided"]["products"] == ["net.0"]
    assert "forward" not in vars(made.net[0])
    assert made.started == [0, 1, 2, 3], "a look at the network is no batch"
    again = fit(tmp_path / "run", Flattened(dims=3), data(1, 4, 4, 4))
    whole = fit(tmp_path / "whole", Flattened(dims=3), data(1, 4, 4, 4))
    assert again.summary()["weights_sha256"] == whole.summary()["weights_sha256"]
    with pytest.raises(UserError, match=r"net\.0: no convolution of this model"):
        other = Flattened(dims=3)
        other.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 4))
        fit(tmp_path / "run", other, data(1, 4, 4, 4), epochs=3)


class Varying(isoscale.Task):
    """Has an operation without a deterministic kernel, from a step on."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.first = first

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = (self.scale * batch["input"]).mean(1).square().mean()
        if int(self.steps) >= self.first:
            text = "odd_sum_cuda does not have a deterministic implementation, but you set it"
            if not torch.is_deterministic_algorithms_warn_only_enabled():
                raise RuntimeError(text)
            warnings.warn(text, stacklevel=1)
        self.steps += 1
        return loss


def test_an_operation_without_a_deterministic_kernel_is_named_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fit(tmp_path / "auto", Varying(), data(5), **{"observe.level": "info"})
    assert run.record["decided"]["kernels"] == "lenient"
    assert "odd_sum_cuda has no deterministic kernel: the bits of this run may differ" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"odd_sum_cuda has no deterministic kernel .* use train\.deterministic=auto"):
        fit(tmp_path / "true", Varying(), data(5), **{"train.deterministic": True})
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_that_is_met_late_ends_no_run(tmp_path: Path) -> None:
    keys = {"checkpoint.every": "2 steps"}
    with pytest.raises(UserError, match="The same command continues the run"):
        fit(tmp_path, Varying(first=5), data(5), **keys)
    run = fit(tmp_path, Varying(first=5), data(5), **keys)
    assert run.summary()["step"] == 8 and run.record["decided"]["kernels"] == "lenient"
