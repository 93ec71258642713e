"""LMDB: one record a sample, as graph and molecule toolkits write them."""

import os
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.data.formats.checks import check_length, check_not_cut, library
from isoscale.data.safe_pickle import loads
from isoscale.errors import UserError

_OPEN: WeakValueDictionary[tuple[str, int], Any] = WeakValueDictionary()
"""By path and process; closed with the last source that reads it."""


class LmdbSource:
    """Records of an LMDB file, each a pickled dict of arrays and numbers.

    Only arrays and plain containers are rebuilt; a record that asks for anything else is refused, and nothing is run.
    """

    on_disk = True
    is_rows = True

    def __init__(self, path: Path) -> None:
        """The records under whole numbers, in their order; where there are none, all records in the order of keys."""
        self._path = str(path.resolve())
        self.files = [self._path]
        self._environment: Any = None
        self._process: int | None = None
        self._file = str(path / "data.mdb" if path.is_dir() else path.resolve())
        opened = self._opened()
        self._end = (opened.info()["last_pgno"] + 1) * opened.stat()["psize"]
        check_length(path, min(os.stat(self._file).st_size, self._end), self._end)
        with opened.begin() as transaction:
            keys = [bytes(key) for key in transaction.cursor().iternext(values=False)]
        numbered = sorted((key for key in keys if key.isdigit()), key=int)
        self._keys = numbered or keys
        if not self._keys:
            raise UserError(f"{path} has no records")

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._keys)

    def fetch(self, indices: Tensor) -> Batch:
        """The samples at `indices`, whose arrays must agree in shape."""
        check_not_cut(self._path, os.stat(self._file).st_size, self._end)  # to touch what is gone would end the process
        with self._opened().begin(buffers=True) as transaction:
            samples = [self._sample(transaction, self._keys[index]) for index in indices.tolist()]
        return {name: self._stacked(samples, name) for name in samples[0]}

    def locate(self, index: int) -> str:
        """The record of a sample."""
        return f"{self._path}, record {self._keys[index].decode()}"

    def _sample(self, transaction: Any, key: bytes) -> dict[str, Any]:
        try:
            sample = loads(transaction.get(key))
        except Exception as error:
            raise UserError(f"{self._path}, record {key.decode()}: {error}") from None
        if not isinstance(sample, dict):
            found = type(sample).__name__
            raise UserError(f"{self._path}, record {key.decode()} is a {found}, expected a dict of arrays")
        return sample

    def _stacked(self, samples: list[dict[str, Any]], name: str) -> Tensor | list[Any]:
        try:
            values = [sample[name] for sample in samples]
        except KeyError:
            raise UserError(f'{self._path}: some records have "{name}" and others have not') from None
        if any(isinstance(value, str | bytes | dict | list | tuple) for value in values):
            return values
        # By way of numpy, which keeps a number in double precision.
        tensors = [value if isinstance(value, Tensor) else torch.from_numpy(np.array(value)) for value in values]
        shapes = sorted({tuple(tensor.shape) for tensor in tensors})
        if len(shapes) > 1:
            listed = ", ".join(map(str, shapes[:4])) + (", …" if len(shapes) > 4 else "")
            raise UserError(
                f'{self._path}: "{name}" has samples of different shapes ({listed}), which do not make one batch; '
                "sizes that vary need a source of their own"
            )
        return torch.stack(tensors)

    def _opened(self) -> Any:
        if self._process != os.getpid():
            self._environment, self._process = _environment(self._path), os.getpid()
        return self._environment

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_environment": None, "_process": None}


def _environment(path: str) -> Any:
    """The open file; LMDB allows a process to open it only once, so that all who read it share it."""
    lmdb, process = library("lmdb", path), os.getpid()
    for (known, owner), environment in list(_OPEN.items()):
        if known == path and owner != process:  # of the process that this one was forked from, where it stays open
            environment.close()
    try:
        found = _OPEN.get((path, process)) or lmdb.open(
            path, subdir=Path(path).is_dir(), readonly=True, lock=False, readahead=False
        )
        return _OPEN.setdefault((path, process), found)
    except lmdb.Error as error:
        raise UserError(f"{path} is not a readable LMDB file: {error}") from None
