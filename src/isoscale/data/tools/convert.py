"""Convert files: what converters read is written as data files, whole or not at all, with a manifest of their origins.

A converter is a function of a path, or a class that is built with arguments and then called with a path. It yields
blocks of rows: dicts of arrays that share their first dimension, with the same names, shapes and types every time.

    def read(path: Path, scale: float = 1.0):
        for chunk in my_format(path):
            yield {"input": chunk.features * scale, "target": chunk.energy}

`isoscale data make my_module:read a.dat b.dat --out DIR scale=2` calls it for each file and writes `DIR/a.input.npy`,
`DIR/a.target.npy` and so on, so that `DIR/*.input.npy` is a column of the component `files`.
"""

import hashlib
import inspect
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from isoscale.data.columns import BLOCK_BYTES, Array, row_bytes
from isoscale.data.files import disk_bytes, sha256, sweep, writing_into
from isoscale.data.formats.checks import check_numbers, number_type
from isoscale.data.formats.opening import dataset_names, open_column
from isoscale.data.formats.text import text_blocks, text_names
from isoscale.data.formats.writing import WRITERS, Writer
from isoscale.errors import UserError
from isoscale.system.files import write_aside

Block = Mapping[str, Array]
"""Some rows: arrays by name."""
Converter = Callable[[Path], Iterable[Block]]
MANIFEST = "manifest.json"
ASIDE = ".making-"


def text(path: Path, dtype: str = "float32", **columns: str | list[str]) -> Iterator[Block]:
    """Columns of a text file by their names; `input=[x,y]` puts some of them together, `target=z` renames one."""
    names, stored = text_names(path), number_type(dtype, "dtype")
    if names is None:
        raise UserError(f"{path} has no line with a name for each column; write one, such as: x,y,energy")
    wanted = columns or {name: name for name in names}
    places = {key: _places(path, names, value) for key, value in wanted.items()}
    for block in text_blocks(path):
        yield {key: np.ascontiguousarray(block[:, place], stored) for key, place in places.items()}


def _places(path: Path, names: Sequence[str], wanted: str | list[str]) -> int | list[int]:
    missing = [name for name in ([wanted] if isinstance(wanted, str) else wanted) if name not in names]
    if missing:
        raise UserError(f'{path} has no column "{missing[0]}"; there is {", ".join(names)}')
    return names.index(wanted) if isinstance(wanted, str) else [names.index(name) for name in wanted]


def arrays(path: Path, **names: str) -> Iterator[Block]:
    """Arrays of an `.npz` or HDF5 file; `input=features` takes only those that are named, under new names."""
    wanted = names or {name.replace("/", "."): name for name in dataset_names(path) or []}
    if not wanted:
        raise UserError(f"{path} holds no arrays by name")
    columns = {name: open_column({"path": str(path), "dataset": dataset}) for name, dataset in wanted.items()}
    counts = {name: column.num_rows for name, column in columns.items()}
    num_rows = min(counts.values())
    if num_rows < max(counts.values()):
        raise UserError(f"{path}: the arrays differ in their number of rows ({counts}); name those that go together")
    size = max(1, BLOCK_BYTES // max(1, *map(row_bytes, columns.values())))
    for start in range(0, num_rows, size):
        places = np.arange(start, min(num_rows, start + size))
        yield {name: column.take(places) for name, column in columns.items()}


@dataclass(frozen=True)
class Making:
    """How files are made: a converter under its name, with its arguments, and the format that is written."""

    target: Callable[..., Any]
    name: str
    arguments: Mapping[str, Any]
    format: str

    def converter(self) -> Converter:
        """The converter, ready for a path."""
        if isinstance(self.target, type):
            return self.target(**self.arguments)
        return partial(self.target, **self.arguments)

    def plain(self) -> dict[str, Any]:
        """What decides the content; the converter's own code too, so that a changed one is run again."""
        code = inspect.getsourcefile(self.target)
        digest = hashlib.sha256(Path(code).read_bytes()).hexdigest() if code else None
        return {"converter": self.name, "code": digest, "arguments": dict(self.arguments), "format": self.format}


@dataclass(frozen=True)
class Made:
    """What became of one input."""

    source: Path
    num_rows: int
    is_new: bool
    """Whether it was converted just now; what was there and right is not made again."""


def make_files(inputs: Sequence[Path], folder: Path, making: Making) -> Iterator[Made]:
    """Convert each input into files in `folder`, and remember in a manifest what was made of what."""
    seen: dict[str, Path] = {}
    for path in inputs:
        if seen.setdefault(path.stem, path) != path:
            raise UserError(f"{seen[path.stem]} and {path} would be written under the same name; rename one of them")
    converter, how = making.converter(), making.plain()
    with writing_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder, ASIDE)
    manifest = _read_manifest(folder)
    for source in inputs:
        origin = {"source": str(source), "sha256": sha256(source), "bytes": source.stat().st_size}
        known = manifest.get(source.stem)
        if known is not None and _is_done(folder, known, origin, how):
            yield Made(source, known["rows"], is_new=False)
            continue
        entry = _convert(source, folder, converter, making.format, known)
        manifest[source.stem] = {**origin, "made_by": how, **entry}
        with writing_into(folder):
            write_aside(folder / MANIFEST, json.dumps({"inputs": manifest}, indent=1))
        yield Made(source, entry["rows"], is_new=True)


