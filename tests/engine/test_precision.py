"""The arithmetic of a run: dtypes of weights and inputs, mixed precision, and switches that are set back."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isoscale
from isoscale.engine.precision import Precision, resolve
from isoscale.errors import UserError
from isoscale.system import devices as accelerator

RECIPE: dict[str, Any] = {
    "data": {"batch_size": 32},
    "train": {"epochs": 3, "threads": 1, "device": "cpu"},
    "optimizer": {"name": "sgd", "lr": 1.0},
    "observe": {"level": "error", "tensorboard": 0, "every": 1},
}


class Watched(isoscale.Supervised):
    """Remembers the dtypes that its step saw."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = (batch["input"].dtype, self.model(batch["input"]).dtype, torch.get_default_dtype())
        self.noise = torch.zeros(1).dtype
        return super().training_step(batch, batch_idx)


def rows(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(128, 5, generator=generator)
    return {"input": inputs.to(dtype), "target": (inputs[:, 0] > 0).long()}


def fit(path: Path, precision: str, dtype: torch.dtype = torch.float32, **train: Any) -> tuple[isoscale.Run, Watched]:
    torch.manual_seed(0)
    task = Watched(nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 2)), "cross_entropy")
    recipe = {**RECIPE, "train": {**RECIPE["train"], "precision": precision, **train}}
    data = isoscale.Sources(train=rows(dtype), val=rows(dtype))
    return isoscale.Trainer(recipe, run=path).fit(task, data), task


def losses(run: isoscale.Run) -> list[float]:
    return [value for _, value in run.history("train/loss")]


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.float64])
def test_64_gives_float64_weights_inputs_and_constants(stored: torch.dtype, tmp_path: Path) -> None:
    run, task = fit(tmp_path / "run", "64", stored)
    assert task.seen == (torch.float64, torch.float64, torch.float64) and task.noise == torch.float64
    assert {weight.dtype for weight in run.model().parameters()} == {torch.float64}
    assert run.record["decided"]["precision"] == "64"


def test_32_casts_inputs_of_other_dtypes_to_float32(tmp_path: Path) -> None:
    _, task = fit(tmp_path / "run", "32", torch.float64)
    assert task.seen == (torch.float32, torch.float32, torch.float32)


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2, "clip": 0.1}], ids=["plain", "accumulate and clip"])
def test_mixed_precision_computes_in_half_and_learns_with_float32_weights(
    precision: str, dtype: torch.dtype, options: dict[str, Any], tmp_path: Path
) -> None:
    run, task = fit(tmp_path / "run", precision, **options)
    assert task.seen[:2] == (torch.float32, dtype)
    assert {weight.dtype for weight in run.model().parameters()} == {torch.float32}
    full, _ = fit(tmp_path / "full", "32", **options)
    assert losses(run)[-1] < losses(run)[0] - 0.3
    assert losses(run) == pytest.approx(losses(full), abs=0.002)
    assert losses(run) != losses(full)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_stop_is_invisible_in_mixed_precision_too(precision: str, tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "whole", precision)
    fit(tmp_path / "cut", precision, epochs=1)
    cut, _ = fit(tmp_path / "cut", precision, epochs=3)
    assert cut.summary()["weights_sha256"] == whole.summary()["weights_sha256"]


def test_fp16_skips_an_update_that_overflows_and_lowers_its_scale(tmp_path: Path) -> None:
    from isoscale.engine.state.checkpoint import read

    class Steep(Watched):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            pair = super().training_step(batch, batch_idx)
            return isoscale.WeightedSum(pair.sum * (1e36 if batch_idx == 0 else 1.0), pair.weight)

    task = Steep(nn.Linear(5, 2), "cross_entropy")
    recipe = {**RECIPE, "train": {**RECIPE["train"], "precision": "fp16", "epochs": 1}}
    run = isoscale.Trainer(recipe, run=tmp_path / "run").fit(task, isoscale.Sources(train=rows()))
    tensors, _ = read(run.checkpoint())
    assert float(tensors["scaler"]["scale"]) < 65536
    assert all(bool(parameter.isfinite().all()) for parameter in task.parameters())


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_scale_of_fp16_is_not_seen_in_the_updates(clip: float | None, tmp_path: Path) -> None:
    """Plain gradient descent would take steps thousands of times too large, or none."""
    weights = []
    for precision in ("fp16", "32"):
        torch.manual_seed(0)
        task = isoscale.Supervised(nn.Linear(5, 2), "cross_entropy")
        keys = {"train": {**RECIPE["train"], "precision": precision, "clip": clip, "epochs": 5}}
        optimizer = {"name": "sgd", "lr": 0.1, "momentum": 0.0}
        recipe = {**RECIPE, **keys, "optimizer": optimizer}
        before = task.model.weight.detach().clone()
        isoscale.Trainer(recipe, run=tmp_path / precision).fit(task, isoscale.Sources(train=rows(), val=rows()))
        weights.append(task.model.weight.detach() - before)
    # fp16 leaves out a few of the 20 updates, until its scale fits
    assert 0.5 < float(weights[0].norm() / weights[1].norm()) < 1.1
    assert torch.nn.functional.cosine_similarity(weights[0].flatten(), weights[1].flatten(), dim=0) > 0.99


def test_what_a_task_wants_as_stored_is_not_cast(tmp_path: Path) -> None:
    class Exact(Watched):
        as_stored = frozenset({"input"})

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen = (batch["input"].dtype, batch["other"].dtype, torch.get_default_dtype())
            return isoscale.Supervised.training_step(self, {**batch, "input": batch["input"].float()}, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            return isoscale.Supervised.validation_step(self, {**batch, "input": batch["input"].float()}, batch_idx)

    task = Exact(nn.Linear(5, 2), "cross_entropy")
    own = {**rows(torch.float64), "other": rows(torch.float64)["input"]}
    isoscale.Trainer(RECIPE, run=tmp_path / "run").fit(task, isoscale.Sources(train=own, val=own))
    assert task.seen == (torch.float64, torch.float32, torch.float32)


def test_tf32_on_a_cpu_is_refused_with_what_to_use_and_leaves_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tf32 needs a CUDA device, and this is cpu; use 32 or auto"):
        fit(tmp_path / "run", "tf32")
    assert not (tmp_path / "run").exists()


def test_auto_on_a_cpu_is_32() -> None:
    assert resolve("auto", accelerator.find("cpu")).name == "32"


def switches() -> tuple[Any, ...]:
    """Everything process-wide that training sets."""
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.get_default_dtype(),
        torch.get_num_threads(),
    )


@pytest.mark.parametrize("fails", [False, True], ids=["done", "failed"])
def test_process_wide_switches_are_set_back_after_training(fails: bool, tmp_path: Path) -> None:
    before = switches()
    torch.set_float32_matmul_precision("medium")
    torch.backends.cudnn.benchmark = True
    torch.set_num_threads(2)
    chosen = switches()
    try:
        if fails:
            with pytest.raises(UserError):
                fit(tmp_path / "run", "64", loss_weights={"nothing": 1.0})
        else:
            fit(tmp_path / "run", "64")
        assert switches() == chosen
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[3]
        torch.set_num_threads(before[5])


def test_the_switches_of_a_precision_hold_inside_and_only_there() -> None:
    before = switches()
    with pytest.raises(ZeroDivisionError), Precision("64", "cpu").applied():
        assert torch.get_default_dtype() == torch.float64
        assert torch.backends.cudnn.deterministic
        math.floor(1 / 0)
    assert switches() == before
