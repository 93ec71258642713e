"""Worker processes that read a dataset ahead of the training, with the results of reading it in the training process.

Not torch's DataLoader: it raises the death of a worker from a signal handler, wherever the training happens to be (in
the middle of a checkpoint, say), reads all that it was asked for before another step can be read, and lets a spawned
worker run the user's script once more.
"""

import ctypes
import io
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, reduction, resource_tracker, util
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.data.feeds import hanging
from isoscale.data.feeds.feed import Part
from isoscale.data.feeds.shared_memory import Packed, pack, unpack
from isoscale.data.samples import Request, SampleReader, Unwanted
from isoscale.data.sources import Source
from isoscale.errors import UserError
from isoscale.system.devices import are_in_use
from isoscale.system.signals import ALL as STOP_SIGNALS

MOST_WORKERS = 8
"""What `auto` stops at: more seldom help, and each may hold a copy of what the dataset keeps."""
PARTS_PER_WORKER = 2
"""Parts asked of each worker ahead of the training."""
GRACE_SECONDS = 2.0
"""How long a worker may take to finish the sample that it is reading when it is told to end."""
BIRTH_SECONDS = 30.0
"""How long a forked process may take to run its first line."""
BIRTHS = 3
"""How often that is tried: before Python 3.11.8 a forked process may hang at once, python/cpython#112275."""

_CLOSED = 1 << 62
_FOR_US = "isoscale"
_ANSWER = struct.Struct("<qqq")
_PR_SET_PDEATHSIG = 1

StartMethod = Literal["fork", "spawn"]


def count_workers(asked: int | Literal["auto"], wish: int | None, num_cores: float) -> int:
    """Worker processes for a dataset: as asked; for `auto` what NUM_WORKERS says, the wish, or all cores but one."""
    if asked != "auto":
        return asked
    variable = os.environ.get("NUM_WORKERS", "")
    if variable and not variable.isdecimal():
        raise UserError(f"NUM_WORKERS is {variable!r}, expected a number such as 4; correct it, or unset it")
    if variable:
        return int(variable)
    return min(MOST_WORKERS, max(0, int(num_cores) - 1)) if wish is None else wish


def start_method(device: torch.device) -> StartMethod:
    """Forked processes start in milliseconds with any dataset, but not where a device is in use: then spawned ones."""
    can_fork = sys.platform == "linux" and device.type == "cpu" and not are_in_use()
    return "fork" if can_fork else "spawn"


def why_not_sent(source: Source) -> str | None:
    """Why a dataset cannot be sent to a spawned process; None if it can."""
    try:
        with _without_main():
            _Probe(io.BytesIO()).dump(source)
    except Exception as error:  # pickle passes on whatever an object raises
        return f"{type(error).__name__}: {error}"
    return None


class _Probe(pickle.Pickler):
    """Pickles everything but arrays of numbers, which may be large and can always be sent."""

    def persistent_id(self, item: Any) -> int | None:
        is_array = isinstance(item, Tensor) or (isinstance(item, np.ndarray) and not item.dtype.hasobject)
        return 0 if is_array else None


@dataclass
class Failure:
    """What a dataset raised."""

    error: Exception


@dataclass
class Worker:
    """A process, and the way to it."""

    process: Any
    connection: Connection
    pulse: hanging.Pulse
    asked: set[int] = field(default_factory=set)
    """Numbers of the parts that it has still to deliver."""


