"""How a rank learns that another one failed, is gone or hangs, and what becomes of it then.

A thread beside the main one keeps the connection to the server of rank 0. What the server decides ends the main
thread at its next word to the others, or at the error that a broken connection gives; where it is stuck, the thread
ends the process.

Whoever waits for another process in Gloo waits until a connection closes, and Gloo has no way to be told. A connection
that is shut from below closes for both sides. Now and then (one in forty, three ranks on a busy machine) Gloo waits on,
in `UnboundBuffer::waitSend`, although its connections are closed: then the watch ends the process.
"""

import ctypes
import os
import selectors
import signal
import socket
import stat
import struct
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from isoscale.errors import FAILED, PeerFailed, Stopped, exit_code, message
from isoscale.parallel.health.server import BEAT, GO_ON, AwakeClock, Cause, Line, knock
from isoscale.parallel.secret import Key
from isoscale.system.printing import shout
from isoscale.system.process import end_of

REACT = 5.0
"""Seconds that the main thread has to end by itself once a cause is known."""
HEAR = 2.0
"""Seconds to wait for the server to say why a connection broke, or that it has heard of a failure."""
LINGER = 8.0
"""Seconds that other ranks stay while rank 0 tells the user: many launchers end all ranks as soon as one has ended."""
ORPHANED = 30.0
"""Seconds to save and end after the launcher is gone."""
LONGEST_TRACEBACK = 20_000

_GONE = "no longer answers: its process or its machine is gone"
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"<frozen"})
_DESCRIPTORS = Path("/proc/self/fd")
_SO_ATTACH_FILTER = 26
_TAKE_NOTHING = ctypes.create_string_buffer(struct.pack("@HBBI", 0x06, 0, 0, 0))
"""A filter of packets in the language of the kernel (BPF) with one instruction: return, with 0 bytes of the packet."""


