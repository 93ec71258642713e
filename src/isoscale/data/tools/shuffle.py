"""Shuffle the rows of `.npy` files into new files: every row once, in any number of files, in little memory.

The rows of all files of a column count as one long column, and all columns follow the same permutation, which is a
function of the seed alone. The new files are written in order, a chunk at a time, each chunk gathered from everywhere
in the old ones. They are written aside, with a note of how many rows are safe on the disk, so that a shuffle that was
killed goes on when it is started again and ends with the same bytes.
"""

import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from isoscale.data.columns import Array, Joined, Rows, row_bytes
from isoscale.data.files import natural
from isoscale.data.formats.checks import check_not_cut
from isoscale.data.formats.writing import write_npy_header
from isoscale.data.order import Order
from isoscale.data.shards import cut
from isoscale.errors import UserError
from isoscale.system.files import write_aside

PURPOSE = "shuffle files"
PIECES = 8
"""A chunk is gathered in so many pieces, so that little more than the chunk itself is in memory."""
INDEX_BYTES = 40
"""Memory for the place of one row, while a chunk is put in order."""
STATE = "state.json"
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}

Report = Callable[[int, int], None]
"""Told how many bytes are written, and how many there will be."""


def shuffle_files(
    patterns: Sequence[str | Path],
    out: str | Path,
    files: int | None = None,
    seed: int = 0,
    memory: int | str = "1GB",
    sample_dims: int = 1,
    report: Report = lambda done, total: None,
) -> list[Path]:
    """Shuffle the rows of `.npy` files, one pattern per column, into `files` new ones (as many as there were).

    `"Be_snapshot*.in.npy"` is a column whose files differ at the `*`; with `out="Be_shuffled*"` it becomes
    `Be_shuffled0.in.npy`, `Be_shuffled1.in.npy`, … `[0-2]` in place of the `*` takes some of the files. All dimensions
    but the last `sample_dims` count rows.
    """
    columns = Columns([Pattern.of(pattern) for pattern in patterns], sample_dims)
    output = Output(Pattern.of(out, is_output=True), columns, files or columns.num_files, seed)
    if not output.is_done:
        output.prepare()
        with output.explained():
            output.write(num_bytes(memory), report)
            output.put_in_place()
    return output.paths


def num_bytes(text: int | str) -> int:
    """A number of bytes as people write it: 200MB, 1.5GB."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)b?", str(text).strip().lower())
    if found is None:
        raise UserError(f"cannot read {text!r} as an amount of memory: write it like 500MB or 2GB")
    return int(float(found[1]) * _UNITS[found[2]])


class Pattern(NamedTuple):
    """Names of files that differ in one place."""

    folder: Path
    prefix: str
    suffix: str
    between: str = "*"
    """What may stand there: any text, or one character of `[0-2]`."""

    @classmethod
    def of(cls, text: str | Path, is_output: bool = False) -> "Pattern":
        """Read a pattern, which has one `*` or one `[0-2]`, in the name of the file."""
        path = Path(text)
        places = re.findall(r"\*" if is_output or "*" in path.name else r"\[[^]]+\]", path.name)
        if len(places) != 1 or "*" in str(path.parent):
            example = 'write "Be_snapshot*.in.npy", in quotes, or "Be_snapshot[0-2].in.npy" for some of them'
            raise UserError(
                f"{text} should have one *, where the names of the files differ: "
                + ('--out "Be_shuffled*"' if is_output else example)
            )
        prefix, suffix = path.name.split(places[0])
        if not is_output and not suffix.endswith(".npy"):
            raise UserError(f"{text} should end in .npy: other files cannot be shuffled")
        if is_output and suffix:
            raise UserError(f"--out {text} should end with the *: what follows is taken from each column")
        return cls(path.parent, prefix, suffix, places[0])

    def files(self) -> dict[str, Path]:
        """What is there, by the text that stands for the `*`; numbers are in the order of their size."""
        if not self.folder.is_dir():
            raise UserError(f"there is no folder {self.folder}")
        shortest = len(self.prefix) + len(self.suffix)
        found = {
            path.name[len(self.prefix) : len(path.name) - len(self.suffix)]: path
            for path in self.folder.iterdir()
            if path.name.startswith(self.prefix) and path.name.endswith(self.suffix) and len(path.name) >= shortest
        }
        chosen = {text: path for text, path in found.items() if fnmatchcase(text, self.between)}
        return dict(sorted(chosen.items(), key=lambda item: natural(item[0])))

    def __str__(self) -> str:
        """As it was written."""
        return str(self.folder / f"{self.prefix}{self.between}{self.suffix}")


class NpyRows:
    """One `.npy` file as rows, read through a memory map.

    Not the column that training reads: a shuffled file keeps the stored type, byte order included, and text and arrays
    in Fortran's order can be shuffled though not trained on.
    """

    def __init__(self, path: Path, num_row_dims: int) -> None:
        """The first `num_row_dims` dimensions count rows."""
        array = open_array(path)
        self.name = str(path)
        self.grid, self.row_shape = array.shape[:num_row_dims], array.shape[num_row_dims:]
        self.num_rows = int(np.prod(self.grid))
        self.dtype = array.dtype
        # To reshape an array in Fortran's order would read all of it.
        self._is_flat = array.flags.c_contiguous
        self._array = array.reshape(self.num_rows, *self.row_shape) if self._is_flat else array
        self._memory, self._end = getattr(array, "_mmap", None), path.stat().st_size

    def take(self, rows: Rows) -> Array:
        """The rows asked for, in the order asked."""
        if self._memory is not None:
            check_not_cut(self.name, self._memory.size(), self._end)
        return self._array[rows] if self._is_flat else self._array[np.unravel_index(rows, self.grid)]


def open_array(path: Path) -> Array:
    """The array of a file, of which only what is asked for is read."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"cannot read {path} as a .npy file of numbers: {error}") from None


