"""Structures as graphs, and back: transforms of a recipe that prepare all data once, before training.

`periodic_edges` finds the neighbours, `point_cloud_to_graph` takes them, or finds some that know of no periodicity;
`graph_to_point_cloud` forgets them. The result has the keys of a batch of PyTorch Geometric, with edges sorted by where
messages go.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isoscale.data.ragged import Level, RaggedSource
from isoscale.data.sources import SPLITS, Sources, Subset
from isoscale.engine.task import TaskRanks
from isoscale.errors import UserError
from isoscale.science.atoms.cache import Say, say_first
from isoscale.science.crystals.edges import GraphSettings
from isoscale.science.crystals.graph_cache import Graphs, find_graphs, in_memory
from isoscale.science.crystals.reading.structure import Structure
from isoscale.science.crystals.reading.table import StructureTable

RESERVED = frozenset(
    {"z", "pos", "batch", "cell", "edge_source", "edge_target", "edge_shift", "by_source", "edge_index"}
)
"""Keys of a batch that no target may have."""
NUMBERS = {"edge_source": "atoms", "edge_target": "atoms", "by_source": "edges"}
"""Columns that number rows of a level."""
_EDGES, _GRAPH = "periodic_edges", "point_cloud_to_graph"


class StructureSource(RaggedSource):
    """Structures as a network reads them: atoms, targets and, where they were found, edges."""

    def __init__(
        self,
        table: StructureTable,
        edges: Level | None = None,
        graph: GraphSettings | None = None,
        partial: frozenset[str] = frozenset(),
        on_disk: bool = False,
    ) -> None:
        """Structures, with `edges` if there are any.

        `partial` names targets for which `has_NAME` is wanted though all structures of this table have them.
        """
        rows, atoms = columns_of(table, partial)
        levels = {"atoms": Level(table.counts, atoms)}
        numbers = {}
        if edges is not None:
            levels["edges"], numbers = edges, NUMBERS
        super().__init__(rows, levels, numbers, {"atoms": "batch"}, table.places, on_disk)
        self.table = table
        """The structures themselves."""
        self.graph = graph
        """How edges were found; None where there are none."""

    @property
    def names(self) -> Sequence[str]:
        """What each structure belongs to; empty where nothing says so."""
        return self.table.names


def columns_of(table: StructureTable, partial: frozenset[str] = frozenset()) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a batch has of each structure, and of each atom."""
    rows: dict[str, Any] = {"cell": table.cells}
    atoms: dict[str, Any] = {"z": table.numbers, "pos": table.positions}
    for name, target in table.targets.items():
        if name in RESERVED or name.startswith("has_"):
            raise UserError(f"a target cannot be called {name!r}, which batches use for something else: rename it")
        (rows if target.per == "structure" else atoms)[name] = target.values
        if name in partial or not target.has.all():
            rows[f"has_{name}"] = target.has.astype(np.uint8)
    return rows, atoms


class StructureSources(Sources):
    """Splits of structures, with what was done to them."""

    def __init__(
        self, sources: Mapping[str, StructureSource], graph: GraphSettings | None = None, done: tuple[str, ...] = ()
    ) -> None:
        """Sources by split; `done` names the transforms that made their edges."""
        super().__init__(**sources)
        self.graph, self.done = graph, done


class PeriodicEdges:
    """Edges between all atoms within a cutoff, through periodic images."""

    def __init__(
        self,
        cutoff: float = 6.0,
        adaptive_cutoff: bool = False,
        max_neighbors: int | None = None,
        limit: float = 30.0,
        allow_isolated: bool = False,
    ) -> None:
        """Distances are in Å.

        With `adaptive_cutoff` the cutoff of a structure grows by 0.5 Å until every atom has a neighbour, up to `limit`;
        without, an atom that has none is an error, unless `allow_isolated`. With both, a structure in which an atom is
        alone up to the limit keeps the cutoff. `max_neighbors` keeps the nearest so many edges to each atom, and those
        that are as long as the last of them (to 0.01 Å), because a shell of equal neighbours has no first one.
        """
        self.settings = GraphSettings(cutoff, adaptive_cutoff, max_neighbors, limit, allow_isolated).checked()

    def adapt(self, data: Any, ranks: TaskRanks, say: Say) -> StructureSources:
        """The data with edges, found by all ranks or in the cache."""
        done = _done(data)
        if _EDGES in done:
            raise UserError(f"{_EDGES} stands twice in data.transforms: leave one of them out")
        if _GRAPH in done:
            raise UserError(f"{_EDGES} comes after {_GRAPH} in data.transforms, but must come before it: it finds the "
                            "edges that the graph is made of")  # fmt: skip
        _tell(data, ranks, say)
        return graph_sources(tables_of(data, _EDGES), self.settings, ranks, say, (_EDGES,))


