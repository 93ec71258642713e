"""Converters: what reads other files, so that `isoscale data make` can write their rows as data files.

A converter is a function of a path, or a class that is built with arguments and then called with a path. It yields
blocks of rows: dicts of arrays that share their first dimension, with the same names, shapes and types every time.

    def read(path: Path, scale: float = 1.0):
        for chunk in my_format(path):
            yield {"input": chunk.features * scale, "target": chunk.energy}

`isoscale data make my_module:read a.dat b.dat --out DIR scale=2` calls it for each file and writes `DIR/a.input.npy`,
`DIR/a.target.npy` and so on, so that `DIR/*.input.npy` is a column of the component `files`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from isoscale.data.columns import BLOCK_BYTES, Array, row_bytes
from isoscale.data.formats.checks import number_type
from isoscale.data.formats.opening import dataset_names, open_column
from isoscale.data.formats.text import text_blocks, text_names
from isoscale.errors import UserError

Block = Mapping[str, Array]
"""Some rows: arrays by name."""
Converter = Callable[[Path], Iterable[Block]]


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
