"""Law 1 and 2 for data: from any position on, wherever the bytes live and whoever reads them, the same batches come."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

from isoscale.data.batches import BatchPlan, tensors_of
from isoscale.data.feeds.feed import Feed, Part
from isoscale.data.feeds.host import HostFeed
from isoscale.data.feeds.residency import make_feed
from isoscale.data.feeds.workers import WorkerPool
from isoscale.data.formats.npy import open_npy
from isoscale.data.order import Order
from isoscale.data.samples import InProcess
from isoscale.data.shards import rank_parts
from isoscale.data.sources import ColumnSource, DatasetSource
from isoscale.data.window_order import WindowOrder

CPU = torch.device("cpu")
NUM_ROWS = 97
PLANS = st.builds(
    BatchPlan,
    st.just(NUM_ROWS),
    st.integers(1, NUM_ROWS),
    st.booleans(),
    st.none(),
    st.integers(1, 3),
    st.sampled_from([1, 8]),
)
ORDERS = [Order(NUM_ROWS, 5), Order(NUM_ROWS, 5, shuffle=False), WindowOrder(NUM_ROWS, 5, 10, 3)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ColumnSource:
    folder: Path = tmp_path_factory.mktemp("rows")
    generator = np.random.default_rng(0)
    for name, width in (("input", 91), ("target", 11)):
        np.save(folder / f"{name}.npy", generator.random((NUM_ROWS, width), dtype=np.float32))
    return ColumnSource({name: open_npy(folder / f"{name}.npy") for name in ("input", "target")})


class Noisy(Dataset):
    """Samples that draw from all generators."""

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"index": index, "noise": torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])}


def stream(feed: Feed, start: int, count: int = 4) -> list[list[list[Part]]]:
    return [feed.parts(step) for step in range(start, start + count)]


def flat(steps: list[list[list[Part]]]) -> list[Tensor]:
    return tensors_of(steps)


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=PLANS, start=st.integers(0, 400), order=st.sampled_from(ORDERS))
def test_every_residency_goes_on_alike_from_any_step(
    files: ColumnSource, plan: BatchPlan, start: int, order: Any
) -> None:
    streams = []
    for residency in ("device", "host", "disk"):
        feed = make_feed(residency, files, order, plan, CPU)  # type: ignore[arg-type]
        try:
            streams.append(flat(stream(feed, start)))
            assert_same(flat(stream(feed, start)), streams[-1])
        finally:
            feed.close()
    assert_same(streams[0], streams[1])
    assert_same(streams[0], streams[2])


@pytest.mark.parametrize("start", [0, 3, 11, 40])
def test_every_number_of_workers_goes_on_alike_from_any_step(start: int) -> None:
    plan, order = BatchPlan(NUM_ROWS, 10), Order(NUM_ROWS, 5)
    source = DatasetSource(Noisy())
    streams = []
    for workers in (0, 1, 3):
        feed = HostFeed(source, order, plan, CPU)
        feed.read_with(WorkerPool(source, 7, workers, "fork") if workers else InProcess(source, 7))
        try:
            streams.append(flat(stream(feed, start)))
        finally:
            feed.close()
    assert_same(streams[0], streams[1])
    assert_same(streams[0], streams[2])


def flat_parts(plan: BatchPlan, size: int, rank: int = 0, world: int = 1) -> list[tuple[int, int]]:
    parts = rank_parts(size, plan.num_micro, plan.num_shards, rank, world)
    return [rows for shard in parts for rows in shard]


@settings(max_examples=60)
@given(plan=PLANS, step=st.integers(0, 200), world=st.sampled_from([1, 2, 4]))
def test_the_shards_of_all_ranks_are_the_batch_of_one(plan: BatchPlan, step: int, world: int) -> None:
    batch = Order(NUM_ROWS, 5).indices(plan.place(step), plan.size(step))
    of_ranks = [
        [batch[start:stop] for start, stop in flat_parts(plan, len(batch), rank, world)] for rank in range(world)
    ]
    together = torch.cat([rows for rank in of_ranks for rows in rank]) if len(batch) else batch
    assert sorted(together.tolist()) == sorted(batch.tolist())
    if plan.num_shards > 1:
        of_one = [batch[start:stop] for start, stop in flat_parts(plan, len(batch))]
        assert_same([rows for rank in of_ranks for rows in rank], of_one)
