"""Data that lives in host memory: a thread fetches it, reading ahead, and copies it to the device before the step."""

import contextlib
import queue
import threading
from collections.abc import Iterator
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from isoscale.data.batches import Batch, Plan, copy_batch, map_tensors, tensors_of, to_device
from isoscale.data.feeds.feed import Feed, Indices, Part, Window, aligned_stride, as_part, cut_rows, owned
from isoscale.data.samples import InProcess, Request, is_dataset
from isoscale.data.sources import Source, is_vectorised, nbytes, own_copy
from isoscale.system import devices

WINDOW = 1 << 15
WINDOW_ON_DEVICE = 1 << 20
CHUNK_BYTES = 16 << 20
MOST_SPARE = 2
"""Times as many rows as a batch has may be gathered for it to be aligned; beyond, its rows are copied once more."""


class Reader:
    """Runs an iterator in a thread, a few items ahead; an error in it is raised where the item is asked for."""

    def __init__(self, items: Iterator[Any], num_ahead: int) -> None:
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(num_ahead)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(items,), name="isoscale-reader", daemon=True)
        self._thread.start()

    def _run(self, items: Iterator[Any]) -> None:
        try:
            for item in items:
                if not self._put((item, None)):
                    return
        except BaseException as error:
            self._put((None, error))

    def _put(self, entry: tuple[Any, BaseException | None]) -> bool:
        while not self._closed.is_set():
            try:
                self._queue.put(entry, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def get(self) -> Any:
        """The next item; waits for it."""
        item, error = self._queue.get()
        if error is not None:
            raise error
        return item

    def __iter__(self) -> Iterator[Any]:
        """The items that are left; like the iterator, it may have no end."""
        while True:
            yield self.get()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        with contextlib.suppress(queue.Empty):
            while True:  # make room, so that a thread that waits for it sees at once that it is closed
                self._queue.get_nowait()
        self._thread.join()


class Inline:
    """Takes the items of an iterator in the thread that asks."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def get(self) -> Any:
        """The next item."""
        return next(self._items)

    def close(self) -> None:
        """Forget the iterator."""
        self._items = iter(())


class Fetcher(Protocol):
    """Reads the parts that a feed asks for."""

    num_ahead: int
    """Steps that a thread keeps ready; 0 where they are read in the thread of the step."""

    def begin(self) -> None:
        """Get ready for a reading, in the thread of the step."""

    def read(self, requests: Iterator[Request]) -> Iterator[Part]:
        """The parts asked for, in that order."""

    def interrupt(self) -> None:
        """End a reading that is under way in another thread."""

    def close(self) -> None:
        """Release what is open."""


class WholeParts:
    """Fetches whole parts from a vectorised source."""

    def __init__(self, source: Source, num_ahead: int) -> None:
        """Parts of `source`, some steps ahead unless it may draw random numbers."""
        self._source = source
        self.num_ahead = num_ahead if is_vectorised(source) else 0

    def begin(self) -> None:
        """Nothing has to be made ready."""

    def read(self, requests: Iterator[Request]) -> Iterator[Part]:
        """The parts asked for, each fetched when it is needed."""
        return (
            Part(own_copy(self._source, self._source.fetch(request.samples)), request.samples) for request in requests
        )

    def interrupt(self) -> None:
        """A part is soon fetched: there is nothing to interrupt."""

    def close(self) -> None:
        """Nothing is open."""


class HostFeed:
    """Parts fetched from host memory by a thread and copied to the device ahead of the step."""

    def __init__(self, source: Source, order: Indices, plan: Plan, device: torch.device, num_ahead: int = 8) -> None:
        """Fetch up to `num_ahead` steps ahead; a dataset is read in the step's thread until `read_with` changes it."""
        self._plan = plan
        self._device = device
        self._window = Window(order, torch.device("cpu"), getattr(order, "window", WINDOW))
        self._num_samples = order.num_samples
        self._fetcher: Fetcher = InProcess(source) if is_dataset(source) else WholeParts(source, num_ahead)
        self._reader: Reader | Inline | None = None
        self._next = -1
        self._stream = devices.of(device).new_stream()

    def read_with(self, fetcher: Fetcher) -> None:
        """Leave the reading to another fetcher from now on."""
        self.close()
        self._fetcher = fetcher

    def parts(self, step: int) -> list[list[Part]]:
        """The parts of a step; reading starts afresh when it is not the one after the last."""
        try:
            if self._reader is None or step != self._next:
                self._stop_reading()
                self._fetcher.begin()
                items = self._read_from(step)
                self._reader = Reader(items, self._fetcher.num_ahead) if self._fetcher.num_ahead else Inline(items)
            self._next = step + 1
            shards, event = self._reader.get()
            wait_for(event, shards, self._device)
            return shards
        except BaseException:
            self.close()  # nothing more comes after an error: the next call reads afresh
            raise

    def _read_from(self, step: int) -> Iterator[tuple[list[list[Part]], Any]]:
        parts = self._fetcher.read(self._requests(step))
        for number in count(step):
            share = self._plan.share(self._plan.size(number))
            yield self._send([[next(parts) for _ in shard] for shard in share.parts])

    def _requests(self, step: int) -> Iterator[Request]:
        """What the parts of a step, and of all that follow it, are made of."""
        for number in count(step):
            place = self._plan.place(number)
            size = self._plan.size(number)
            share = self._plan.share(size)
            samples = owned(self._window.read(place, size), share)
            first, last = place // self._num_samples, (place + size - 1) // self._num_samples
            epochs = torch.full((size,), first)
            if first != last:
                epochs = torch.arange(place, place + size) // self._num_samples
            epochs = owned(epochs, share)
            for shard in share.parts:
                yield from (Request(samples[start:stop].clone(), epochs[start:stop], number) for start, stop in shard)

    def _send(self, shards: list[list[Part]]) -> tuple[list[list[Part]], Any]:
        """Copy to the device on a stream of its own, so that it overlaps with the running step."""
        if self._stream is None:
            return [[to_device_part(part, self._device) for part in shard] for shard in shards], None
        with devices.of(self._device).on(self._stream):
            pinned = [[map_part(part, lambda tensor: tensor.pin_memory()) for part in shard] for shard in shards]
            sent = [[to_device_part(part, self._device) for part in shard] for shard in pinned]
            return sent, self._stream.record_event()

    def slot(self, step: int, num_steps: int) -> "HostSlot":
        """A slot that holds whole batches."""
        return HostSlot(self, self.parts(step), num_steps)

    def close(self) -> None:
        """Stop the thread, and the worker processes where there are some."""
        self._stop_reading()
        self._fetcher.close()

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._fetcher.interrupt()
            self._reader.close()
        self._reader = None


class HostSlot:
    """Batches at a fixed address, copied from the feed before each launch."""

    def __init__(self, feed: Feed, example: list[list[Part]], num_steps: int) -> None:
        """Room for `num_steps` steps shaped like `example`."""
        self._feed = feed
        self._steps = [map_tensors(example, torch.empty_like) for _ in range(num_steps)]

    def fill(self, step: int) -> None:
        """Copy the parts of the launch's steps."""
        for offset, target in enumerate(self._steps):
            copy_batch(target, self._feed.parts(step + offset))

    def parts(self, offset: int) -> list[list[Part]]:
        """The parts of a step."""
        return self._steps[offset]


def map_part(part: Part, function: Any) -> Part:
    """Apply a function to every tensor of a part."""
    return Part(map_tensors(part.batch, function), function(part.samples))


def to_device_part(part: Part, device: torch.device) -> Part:
    """A part on a device, without waiting."""
    return Part(to_device(part.batch, device), part.samples.to(device, non_blocking=True))


class RowFeed:
    """Rows of tensors in host memory, gathered and copied to the device in chunks of many steps, ahead of them."""

    def __init__(self, source: Source, order: Indices, plan: Plan, device: torch.device, num_ahead: int = 2) -> None:
        """Keep `num_ahead` chunks of about `CHUNK_BYTES` ready."""
        self._source = source
        self._plan = plan
        self._device = device
        self._num_ahead = num_ahead
        self._readers: list[Reader] = []
        self._next = 0
        self._chunk = Chunk(0, 0, None, torch.empty(0), None)
        self._stream = devices.of(device).new_stream()
        on_cpu = self._stream is None
        # What a sample's place is costs a core as much as a short row: a GPU does that in passing.
        self._window = Window(order, torch.device("cpu") if on_cpu else device, WINDOW if on_cpu else WINDOW_ON_DEVICE)
        share = plan.share(plan.batch_size)
        per_step = max(1, nbytes(source) // len(source) * share.count)
        self._chunk_steps = min(64, max(1, CHUNK_BYTES // per_step))
        whole = plan.num_micro * plan.num_shards == 1 and device.type == "cpu"
        self._row_bytes = _row_bytes(source) if whole else []
        if aligned_stride(share.count, self._row_bytes or [1]) > MOST_SPARE * share.count:
            self._row_bytes = []

    def parts(self, step: int) -> list[list[Part]]:
        """The parts of a step, each in tensors of its own, or at an address as aligned as theirs."""
        share = self._plan.share(self._plan.size(step))
        if not share.count:
            return [[] for _ in share.parts]
        if self._row_bytes and step < self._next:
            self.close()  # a step may have changed its rows, which are a view of the chunk
        self._next = step + 1
        ((batch, samples),) = self.rows(step, 1)
        return (as_part if self._row_bytes else cut_rows)(share, batch, samples)

    def _stride(self, size: int) -> int:
        """Rows from one step to the next in a chunk: with a few to spare, batches need not be copied to be aligned."""
        return aligned_stride(size, self._row_bytes) if self._row_bytes else size

    def rows(self, step: int, num_steps: int) -> Iterator[tuple[Batch, Tensor]]:
        """The rows of equal steps and their sample indices, as views into the chunks that hold them."""
        size, stop = self._plan.share(self._plan.size(step)).count, step + num_steps
        stride = self._stride(size)
        while step < stop:
            chunk = self._holding(step)
            end = min(stop, chunk.stop) if stride == size else step + 1
            first = (step - chunk.first) * stride
            rows = slice(first, first + (end - step) * size)
            yield map_tensors(chunk.batch, lambda tensor: tensor[rows]), chunk.samples[rows]  # noqa: B023
            step = end

    def _holding(self, step: int) -> "Chunk":
        """The chunk that holds a step; reading starts afresh when it is not in the next one."""
        if self._chunk.first <= step < self._chunk.stop:
            return self._chunk
        if not self._readers or step != self._chunk.stop:
            self.close()
            self._readers = self._start_reading(step)
        try:
            self._chunk = self._readers[-1].get()
            wait_for(self._chunk.event, (self._chunk.batch, self._chunk.samples), self._device)
        except BaseException:
            self.close()  # nothing more comes after an error: the next call reads afresh
            raise
        return self._chunk

    def _start_reading(self, step: int) -> list[Reader]:
        """A thread that gathers rows, and on its way to another device one that sends them: each is busy by itself."""
        if self._stream is None:
            return [Reader(map(self._send, self._read_from(step)), self._num_ahead)]
        gathering = Reader(self._read_from(step), 1)
        return [gathering, Reader(map(self._send, gathering), self._num_ahead)]

    def _read_from(self, step: int) -> Iterator["Chunk"]:
        while True:
            stop = self._end_of_chunk(step)
            size, count = self._plan.size(step), stop - step
            share = self._plan.share(size)
            samples = self._places(self._plan.place(step), count * size)
            samples = owned(samples.view(count, size), share).clone(memory_format=torch.contiguous_format)
            samples = _spaced(samples, self._stride(share.count))
            yield Chunk(step, stop, own_copy(self._source, self._source.fetch(samples)), samples, None)
            step = stop

    def _places(self, place: int, count: int) -> Tensor:
        """Sample indices, on the host."""
        if self._stream is None:
            return self._window.read(place, count)
        with devices.of(self._device).on(self._stream):
            return self._window.read(place, count).cpu()

    def _end_of_chunk(self, step: int) -> int:
        """Steps of one batch size within one epoch."""
        if self._plan.size(step) != self._plan.batch_size:
            return step + 1
        per_epoch = self._plan.steps_per_epoch
        start = step - step % per_epoch
        full = per_epoch - (self._plan.size(start + per_epoch - 1) != self._plan.batch_size)
        return min(step + self._chunk_steps, start + full)

    def _send(self, chunk: "Chunk") -> "Chunk":
        """Copy to the device on a stream of its own, so that it overlaps with the running steps."""
        if self._stream is None:
            batch = map_tensors(to_device(chunk.batch, self._device), _aligned)
            return chunk._replace(batch=batch, samples=chunk.samples.to(self._device))
        with devices.of(self._device).on(self._stream):
            batch = map_tensors(chunk.batch, self._pinned_copy)
            return Chunk(chunk.first, chunk.stop, batch, self._pinned_copy(chunk.samples), self._stream.record_event())

    def _pinned_copy(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def slot(self, step: int, num_steps: int) -> "RowSlot":
        """A slot that holds the rows of whole launches."""
        return RowSlot(self, self._plan, step, num_steps)

    def close(self) -> None:
        """Stop the thread and forget the chunk."""
        for reader in reversed(self._readers):
            reader.close()
        self._readers = []
        self._chunk = Chunk(0, 0, None, torch.empty(0), None)


def _row_bytes(source: Source) -> list[int]:
    """Bytes of a sample in each tensor."""
    return [tensor.nbytes for tensor in tensors_of(source.fetch(torch.zeros(1, dtype=torch.int64)))]


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor where torch would have put it: arrays of numpy begin at any multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % 64 == 0 else tensor.clone()


def _spaced(samples: Tensor, stride: int) -> Tensor:
    """Sample indices of equal steps, each in the first places of `stride`."""
    if stride == samples.shape[1]:
        return samples.view(-1)
    spaced = samples[:, :1].repeat(1, stride)
    spaced[:, : samples.shape[1]] = samples
    return spaced.view(-1)


class Chunk(NamedTuple):
    """The rows of steps `first` to `stop`, on the device once `event` has passed."""

    first: int
    stop: int
    batch: Batch
    samples: Tensor
    event: Any


class RowSlot:
    """The rows of a launch at a fixed address; each part is copied out of them inside the captured launch."""

    def __init__(self, feed: RowFeed, plan: Plan, step: int, num_steps: int) -> None:
        """Room for `num_steps` steps like `step`."""
        self._feed = feed
        self._share = plan.share(plan.size(step))
        self._size = self._share.count
        self._num_steps = num_steps
        count = num_steps * self._size
        ((batch, samples),) = feed.rows(step, 1)
        self._batch = map_tensors(batch, lambda tensor: tensor.new_empty(count, *tensor.shape[1:]))
        self._samples = samples.new_empty(count)

    def fill(self, step: int) -> None:
        """Copy the rows of the launch's steps."""
        start = 0
        for batch, samples in self._feed.rows(step, self._num_steps):
            rows = slice(start, start + len(samples))
            copy_batch(self._rows(rows), (batch, samples))
            start = rows.stop

    def _rows(self, rows: slice) -> tuple[Batch, Tensor]:
        return map_tensors(self._batch, lambda tensor: tensor[rows]), self._samples[rows]

    def parts(self, offset: int) -> list[list[Part]]:
        """Copy the parts of a step into tensors of their own."""
        return cut_rows(self._share, *self._rows(slice(offset * self._size, (offset + 1) * self._size)))


def wait_for(event: Any, batch: Batch, device: torch.device) -> None:
    """Let the running stream wait for tensors that another stream copies, and keep their memory until it is done."""
    if event is None:
        return
    found = devices.of(device)
    assert isinstance(found, devices.Cuda)
    running = found.running_stream()
    running.wait_event(event)
    for tensor in tensors_of(batch):
        tensor.record_stream(running)
