"""The laws for samples of many sizes: neither padding, residency, ranks, a stop nor a capture is seen in the result."""

from pathlib import Path
from typing import Any

import pytest
import torch

import isoscale
from tests.data.ragged_made import graphs, task_and_data
from tests.engine.step.recorded_graphs import recorded_graphs
from tests.helpers import QUIET, sha, timeless
from tests.ranks import fit_on

__all__ = ["recorded_graphs"]

OPTIONS: dict[str, Any] = {"data.batch_size": 6, "train.epochs": 3, "train.threads": 1, "observe.every": 4, **QUIET}


def fitted(path: Path, **options: Any) -> isoscale.Run:
    torch.manual_seed(0)
    return isoscale.Trainer(run=path, **{**OPTIONS, **options}).fit(*task_and_data())


def test_where_the_samples_live_is_not_seen(tmp_path: Path) -> None:
    runs = [fitted(tmp_path / place, **{"data.residency": place}) for place in ("device", "host")]
    assert sha(runs[0]) == sha(runs[1])
    assert timeless(runs[0]) == timeless(runs[1])


def test_padding_has_no_weight() -> None:
    torch.manual_seed(0)
    task, data = task_and_data()
    some, source = torch.tensor([3, 1, 9]), data.train
    batches = [source.fetch(some), source.pack(some, (64, 256))]
    losses = [task.double().training_step(batch, 0) for batch in batches]
    slopes = [torch.autograd.grad(loss, list(task.parameters())) for loss in losses]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


@pytest.mark.slow
def test_a_tree_gives_the_same_bits_on_any_number_of_ranks(tmp_path: Path) -> None:
    options = {key.replace(".", "__"): value for key, value in OPTIONS.items()}
    options |= {"parallel__reduce": "tree", "parallel__shards": 4, "train__accumulate": 2}
    runs = [fit_on(world, tmp_path / str(world), task_and_data, **options) for world in (1, 2)]
    assert sha(runs[0]) == sha(runs[1])
    assert timeless(runs[0]) == timeless(runs[1])


def test_a_stop_in_the_middle_of_an_epoch_is_not_seen(tmp_path: Path) -> None:
    whole = fitted(tmp_path / "whole")
    for steps in (7, 20, None):
        parts = fitted(tmp_path / "parts", **({} if steps is None else {"train.steps": steps}))
    assert sha(parts) == sha(whole)


@pytest.mark.usefixtures("recorded_graphs")
def test_captured_steps_of_all_shapes_give_the_bits_of_eager_ones(tmp_path: Path) -> None:
    found = {}
    for program in ("eager", "graphed"):
        torch.manual_seed(0)
        trainer = isoscale.Trainer(run=tmp_path / program, **{**OPTIONS, "train.program": program})
        found[program] = sha(trainer.fit(*task_and_data()))
    assert found["eager"] == found["graphed"]


def test_a_subset_and_an_evaluation_count_every_sample_once(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task, data = task_and_data()
    run = isoscale.Trainer(run=tmp_path / "run", **{**OPTIONS, "data.subset": 31, "train.epochs": 1}).fit(task, data)
    with torch.no_grad():
        every = task.double()(whole := graphs(23, 1).fetch(torch.arange(23))) - whole["y"]
    assert run.metrics["val/loss"] == pytest.approx(float(every.square().mean()), rel=1e-4)
