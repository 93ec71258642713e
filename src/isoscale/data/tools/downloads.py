"""Bring published files into place, from the network or from a folder: checked, and whole or not at all."""

import hashlib
import http.client
import os
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urljoin

from isoscale._version import __version__
from isoscale.data.files import CHUNK, GZIP_SUFFIX, chunks, find_all, sweep, writing_into, wrong_files
from isoscale.data.tools.published import Entry
from isoscale.errors import UserError

TIMEOUT = 20.0
"""Seconds without an answer after which an address counts as unreachable."""

INCOMING = ".incoming-"

Report = Callable[[str, int, int | None], None]
"""Told the name of a file, the bytes that are there, and how many there will be where that is known."""


class Unusable(Exception):
    """Why an address or a file did not give what was wanted."""


class Fetching:
    """One published thing, on its way into a folder."""

    def __init__(self, entry: Entry, folder: Path) -> None:
        """Look at what of `entry` is in the data folder `folder` already."""
        self.entry = entry
        self.home = folder / entry.home
        found = find_all(self.home, entry.files)
        self.damaged = wrong_files(found, entry.files)
        self.wanted = [name for name in entry.files if name not in found or found[name] in self.damaged]

    def from_network(self, mirror: str | None, report: Report) -> None:
        """Download what is wanted, each file from the first address that has it, unless a system's package has it."""
        for folder in self.entry.elsewhere:
            self._take_from(folder)
        addresses = self.entry.addresses
        if mirror is not None:
            if not mirror.startswith(("http://", "https://")):
                raise UserError(f"--mirror {mirror}: expected an address that begins with http:// or https://")
            addresses = (mirror.rstrip("/") + "/",)
        for published in self._published():
            self._from_first(addresses, published, report)

    def from_folder(self, folder: Path) -> None:
        """Take what is wanted from files in a folder or below it, by their names."""
        if not folder.is_dir():
            raise UserError(f"--from {folder}: there is no such folder")
        reasons = self._take_from(folder)
        if self.wanted:
            expected = self.entry.archive or "compressed or not, by its name"
            reasons = reasons or [f"expected there or in a folder below, {expected}"]
            raise UserError("\n  ".join([f"--from {folder}: did not find {', '.join(self.wanted)}", *reasons]))

    def _published(self) -> list[str]:
        """The files at an address that hold what is wanted."""
        entry = self.entry
        return [entry.archive] * bool(self.wanted) if entry.archive else [name + entry.suffix for name in self.wanted]

    def _from_first(self, addresses: Iterable[str], published: str, report: Report) -> None:
        reasons = []
        for address in addresses:
            try:
                with _opened(urljoin(address, published)) as response, self._aside() as aside:
                    self._write(aside / published, _body(response, lambda done, total: report(published, done, total)))
                    self._take(aside / published, published)
                return
            except Unusable as unusable:
                reasons.append(f"{urljoin(address, published)}: {unusable}")
        entry = self.entry
        place, note = (self.home.parent, " and unpack it there") if entry.archive else (self.home, "")
        lines = [f"{urljoin(entry.addresses[0], name)}  →  {place / name}" for name in self._published()]
        by_hand = [
            f"cannot fetch {entry.name} from here:",
            *(f"  {reason}" for reason in reasons),
            f"fetch it on a machine with internet, and put it into place{note}:",
            *(f"  {line}" for line in lines),
            f"or bring it in any folder DIR and type: isoscale data get {entry.name} --from DIR",
        ]
        raise UserError("\n  ".join(by_hand))

    def _take_from(self, folder: Path) -> list[str]:
        """Take files from a folder; says which ones were not right."""
        reasons = []
        names = {variant for name in self.wanted for variant in (name, name + GZIP_SUFFIX)}
        for path in sorted(folder.rglob("*")) if self.wanted else ():
            if path.name in {*names, self.entry.archive} and path.is_file():
                try:
                    self._take(path, path.name)
                except Unusable as unusable:
                    reasons.append(f"{path}: {unusable}")
        return reasons

    def _take(self, raw: Path, published: str) -> None:
        """Put what a file holds in place, if it is right."""
        if published != self.entry.archive:
            return self._put(published.removesuffix(GZIP_SUFFIX), chunks(raw))
        for name, content in _members(raw):
            self._put(name, content)
        if self.wanted:
            raise Unusable(f"it does not hold {', '.join(self.wanted)}")

    def _put(self, name: str, content: Iterable[bytes]) -> None:
        """Write a file aside, check it, and only then give it its name."""
        if name not in self.wanted:
            return
        with self._aside() as aside:
            digest = self._write(aside / name, _readable(content))
            if not digest.startswith(self.entry.files[name]):
                raise Unusable(f"the content of {name} is not the published one (its sha256 is {digest})")
            (aside / name).replace(self.home / name)
        (self.home / (name + GZIP_SUFFIX)).unlink(missing_ok=True)
        self.wanted.remove(name)

    def _write(self, path: Path, content: Iterable[bytes]) -> str:
        """Write a file; returns the hash of what was written."""
        digest = hashlib.sha256()
        with writing_into(self.home), path.open("wb") as file:
            for chunk in content:
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())  # before the rename, or a crash could leave a name without content
        return digest.hexdigest()

    @contextmanager
    def _aside(self) -> Iterator[Path]:
        """A folder beside the target, so that a rename is all that is left to do."""
        with writing_into(self.home):
            self.home.mkdir(parents=True, exist_ok=True)
            sweep(self.home, INCOMING)
            aside = tempfile.TemporaryDirectory(prefix=INCOMING, dir=self.home)
        with aside:
            yield Path(aside.name)


def _members(archive: Path) -> Iterator[tuple[str, Iterable[bytes]]]:
    """The plain files of an archive, by their names alone: no path in it decides where anything is written."""
    try:
        with tarfile.open(archive) as opened:
            for member in opened:
                content = opened.extractfile(member) if member.isfile() else None
                if content is not None:
                    yield Path(member.name).name, iter(lambda file=content: file.read(CHUNK), b"")  # type: ignore[misc]
    except (EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise Unusable(f"it is not a complete archive: {error}") from None


def _readable(content: Iterable[bytes]) -> Iterator[bytes]:
    try:
        yield from content
    except (EOFError, OSError, zlib.error, tarfile.TarError) as error:
        raise Unusable(f"it is truncated or damaged: {error}") from None


def _opened(address: str) -> http.client.HTTPResponse:
    request = urllib.request.Request(address, headers={"User-Agent": f"isoscale/{__version__}"})
    try:
        return urllib.request.urlopen(request, timeout=TIMEOUT)
    except (OSError, http.client.HTTPException) as error:
        raise Unusable(_reason(error)) from None


def _body(response: http.client.HTTPResponse, report: Callable[[int, int | None], None]) -> Iterator[bytes]:
    """What an address gives, piece by piece and to the end."""
    done, total = 0, response.length
    try:
        while chunk := response.read(CHUNK):
            done += len(chunk)
            report(done, total)
            yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise Unusable(_reason(error)) from None
    if total is not None and done < total:
        raise Unusable(f"the connection ended after {done:,} of {total:,} bytes")


def _reason(error: Exception) -> str:
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, TimeoutError):
        return f"no answer for {TIMEOUT:.0f} s"
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    return str(getattr(cause, "strerror", None) or cause)
