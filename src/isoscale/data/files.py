"""Files of data sets: where they lie, which ones a pattern stands for, and whether they are what they should be."""

import difflib
import glob
import gzip
import hashlib
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath

from isoscale.errors import UserError

DATA_VARIABLE = "ISOSCALE_DATA"
GZIP_SUFFIX = ".gz"
GZIP_MAGIC = b"\x1f\x8b"
CHUNK = 1 << 20
DAY = 86400.0
MOST_NAMES = 5


def data_folder() -> Path:
    """The folder of all data sets: `$ISOSCALE_DATA`, or `data` in the working directory."""
    return Path(os.environ.get(DATA_VARIABLE) or "data").expanduser()


def find(folder: Path, name: str) -> Path | None:
    """A file in a folder, under its name or compressed."""
    for path in (folder / name, folder / (name + GZIP_SUFFIX)):
        if path.is_file():
            return path
    return None


def find_all(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Those files of a folder that are there, by name."""
    found = {name: find(folder, name) for name in names}
    return {name: path for name, path in found.items() if path is not None}


def is_gzip(path: Path) -> bool:
    """Whether a file is compressed, by what is in it: names are changed on the way."""
    with path.open("rb") as file:
        return file.read(2) == GZIP_MAGIC


def chunks(path: Path) -> Iterable[bytes]:
    """The uncompressed content of a file, piece by piece."""
    with gzip.open(path) if is_gzip(path) else path.open("rb") as file:
        while chunk := file.read(CHUNK):
            yield chunk


def sha256(path: Path) -> str | None:
    """The hash of the uncompressed content, so that it is the same for every way of packing; None if it is damaged."""
    digest = hashlib.sha256()
    try:
        for chunk in chunks(path):
            digest.update(chunk)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return None
    return digest.hexdigest()


def is_right(path: Path, expected: str) -> bool:
    """Whether the hash of a file begins as expected; a published hash may be its beginning only."""
    found = sha256(path)
    return found is not None and found.startswith(expected)


def wrong_files(found: Mapping[str, Path], expected: Mapping[str, str]) -> list[Path]:
    """The files whose content is not what it should be."""
    return [path for name, path in found.items() if not is_right(path, expected[name])]


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Turn an operating system's refusal to write into a folder into an error that says what is needed."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write into {folder}: {reason}. Free space or permission is needed there.") from error


def sweep(folder: Path, prefix: str) -> None:
    """Remove what commands that were killed long ago left behind."""
    for old in folder.glob(f"{prefix}*"):
        if time.time() - old.stat().st_mtime > DAY:
            shutil.rmtree(old, ignore_errors=True)


def find_files(path: str | Sequence[str], suffixes: Sequence[str]) -> list[Path]:
    """The files, in natural order inside a pattern or folder: snapshot2 before snapshot10."""
    if not isinstance(path, str):
        return [file for one in path for file in find_files(one, suffixes)]
    place = Path(path).expanduser()
    if place.is_dir() and not is_store(place):
        found = [file for file in place.iterdir() if file.suffix.lower() in suffixes]
    elif place.exists():
        return [place]
    else:
        found = [Path(file) for file in glob.glob(str(place), recursive=True)]
    if not found:
        raise UserError(_nothing(place))
    return sorted(found, key=natural)


def is_store(path: Path) -> bool:
    """Whether a folder is one thing: a Zarr store or an LMDB database."""
    marks = (".zarray", ".zgroup", "zarr.json", "data.mdb")
    return path.is_dir() and (path.suffix == ".zarr" or any((path / mark).exists() for mark in marks))


def disk_bytes(path: Path) -> int:
    """Bytes of a file, or of all files of a store together."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size


def natural(path: Path | str) -> list[tuple[int, str]]:
    """A key that sorts numbers by their value."""
    words = re.split(r"(\d+)", str(path))
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]


def short_names(paths: Sequence[str]) -> list[str]:
    """The last words of paths, as many as it takes to tell them apart."""
    words = [PurePath(path.replace("#", "/")).parts for path in paths]
    for count in range(1, max(map(len, words)) + 1):
        names = ["/".join(part.strip("/") for part in each[-count:]).lstrip("/") for each in words]
        if len(set(names)) == len(names):
            return names
    return [f"{name} {number}" for number, name in enumerate(names)]  # one system, given several times


def _nothing(place: Path) -> str:
    """What is missing, and what is there instead."""
    if place.is_dir():
        return f"the folder {place} holds no data file"
    folder = place.parent
    while not folder.is_dir():
        folder = folder.parent
    names = [path.name for path in sorted(folder.iterdir(), key=natural)]
    wanted = place.relative_to(folder).parts[0]
    near = difflib.get_close_matches(wanted, names, MOST_NAMES, 0.5) or names[:MOST_NAMES]
    what = "no file matches" if glob.has_magic(str(place)) else "there is no file"
    return f"{what} {place}; in {folder.absolute()} there is {', '.join(near) or 'nothing'}"
