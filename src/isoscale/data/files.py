"""Files of data sets: where they lie, and whether they are what they should be."""

import gzip
import hashlib
import os
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from isoscale.errors import UserError

DATA_VARIABLE = "ISOSCALE_DATA"
GZIP_SUFFIX = ".gz"
GZIP_MAGIC = b"\x1f\x8b"
CHUNK = 1 << 20
DAY = 86400.0


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
