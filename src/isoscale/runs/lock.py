"""One training at a time in a run directory: `.lock` says who trains there, and a second start is refused.

The kernel lets go of a file lock (flock) when its process ends, however it ends: who still has it is not dead, however
still it stands. Where that does not reach, between hosts or on a file system without such locks, a counter in the file
tells: it moves for as long as its writer lives. No clocks are compared to take a run over.

A process or a host that was paused for long may wake up after its run was taken over. Who takes over puts a new file in
the place of the old one, and a training asks before it writes whether the file is still its own. It also asks whether
the directory is: people move and delete directories while something trains there.

By hand, because libraries such as filelock rely on the file system's locks alone, and notice no takeover.
"""

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any

from isoscale.errors import RunGone, RunLost, UserError
from isoscale.parallel.environments.batch import batch_job
from isoscale.runs.directory import ROOT
from isoscale.system.files import open_no_link
from isoscale.system.process import machine, state


class Place:
    """A directory itself, by its identity, wherever it is moved."""

    def __init__(self, path: Path, words: str) -> None:
        """The directory in `path`; `words` say what it is to people."""
        self.path = path
        self.first = path.absolute()
        """Where it was when it was opened."""
        self._words = words
        self.handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def is_here(self) -> bool:
        """Whether it is still what its path names."""
        return is_file(self.handle, self.path)

    def check(self) -> None:
        """Raise where it is not."""
        if not self.is_here:
            raise RunGone(self._what_became_of_it())

    def moved_to(self) -> Path | None:
        """Where it is now, as far as the system tells; None for one that is deleted."""
        with suppress(OSError):
            path = Path(os.readlink(f"/proc/self/fd/{self.handle}"))
            return path if is_file(self.handle, path) else None
        return None

    def _what_became_of_it(self) -> str:
        moved = self.moved_to()
        if moved is not None:
            return f"{self._words} {self.path} was moved to {moved} while it was trained in"
        others = ", and another put in its place" if self.path.exists() else ""
        return f"{self._words} {self.path} was deleted while it was trained in{others}"

    def close(self) -> None:
        """Let go of it."""
        os.close(self.handle)


def is_file(handle: int, path: Path) -> bool:
    """Whether an open file or directory is still the one of that name."""
    try:
        found = path.stat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(handle), found)


NAME = ".lock"
BEAT = 2.0
"""Seconds between two movements of the counter."""
WATCH = 7.0
"""Seconds for which a counter must stand still before a run of another host is taken over: three beats and a bit."""
SILENT = 120.0
"""Seconds since the last beat after which a run of another host is shown as killed."""
_GLANCE = 0.2
_ROOM = 64
"""Spare bytes in the file, so that a counter which grows changes no length."""

Say = Callable[[str], None]


@dataclass
class Owner:
    """Who trains in a directory."""

    host: str
    machine: str
    """Tells hosts of one name apart: the kernel's start, and which numbers its processes have."""
    process: int
    begun: str
    """When the process began, as its kernel counts: numbers of processes are used again."""
    job: str = ""
    """The job, in words."""
    end_job: str = ""
    """What to type to end the job."""
    attempt: int = 0
    """How often the scheduler has started the job again."""
    since: str = ""
    token: str = ""
    beats: int = 0

    @classmethod
    def here(cls) -> "Owner":
        """This process."""
        job = batch_job()
        return cls(
            socket.gethostname(), machine(), os.getpid(), state(os.getpid())[1], str(job or ""),
            job.cancel if job else "", job.restarts if job else 0,
            time.strftime("%Y-%m-%d %H:%M:%S"), uuid.uuid4().hex,
        )  # fmt: skip

    def is_neighbour(self, other: "Owner") -> bool:
        """Whether both are processes of one host, which can look for each other."""
        return (self.host, self.machine) == (other.host, other.machine)

    def shares_kernel(self, other: "Owner") -> bool:
        """Whether one kernel knows the locks of both, though perhaps each has process numbers of its own."""
        mine, _, _ = self.machine.partition(" ")
        return bool(mine) and mine == other.machine.partition(" ")[0]

    def is_alive(self) -> bool:
        """Whether the process, which must be one of this host, is still there."""
        letter, begun = state(self.process)
        return letter not in ("", "Z", "X") and begun in ("", self.begun)

    def is_earlier_start_of(self, other: "Owner") -> bool:
        """Whether the scheduler has started the same job again since; then it had ended this one."""
        return bool(self.job) and self.job == other.job and self.attempt < other.attempt

    def __str__(self) -> str:
        job = f" ({self.job})" if self.job else ""
        return f"process {self.process} on {self.host}{job}"