class WorkerPool:
    """Processes that read the parts of a dataset ahead of the training; parts are delivered in the order asked."""

    num_ahead = 2

    def __init__(
        self, source: Source, seed: int, num_workers: int, method: StartMethod,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:  # fmt: skip
        """The processes start with the first reading and stay until `close`; `warn` is told of one that hangs."""
        self._source = source
        self._reader = SampleReader(source, seed)
        self._warn = warn
        self._seed = seed
        self._num_workers = num_workers
        self._method = method
        self._workers: list[Worker] = []
        self._next = self._first = 0
        self._interrupted = False

    def begin(self) -> None:
        """Start the processes if need be, and forget what an earlier reading asked for.

        They die with the thread that calls this: it must not be one that only reads ahead.
        """
        if not self._workers:
            self._start()
        self._interrupted = False
        self._first = self._wanted.value = self._next
        for worker in self._workers:
            worker.asked.clear()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(self._method)
        self._wanted = context.RawValue("q", 0)
        self._end = util.Finalize(self, end_workers, (self._workers, self._wanted), exitpriority=10)
        with _stop_signals_blocked(), _spawning() if self._method == "spawn" else nullcontext():
            for _ in range(self._num_workers):
                self._workers.append(self._started(context))

    def _started(self, context: Any) -> Worker:
        if self._method == "spawn":
            return self._begun(context, work)
        for _ in range(BIRTHS):
            worker = self._begun(context, work_and_say_so)
            if worker.connection.poll(BIRTH_SECONDS):
                with suppress(EOFError, OSError):  # its end is told when something is asked of it
                    worker.connection.recv_bytes()
                return worker
            worker.process.kill()
            worker.process.join()
        raise UserError(
            f"a process that reads the dataset did not start within {BIRTH_SECONDS:g} s, tried {BIRTHS} times; "
            "data.workers=0 reads in the training process"
        )

    def _begun(self, context: Any, life: Callable[..., None]) -> Worker:
        ours, theirs = context.Pipe()
        pulse = hanging.Pulse(context)
        arguments = (theirs, self._source, self._seed, self._wanted, pulse, torch.get_default_dtype(), os.getpid())
        process = context.Process(target=life, args=arguments, name="isoscale-worker", daemon=True)
        process.start()
        theirs.close()
        pulse.is_started()
        return Worker(process, ours, pulse)

    def read(self, requests: Iterator[Request]) -> Iterator[Part]:
        """The parts asked for, in that order, some of them read ahead; `begin` comes first."""
        waiting: deque[tuple[int, Tensor]] = deque()
        arrived: dict[int, Batch | Failure] = {}
        while True:
            while len(waiting) < PARTS_PER_WORKER * self._num_workers:
                request = next(requests)
                waiting.append((self._ask(request), request.samples))
            number, samples = waiting.popleft()
            self._wait_for(number, samples, arrived)
            answer = arrived.pop(number)
            if isinstance(answer, Failure):
                raise answer.error
            yield Part(answer, samples)

    def _wait_for(self, number: int, samples: Tensor, arrived: dict[int, Batch | Failure]) -> None:
        """Wait for a part, and name a worker that hangs meanwhile."""
        if number in arrived:
            return
        waiting = hanging.Waiting()
        worker = next(worker for worker in self._workers if number in worker.asked)
        while number not in arrived:
            self._receive(arrived)
            if number not in arrived and waiting.is_due(worker.pulse):
                asked = self._reader.indices(samples).tolist()
                found = hanging.describe(worker.pulse, worker.process.pid, asked, self._reader.name)
                self._warn(f"{self._name(worker)} {found}")
        if waiting.ended:
            self._warn(f"{self._name(worker)} {waiting.ended}")

    def _name(self, worker: Worker) -> str:
        return f"worker process {self._workers.index(worker) + 1} of {self._num_workers} (process {worker.process.pid})"

    def _ask(self, request: Request) -> int:
        worker = min(self._workers, key=lambda worker: len(worker.asked))
        number, self._next = self._next, self._next + 1
        worker.asked.add(number)
        message = pickle.dumps((number, request.samples.numpy(), request.epochs.numpy()))
        try:
            worker.connection.send_bytes(message)
        except OSError:
            raise self._died(worker) from None
        return number

    def _receive(self, arrived: dict[int, Batch | Failure]) -> None:
        """Take what has come; waits for a moment only, to notice when nobody wants it any more."""
        if self._interrupted:
            raise Unwanted
        ready = connection.wait([worker.connection for worker in self._workers], timeout=0.1)
        for worker in self._workers:
            if worker.connection in ready:
                try:
                    number, answer = _received(worker.connection)
                except (EOFError, OSError):
                    raise self._died(worker) from None
                if number >= self._first:
                    worker.asked.discard(number)
                    arrived[number] = answer

    def _died(self, worker: Worker) -> UserError:
        worker.process.join(1)
        return UserError(f"{self._name(worker)}, which reads the dataset, {_end_in_words(worker.process.exitcode)}")

    def interrupt(self) -> None:
        """End a reading that is under way in another thread."""
        self._interrupted = True

    def close(self) -> None:
        """End the processes."""
        if self._workers:
            self._end()


def _end_in_words(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return (
            "was killed by SIGKILL, which is what a system does when memory runs out. Start again with fewer workers, "
            "say data.workers=1, or give the job more memory; the run goes on from its last checkpoint"
        )
    if code is not None and code < 0:
        return (
            f"was ended by {signal.Signals(-code).name}. data.workers=0 reads in the training process, and shows "
            "whether it is the dataset's own code; the run goes on from its last checkpoint"
        )
    return f"ended with exit code {code}: see what it printed above. data.workers=0 reads in the training process"


def end_workers(workers: list[Worker], wanted: Any) -> None:
    """Tell processes to end, wait a little for the samples that they are reading, and kill those that are left."""
    wanted.value = _CLOSED
    for worker in workers:
        with socket.socket(fileno=os.dup(worker.connection.fileno())) as end, suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)  # closing is not enough: processes that were forked later have it open too
        worker.connection.close()
        worker.pulse.close()
    deadline = time.monotonic() + GRACE_SECONDS
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        worker.process.kill()
        worker.process.join()
        with suppress(ValueError):  # a thread that asked for its exit code just now may have it, and nobody else
            worker.process.close()
    workers.clear()


@contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """No signal ends a process that is started inside before it has said that it ignores them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _spawning() -> Iterator[None]:
    with _without_main(), _without_working_folder():
        resource_tracker.ensure_running()  # the first process would start it, and unblock signals
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        yield


@contextmanager
def _without_working_folder() -> Iterator[None]:
    """Keep a spawned process from importing files of the working folder before it is told where modules are."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = before or _FOR_US
    try:
        yield
    finally:
        _forget_safe_path()


@contextmanager
def _without_main() -> Iterator[None]:
    """Keep a spawned process from importing the script that starts it, which would start the training once more."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _forget_safe_path() -> None:
    """What a worker or the training starts itself finds its modules as ever."""
    if os.environ.get("PYTHONSAFEPATH") == _FOR_US:
        del os.environ["PYTHONSAFEPATH"]


def work(
    connection: Connection, source: Source, seed: int, wanted: Any, pulse: hanging.Pulse, dtype: torch.dtype,
    parent: int,
) -> None:  # fmt: skip
    """The life of a worker process: read what is asked for, while it is wanted, until the training hangs up."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)
    _forget_safe_path()
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    pulse.begin()
    reader = SampleReader(source, seed)
    with suppress(EOFError, ConnectionError):
        while wanted.value != _CLOSED:
            _serve(connection, reader, wanted, pulse)


def work_and_say_so(connection: Connection, *arguments: Any) -> None:
    """The life of a forked one, which says first that it was born."""
    with suppress(OSError):  # the training is gone already
        connection.send_bytes(b"")
    work(connection, *arguments)


def _serve(connection: Connection, reader: SampleReader, wanted: Any, pulse: hanging.Pulse) -> None:
    number, samples, epochs = pickle.loads(connection.recv_bytes())
    request = Request(torch.from_numpy(samples), torch.from_numpy(epochs))

    def is_wanted(index: int) -> bool:
        pulse.reads(index)
        return bool(wanted.value <= number)

    with suppress(Unwanted):
        packed = _packed(reader, request, is_wanted)
        try:
            # So small a message that sending it never waits for the training, and the shared memory.
            connection.send_bytes(_ANSWER.pack(number, packed.start, packed.size))
            reduction.send_handle(connection, packed.file, None)
        finally:
            os.close(packed.file)


def _packed(reader: SampleReader, request: Request, is_wanted: Callable[[int], bool]) -> Packed:
    try:
        batch = reader.fetch(request, is_wanted)
    except Unwanted:
        raise
    except Exception as error:
        return pack(failure(error))
    try:
        return pack(batch)
    except Exception as error:
        words = f"a worker process cannot send what the dataset gives ({type(error).__name__}: {error})"
        return pack(failure(UserError(f"{words}; use data.workers=0, which reads in the training process")))


def failure(error: Exception) -> Failure:
    """An error that can be sent, with its traceback in a note, because the traceback itself cannot."""
    found = error.__traceback__  # without the lines of this package that led to the dataset
    package = os.path.dirname(os.path.dirname(__file__))
    while found is not None and found.tb_next is not None and found.tb_frame.f_code.co_filename.startswith(package):
        found = found.tb_next
    text = "".join(traceback.format_exception(type(error), error, found)).rstrip()
    try:
        sent = pickle.loads(pickle.dumps(error))
    except Exception:
        sent = RuntimeError(f"{type(error).__name__}: {error}")
    if not isinstance(error, UserError):
        sent.__notes__ = [f"in a worker process:\n{text}"]
    return Failure(sent)


def _received(connection: Connection) -> tuple[int, Any]:
    number, start, size = _ANSWER.unpack(connection.recv_bytes())
    file = reduction.recv_handle(connection)
    try:
        return number, unpack(Packed(file, start, size))
    finally:
        os.close(file)
