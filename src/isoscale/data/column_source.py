"""A source over columns of files, in whichever formats they are."""

from collections.abc import Mapping

from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.data.columns import Column, as_tensor, row_bytes
from isoscale.data.formats.views import place
from isoscale.errors import UserError


class ColumnSource:
    """Samples in files: one row of each column."""

    on_disk = True
    is_rows = True

    def __init__(self, columns: Mapping[str, Column]) -> None:
        """Columns by name, all of the same number of rows."""
        self.columns = dict(columns)
        lengths = {name: column.num_rows for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            found = ", ".join(f"{name} has {count:,} ({columns[name].name})" for name, count in lengths.items())
            raise UserError(f"every column needs one row per sample, but {found}")
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        """Number of samples."""
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes of all samples, as stored."""
        return self._length * sum(row_bytes(column) for column in self.columns.values())

    def fetch(self, indices: Tensor) -> Batch:
        """The samples at `indices`, read from the files."""
        rows = indices.numpy()
        return {name: as_tensor(column.take(rows)) for name, column in self.columns.items()}

    def locate(self, index: int) -> str:
        """The files that a sample is in, and its row there."""
        places = (place(column, index) for column in self.columns.values())
        return " and ".join(dict.fromkeys(f"{file}, row {row}" for file, row in places))