class RunLock:
    """Holds a run directory for as long as the context lasts; refuses where another process holds it."""

    def __init__(self, folder: Path, say: Say = lambda text: None) -> None:
        """The lock of `folder`, which is made if need be; `say` is told of a run that is taken over."""
        self._folder = folder
        self._path = folder / NAME
        self._say = say
        self._owner = Owner.here()
        self._handle = -1
        self.place: Place | None = None
        """The directory itself, while it is held."""
        self._made: list[Path] = []
        self._checking = Lock()
        self._ending = Event()
        self._thread = Thread(target=self._beat, name="isoscale-lock", daemon=True)

    def __enter__(self) -> "RunLock":
        """Take the directory, or say who has it."""
        try:
            self._made = _make(self._folder)
            while not self._take():
                pass
            self.place = Place(self._folder, "the run directory")
        except OSError as error:
            self._leave()
            raise UserError(
                f"cannot write the run directory {self._folder}: {error.strerror or error}; "
                "choose another one with --run DIR"
            ) from None
        except BaseException:
            self._leave()
            raise
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go, and leave nothing behind: no empty directory either."""
        if os.getpid() != self._owner.process:  # a copy of the process that took it
            return
        self._ending.set()
        self._thread.join(BEAT)
        with suppress(OSError):
            if self.place and self._is_own(self.place):
                os.unlink(NAME, dir_fd=self.place.handle)
        self._leave()

    def check(self) -> None:
        """Raise unless the directory is where it was and this process still has it: ask before writing there."""
        if self.place:
            self.place.check()
            self.check_owner()

    def check_owner(self) -> None:
        """Raise where another process has taken the run over, wherever its directory is by now."""
        if self.place is None:
            return
        with self._checking:
            try:
                if not self._is_own(self.place):
                    self._raise_lost(self.place)
            except FileNotFoundError:  # somebody removed it
                self._regain(self.place)
            except OSError:
                pass  # nobody can say; whatever is written says why it cannot be

    def follow(self, path: Path) -> None:
        """Go on in the place that the directory was moved to."""
        assert self.place is not None
        self.place.path = self._folder = path
        self._path, self._made = path / NAME, []

    def _is_own(self, place: Place) -> bool:
        """Whether the lock in the directory is that of this process, by the file itself and by what it says."""
        handle = os.open(NAME, os.O_RDONLY | os.O_CLOEXEC, dir_fd=place.handle)  # asks the server, unlike stat
        try:
            same = os.path.samestat(os.fstat(handle), os.fstat(self._handle))
            text = os.read(handle, 1 << 16)
        finally:
            os.close(handle)
        # what cannot be read was being written, or found no room on the disk
        return same and (self._owner.token.encode() in text or _parsed(text) is None)

    def _raise_lost(self, place: Place) -> None:
        owner = _read(place.moved_to() or self._folder)
        who = f"{owner} has it since {owner.since}" if owner else "another process has it"
        raise RunLost(
            f"{self._folder} was taken over while this training stood still: {who}. Nothing was written since; this "
            "one ends here, and what it had not saved is trained there"
        )

    def _regain(self, place: Place) -> None:
        """Make the file again, unless somebody else does."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            handle = os.open(NAME, flags, 0o644, dir_fd=place.handle)
        except FileExistsError:
            self._raise_lost(place)
        except OSError:
            return  # nobody can make one there: it is deleted, full or may only be read
        if _lock(handle) is False:
            os.close(handle)
            self._raise_lost(place)
        _write(handle, self._owner)
        before, self._handle = self._handle, handle
        os.close(before)

    def _take(self) -> bool:
        """Try once; False where the file has changed meanwhile, and all is to be looked at again."""
        handle = open_no_link(self._path, os.O_RDWR | os.O_CREAT)
        locked = _lock(handle)
        if not is_file(handle, self._path):
            os.close(handle)
            return False
        before = _read(self._folder) if locked else _patiently(self._folder)
        try:
            self._check(before, locked)
            if locked and before is None:
                self._handle, handle = handle, -1
                _write(self._handle, self._owner)
                return True
            if locked:  # so that nobody else could take it over while we watched
                self._replace()
                return True
        finally:
            if handle >= 0:
                os.close(handle)
        time.sleep(2 * _GLANCE)  # who has the kernel's lock may be another newcomer, about to write down its name
        if _token(self._folder) != (before and before.token):
            return False
        self._replace()
        time.sleep(_GLANCE)
        if is_file(self._handle, self._path):
            return True
        os.close(self._handle)
        self._handle = -1
        return False

    def _check(self, owner: Owner | None, locked: bool | None) -> None:
        """Raise where somebody trains in the directory; says so where somebody did and is gone."""
        if owner is None:
            if locked is False:
                self._refuse(None)
            return
        if owner.is_neighbour(self._owner):
            if not locked and owner.is_alive():
                self._refuse(owner)
        elif not owner.is_earlier_start_of(self._owner) and (locked is False or self._moves(owner)):
            self._refuse(_read(self._folder) or owner)
        self._say(f"{owner}, which trained here since {owner.since}, has ended without a word; this start goes on")

    def _moves(self, owner: Owner) -> bool:
        """Watch the counter of a process that cannot be asked."""
        end = time.monotonic() + WATCH
        while time.monotonic() < end:
            time.sleep(_GLANCE)
            found = _read(self._folder)
            if found and (found.token, found.beats) != (owner.token, owner.beats):
                return True
        return False

    def _refuse(self, owner: Owner | None) -> None:
        who = f"{owner} trains there since {owner.since}" if owner else "another process trains there"
        here = owner is not None and owner.is_neighbour(self._owner)
        end = owner and (owner.end_job or (f"kill {owner.process}" if here else ""))
        stop = f"stop it, after which it saves and ends (`{end}`), " if end else ""
        raise UserError(
            f"{self._folder} is in use: {who}. Wait for its end, {stop}or name another directory with --run DIR; if "
            f"you know that nothing trains there, remove {self._path}"
        )

    def _replace(self) -> None:
        """Put a new file in the place of the one there: its owner, should it wake up, sees that. The last has it."""
        aside = self._folder / f"{NAME}-{self._owner.token}"
        self._handle = open_no_link(aside, os.O_RDWR | os.O_CREAT)
        _lock(self._handle)
        _write(self._handle, self._owner)
        aside.replace(self._path)

    def _beat(self) -> None:
        """Move the counter; whatever goes wrong here, training goes on."""
        while not self._ending.wait(BEAT):
            with suppress(Exception), self._checking:
                if self.place is None or not self._is_own(self.place):
                    continue  # taken over: not ours to write in
                self._owner.beats += 1
                # closed each time, which is what sends it to other hosts
                handle = os.open(NAME, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.place.handle)
                try:
                    if os.path.samestat(os.fstat(handle), os.fstat(self._handle)):
                        _write(handle, self._owner)
                finally:
                    os.close(handle)

    def _leave(self) -> None:
        is_here = self.place is None or self.place.is_here
        if self._handle >= 0:
            with suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # also for processes that were forked from this one
            os.close(self._handle)
            self._handle = -1
        if self.place:
            self.place.close()
            self.place = None
        above = [self._folder.parent] if self._folder.parent == ROOT else []
        for folder in (self._folder, *above, *reversed(self._made)) if is_here else ():
            with suppress(OSError):
                folder.rmdir()  # only where nothing came into it


