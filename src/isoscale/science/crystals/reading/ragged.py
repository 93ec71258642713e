"""Structures as samples: unpadded batches of atoms, in the words of PyTorch Geometric."""

from typing import Any

import numpy as np

from isoscale.data.ragged import Level, RaggedSource
from isoscale.science.crystals.reading.table import StructureTable


class TableSource(RaggedSource):
    """A source that knows the structures that it was made of."""

    table: StructureTable


def source_of(table: StructureTable) -> TableSource:
    """A source of structures without edges: `z, pos, batch, cell, pbc` and the targets.

    A target that only some structures have comes with `has_NAME`.
    """
    rows: dict[str, Any] = {"cell": table.cells, "pbc": table.pbc}
    atoms: dict[str, Any] = {"z": table.numbers, "pos": table.positions}
    for name, target in table.targets.items():
        (rows if target.per == "structure" else atoms)[name] = target.values
        if not target.has.all():
            rows[f"has_{name}"] = target.has.astype(np.uint8)
    level = Level(table.counts, atoms)
    found = TableSource(rows, {"atoms": level}, members={"atoms": "batch"}, locate=table.places)
    found.table = table
    return found