class PointCloudToGraph:
    """A graph of each structure: with the edges of `periodic_edges` before it, else with edges inside one cell."""

    def __init__(self, cutoff: float | None = None, allow_isolated: bool = False) -> None:
        """`cutoff` (Å) is needed, and used, only where `periodic_edges` does not come before."""
        self.settings = None if cutoff is None else GraphSettings(
            cutoff, allow_isolated=allow_isolated, periodic=False
        ).checked()  # fmt: skip

    def adapt(self, data: Any, ranks: TaskRanks, say: Say) -> StructureSources:
        """The data with edges."""
        done, settings = _done(data), self.settings
        if _GRAPH in done:
            raise UserError(f"{_GRAPH} stands twice in data.transforms: leave one of them out")
        if _EDGES in done:
            if settings is not None and settings.cutoff != data.graph.cutoff:
                say_first(ranks, say, f"{_GRAPH} takes the edges of {_EDGES}, within {data.graph.cutoff:g} Å: its "
                          f"cutoff={settings.cutoff:g} is not used")  # fmt: skip
            return StructureSources(_splits(data), data.graph, (*done, _GRAPH))
        if settings is None:
            raise UserError(f"{_GRAPH} needs the edges of {_EDGES}, which goes before it in data.transforms, or a "
                            "cutoff of its own, such as cutoff=6.0: that ignores periodic images")  # fmt: skip
        _tell(data, ranks, say)
        tables = tables_of(data, _GRAPH)
        num_periodic = sum(int(table.pbc.any(1).sum()) for table in _once(tables.values()))
        if num_periodic:
            say_first(ranks, say, f"{num_periodic:,} structures are periodic, which {_GRAPH} ignores: atoms near the "
                      f"sides of a cell lack neighbours. Put {_EDGES} before it in data.transforms")  # fmt: skip
        return graph_sources(tables, settings, ranks, say, (_GRAPH,))


class GraphToPointCloud:
    """The structures without their edges."""

    def adapt(self, data: Any, ranks: TaskRanks, say: Say) -> StructureSources:
        """The data without edges."""
        if not _done(data):
            raise UserError(f"graph_to_point_cloud has no graph to begin with: it goes after {_EDGES} or {_GRAPH} in "
                            "data.transforms")  # fmt: skip
        tables = tables_of(data, "graph_to_point_cloud")
        made = {
            id(table): StructureSource(table, partial=_partial(tables.values())) for table in _once(tables.values())
        }
        return StructureSources({split: made[id(table)] for split, table in tables.items()})


def graph_sources(
    tables: Mapping[str, StructureTable],
    settings: GraphSettings,
    ranks: TaskRanks,
    say: Say,
    done: tuple[str, ...] = (_EDGES, _GRAPH),
) -> StructureSources:
    """Splits of structures with their edges, from the cache or found by all ranks; each rank must call it alike."""
    listed = _once(tables.values())
    if not listed:
        raise UserError("there are no structures to make graphs of: set data.train")
    began = time.perf_counter()
    found = find_graphs(listed, settings, ranks, say)
    say_first(ranks, say, _summary(listed, found, settings, time.perf_counter() - began))
    partial = _partial(listed)
    made = {
        id(table): graph_source(table, graphs, settings, partial) for table, graphs in zip(listed, found, strict=True)
    }
    return StructureSources({split: made[id(table)] for split, table in tables.items()}, settings, done)


