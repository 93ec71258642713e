"""Boxes read in tiles: every crop once in a pass, whatever is in memory, and the same training wherever tiles live."""

import threading
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import isoscale
from isoscale.data.batches import BatchPlan
from isoscale.data.feeds.residency import choose, make_feed
from isoscale.data.feeds.tiles import TileFeed
from isoscale.data.formats import hdf5
from isoscale.data.formats.opening import open_array
from isoscale.data.tiles import TiledCrops, TileOrder
from isoscale.data.volumes import Crops, Volume
from isoscale.errors import UserError
from isoscale.system import devices
from tests.data.test_volumes import Field, box
from tests.engine.step.recorded_graphs import recorded_graphs
from tests.helpers import QUIET, first_step, sha
from tests.laws.test_host_stays_out_of_the_step import nothing_waits
from tests.ranks import fit_on

__all__ = ["recorded_graphs"]

CPU = torch.device("cpu")
KEYS = {"data.batch_size": 6, "data.samples_per_epoch": 60, "train.epochs": 2, "train.threads": 1}


def tiled(wrap: bool = True, **options: Any) -> TiledCrops:
    """Two boxes with 20 tiles, of which 2 are there at once: a window has about 3 batches of 6."""
    asked = {"tile": 6, "tiles_at_once": 2, "crops_per_tile": 10, **options}
    return TiledCrops([box((9, 7, 8)), box((6, 6, 6), 1)], 3, wrap=wrap, **asked)


def tile_of(crops: TiledCrops, index: int) -> int:
    """The one tile that has the place of a crop, by looking at all."""
    where, cells = crops.locate(index).split(", cells ")
    corner = np.array([int(part.split(":")[0]) for part in cells.split(", ")])
    tiling, number = crops.tiling, [volume.name for volume in crops.volumes].index(where)
    inside = ((tiling.start <= corner) & (corner < tiling.start + tiling.extent)).all(1) & (tiling.box == number)
    (found,) = np.flatnonzero(inside)
    return int(found)


@given(
    st.lists(st.tuples(*[st.integers(4, 8)] * 3), min_size=1, max_size=2), st.integers(1, 3), st.integers(0, 3),
    st.integers(1, 3), st.integers(1, 40), st.booleans(), st.integers(0, 10**6),
)  # fmt: skip
@settings(deadline=None, max_examples=25)
def test_a_pass_visits_every_crop_once_and_a_window_holds_all_of_its_crops(
    sizes: list[Any], crop: int, more: int, at_once: int, per_tile: int, wrap: bool, seed: int
) -> None:
    volumes = [box(size, number) for number, size in enumerate(sizes)]
    tile = min(crop + more, *(min(size) for size in sizes))
    crops = TiledCrops(volumes, crop, tile, None, per_tile, wrap)
    num_tiles = crops.tiling.num_tiles
    order = TileOrder(crops.tiling, seed, min(at_once, num_tiles), per_tile)
    assert len(crops) == order.num_samples == len(Crops(volumes, crop, wrap))
    assert crops.tiling.edge <= tile
    passes = [order.indices(number * len(crops), len(crops)).tolist() for number in range(2)]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(len(crops)))
    where = seed % (2 * len(crops) - 3)
    assert order.indices(where, 3).tolist() == (passes[0] + passes[1])[where : where + 3]
    window = order.window_at(where)
    assert window.start <= where < window.stop and window == order.numbered(window.number)
    found = Counter(tile_of(crops, index) for index in order.indices(window.start, window.stop - window.start).tolist())
    assert set(found) <= set(window.tiles) and len(window.tiles) <= at_once
    assert max(found.values()) <= per_tile


def test_the_order_never_changes_between_versions() -> None:
    crops = tiled()
    assert crops.tiling.num_tiles == 20
    assert crops.order(0).indices(0, 6).tolist() == [463, 398, 209, 267, 470, 208]
    assert crops.order(0).indices(719, 4).tolist() == [405, 395, 633, 338]


