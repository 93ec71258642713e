"""Which files a path, a pattern, a folder or a list of them stands for."""

import difflib
import glob
import re
from collections.abc import Sequence
from pathlib import Path

from isoscale.errors import UserError

MOST_NAMES = 5


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


def natural(path: Path) -> list[tuple[int, str]]:
    """A key that sorts numbers by their value."""
    words = re.split(r"(\d+)", str(path))
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]


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
