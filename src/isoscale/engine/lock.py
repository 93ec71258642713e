"""One training at a time in a run directory: `.lock` says who trains there, and a second start is refused.

The kernel lets go of a file lock (flock) when its process ends, however it ends. Where that does not reach, between
hosts or on a file system without such locks, a counter in the file tells: it moves for as long as its writer lives. No
clocks are compared to take a run over.
"""

import fcntl
import json
import os
import shlex
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any

from isoscale.engine.run_directory import ROOT
from isoscale.errors import UserError
from isoscale.observe.files import open_no_link
from isoscale.parallel.process import machine, state

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

JOBS = {
    "SLURM_JOB_ID": ("Slurm job", "scancel"),
    "LSB_JOBID": ("LSF job", "bkill"),
    "PBS_JOBID": ("PBS job", "qdel"),
}
"""What schedulers call a job's number, in the environment and for people, and how a job is ended."""

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
        found = next((name for name in JOBS if os.environ.get(name)), None)
        word, command = JOBS[found] if found else ("", "")
        number = os.environ[found] if found else ""
        restarts = os.environ.get("SLURM_RESTART_COUNT", "")
        return cls(
            socket.gethostname(), machine(), os.getpid(), state(os.getpid())[1], f"{word} {number}".strip(),
            f"{command} {shlex.quote(number)}" if found else "", int(restarts) if restarts.isdigit() else 0,
            time.strftime("%Y-%m-%d %H:%M:%S"), uuid.uuid4().hex,
        )  # fmt: skip

    def is_neighbour(self, other: "Owner") -> bool:
        """Whether both are processes of one host, which can look for each other."""
        return (self.host, self.machine) == (other.host, other.machine)

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
        self._made: list[Path] = []
        self._ending = Event()
        self._thread = Thread(target=self._beat, name="isoscale-lock", daemon=True)

    def __enter__(self) -> "RunLock":
        """Take the directory, or say who has it."""
        try:
            self._made = _make(self._folder)
            while not self._take():
                pass
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
            if _token(self._path) == self._owner.token:
                self._path.unlink()
        self._leave()

    def _take(self) -> bool:
        """Try once; False where the file has changed meanwhile, and all is to be looked at again."""
        handle = open_no_link(self._path, os.O_RDWR | os.O_CREAT)
        locked = _lock(handle)
        if not _is_file(handle, self._path):
            os.close(handle)
            return False
        before = _read(self._path) if locked else _patiently(self._path)
        try:
            self._check(before, locked)
        except BaseException:
            os.close(handle)
            raise
        if locked:  # so that nobody else could take it over while we watched
            self._handle = handle
            _write(handle, self._owner)
            return True
        os.close(handle)
        time.sleep(2 * _GLANCE)  # who has the kernel's lock may be another newcomer, about to write down its name
        return _token(self._path) == (before and before.token) and self._replace()

    def _check(self, owner: Owner | None, locked: bool | None) -> None:
        """Raise where somebody trains in the directory; says so where somebody did and is gone."""
        if owner is None:
            if locked is False:
                self._refuse(None)
            return
        if owner.is_neighbour(self._owner):
            if not locked and owner.is_alive():
                self._refuse(owner)
        elif not owner.is_earlier_start_of(self._owner) and self._moves(owner):
            self._refuse(_read(self._path) or owner)
        self._say(f"{owner}, which trained here since {owner.since}, has ended without a word; this start goes on")

    def _moves(self, owner: Owner) -> bool:
        """Watch the counter of a process that cannot be asked."""
        end = time.monotonic() + WATCH
        while time.monotonic() < end:
            time.sleep(_GLANCE)
            found = _read(self._path)
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

    def _replace(self) -> bool:
        """Put a new file in the place of one that the kernel cannot give us; of several who try, the last has it."""
        aside = self._folder / f"{NAME}-{self._owner.token}"
        self._handle = open_no_link(aside, os.O_RDWR | os.O_CREAT)
        _lock(self._handle)
        _write(self._handle, self._owner)
        aside.replace(self._path)
        time.sleep(_GLANCE)
        if _is_file(self._handle, self._path):
            return True
        os.close(self._handle)
        self._handle = -1
        return False

    def _beat(self) -> None:
        """Move the counter; whatever goes wrong here, training goes on."""
        while not self._ending.wait(BEAT):
            with suppress(Exception):
                if _token(self._path) != self._owner.token:
                    continue  # taken over or removed: not ours to write in
                self._owner.beats += 1
                # closed each time, which is what sends it to other hosts
                handle = os.open(self._path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    _write(handle, self._owner)
                finally:
                    os.close(handle)

    def _leave(self) -> None:
        if self._handle >= 0:
            with suppress(OSError):
                fcntl.flock(self._handle, fcntl.LOCK_UN)  # also for processes that were forked from this one
            os.close(self._handle)
            self._handle = -1
        above = [self._folder.parent] if self._folder.parent == ROOT else []
        for folder in (self._folder, *above, *reversed(self._made)):
            with suppress(OSError):
                folder.rmdir()  # only where nothing came into it


def is_held(folder: Path) -> bool:
    """Whether somebody seems to train in a directory: for people who look, without waiting."""
    path = folder / NAME
    owner, here = _read(path), Owner.here()
    if owner is None:
        return False
    if owner.is_neighbour(here):
        return owner.is_alive()
    try:
        return time.time() - path.stat().st_mtime < SILENT
    except OSError:
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


def _is_file(handle: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        found = path.stat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(handle), found)


def _write(handle: int, owner: Owner) -> None:
    """Write over what is there, in one call and always as long; a full disk leaves the lock without a name."""
    text = json.dumps(asdict(owner))
    size = len(json.dumps({**asdict(owner), "beats": 0}).encode()) + _ROOM
    with suppress(OSError):
        os.pwrite(handle, text.encode().ljust(size - 1) + b"\n", 0)
        os.ftruncate(handle, size)


def _read(path: Path) -> Owner | None:
    """Who wrote the file; None where it says nothing that can be read."""
    try:
        values = json.loads(path.read_bytes())
        return Owner(**{name: kind(values[name]) for name, kind in _KINDS.items()})
    except (OSError, ValueError, KeyError, TypeError):
        return None


_KINDS: dict[str, Callable[[Any], Any]] = {
    name: int if name in ("process", "attempt", "beats") else str for name in Owner.__dataclass_fields__
}


def _patiently(path: Path) -> Owner | None:
    """Who holds a lock that was taken just now, and whose owner is about to write down its name."""
    for _ in range(10):
        if found := _read(path):
            return found
        time.sleep(_GLANCE / 2)
    return None


def _token(path: Path) -> str | None:
    found = _read(path)
    return found.token if found else None