class Columns:
    """What is shuffled: columns by the end of their files' names, with the same rows."""

    def __init__(self, patterns: Sequence[Pattern], sample_dims: int) -> None:
        """Look at the files of every pattern; nothing is read but their shapes."""
        self.patterns = list(patterns)
        self.files = {pattern.suffix: pattern.files() for pattern in patterns}
        self._check_names()
        self.num_row_dims = self._count_row_dims(sample_dims)
        parts = {
            suffix: [NpyRows(path, self.num_row_dims) for path in files.values()]
            for suffix, files in self.files.items()
        }
        _check_rows(parts)
        self.by_suffix = {suffix: Joined(column) for suffix, column in parts.items()}
        first = next(iter(parts.values()))
        self.num_files = len(first)
        self.num_rows = sum(part.num_rows for part in first)

    def _check_names(self) -> None:
        if len(self.files) != len(self.patterns):
            raise UserError(
                "two patterns have the same end, so that their columns would be written to the same files: "
                + ", ".join(map(str, self.patterns))
            )
        first, keys = self.patterns[0], set(self.files[self.patterns[0].suffix])
        for pattern in self.patterns:
            own = set(self.files[pattern.suffix])
            if not own:
                raise UserError(f"no file is called {pattern}")
            if own != keys:
                odd = sorted(own ^ keys, key=natural)[0]
                there, missing = (pattern, first) if odd in own else (first, pattern)
                name = missing.folder / f"{missing.prefix}{odd}{missing.suffix}"
                raise UserError(f"{name} is missing: {there} has {len(self.files[there.suffix])} files, one of them "
                                f"for {odd!r}, and every column needs the same")  # fmt: skip

    def _count_row_dims(self, sample_dims: int) -> int:
        """Columns have the dimensions that count rows in common; a sample of some has fewer of its own."""
        shapes = {path: open_array(path).shape for files in self.files.values() for path in [*files.values()][:1]}
        num_row_dims = max(map(len, shapes.values())) - sample_dims
        for path, shape in shapes.items():
            if not 0 < num_row_dims <= len(shape):
                raise UserError(f"{path} has the shape {shape}, but the first {num_row_dims} dimensions of every file "
                                f"should count rows; --sample-dims says how many belong to a sample")  # fmt: skip
        return num_row_dims

    @property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of a row of each column."""
        return {suffix: row_bytes(column) for suffix, column in self.by_suffix.items()}

    def fingerprint(self) -> dict[str, Any]:
        """Name, size and time of every file."""
        return {suffix: _stamps(files.values()) for suffix, files in self.files.items()}


def _check_rows(parts: Mapping[str, Sequence[NpyRows]]) -> None:
    """Rows belong together by their place, so that every snapshot needs the same grid in all columns."""
    for same in zip(*parts.values(), strict=True):
        for part in same[1:]:
            if part.grid != same[0].grid:
                raise UserError(
                    f"{part.name} has {part.num_rows:,} rows {part.grid}, but {same[0].name} has "
                    f"{same[0].num_rows:,} {same[0].grid}; rows at the same place belong together"
                )


def _stamps(paths: Any) -> dict[str, list[int]]:
    return {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in paths}


class Output:
    """The shuffled files: written aside, then put in place."""

    def __init__(self, pattern: Pattern, columns: Columns, num_files: int, seed: int) -> None:
        """`num_files` files of each column, as equal in length as can be."""
        if not 0 < num_files <= columns.num_rows:
            raise UserError(f"cannot write {columns.num_rows:,} rows into {num_files:,} files: "
                            f"use --files {columns.num_rows} or fewer")  # fmt: skip
        self._columns = columns
        self._pattern = pattern
        self._order = Order(columns.num_rows, seed, purpose=PURPOSE)
        self._ranges = cut(columns.num_rows, num_files)
        name = pattern.prefix or "files"
        self._aside = pattern.folder / f".{name}.unfinished"
        self._manifest = pattern.folder / f"{name}.shuffle.json"
        self._plan = {"seed": seed, "files": num_files, "from": columns.fingerprint(), "row_dims": columns.num_row_dims}
        self._state: dict[str, Any] = {"plan": self._plan, "rows": 0, "placing": False}
        # Files that a pattern would find the next time would be shuffled with themselves.
        for source in self._columns.patterns:
            same_folder = source.folder.resolve() == self._pattern.folder.resolve()
            if same_folder and self._pattern.prefix.startswith(source.prefix):
                raise UserError(f"the new files, {self._pattern}, would be found by {source} too: use another --out")

    @property
    def paths(self) -> list[Path]:
        """The files, column by column."""
        numbers = range(len(self._ranges))
        return [self._path(self._pattern.folder, suffix, number)
                for suffix in self._columns.by_suffix for number in numbers]  # fmt: skip

    def _path(self, folder: Path, suffix: str, number: int) -> Path:
        return folder / f"{self._pattern.prefix}{number}{suffix}"

    @property
    def is_done(self) -> bool:
        """Whether this very shuffle was finished before, and nothing of it changed since."""
        made = _read_json(self._manifest)
        files = [path for path in self.paths if path.exists()]
        is_whole = made.get("plan") == self._plan and made.get("files") == _stamps(files)
        return is_whole and not (self._aside / STATE).exists()

    def prepare(self) -> None:
        """Refuse what would lose somebody's files or work, or cannot fit; go on where an earlier start ended."""
        self._check_foreign()
        if self._aside.exists():
            self._continue()
        with self.explained():
            self._check_space()
            self._aside.mkdir(parents=True, exist_ok=True)
            self._save_state()

    def _check_foreign(self) -> None:
        patterns = (self._pattern._replace(suffix=suffix) for suffix in self._columns.by_suffix)
        there = (pattern.files() for pattern in patterns if pattern.folder.is_dir())
        numbered = {path for files in there for text, path in files.items() if text.isdecimal()}
        foreign = sorted(numbered - set(self._made()))
        if foreign:
            raise UserError(
                f"{foreign[0]} is there already and was not made, or not left as it was, by `isoscale data shuffle`; "
                "move it away, or use another --out"
            )

    def _made(self) -> list[Path]:
        """Files that an earlier shuffle made and nobody changed."""
        folder = self._pattern.folder
        stamps = _read_json(self._manifest).get("files", {})
        there = [folder / name for name in stamps if (folder / name).exists()]
        return [path for path in there if _stamps([path])[path.name] == stamps[path.name]]

    def _continue(self) -> None:
        state = _read_json(self._aside / STATE)
        if state.get("plan") == self._plan:
            self._state = state
        elif state.get("rows", 0) == 0:
            shutil.rmtree(self._aside)  # nothing is lost
        else:
            raise UserError(
                f"{self._aside} holds an unfinished shuffle of other files, another seed or another number of files; "
                f"finish that one first, or give it up: rm -r {self._aside}"
            )

    def _check_space(self) -> None:
        total = sum(self._columns.row_bytes.values()) * self._columns.num_rows
        there = sum(path.stat().st_size for path in self._aside.glob("*"))
        nearest = next(folder for folder in self._aside.absolute().parents if folder.exists())
        free = shutil.disk_usage(nearest).free
        if not self._state["placing"] and total - there > free:
            raise UserError(f"{self._pattern.folder} has {free / 1e9:.1f} GB free, but the shuffled files need "
                            f"{(total - there) / 1e9:.1f} GB; free some space, or use another --out")  # fmt: skip

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Say what is safe when the disk is full or may not be written."""
        try:
            yield
        except OSError as error:
            rows = f"{self._state['rows']:,} of {self._columns.num_rows:,} rows are written"
            raise UserError(
                f"cannot write into {self._pattern.folder}: {error.strerror or error}; {rows} and kept. Free space "
                "or permission is needed there; then start the same command again: it goes on where it stopped"
            ) from error

    def write(self, memory: int, report: Report) -> None:
        """Write aside what is not there yet, a chunk after the other."""
        widths = self._columns.row_bytes
        most = max(1, int(memory / (max(widths.values()) * (1 + 2 / PIECES) + INDEX_BYTES)))
        row_width = sum(widths.values())
        for number, (start, stop) in enumerate(self._ranges):
            for first in range(max(start, self._state["rows"]), stop, most):
                report(first * row_width, self._columns.num_rows * row_width)
                end = min(stop, first + most)
                self._write_chunk(number, first, end)
                self._state["rows"] = end
                self._save_state()
        report(self._columns.num_rows * row_width, self._columns.num_rows * row_width)

    def _write_chunk(self, number: int, first: int, end: int) -> None:
        """Rows `first` to `end` of the shuffled ones, all in the file `number`."""
        start, stop = self._ranges[number]
        rows = self._order.indices(first, end - first).numpy()
        by_place = np.argsort(rows)
        for suffix, column in self._columns.by_suffix.items():
            head = io.BytesIO()
            write_npy_header(head, column.dtype, (stop - start, *column.row_shape))
            path = self._path(self._aside, suffix, number)
            with open(path, "r+b" if path.exists() else "w+b") as file:
                file.write(head.getvalue())
                file.seek(head.tell() + (first - start) * row_bytes(column))
                file.write(_gathered(column, rows, by_place).reshape(-1).view(np.uint8).data)
                file.flush()
                os.fsync(file.fileno())

    def _save_state(self) -> None:
        write_aside(self._aside / STATE, json.dumps(self._state, indent=1))

    def put_in_place(self) -> None:
        """Give the files their names, in place of what an earlier shuffle made."""
        if not self._state["placing"]:
            self._check_foreign()
            for path in self._made():
                path.unlink()
            written = [self._aside / path.name for path in self.paths]
            write_aside(self._manifest, json.dumps({"plan": self._plan, "files": _stamps(written)}, indent=1))
            self._state["placing"] = True
            self._save_state()
        for path in self.paths:
            if (self._aside / path.name).exists():
                (self._aside / path.name).replace(path)
        shutil.rmtree(self._aside)


def _gathered(column: Joined, rows: Rows, by_place: Rows) -> Array:
    """Rows in the order asked, read in the order in which they lie in the files."""
    found = np.empty((len(rows), *column.row_shape), column.dtype)
    size = -(-len(rows) // PIECES)
    for start in range(0, len(rows), size):
        mine = by_place[start : start + size]
        found[mine] = column.take(rows[mine])
    return found


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