class HealthClient:
    """This rank's connection to all others."""

    def __init__(
        self, rank: int, hosts: Sequence[str], server: tuple[str, int], key: Key, parent: int | None = None
    ) -> None:
        """Connect to the server, which has the same key; `parent` is the process whose end is also ours."""
        self.rank, self.hosts = rank, hosts
        self.limit: float | None = None
        """Seconds without a sign of life of rank 0 after which it is taken to hang."""
        self.on_abort: Callable[[str], None] | None = None
        """Told why, before a process whose main thread is stuck is ended."""
        self.wake: Callable[[], None] = lambda: None
        """Frees the main thread from waiting for other ranks, where that can be done."""
        self.cause: Cause | None = None
        self._ticks, self._what = 0, "the start"
        self._without_first = False
        self._placed = (0, 0.0)
        self._parent = parent
        self._neighbour = 0
        self._end_of_neighbour: int | None = None
        """A descriptor, as long as that has not been read."""
        self._neighbour_ended = False
        self._orphaned_at: float | None = None
        self._handled: BaseException | None = None
        self._known, self._hub_ended, self._done = threading.Event(), threading.Event(), threading.Event()
        self._known_at = 0.0
        self._clock = AwakeClock()
        self._heard = 0.0
        self._main = threading.main_thread().ident or 0
        self._line = knock(server, rank, key)
        threading.Thread(target=self._run, name="isoscale watch", daemon=True).start()

    def tick(self, what: str) -> None:
        """Note what this rank is about to wait for; raises if there is nothing to wait for any more."""
        self._what = what
        self._ticks += 1
        if self.cause is not None:
            raise self.cause.error()

    def say(self, words: list[Any]) -> bool:
        """Tell rank 0 something for the log, if the connection takes it now: a sign of life must not wait behind it."""
        return bool(_ready([self._line], selectors.EVENT_WRITE, 0)) and self._line.send(said=words)

    def look_after(self, rank: int, process: int, born: str) -> None:
        """Notice the end of a rank on this machine also where its connections are kept open."""
        self._neighbour, self._end_of_neighbour = rank, end_of(process, born)

    @property
    def speaks(self) -> bool:
        """Whether it is this rank that tells the user: rank 0, or the first on each host when that one is gone."""
        if self.rank == 0 or self.cause is None:
            return True
        lower = [rank for rank in range(1, self.rank) if self.hosts[rank] == self.hosts[self.rank]]
        return self._without_first and not lower

    def failed(self, error: BaseException) -> BaseException:
        """Tell the others of an error, unless it is one of theirs; returns what this rank should raise."""
        if error is self._handled:
            return error
        self._handled = error  # from here on the thread leaves it to the main thread to end the process
        if not isinstance(error, PeerFailed):
            if _is_broken_connection(error):
                error = self._heard_from_peers(error)
            else:
                words = f"rank {self.rank} on {self.hosts[self.rank]} failed: {message(error)}"
                self._publish(words, exit_code(error), error)
        self._handled = error
        return error

    def _heard_from_peers(self, error: BaseException) -> BaseException:
        """The reason why a connection broke, if anybody knows one."""
        if not self._known.wait(HEAR):
            here = f"rank {self.rank} on {self.hosts[self.rank]}"
            self._publish(f"{here} lost the connection to another rank: {error}\n  {GO_ON}", FAILED, error)
        if self.cause is None or self.cause.ranks == (self.rank,):
            return error
        return self.cause.error()

    def _publish(self, words: str, code: int, error: BaseException) -> None:
        was_asked = isinstance(error, KeyboardInterrupt | Stopped)  # where it was then tells nobody anything
        text = "" if was_asked else "".join(traceback.format_exception(error))[-LONGEST_TRACEBACK:]
        self._line.send(cause=asdict(Cause((self.rank,), words, code, text, raised=True)))
        self._known.wait(HEAR)

    def linger(self) -> None:
        """Stay until rank 0 has told the user what happened."""
        if self.rank != 0 and not self._without_first:
            self._hub_ended.wait(LINGER)

    def leave(self) -> None:
        """Wait until all ranks are done; ends the process where one of them fails meanwhile."""
        if self._handled is not None:
            return
        self._what = "the end of the other ranks"
        self._line.send(left=True)
        while not self._done.wait(BEAT):
            if self.cause is not None:
                self._abort(self.cause)

    def _run(self) -> None:
        while not self._done.is_set():
            until = time.monotonic() + BEAT
            try:
                self._judge(self._clock())
                self._line.send(ticks=self._ticks, what=self._what, place=self._place())
                self._receive(until)
            except Exception as error:  # a rank that nobody watches could wait for the others for ever
                self._give_up(error)
                time.sleep(max(0, until - time.monotonic()))

    def _receive(self, until: float) -> None:
        """Take what the server says, until the next beat."""
        while (seconds := until - time.monotonic()) > 0:
            heard = [] if self._hub_ended.is_set() else [self._line]
            ends = [] if self._end_of_neighbour is None else [self._end_of_neighbour]
            ready = _ready([*heard, *ends], selectors.EVENT_READ, seconds)
            if self._line in ready:
                self._take(self._line.receive())
            if ends and ends[0] in ready:
                os.close(ends[0])
                self._neighbour_ended, self._end_of_neighbour = True, None

    def _take(self, messages: list[dict[str, Any]] | None) -> None:
        self._heard = self._clock()
        for news in messages or ():
            if "cause" in news:
                self._learn(Cause.read(news["cause"]))
            elif "end" in news:
                self._done.set()
        if messages is None:
            self._hub_ended.set()
            if self.cause is None and not self._done.is_set():
                self._lose_first(_GONE)

    def _give_up(self, error: Exception) -> None:
        """This rank can no longer be watched."""
        words = f"rank {self.rank} on {self.hosts[self.rank]} lost sight of the others: {message(error)}\n  {GO_ON}"
        cause = Cause((self.rank,), words, FAILED, "".join(traceback.format_exception(error)), raised=True)
        if self.cause is None:
            self._line.send(cause=asdict(cause))
        self._learn(cause)

    def _lose_first(self, state: str) -> None:
        """Without rank 0 there is no server, and every rank finds out by itself."""
        self._without_first = True
        self._learn(Cause((0,), f"rank 0 on {self.hosts[0]} {state}\n  {GO_ON}"))

    def _learn(self, cause: Cause) -> None:
        if self.cause is None:
            self.cause, self._known_at = cause, time.monotonic()
            self._known.set()
            self.wake()

    def _judge(self, now: float) -> None:
        """End what does not end by itself."""
        if self._neighbour_ended and self.cause is None and not self._done.is_set():
            self._neighbour_ended = False
            if self._neighbour == 0:
                self._lose_first(_GONE)
            else:
                self._line.send(gone=self._neighbour)
        if self.cause is None and self.limit and now - self._heard > self.limit:
            self._lose_first(f"has given no sign of life for {now - self._heard:.0f} s")
        if self.cause is not None and self._handled is None and time.monotonic() - self._known_at > REACT:
            self._abort(self.cause)
        if self._parent is not None and os.getppid() != self._parent:
            self._end_without_parent(now)

    def _abort(self, cause: Cause) -> None:
        """Say why, if that is on us, and end the process."""
        if self.speaks:
            error = cause.error()
            behind_a_bar = "\n" if os.isatty(2) else ""
            shout(f"{behind_a_bar}error: {error}\n{error.traceback}")
        if self.on_abort is not None:
            last = threading.Thread(target=self.on_abort, args=(cause.message,), daemon=True)
            last.start()
            last.join(HEAR)  # a disk that does not answer must not keep us
        os._exit(cause.exit_code)

    def _end_without_parent(self, now: float) -> None:
        """The system has asked for a stop where it can; elsewhere we do it, and later nobody is asked any more."""
        if self._orphaned_at is None:
            self._orphaned_at = now
            if not sys.platform.startswith("linux"):
                os.kill(os.getpid(), signal.SIGTERM)
        elif now - self._orphaned_at > ORPHANED:
            os._exit(FAILED)

    def _place(self) -> str:
        """Where the main thread is, once it has been there for some beats: the innermost line of nobody's library."""
        if self._ticks != self._placed[0]:
            self._placed = (self._ticks, self._clock())
        if self._clock() - self._placed[1] < 2 * BEAT:
            return ""
        frames = traceback.extract_stack(sys._current_frames().get(self._main))
        own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
        return "".join(f"{frame.name}, {frame.filename}:{frame.lineno}" for frame in (own or frames)[-1:])


