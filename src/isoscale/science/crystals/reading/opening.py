"""Files of structures: which ones a path stands for, and the reader of each."""

import glob
import os
import re
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from isoscale.data.files import find_files, is_store, natural
from isoscale.errors import UserError
from isoscale.science.crystals.reading import lmdb_records, npz
from isoscale.science.crystals.reading.ase_files import read_database, read_with_ase
from isoscale.science.crystals.reading.extxyz import read_extxyz
from isoscale.science.crystals.reading.found import Found

SUFFIXES = (
    ".extxyz",
    ".xyz",
    ".cif",
    ".traj",
    ".vasp",
    ".poscar",
    ".db",
    ".json",
    ".lmdb",
    ".npz",
    ".xsf",
    ".cfg",
    ".res",
)
"""Names of files in a folder that hold structures; a file that is named itself may end as it likes."""
VASP = (r"vasprun.*\.xml", r"OUTCAR.*", r"CONTCAR.*", r"POSCAR.*")
"""Of one calculation in a folder, the first of these is read: it says the most."""
COMPRESSED = (".gz", ".bz2", ".xz")


def open_files(paths: str | Sequence[str], advice: str = "") -> list[Found]:
    """What is in files, folders and patterns, in the order given; `advice` is for who has none there."""
    listed = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not listed:
        raise UserError(f"no file is named{f'; {advice}' if advice else ''}")
    return [read_file(file) for path in listed for file in files_at(str(path), advice)]


def files_at(path: str, advice: str = "") -> list[Path]:
    """The files that a path stands for: itself, those below a folder, or those that fit a pattern."""
    place = Path(path).expanduser()
    if place.is_dir() and not is_store(place):
        found = list(_below(place))
        if not found:
            raise UserError(
                f"the folder {place} and those in it hold no structures: looked for {', '.join(SUFFIXES)}, "
                "vasprun.xml, OUTCAR, CONTCAR and POSCAR"
            )
        return found
    try:
        files = find_files(str(place), SUFFIXES)
    except UserError as error:
        raise UserError(f"{error}{f'; {advice}' if advice else ''}") from None
    if glob.has_magic(str(place)) and not place.exists():
        return [each for file in files for each in (files_at(str(file)) if file.is_dir() else [file])]
    return files


def _below(folder: Path) -> Iterator[Path]:
    """Files of structures in a folder and below it, also behind links, each folder once."""
    seen: set[str] = set()
    for where, inside, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(where)
        stores = sorted((name for name in inside if is_store(Path(where, name))), key=natural)
        inside[:] = [] if real in seen else sorted(set(inside) - set(stores), key=natural)
        if real not in seen:
            yield from (path for name in stores if recognises(path := Path(where, name)))
            yield from _chosen(Path(where), sorted(names, key=natural))
        seen.add(real)


def _chosen(folder: Path, names: Sequence[str]) -> list[Path]:
    vasp = next((found for kind in VASP if (found := [name for name in names if re.fullmatch(kind, name)])), [])
    others = [name for name in names if _ending(name) in SUFFIXES and recognises(folder / name)]
    return [folder / name for name in [*vasp, *others]]


def _ending(name: str) -> str:
    plain = name.lower()
    for ending in COMPRESSED:
        plain = plain.removesuffix(ending)
    return Path(plain).suffix


def read_file(path: Path) -> Found:
    """All structures of a file, by the reader of its kind; one without any is refused."""
    if not path.exists():
        raise UserError(f"there is no file {path}")
    if path.is_file() and not path.stat().st_size:
        raise UserError(f"{path} is empty")
    try:
        found = _reader(path)(path)
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read: {error}; it may be damaged, or not yours to read") from None
    if not found.structures:
        raise UserError(f"{path} holds no structure")
    return found


def _reader(path: Path) -> Callable[[Path], Found]:
    ending = path.suffix.lower()
    if is_store(path) or ending == ".lmdb":
        return lmdb_records.read_lmdb
    if _ending(path.name) in (".extxyz", ".xyz") and ending not in (".bz2", ".xz"):
        return read_extxyz
    if ending == ".npz":
        return npz.read_npz
    if ending == ".db" or (ending == ".json" and _is_ase_json(path)):
        return read_database
    return read_with_ase


def recognises(path: Path) -> bool:
    """Whether a file, or a folder of them, holds structures, as far as a look at its name or beginning tells."""
    if path.is_dir() and not is_store(path):
        return next(_below(path), None) is not None
    ending = _ending(path.name)
    if is_store(path) or ending == ".lmdb":
        return lmdb_records.holds_structures(path)
    if ending == ".npz":
        return npz.holds_structures(path)
    if ending == ".json":
        return _is_ase_json(path)
    if ending == ".db":
        return _is_ase_sqlite(path)
    return ending in SUFFIXES or any(re.fullmatch(kind, path.name) for kind in VASP)


def _is_ase_json(path: Path) -> bool:
    """Whether a file is a database of ASE: rows under numbers, with cells and times."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            beginning = file.read(4096)
    except OSError:
        return False
    is_numbered = re.match(r'\s*\{\s*"\d+"\s*:\s*\{', beginning) is not None
    return is_numbered and any(f'"{key}"' in beginning for key in ("calculator", "cell", "ctime", "unique_id"))


def _is_ase_sqlite(path: Path) -> bool:
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    except sqlite3.Error:
        return False
    return {"systems", "number_key_values"} <= tables
