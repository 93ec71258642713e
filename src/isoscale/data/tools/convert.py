"""Write what converters read: streaming, whole or not at all, and with a manifest of what was made of what."""

import hashlib
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from isoscale.data.columns import Array
from isoscale.data.files import sha256, sweep, writing_into
from isoscale.data.formats.checks import check_numbers
from isoscale.data.formats.writing import WRITERS, Writer
from isoscale.data.tools.converters import Converter
from isoscale.errors import UserError

MANIFEST = "manifest.json"
ASIDE = ".making-"


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
    _check_stems(inputs)
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
        _write_manifest(folder, manifest)
        yield Made(source, entry["rows"], is_new=True)


def _check_stems(inputs: Sequence[Path]) -> None:
    seen: dict[str, Path] = {}
    for source in inputs:
        if seen.setdefault(source.stem, source) != source:
            raise UserError(
                f"{seen[source.stem]} and {source} would be written under the same name; rename one of them"
            )


def _is_done(folder: Path, known: dict[str, Any], origin: dict[str, Any], how: dict[str, Any]) -> bool:
    is_same = known["sha256"] == origin["sha256"] and known["made_by"] == how
    return is_same and all(_size(folder / name) == size for name, size in known["files"].items())


def _size(path: Path) -> int | None:
    """Bytes of a file, or of all files of a store."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size if path.exists() else None


def _convert(
    source: Path, folder: Path, converter: Converter, format_name: str, known: dict[str, Any] | None
) -> dict[str, Any]:
    """Write aside, and give the files their names only when they are whole."""
    with _aside(folder) as aside:
        writer: Writer = WRITERS[format_name](aside, source.stem)
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
    return {"rows": num_rows, "files": {path.name: _size(folder / path.name) for path in written}}


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


def _write_manifest(folder: Path, inputs: Mapping[str, Any]) -> None:
    with _aside(folder) as aside, writing_into(folder), (aside / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump({"inputs": inputs}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
        (aside / MANIFEST).replace(folder / MANIFEST)


@contextmanager
def _aside(folder: Path) -> Iterator[Path]:
    """A folder beside the target, so that a rename is all that is left to do."""
    with tempfile.TemporaryDirectory(prefix=ASIDE, dir=folder) as aside:
        yield Path(aside)
