"""On a CUDA device: captured steps that are interrupted, ranks that share a device, sums that are captured."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from isoscale.engine.state.checkpoint import read_weights
from isoscale.parallel.collectives import Ranks
from isoscale.parallel.reduction import FlatReducer
from tests import warm
from tests.helpers import command, sha, timeless
from tests.laws.test_any_number_of_ranks import ODD, assert_close, small_network
from tests.ranks import fit_on, free_port, on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LONG = [
    "train.epochs=400", "checkpoint.every=100 steps", "observe.every=50", "train.program=graphed", "train.device=cuda",
    "train.evaluate=never", "observe.level=warning", "observe.tensorboard=0",
]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_captured_training_that_was_interrupted_ends_as_if_it_had_not(number: int, tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    warm.run(command("train", "images/digits", *LONG, "--run", str(whole)), check=True)
    for seconds in (0.3, 0.8):
        process = warm.Popen(command("train", "images/digits", *LONG, "--run", str(run)))
        while not (run / "checkpoints" / "last").exists():
            time.sleep(0.02)
        time.sleep(seconds)
        process.send_signal(number)
        assert process.wait(60) in (75, -number, 0)
    warm.run(command("train", "images/digits", *LONG, "--run", str(run)), check=True)
    assert sha(run) == sha(whole)
    assert timeless(run) == timeless(whole)


@pytest.mark.parametrize("reduce", ["flat", "tree"])
def test_two_ranks_that_share_a_device_agree_with_one(reduce: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        **ODD, "train__device": "cuda", "parallel__reduce": reduce, "train__precision": "32", "train__steps": 50,
        "train__epochs": 20, "optimizer__name": "sgd", "optimizer__lr": 0.05, "data__drop_last": True,
    }  # fmt: skip
    runs = [fit_on(world, tmp_path / str(world), small_network, **options) for world in (1, 2)]
    weights = [read_weights(run.checkpoint("last")) for run in runs]
    assert_close(weights[1], weights[0], reduce)
    if reduce == "tree":
        assert sha(runs[1]) == sha(runs[0])
        assert timeless(runs[1]) == timeless(runs[0])


def captured_sums() -> list[float]:
    """A reduction inside a CUDA graph over NCCL, with a group of one: what a replay adds up is what is there then."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1)
    try:
        # two ranks as far as the reducer knows, one in the group: every operation is issued, and adds nothing
        ranks = Ranks(0, 2, backend="nccl")
        reducer = FlatReducer(ranks)
        values = torch.ones(100, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                reducer.add(0, [values * 2])
                reducer.total()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                reducer.add(0, [values * 2])
                (total,) = reducer.total()
            found = []
            for value in (1.0, 2.0, 3.0):
                values.fill_(value)
                graph.replay()
                torch.cuda.synchronize()
                found.append(float(total[7]))
        return found
    finally:
        dist.destroy_process_group()


def test_a_sum_over_ranks_can_be_captured() -> None:
    assert on_ranks(1, captured_sums) == [[2.0, 4.0, 6.0]]