def graph_of(structures: Sequence[Structure] | StructureTable, settings: GraphSettings) -> StructureSource:
    """Some structures with their edges, found now and not kept: for calculators."""
    table = structures if isinstance(structures, StructureTable) else StructureTable.of(structures)
    return graph_source(table, in_memory(table, settings), settings)


def graph_source(
    table: StructureTable, graphs: Graphs, settings: GraphSettings, partial: frozenset[str] = frozenset()
) -> StructureSource:
    """Structures with edges; `partial` names targets for which `has_NAME` is wanted though all have them."""
    columns = {
        "edge_source": graphs.edge_source, "edge_target": graphs.edge_target, "edge_shift": graphs.edge_shift,
        "by_source": graphs.by_source,
    }  # fmt: skip
    edges = Level(graphs.counts, columns)
    return StructureSource(table, edges, settings, partial, on_disk=graphs.folder is not None)


def settings_of(data: Any) -> GraphSettings | None:
    """How the edges of data were found; None where there are none yet."""
    found = [getattr(source, "graph", None) for source in _splits(data).values()]
    return found[0] if found else None


def tables_of(data: Any, what: str) -> dict[str, StructureTable]:
    """The structures of each split of data; `what` needs them."""
    splits = _splits(data)
    known = getattr(data, "tables", {})
    shared = {id(splits[split]): table for split, table in known.items() if split in splits}
    found = {split: shared.get(id(source)) or table_of(source) for split, source in splits.items()}
    for split, table in found.items():
        if table is None:
            raise UserError(f"{what} needs structures, but data.{split} is a {type(splits[split]).__name__}: set "
                            "data.class to structures")  # fmt: skip
    return {split: table for split, table in found.items() if table is not None}


def table_of(source: Any) -> StructureTable | None:
    """The structures behind a source, or behind a part of one."""
    if isinstance(source, Subset):
        whole = table_of(source.source)
        return None if whole is None else whole.subset(source.indices.numpy())
    table = source if isinstance(source, StructureTable) else getattr(source, "table", None)
    return table if isinstance(table, StructureTable) else None


def _splits(data: Any) -> dict[str, Any]:
    """The splits that are there; data without any is for prediction."""
    splits = {split: getattr(data, split, None) for split in (*SPLITS, "predict")}
    found = {split: source for split, source in splits.items() if source is not None}
    return found or ({} if isinstance(data, Sources) else {"predict": data})


def _tell(data: Any, ranks: TaskRanks, say: Say) -> None:
    """Say what is odd about the structures: their data has nobody else to say it to."""
    for remark in getattr(data, "remarks", ()):
        say_first(ranks, say, remark)


def _done(data: Any) -> tuple[str, ...]:
    return tuple(getattr(data, "done", ()))


def _once(tables: Any) -> list[StructureTable]:
    """Each table once: what is tested is often what is predicted."""
    return list({id(table): table for table in tables}.values())


def _partial(tables: Any) -> frozenset[str]:
    """Targets that some structure of some split lacks: all splits then say which have them."""
    return frozenset(name for table in tables for name, target in table.targets.items() if not target.has.all())


def _summary(tables: Sequence[StructureTable], found: Sequence[Graphs], settings: GraphSettings, seconds: float) -> str:
    """What was made, in one line."""
    num_structures, num_atoms = sum(map(len, tables)), sum(table.num_atoms for table in tables)
    num_edges = sum(int(graphs.counts.sum()) for graphs in found)
    num_grown = sum(graphs.num_grown for graphs in found)
    grown = ""
    if settings.adaptive_cutoff:
        largest = max(graphs.largest_cutoff for graphs in found)
        grown = f" (adapted for {num_grown:,}, up to {largest:g} Å)" if num_grown else " (none had to be adapted)"
    folders = {graphs.folder.parent for graphs in found if graphs.folder is not None}
    where = "read from" if not any(graphs.is_new for graphs in found) else f"made in {seconds:.1f} s, kept in"
    kept = f"{where} {folders.pop()}" if len(folders) == 1 else f"made in {seconds:.1f} s"
    return (
        f"graphs of {num_structures:,} structures: {num_edges:,} edges within {settings.cutoff:g} Å{grown}, "
        f"{num_edges / max(1, num_atoms):.1f} per atom; {kept}"
    )
