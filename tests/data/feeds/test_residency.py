"""Where the data lives changes nothing about what a step sees."""

import statistics
import threading
import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset

from isoscale.data.batches import BatchPlan, tensors_of
from isoscale.data.feeds import device as device_feed
from isoscale.data.feeds.device import DeviceFeed, DeviceSlot, LaunchSlot, brought_in_blocks
from isoscale.data.feeds.feed import ALIGNMENT, Part, Window, aligned_stride
from isoscale.data.feeds.host import HostFeed, RowFeed
from isoscale.data.feeds.residency import SHARE_OF_DEVICE, SHARE_OF_HOST, choose, make_feed
from isoscale.data.formats.mapped import MemoryColumn
from isoscale.data.order import Order
from isoscale.data.sources import ColumnSource, DatasetSource, Source, Subset, TensorSource
from isoscale.data.transforms import Divide, Noise, Scale
from isoscale.errors import UserError

CPU = torch.device("cpu")
FEEDS = pytest.mark.parametrize("kind", [DeviceFeed, HostFeed, RowFeed])


class Numbers(NamedTuple):
    """A batch with names of its own."""

    input: Tensor
    nested: list[Tensor]


class Cubes(Dataset):
    """A dataset of single samples, which remembers the threads that read it."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.threads: set[str] = set()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, int]:
        self.threads.add(threading.current_thread().name)
        return {"input": index**3}


class Breaks:
    """A source that cannot read one of its samples."""

    def __init__(self, length: int, broken: int) -> None:
        self.length, self.broken = length, broken

    def __len__(self) -> int:
        return self.length

    def fetch(self, indices: Tensor) -> dict[str, Tensor]:
        if self.broken in indices.tolist():
            raise OSError(f"sample {self.broken} cannot be read")
        return {"input": indices}


class Counting(Order):
    """An order that counts how often it is evaluated."""

    num_evaluations = 0

    def indices(self, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
        self.num_evaluations += 1
        return super().indices(start, count, device)


def source_of(length: int) -> TensorSource:
    """Rows that tell their index, in two dtypes."""
    return TensorSource({"input": torch.arange(length * 3).view(length, 3).float(), "target": torch.arange(length)})


def feed_of(kind: type, plan: BatchPlan, source: Source | None = None, seed: int = 0) -> DeviceFeed | HostFeed:
    """A feed of shuffled samples."""
    return kind(source or source_of(plan.num_samples), Order(plan.num_samples, seed), plan, CPU)


def assert_same(one: list[list[Part]], other: list[list[Part]]) -> None:
    """Two deliveries agree in shape, dtype and every value."""
    assert [len(shard) for shard in one] == [len(shard) for shard in other]
    for left, right in zip(tensors_of(one), tensors_of(other), strict=True):
        assert left.dtype == right.dtype and torch.equal(left, right)


def num_readers() -> int:
    """Threads that read ahead."""
    return sum(thread.name == "isoscale-reader" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = num_readers()
    yield
    assert num_readers() == before


@st.composite
def plans(draw: st.DrawFn) -> BatchPlan:
    """Plans of every kind."""
    num_samples = draw(st.integers(1, 120))
    return BatchPlan(
        num_samples,
        draw(st.integers(1, num_samples)),
        draw(st.booleans()),
        draw(st.none() | st.integers(1, 5)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([1, 2, 8])),
    )


@pytest.mark.parametrize("kind", [HostFeed, RowFeed])
@settings(max_examples=60, suppress_health_check=[HealthCheck.differing_executors])
@given(plans(), st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(0, 9))
@pytest.mark.slow
def test_device_and_host_deliver_the_same_parts_from_any_step_on(kind, plan, starts, seed):
    device, host = feed_of(DeviceFeed, plan, seed=seed), feed_of(kind, plan, seed=seed)
    try:
        for start in starts:
            for step in range(start, start + 3):
                assert_same(host.parts(step), device.parts(step))
    finally:
        host.close()


@settings(max_examples=40)
@given(plans(), st.integers(0, 100))
def test_the_parts_of_a_step_are_the_samples_that_the_order_gives_it(plan, step):
    order = Order(plan.num_samples, 3).indices(plan.place(step), plan.size(step)).tolist()
    shards = feed_of(DeviceFeed, plan, seed=3).parts(step)
    for shard, ranges in zip(shards, plan.share(len(order)).parts, strict=True):
        for part, (start, stop) in zip(shard, ranges, strict=True):
            assert part.samples.tolist() == part.batch["target"].tolist() == order[start:stop]
            assert part.batch["input"][:, 0].tolist() == [3 * index for index in order[start:stop]]


@FEEDS
def test_an_epoch_delivers_every_sample_once(kind):
    plan = BatchPlan(53, 8, num_micro=2, num_shards=4)
    feed = feed_of(kind, plan)
    for epoch in range(2):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        parts = [part for step in steps for shard in feed.parts(step) for part in shard]
        assert sorted(index for part in parts for index in part.samples.tolist()) == list(range(53))
    feed.close()


@pytest.mark.slow
@FEEDS
@settings(max_examples=30, suppress_health_check=[HealthCheck.differing_executors])
@given(plans(), st.data())
def test_a_slot_delivers_the_parts_of_the_steps_it_is_filled_with(kind, plan, data):
    per_epoch = plan.steps_per_epoch
    equal = sum(plan.size(step) == plan.size(0) for step in range(per_epoch))
    num_steps = data.draw(st.integers(1, min(4, equal)))
    feed, plain = feed_of(kind, plan), feed_of(DeviceFeed, plan)
    slot = feed.slot(0, num_steps)
    for _ in range(2):
        step = data.draw(st.integers(0, 3)) * per_epoch + data.draw(st.integers(0, equal - num_steps))
        slot.fill(step)
        for offset in range(num_steps):
            assert_same(slot.parts(offset), plain.parts(step + offset))
    feed.close()


def test_a_slot_of_the_host_stays_at_its_address():
    plan, order = BatchPlan(40, 4, num_shards=2), Order(40, 0)
    feed = feed_of(HostFeed, plan)
    slot = feed.slot(0, 2)
    before = [tensor.data_ptr() for offset in range(2) for tensor in tensors_of(slot.parts(offset))]
    for step in (4, 6, 0, 12):
        slot.fill(step)
        assert [tensor.data_ptr() for offset in range(2) for tensor in tensors_of(slot.parts(offset))] == before
        for offset in range(2):
            indices = order.indices(plan.place(step + offset), 4).tolist()
            for (part,), expected in zip(slot.parts(offset), (indices[:2], indices[2:]), strict=True):
                assert part.samples.tolist() == part.batch["target"].tolist() == expected
                assert part.batch["input"].tolist() == [[3 * row, 3 * row + 1, 3 * row + 2] for row in expected]
    feed.close()


@FEEDS
def test_what_was_delivered_stays_as_it_was_while_later_steps_come(kind):
    plan = BatchPlan(1000, 50, num_shards=2)
    feed = feed_of(kind, plan)
    first = feed.parts(0)
    copies = [tensor.clone() for tensor in tensors_of(first)]
    for step in range(1, 60):
        feed.parts(step)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(tensors_of(first), copies, strict=True))
    feed.close()


@FEEDS
def test_every_part_has_tensors_of_its_own(kind):
    feed = feed_of(kind, BatchPlan(30, 10, num_micro=2, num_shards=2))
    parts = [part for shard in feed.parts(0) for part in shard]
    storages = {tensor.untyped_storage().data_ptr() for part in parts for tensor in tensors_of(part.batch)}
    assert len(storages) == sum(len(tensors_of(part.batch)) for part in parts)
    feed.close()


@FEEDS
@pytest.mark.parametrize(
    "tensors",
    [
        torch.arange(20),
        (torch.arange(20), torch.zeros(20, 2)),
        {"a": {"b": torch.arange(20)}},
    ],
    ids=["tensor", "tuple", "nested"],
)
def test_any_structure_of_tensors_is_delivered(kind, tensors):
    source = TensorSource(tensors)
    feed = feed_of(kind, BatchPlan(20, 6), source)
    ((part,),) = feed.parts(1)
    assert type(part.batch) is type(source.tensors)
    for found, expected in zip(tensors_of(part.batch), tensors_of(source.fetch(part.samples)), strict=True):
        assert torch.equal(found, expected)
    feed.close()


@FEEDS
def test_a_structure_with_names_of_its_own_is_delivered(kind):
    source = DatasetSource(Cubes(12), lambda samples: Numbers(torch.tensor([s["input"] for s in samples]), []))
    feed = feed_of(kind, BatchPlan(12, 5), source)
    ((part,),) = feed.parts(0)
    assert part.batch.input.tolist() == [index**3 for index in part.samples.tolist()]
    feed.close()


@FEEDS
def test_a_subset_is_delivered_by_its_own_indices(kind):
    subset = Subset(source_of(100), torch.arange(99, 49, -1))
    feed = feed_of(kind, BatchPlan(50, 7), subset)
    ((part,),) = feed.parts(3)
    assert part.batch["target"].tolist() == [99 - index for index in part.samples.tolist()]
    feed.close()


def test_a_dataset_is_read_in_the_thread_of_the_step():
    dataset = Cubes(30)
    feed = feed_of(HostFeed, BatchPlan(30, 4), DatasetSource(dataset))
    for step in (0, 1, 2, 1):
        ((part,),) = feed.parts(step)
        assert part.batch["input"].tolist() == [index**3 for index in part.samples.tolist()]
    assert dataset.threads == {threading.current_thread().name}
    feed.close()


def test_the_host_reads_ahead_but_not_without_bound():
    feed = feed_of(HostFeed, BatchPlan(1000, 1))
    feed.parts(0)
    assert num_readers() == 1
    deadline = time.monotonic() + 5
    while feed._reader._queue.qsize() < 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert feed._reader._queue.qsize() == 8
    feed.close()


@FEEDS
def test_a_closed_feed_delivers_again_and_may_be_closed_again(kind):
    feed = feed_of(kind, BatchPlan(30, 4))
    expected = feed.parts(5)
    feed.close()
    feed.close()
    assert_same(feed.parts(5), expected)
    feed.close()


def test_files_come_to_a_device_block_by_block(monkeypatch):
    rows = {"input": np.random.default_rng(0).normal(size=(1003, 7)).astype(np.float32), "target": np.arange(1003)}
    columns = {name: MemoryColumn(name, values) for name, values in rows.items()}
    monkeypatch.setattr(device_feed, "BLOCK_BYTES", 36 * 100)
    found = brought_in_blocks(ColumnSource(columns), torch.device("cpu"))
    assert {name: tensor.dtype for name, tensor in found.items()} == {"input": torch.float32, "target": torch.int64}
    assert all(np.array_equal(found[name].numpy(), values) for name, values in rows.items())


def test_jumping_leaves_no_thread_behind_and_does_not_wait():
    feed = feed_of(HostFeed, BatchPlan(3000, 1))
    waits = []
    for step in (10, 500, 3, 3, 999) * 3:
        begin = time.monotonic()
        feed.parts(step)
        waits.append(time.monotonic() - begin)
        time.sleep(0.02)  # the thread fills its queue and waits for room
        assert num_readers() == 1
    assert statistics.median(waits) < 0.1
    feed.close()
    assert num_readers() == 0


@pytest.mark.parametrize("broken", [0, 2, 20])
def test_an_error_in_the_source_reaches_the_step_that_needs_the_sample(broken):
    feed = HostFeed(Breaks(40, broken), Order(40, 0, shuffle=False), BatchPlan(40, 1), CPU)
    for step in range(broken):
        assert feed.parts(step)[0][0].samples.tolist() == [step]
    for _ in range(2):
        with pytest.raises(OSError, match=f"sample {broken} cannot be read"):
            feed.parts(broken)
    assert feed.parts(broken + 1)[0][0].samples.tolist() == [broken + 1]
    feed.close()


def test_an_error_in_a_dataset_reaches_the_step_every_time():
    dataset = Cubes(10)
    feed = feed_of(HostFeed, BatchPlan(10, 5), DatasetSource(dataset))
    dataset.__class__ = type("Broken", (Cubes,), {"__getitem__": lambda self, index: [][index]})
    for _ in range(2):
        with pytest.raises(IndexError):
            feed.parts(0)
    feed.close()


@settings(max_examples=40)
@given(st.integers(1, 50), st.integers(1, 40), st.lists(st.tuples(st.integers(0, 200), st.integers(1, 60))))
def test_a_window_reads_any_stretch_whatever_its_size(num_samples, size, reads):
    order = Order(num_samples, 0)
    window = Window(order, CPU, size)
    for place, count in reads:
        assert torch.equal(window.read(place, count), order.indices(place, count))


def test_a_window_is_evaluated_once_for_many_reads():
    order = Counting(1000, 0)
    window = Window(order, CPU, 300)
    for place in range(0, 300, 10):
        window.read(place, 10)
    assert order.num_evaluations == 1
    window.read(295, 10)
    assert order.num_evaluations == 2


class Stored:
    """A column that lives in memory and says that it does not."""

    name, row_shape, dtype = "stored", (3,), np.dtype(np.float32)

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._rows = np.arange(num_rows * 3, dtype=np.float32).reshape(num_rows, 3)

    def take(self, rows):
        return self._rows[rows]


def files_of(num_rows: int) -> ColumnSource:
    return ColumnSource({"input": Stored(num_rows)})


@pytest.mark.parametrize("residency", ["device", "host"])
def test_a_residency_that_is_asked_for_is_taken(residency):
    assert choose(source_of(10), residency, device_memory=0, host_memory=0) == residency
    assert choose(files_of(10), residency, device_memory=120, host_memory=120) == residency


@pytest.mark.parametrize(("residency", "memory"), [("device", (119, 2**40)), ("host", (2**40, 119))])
def test_files_that_memory_cannot_hold_are_not_read_into_it(residency, memory):
    with pytest.raises(UserError, match=rf"data\.residency: {residency} would read .* use data\.residency=disk"):
        choose(files_of(10), residency, *memory)


def test_auto_keeps_on_the_device_what_fits_a_share_of_its_memory():
    source = TensorSource({"input": torch.zeros(1000, dtype=torch.uint8)})
    enough = int(1000 / SHARE_OF_DEVICE)
    assert choose(source, "auto", enough, 0) == "device"
    assert choose(source, "auto", enough - 1, 0) == "host"
    half = Subset(source, torch.arange(500))
    assert choose(half, "auto", enough // 2, 0) == "device" and choose(half, "auto", enough // 2 - 1, 0) == "host"


def test_auto_reads_files_into_memory_where_they_fit_and_leaves_them_on_disk_where_they_do_not():
    source, size = files_of(100), 100 * 12
    assert choose(source, "auto", int(size / SHARE_OF_DEVICE), 0) == "device"
    assert choose(source, "auto", 0, int(size / SHARE_OF_HOST)) == "host"
    assert choose(source, "auto", 0, int(size / SHARE_OF_HOST) - 1) == "disk"
    assert choose(Subset(source, torch.arange(50)), "auto", 0, size) == "host"


def test_only_files_live_on_disk():
    assert choose(files_of(10), "disk", 2**40, 2**40) == "disk"
    with pytest.raises(UserError, match="disk is for data in files"):
        choose(source_of(10), "disk", 2**40, 2**40)


def test_auto_leaves_a_dataset_of_single_samples_on_the_host():
    dataset = DatasetSource(Cubes(3))
    with pytest.raises(UserError, match=r"data\.residency=host"):
        choose(dataset, "device", 2**40, 2**40)
    assert choose(dataset, "auto", 2**40, 2**40) == "host"
    assert choose(Subset(dataset, torch.arange(2)), "auto", 2**40, 2**40) == "host"


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.differing_executors])
@given(plans(), st.lists(st.integers(0, 300), min_size=1, max_size=3))
def test_files_are_delivered_the_same_from_device_host_and_disk(plan, starts):
    source = Subset(files_of(plan.num_samples + 7), torch.arange(plan.num_samples).flip(0))
    order = Order(plan.num_samples, 1)
    feeds = [make_feed(place, source, order, plan, CPU) for place in ("device", "host", "disk")]
    try:
        for step in (start + offset for start in starts for offset in range(2)):
            device, host, disk = (feed.parts(step) for feed in feeds)
            assert_same(device, host)
            assert_same(device, disk)
    finally:
        for feed in feeds:
            feed.close()


@pytest.mark.parametrize(("residency", "kind"), [("device", DeviceFeed), ("host", RowFeed)])
def test_the_feed_of_a_residency_is_made(residency, kind):
    plan = BatchPlan(10, 2)
    assert type(make_feed(residency, source_of(10), Order(10, 0), plan, CPU)) is kind


@settings(max_examples=40)
@given(st.integers(1, 3000), st.lists(st.sampled_from([1, 3, 4, 12, 364, 804, 3072]), min_size=1, max_size=3))
def test_the_rows_of_every_step_of_a_launch_are_aligned(size, row_bytes):
    stride = aligned_stride(size, row_bytes)
    assert stride >= size
    assert all(stride * count % ALIGNMENT == 0 for count in row_bytes)


def test_a_launch_gathers_its_rows_at_once_where_there_is_room():
    plan = BatchPlan(300, 50)
    feed = feed_of(DeviceFeed, plan)
    slot = feed.slot(0, 3)
    assert type(slot) is LaunchSlot and type(feed.slot(0, 1)) is DeviceSlot
    assert type(feed_of(DeviceFeed, BatchPlan(300, 1)).slot(0, 3)) is DeviceSlot, "more padding than rows"
    slot.fill(0)
    addresses = {tensor.data_ptr() % ALIGNMENT for k in range(3) for tensor in tensors_of(slot.parts(k)[0][0].batch)}
    assert len(addresses) <= 2, "as aligned as the buffers that they lie in"


class Reversed:
    """Touches an entry without saying how."""

    def __call__(self, batch):
        return {**batch, "input": batch["input"].flip(1)}


@pytest.mark.parametrize(
    ("names", "left"),
    [
        (["input", "target"], []),
        (["input", "noise", "target"], ["noise"]),
        (["noise", "input", "target"], ["noise", "input"]),
        (["reversed", "target"], ["reversed", "target"]),
        (["bytes", "input"], ["bytes"]),
    ],
)
def test_what_every_step_would_do_alike_is_done_once(names, left, monkeypatch):
    monkeypatch.setattr(device_feed, "BLOCK_BYTES", 36 * 100)
    generator = np.random.default_rng(0)
    rows = {"input": generator.normal(size=(1003, 7)).astype(np.float32), "target": generator.random((1003, 2)),
            "pixels": generator.integers(0, 255, (1003, 3), np.uint8)}  # fmt: skip
    source = ColumnSource({name: MemoryColumn(name, values) for name, values in rows.items()})
    known = {"input": Scale(key="input"), "target": Scale("minmax", "whole", key="target"), "reversed": Reversed(),
             "noise": Noise(0.1), "bytes": Divide(255, key="pixels")}  # fmt: skip
    whole = source.fetch(torch.arange(1003))
    for name in ("input", "target"):
        known[name].fit([whole])
    plan, order, transforms = BatchPlan(1003, 50), Order(1003, 0), [known[name] for name in names]
    plain, settled = (DeviceFeed(source, order, plan, torch.device("cpu")) for _ in range(2))
    rest = settled.settle(transforms)
    assert rest == [known[name] for name in left]
    for step in (0, 7, 20):
        (((before, _),),), (((after, _),),) = plain.parts(step), settled.parts(step)
        for transform in transforms:
            before = transform(before)
        for transform in rest:
            after = transform(after)
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_tensors_of_the_user_are_not_changed():
    tensors = {"input": torch.randn(100, 3)}
    kept = tensors["input"].clone()
    scale = Scale()
    scale.fit([tensors])
    feed = DeviceFeed(TensorSource(tensors), Order(100, 0), BatchPlan(100, 10), torch.device("cpu"))
    assert feed.settle([scale]) == [scale]
    assert torch.equal(tensors["input"], kept)