def _is_done(folder: Path, known: dict[str, Any], origin: dict[str, Any], how: dict[str, Any]) -> bool:
    files = {folder / name: size for name, size in known["files"].items()}
    is_whole = all(path.exists() and disk_bytes(path) == size for path, size in files.items())
    return is_whole and known["sha256"] == origin["sha256"] and known["made_by"] == how


def _convert(
    source: Path, folder: Path, converter: Converter, format_name: str, known: dict[str, Any] | None
) -> dict[str, Any]:
    """Write aside, and give the files their names only when they are whole."""
    with tempfile.TemporaryDirectory(prefix=ASIDE, dir=folder) as aside:
        writer: Writer = WRITERS[format_name](Path(aside), source.stem)
        num_rows = 0
        for rows in _checked(source, converter):
            with writing_into(folder):
                writer.add(rows)
            num_rows += len(next(iter(rows.values())))
        if not num_rows:
            raise UserError(f"the converter found no rows in {source}")
        with writing_into(folder):
            written = writer.close()
            for name in (known or {}).get("files", {}):
                _remove(folder / name)
            for path in written:
                _remove(folder / path.name)
                path.rename(folder / path.name)
    return {"rows": num_rows, "files": {path.name: disk_bytes(folder / path.name) for path in written}}


def _checked(source: Path, converter: Converter) -> Iterator[dict[str, Array]]:
    """The blocks of a converter, which must agree with each other."""
    first: dict[str, Any] | None = None
    try:
        for number, rows in enumerate(converter(source)):
            block = {str(name): np.asarray(values) for name, values in rows.items()}
            kinds = _kinds(block, f"{source}, block {number}")
            first = first or kinds
            if kinds != first:
                raise UserError(f"{source}, block {number} has {kinds}, but the first block had {first}")
            yield block
    except Exception as error:
        error.add_note(f"while converting {source}")
        raise


def _kinds(block: Mapping[str, Array], where: str) -> dict[str, Any]:
    """Shape of a row and type of each array of a block."""
    for name, values in block.items():
        check_numbers(f'"{name}" of {where}', values.dtype)
        if not name or "/" in name or values.ndim == 0:
            raise UserError(f'"{name}" of {where} is not an array of rows under a plain name')
    lengths = {name: len(values) for name, values in block.items()}
    if len(set(lengths.values())) != 1:
        raise UserError(f"{where}: every array needs one row per sample, found {lengths or 'no arrays'}")
    return {name: (values.shape[1:], str(values.dtype)) for name, values in block.items()}


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))["inputs"]) if path.exists() else {}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is not the manifest of this command; choose another folder, or remove it") from None