def test_every_round_sees_all_parts_of_the_boxes_equally() -> None:
    crops = TiledCrops([box((20, 8, 8))], 3, 7, tiles_at_once=3, crops_per_tile=16)
    order = crops.order(3)
    counts, rounds = crops.tiling.num_places, order.num_rounds
    assert rounds == -(-max(counts) // 16) and len(set(counts.tolist())) > 1
    found = order.indices(0, len(crops)).tolist()
    start = 0
    for number in range(rounds):
        stop = start + sum(int(count) * (number + 1) // rounds - int(count) * number // rounds for count in counts)
        seen = Counter(tile_of(crops, index) for index in found[start:stop])
        assert all(abs(seen[tile] - count / rounds) < 1 for tile, count in enumerate(counts))
        start = stop


@pytest.mark.slow
@pytest.mark.parametrize("residency", ["device", "host"])
@pytest.mark.parametrize("wrap", [False, True])
def test_parts_are_those_of_crops_read_one_by_one(residency: Any, wrap: bool) -> None:
    """Also where a batch reaches over several windows, in shards and micro-batches, and after steps back and ahead."""
    crops = tiled(wrap)
    order = crops.order(5)
    for plan in (
        BatchPlan(100, 7), BatchPlan(100, 70), BatchPlan(100, 13, num_shards=4, num_micro=2, rank=1, world=2),
    ):  # fmt: skip
        feed = make_feed(residency, crops, order, plan, CPU)
        plain = make_feed("disk", crops, order, plan, CPU)
        for step in [*range(8), 3, 4, 40, 0]:
            for found, expected in zip(feed.parts(step), plain.parts(step), strict=True):
                for part, other in zip(found, expected, strict=True):
                    assert torch.equal(part.samples, other.samples)
                    assert all(torch.equal(part.batch[key], other.batch[key]) for key in ("input", "target"))
                    assert all(part.batch[key].stride() == other.batch[key].stride() for key in ("input", "target"))
        feed.close()
        plain.close()


def test_no_more_than_two_windows_are_held_and_one_is_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    crops = tiled()
    plan, order = BatchPlan(len(crops), 6), crops.order(0)
    read: list[int] = []
    fill = TiledCrops.fill

    def noted(self: TiledCrops, part: Any, key: str, tile: int, first: int) -> None:
        if key == "input" and first == 0:
            read.append(tile)
        fill(self, part, key, tile, first)

    monkeypatch.setattr(TiledCrops, "fill", noted)
    feed = TileFeed(crops, order, plan, CPU)
    buffers = {key: (buffer.data_ptr(), buffer.nbytes) for key, buffer in feed._buffers.items()}
    assert sum(size for _, size in buffers.values()) == crops.buffer_bytes == 2 * 2 * crops.tiling.edge**3 * 3 * 4
    for step in range(plan.steps_per_epoch):
        feed.parts(step)
        window = order.window_at(plan.place(step) + plan.size(step) - 1)
        assert len(read) <= sum(len(order.numbered(number).tiles) for number in range(window.number + 2))
    assert {key: (buffer.data_ptr(), buffer.nbytes) for key, buffer in feed._buffers.items()} == buffers
    threads = [thread for thread in threading.enumerate() if thread.name == "isoscale-reader"]
    assert threads
    feed.close()
    assert not any(thread.is_alive() for thread in threads)


def test_a_tile_that_stays_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    crops = tiled(tiles_at_once=20)
    plan, read = BatchPlan(len(crops), 50), []
    fill = TiledCrops.fill
    monkeypatch.setattr(TiledCrops, "fill", lambda self, *part: (read.append(part[2]), fill(self, *part)))
    feed = TileFeed(crops, crops.order(0), plan, CPU)
    for step in range(plan.steps_per_epoch):
        feed.parts(step)
    feed.close()
    assert len(read) == 2 * 20


def trained(path: Path, crops: TiledCrops, **keys: Any) -> isoscale.Run:
    data = isoscale.Sources(train=crops, val=crops.draw(7))
    return isoscale.Trainer(run=path, **{**KEYS, **QUIET, **keys}).fit(Field(), data)


def boxes_in(folder: Path, **options: Any) -> TiledCrops:
    """The same in HDF5 files."""
    volumes = []
    for number, volume in enumerate(tiled().volumes):
        path = folder / f"box{number}.h5"
        if not path.exists():
            with h5py.File(path, "w") as file:
                for key, array in volume.arrays.items():
                    file.create_dataset(key, data=array, chunks=(1, 4, 4, 4))
        volumes.append(Volume(str(path), {key: open_array(path, key) for key in volume.arrays}))
    return TiledCrops(volumes, 3, **{"tile": 6, "tiles_at_once": 2, "crops_per_tile": 10, "wrap": True, **options})


@pytest.mark.slow
def test_training_does_not_depend_on_where_tiles_are(tmp_path: Path) -> None:
    runs = [
        trained(tmp_path / residency, boxes_in(tmp_path), **{"data.residency": residency, **keys})
        for residency, keys in (("device", {}), ("host", {"train.steps_per_launch": 4}), ("disk", {}))
    ]
    assert len({(sha(run), run.metrics["val/loss"]) for run in runs}) == 1
    other = trained(tmp_path / "other", boxes_in(tmp_path, crops_per_tile=20))
    assert sha(other) != sha(runs[0])


def made() -> tuple[nn.Module, Any]:
    return Field(), isoscale.Sources(train=tiled())


@pytest.mark.full
def test_tiles_are_the_same_on_any_number_of_ranks_and_after_a_stop_inside_a_window(tmp_path: Path) -> None:
    keys = {key.replace(".", "__"): value for key, value in KEYS.items()} | {"parallel__reduce": "tree"}
    order = tiled().order(0)
    assert order.window_at(8 * 6 - 1) == order.window_at(8 * 6), "the stop is to be inside a window"
    whole = fit_on(1, tmp_path / "1", made, **keys)
    path = tmp_path / "2"
    fit_on(2, path, made, **keys, train__steps=8)
    again = fit_on(2, path, made, **keys, train__steps=20)
    assert first_step(again) == 8 and sha(again) == sha(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("recorded_graphs")
@pytest.mark.parametrize("residency", ["device", "host"])
def test_captured_launches_cross_from_window_to_window(residency: str, tmp_path: Path) -> None:
    keys = {"data.residency": residency, "observe.every": 10}
    eager = trained(tmp_path / "eager", tiled(), **keys, **{"train.program": "eager"})
    for count in (1, 5):
        more = {"train.program": "graphed", "train.steps_per_launch": count}
        assert sha(trained(tmp_path / str(count), tiled(), **keys, **more)) == sha(eager)


@pytest.mark.parametrize("residency", ["device", "host", "disk"])
def test_a_value_that_is_not_finite_is_named_when_its_tile_is_read(residency: str, tmp_path: Path) -> None:
    crops = tiled()
    crops.volumes[0].arrays["input"][1, 8, 6, 7] = np.nan
    with pytest.raises(UserError, match=r"box 0: input, field 1, is nan at the cell \(8, 6, 7\)"):
        trained(tmp_path / "run", crops, **{"data.residency": residency, "train.epochs": 40})


@pytest.mark.parametrize("residency", ["device", "host"])
def test_a_file_that_is_cut_short_while_training_is_named(residency: str, tmp_path: Path) -> None:
    path = tmp_path / "box.h5"
    with h5py.File(path, "w") as file:  # larger than what HDF5 keeps in memory
        file.create_dataset("input", data=np.zeros((2, 72, 72, 72), np.float32), chunks=(2, 8, 8, 8))
    crops = TiledCrops([Volume(str(path), {"input": open_array(path, "input")})], 3, 20, 2, 10)
    feed = make_feed(residency, crops, crops.order(0), BatchPlan(len(crops), 6), CPU)
    feed.parts(0)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(UserError, match=r"box\.h5 (\(input\) is damaged|.*bytes found)"):
        for step in range(1, 100):
            feed.parts(step)
    path.unlink()
    hdf5._kept_open.cache_clear()
    with pytest.raises(UserError, match=r"box\.h5 is not a readable HDF5 file"):
        feed.parts(0)
    feed.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tile": 2}, r"a tile of 2³ cells is too small for a crop of 3³; use data\.tile=12"),
        ({"tile": 7}, r"box 1 has 6×6×6 cells, fewer than a tile of 7³; use data\.tile=3, or leave"),
        ({"tiles_at_once": 27}, r"data\.tiles_at_once is 27, but the boxes have 20 tiles; use data\.tiles_at_once=20"),
        ({"tiles_at_once": 0}, r"data\.tiles_at_once is 0"),
        ({"crops_per_tile": 0}, r"data\.crops_per_tile is 0"),
    ],
)
def test_tiles_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        tiled(**options)


def test_too_many_tiles_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isoscale.data.tiles.MOST_TILES", 100)
    with pytest.raises(UserError, match=r"data\.tile=3 cuts the boxes into 720 tiles.* use data\.tile=6 or more"):
        tiled(tile=3)


def test_tiles_that_do_not_fit_into_memory_are_refused_with_a_size_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    crops = tiled()
    monkeypatch.setattr(devices.Accelerator, "available_memory", crops.buffer_bytes - 1)
    with pytest.raises(UserError, match=r"4 tiles of 6³ cells take .* use data\.tile=4, .*data\.dtype=bfloat16"):
        TileFeed(crops, crops.order(0), BatchPlan(100, 6), CPU)


def test_memory_is_chosen_by_the_tiles_that_are_there_at_a_time() -> None:
    crops = tiled(tiles_at_once=1, tile=4)
    order, size = crops.order(0), crops.buffer_bytes
    assert size < crops.nbytes / 4
    assert choose(crops, "auto", 4 * size, 0, order) == "device"
    assert choose(crops, "auto", 4 * size - 1, 2 * size, order) == "host"
    assert choose(crops, "auto", 4 * size - 1, 2 * size - 1, order) == "disk"
    assert choose(crops, "auto", 4 * size, 0) == "disk"


@pytest.mark.parametrize("keys", [{"data.shuffle": False}, {"data.shuffle": {"samples_per_block": 5}}])
def test_another_order_is_refused(keys: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.tile has an order of its own.*leave data\.shuffle out"):
        trained(tmp_path / "run", tiled(), **keys)


def test_the_start_says_how_many_tiles_there_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path / "run", tiled(), **{"observe.level": "info", "train.steps": 1})
    assert "20 of up to 6³ cells, 2 at once, 10 crops of each, 10 KiB with those read ahead" in capsys.readouterr().out
    trained(tmp_path / "few", tiled(), **{"data.subset": 20, "train.epochs": 1, "data.samples_per_epoch": 20})


class Event:
    """Of a stream that does everything at once."""

    def synchronize(self) -> None:
        pass


class Stream:
    """Notes who waits for what."""

    def __init__(self, name: str, noted: list[Any]) -> None:
        self.name, self.noted = name, noted

    def wait_event(self, event: Event) -> None:
        self.noted.append(("waits", self.name, event))

    def record_event(self) -> Event:
        event = Event()
        self.noted.append(("records", self.name, event))
        return event

    def synchronize(self) -> None:
        pass


class Streams(devices.Cuda):
    """A CPU that believes to have streams."""

    available_memory = 1 << 30

    def __init__(self, noted: list[Any]) -> None:
        super().__init__(CPU)
        self.running, self.beside = Stream("running", noted), Stream("beside", noted)

    def new_stream(self) -> Stream:
        return self.beside

    def running_stream(self) -> Stream:
        return self.running

    def on(self, stream: Any) -> Any:
        return nullcontext()

    def recorded(self, **options: Any) -> Event:
        is_main = threading.current_thread() is threading.main_thread()
        return (self.running if is_main else self.beside).record_event()

    def sent(self, tensor: Tensor) -> Tensor:
        return tensor


def test_streams_wait_for_each_other_before_a_half_is_written_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[Any] = []
    empty, cells, load = torch.empty, TileFeed._cells, TileFeed._load

    def reads(self: TileFeed, samples: Tensor, loaded: Any) -> Tensor:
        noted.append(("reads", loaded.first_slot // 2))
        return cells(self, samples, loaded)

    def writes(self: TileFeed, tile: int, slot: int, known: int | None) -> Any:
        noted.append(("writes", slot // 2))
        return load(self, tile, slot, known)

    monkeypatch.setattr(TileFeed, "_cells", reads)
    monkeypatch.setattr(TileFeed, "_load", writes)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
    streams = Streams(noted)
    monkeypatch.setattr(devices, "of", lambda device: streams)
    crops = tiled()
    feed = TileFeed(crops, crops.order(0), BatchPlan(len(crops), 6), CPU)
    for step in [*range(20), 2, 3]:
        feed.parts(step)
    feed.close()

    def follows(earlier: int, later: int, one: str, other: str) -> bool:
        """Whether a stream notes its place after `earlier`, and the other one waits for it before `later`."""
        between = noted[earlier:later]
        recorded = [entry[2] for entry in between if entry[:2] == ("records", one)]
        return any(("waits", other, event) in between for event in recorded)

    for what, before, one, other in (
        ("writes", "reads", "running", "beside"),
        ("reads", "writes", "beside", "running"),
    ):
        checked = 0
        for later, entry in enumerate(noted):
            places = [at for at, past in enumerate(noted[:later]) if past == (before, entry[1])]
            if entry[0] == what and places:
                assert follows(places[-1], later, one, other), (what, later)
                checked += 1
        assert checked >= 15


def test_gathering_from_tiles_never_looks_at_a_value() -> None:
    crops = tiled()
    feed = TileFeed(crops, crops.order(0), BatchPlan(len(crops), 6), CPU)
    with nothing_waits():
        for step in range(20):
            feed.parts(step)
    feed.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tiles_come_to_a_device_while_it_computes(tmp_path: Path) -> None:
    """The device is kept busy, so that a copy that does not wait for it would be seen in the crops."""
    device = torch.device("cuda", torch.cuda.current_device())
    crops = boxes_in(tmp_path)
    plan, order = BatchPlan(len(crops), 6), crops.order(0)
    feed, plain = make_feed("device", crops, order, plan, device), make_feed("disk", crops, order, plan, CPU)
    busy, found = torch.randn(4096, 4096, device=device), []
    with torch.cuda.stream(torch.cuda.Stream()):
        for step in range(plan.steps_per_epoch):
            busy = (busy @ busy).clamp(-1, 1)
            found.append(feed.parts(step)[0][0])
        torch.cuda.synchronize()
    for step, part in enumerate(found):
        ((expected,),) = plain.parts(step)
        assert torch.equal(part.samples.cpu(), expected.samples)
        assert all(torch.equal(part.batch[key].cpu(), expected.batch[key]) for key in expected.batch)
    feed.close()
    plain.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_steps_on_a_device_give_the_same_bits_from_tiles_anywhere(tmp_path: Path) -> None:
    hashes = {
        sha(trained(tmp_path / f"{residency}{program}", boxes_in(tmp_path), **{
            "data.residency": residency, "train.program": program, "train.steps_per_launch": count, "observe.every": 10,
        }))
        for residency, program, count in (
            ("device", "eager", 1), ("device", "graphed", 1), ("device", "graphed", 5), ("host", "graphed", 5),
            ("disk", "graphed", 5),
        )
    }  # fmt: skip
    assert len(hashes) == 1