def _ready(files: Sequence[Line | int], event: int, seconds: float) -> list[Line | int]:
    """Those that can be read or written within some seconds; however many files the process has open."""
    with selectors.DefaultSelector() as selector:
        for file in files:
            selector.register(file, event)
        return [key.fileobj for key, _ in selector.select(seconds)]  # type: ignore[misc]


def _is_broken_connection(error: BaseException) -> bool:
    """Whether a word to other ranks could not be said, here or on the way to this error."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, dist.DistError) or (isinstance(chain, RuntimeError) and "/gloo/" in str(chain)):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def open_sockets() -> dict[str, int]:
    """The descriptor of every open socket, by a name that is never used again; none where there is no /proc."""
    found: dict[str, int] = {}
    for entry in _DESCRIPTORS.iterdir() if _DESCRIPTORS.is_dir() else ():
        with suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(entry.stat().st_mode):
                found[os.readlink(entry)] = int(entry.name)
    return found


def shut(names: Iterable[str]) -> None:
    """Shut connections, except those over which ranks tell each other what happened."""
    kept = {line.fileno() for line in Line.everywhere}
    for name, descriptor in open_sockets().items():
        if name in names and descriptor not in kept:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # not one that listens: Gloo ends the process when that one fails
                connection.shutdown(socket.SHUT_RDWR)


def shut_doors(names: Iterable[str], port: int) -> None:
    """Let nobody connect any more at some sockets that listen, nor at a port; those who are connected stay so.

    Neither torch's store nor Gloo asks who connects, or how often. The sockets are theirs and must stay open, so that
    the system is told to drop what arrives.
    """
    for name, descriptor in open_sockets().items() if sys.platform == "linux" else ():
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as door:
            is_door = door.family != socket.AF_UNIX and door.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if is_door and (name in names or door.getsockname()[1] == port):
                program = struct.pack("@HP", 1, ctypes.addressof(_TAKE_NOTHING))
                door.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