def is_held(folder: Path) -> bool:
    """Whether somebody seems to train in a directory: for people who look, without waiting."""
    owner, here = _read(folder), Owner.here()
    if owner is None:
        return False
    if owner.is_neighbour(here):
        return owner.is_alive()
    try:
        silent = time.time() - (folder / NAME).stat().st_mtime >= SILENT
        return not silent or (owner.shares_kernel(here) and _is_locked(folder / NAME))
    except OSError:
        return False


def _is_locked(path: Path) -> bool:
    """Whether the kernel knows a holder, who may stand still in a space of process numbers that cannot be seen."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _make(folder: Path) -> list[Path]:
    """Make a folder with all above it; returns those that were not there, from the outside in."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()][::-1]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _lock(handle: int) -> bool | None:
    """Whether the kernel gave us the file's lock, or another has it; None where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _write(handle: int, owner: Owner) -> None:
    """Write over what is there, in one call and always as long; a full disk leaves the lock without a name."""
    text = json.dumps(asdict(owner))
    size = len(json.dumps({**asdict(owner), "beats": 0}).encode()) + _ROOM
    with suppress(OSError):
        os.pwrite(handle, text.encode().ljust(size - 1) + b"\n", 0)
        os.ftruncate(handle, size)


def _read(folder: Path) -> Owner | None:
    """Who the lock of a directory names; None where it says nothing that can be read."""
    try:
        return _parsed((folder / NAME).read_bytes())
    except OSError:
        return None


def _parsed(text: bytes) -> Owner | None:
    try:
        values = json.loads(text)
        return Owner(**{name: kind(values[name]) for name, kind in _KINDS.items()})
    except (ValueError, KeyError, TypeError):
        return None


_KINDS: dict[str, Callable[[Any], Any]] = {
    name: int if name in ("process", "attempt", "beats") else str for name in Owner.__dataclass_fields__
}


def _patiently(folder: Path) -> Owner | None:
    """Who holds a lock that was taken just now, and whose owner is about to write down its name."""
    for _ in range(10):
        if found := _read(folder):
            return found
        time.sleep(_GLANCE / 2)
    return None


def _token(folder: Path) -> str | None:
    found = _read(folder)
    return found.token if found else None
