"""To and from PyTorch Geometric: `Data` and `Batch` of structures, and graphs of one's own as a source of samples."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isoscale.data.ragged import Level, RaggedSource
from isoscale.data.sources import SPLITS, Sources, TensorSource, split_source
from isoscale.errors import UserError
from isoscale.science.crystals.reading.table import StructureTable, Target
from isoscale.science.crystals.transforms import NUMBERS, StructureSource, columns_of

OTHER_NAMES = {"atomic_numbers": "z", "lattice": "cell", "natoms": "", "num_atoms": "", "num_nodes": ""}
"""What others call attributes, and what they are here; nothing for what is known anyway."""
IMAGES = {"edge_shift": 1, "cell_offsets": 1, "unit_shifts": -1}
"""Attributes that say in which image of the cell the source of an edge is, and their sign: MACE counts for targets."""
OF_ATOMS = frozenset({"z", "pos", "x", "force", "forces", "batch"})
"""Attributes that always have a row per atom."""
NOT_KEPT = frozenset({"edge_index", "batch", "ptr", "shifts", "edge_vec", *IMAGES})
"""Attributes that columns of other names stand for, or that follow from others."""
Columns = Sequence[Mapping[str, NDArray[Any]]]
"""The attributes of each graph."""
_NOT_TARGETS = frozenset({"z", "pos", "cell", "pbc", "x"})


class PyGSource(RaggedSource):
    """Structures whose edges came with them; it has no `graph`, because nobody knows how they were found."""

    def __init__(self, table: StructureTable, edges: Level, more_atoms: Mapping[str, Any]) -> None:
        """Structures with edges, and features of atoms."""
        rows, atoms = columns_of(table)
        levels = {"atoms": Level(table.counts, {**atoms, **more_atoms}), "edges": edges}
        super().__init__(rows, levels, NUMBERS, {"atoms": "batch"}, table.places)
        self.table = table


def to_pyg(source: Any, indices: Sequence[int] | None = None, y: str = "energy") -> list[Any]:
    """Structures as PyG `Data`, all or those at `indices`; `y` is the target that has this name too.

    A Data has z, pos, cell (1, 3, 3) and the targets that the structure has, and with edges: edge_index (source,
    target), edge_shift (images), shifts (Å), edge_vec (from target to source, Å), edge_weight and edge_attr (lengths).
    """
    if isinstance(source, StructureTable):
        source = StructureSource(source)
    wanted = range(len(source)) if indices is None else indices
    return [data for index in wanted for data in _data_of(source.fetch(torch.tensor([int(index)])), y)]


def to_pyg_batch(batch: Mapping[str, Tensor], y: str = "energy") -> Any:
    """One of our batches as a PyG `Batch`, without its padding."""
    return load_pyg().Batch.from_data_list(_data_of(batch, y))


class PyGGraphs(Sources):
    """A dataset of PyTorch Geometric, split at random into train, val and test."""

    def __init__(
        self,
        dataset: Any,
        names: dict[str, str] | None = None,
        edges: bool = True,
        split: dict[str, float | int] | None = None,
        split_seed: int = 0,
    ) -> None:
        """A PyG dataset or list of Data; `names` renames attributes, such as {y: energy}.

        Without `edges`, those of the dataset (bonds, say) are left out, and found anew within a cutoff.
        """
        listed = _listed(dataset)
        places = TensorSource(torch.arange(len(listed)))
        parts = split_source(places, split or {"train": 0.8, "val": 0.1, "test": 0.1}, split_seed)
        chosen = {name: getattr(parts, name) for name in SPLITS}
        super().__init__(
            **{
                name: from_pyg([listed[index] for index in part.indices.tolist()], names, edges)
                for name, part in chosen.items()
                if part is not None
            }
        )
        self.predict = self.test


def from_pyg(graphs: Any, names: Mapping[str, str] | None = None, edges: bool = True) -> RaggedSource:
    """A PyG dataset, list of `Data` or `Batch` as a source of samples; `names` renames attributes: {"y": "energy"}.

    Graphs with z and pos are structures: edges are kept, sorted as ours are; without any, or without `edges`,
    transforms such as `periodic_edges` find them. A cell means that a structure is periodic along its vectors that are
    not 0, unless pbc says otherwise. Attributes with a row per atom or per edge are kept so; all others belong to the
    graph. What is not of numbers is left out.
    """
    listed = _listed(graphs)
    columns = [_renamed(data, names or {}, place) for place, data in enumerate(listed)]
    if not edges:
        columns = [{name: each[name] for name in each if not _is_of_edges(name)} for each in columns]
    sizes = _Sizes(listed, columns)
    levels = {name: sizes.level_of(name, columns) for name in dict.fromkeys(name for each in columns for name in each)}
    if names:
        lost = sorted(set(names.values()) - set(levels))
        if lost:
            raise UserError(f"names gives {', '.join(lost)}, but no graph has what it stands for: {dict(names)}")
    found = _edges(columns, sizes, levels) if sizes.edges is not None else None
    if {"z", "pos"} <= set(levels):
        return _structures(columns, sizes, levels, found)
    return _graphs(columns, sizes, levels, found)


def load_pyg() -> Any:
    """The part of PyTorch Geometric that holds graphs, or what to install."""
    try:
        return import_module("torch_geometric.data")
    except ImportError as error:
        raise UserError(f"PyTorch Geometric is not installed: pip install 'isoscale[pyg]' ({error})") from None


@cache
def _data_class() -> Any:
    """A Data whose attributes are put together by what they are, and not by what is in their names."""

    class StructureData(load_pyg().Data):  # type: ignore[misc]
        def __inc__(self, key: str, value: Any, *rest: Any, **more: Any) -> Any:
            return super().__inc__(key, value, *rest, **more) if key == "edge_index" else 0

        def __cat_dim__(self, key: str, value: Any, *rest: Any, **more: Any) -> Any:
            return -1 if key == "edge_index" else 0

    return StructureData


def _data_of(batch: Mapping[str, Tensor], y: str) -> list[Any]:
    """The structures of a batch, each as a Data."""
    if not {"z", "pos", "cell", "batch"} <= batch.keys():
        raise UserError(f"a batch of structures has z, pos, cell and batch, but this one has {', '.join(batch)}")
    num_structures, num_atoms = len(batch["cell"]), len(batch["z"])
    counts = torch.bincount(batch["batch"], minlength=num_structures)[:num_structures].tolist()
    of_edges = batch["batch"][batch["edge_target"]] if "edge_target" in batch else None
    found, start = [], 0
    for index, count in enumerate(counts):
        values = {}
        for name, column in batch.items():
            has = batch.get(f"has_{name}")
            if name == "batch" or name.startswith("has_") or (has is not None and not has[index]):
                continue
            if of_edges is not None and (name in NUMBERS or name.startswith("edge_")):
                if name not in (*NUMBERS, "edge_shift"):
                    values[name] = column[of_edges == index]
                continue
            per_atom = name in OF_ATOMS or (len(column) == num_atoms and num_atoms != num_structures)
            values[name] = column[start : start + count] if per_atom else column[index : index + 1]
        if of_edges is not None:
            values = _edge_values(batch, of_edges == index, start, values) | values
        if y in values and "y" not in values:
            values["y"] = values[y]
        found.append(_data_class()(**values))
        start += count
    return found


def _edge_values(
    batch: Mapping[str, Tensor], mine: Tensor, before: int, values: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    ends = torch.stack([batch["edge_source"][mine], batch["edge_target"][mine]]) - before
    images, pos = batch["edge_shift"][mine], values["pos"]
    shifts = images.to(pos.dtype) @ values["cell"][0].to(pos.dtype)
    vectors = pos[ends[0]] + shifts - pos[ends[1]]
    lengths = vectors.norm(dim=1)
    return {
        "edge_index": ends, "edge_shift": images, "shifts": shifts, "edge_vec": vectors, "edge_weight": lengths,
        "edge_attr": lengths[:, None],
    }  # fmt: skip


def _listed(graphs: Any) -> list[Any]:
    data = load_pyg()
    if isinstance(graphs, data.Batch):
        graphs = graphs.to_data_list()
    if not isinstance(graphs, Iterable):
        raise UserError(f"graphs are given as a list of Data or a dataset, not as a {type(graphs).__name__}")
    listed = list(graphs)
    if not listed:
        raise UserError("there are no graphs: at least one is needed")
    for place, each in enumerate(listed):
        if not isinstance(each, data.Data):
            raise UserError(f"graph {place} is a {type(each).__name__}, but should be a torch_geometric.data.Data")
    return listed


def _renamed(data: Any, names: Mapping[str, str], place: int) -> dict[str, NDArray[Any]]:
    """The attributes of a graph that are numbers, by the names that they have here."""
    found: dict[str, NDArray[Any]] = {}
    for key, value in data.to_dict().items():
        name = names.get(key, OTHER_NAMES.get(key, key))
        if isinstance(value, Tensor | np.ndarray | int | float | bool):
            array = value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
            if name and array.dtype.kind in "biuf":
                if name in found:
                    raise UserError(f"graph {place} has two attributes for {name}: rename one (names)")
                found[name] = array
    return found


class _Sizes:
    """How many atoms and edges graphs have, and so at which level an attribute is."""

    def __init__(self, listed: Sequence[Any], columns: Columns) -> None:
        """Of all graphs; either all have edges, or none."""
        has_edges = ["edge_index" in each for each in columns]
        if any(has_edges) and not all(has_edges):
            raise UserError(
                f"graph {has_edges.index(False)} has no edge_index, but others have: give it to all, or none"
            )
        self.atoms = np.array([_num_atoms(data, each) for data, each in zip(listed, columns, strict=True)], np.int64)
        self.edges = np.array([each["edge_index"].shape[1] for each in columns], np.int64) if all(has_edges) else None
        """None where graphs have none."""

    def level_of(self, name: str, columns: Columns) -> str:
        """`atoms` or `edges`, if there is a row for each in every graph, else `graph`."""
        lengths = np.array([len(each[name]) if each[name].ndim else 0 for each in columns if name in each])
        has = np.array([name in each for each in columns])
        if name in OF_ATOMS or (not (self.atoms == 1).all() and np.array_equal(lengths, self.atoms[has])):
            return "atoms"
        if self.edges is not None and np.array_equal(lengths, self.edges[has]):
            return "edges" if _is_of_edges(name) or (lengths > 1).any() else "graph"
        return "graph"


def _is_of_edges(name: str) -> bool:
    """Whether an attribute is of edges by its name."""
    return name.startswith("edge_") or name in NOT_KEPT - {"batch", "ptr"}


def _num_atoms(data: Any, columns: Mapping[str, NDArray[Any]]) -> int:
    for name in ("pos", "z", "x"):
        if name in columns:
            return len(columns[name])
    return int(data.num_nodes)


def _edges(columns: Columns, sizes: "_Sizes", levels: Mapping[str, str]) -> Level:
    """The edges of all graphs, sorted by target, source and image, with their attributes."""
    image = next((name for name in IMAGES if name in levels), None)
    kept = [name for name, level in levels.items() if level == "edges" and name not in NOT_KEPT]
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in (*NUMBERS, "edge_shift", *kept)}
    for place, each in enumerate(columns):
        source, target = each["edge_index"].astype(np.int32)
        if (
            len(source)
            and not 0 <= min(source.min(), target.min()) <= max(source.max(), target.max()) < sizes.atoms[place]
        ):
            raise UserError(f"edge_index of graph {place} names atoms that it has not: it has {sizes.atoms[place]}")
        lacking = [name for name in (*kept, *([image] if image else [])) if name not in each]
        if lacking:
            raise UserError(f"graph {place} has no {lacking[0]}, but others have: give it to all, or none")
        if image is None and _pbc(each).any():
            raise UserError(
                f"graph {place} is periodic, but its edges do not say through which images (edge_shift): leave "
                "edge_index out (del data.edge_index) and let the transform periodic_edges find them"
            )
        shift = (
            np.zeros((len(source), 3), np.int16) if image is None else IMAGES[image] * _whole(each[image], image, place)
        )
        order = np.lexsort((shift[:, 2], shift[:, 1], shift[:, 0], source, target))
        parts["edge_source"].append(source[order])
        parts["edge_target"].append(target[order])
        parts["edge_shift"].append(shift[order])
        parts["by_source"].append(np.argsort(source[order], kind="stable").astype(np.int32))
        for name in kept:
            parts[name].append(each[name][order])
    joined = {name: _concatenated(name, arrays) for name, arrays in parts.items()}
    if np.abs(joined["edge_shift"]).max(initial=0) <= np.iinfo(np.int8).max:
        joined["edge_shift"] = joined["edge_shift"].astype(np.int8)
    return Level(sizes.edges, joined)


def _whole(images: NDArray[Any], name: str, place: int) -> NDArray[np.int16]:
    whole = np.round(images).astype(np.int16)
    if np.abs(images - whole).max(initial=0) > 1e-3:
        raise UserError(f"{name} of graph {place} should count images of the cell, but is not of whole numbers")
    return whole


def _structures(columns: Columns, sizes: _Sizes, levels: Mapping[str, str], edges: Level | None) -> RaggedSource:
    for place, each in enumerate(columns):
        if not {"z", "pos"} <= each.keys():
            raise UserError(f"graph {place} has no z or no pos, but others have")
    table = StructureTable(
        counts=sizes.atoms,
        numbers=np.concatenate([each["z"].reshape(-1) for each in columns]).astype(np.int64),
        positions=np.concatenate([each["pos"] for each in columns]).astype(np.float64),
        cells=np.stack([_cell(each) for each in columns]),
        pbc=np.stack([_pbc(each) for each in columns]),
        targets={
            name: _target(name, level, columns, sizes) for name, level in levels.items()
            if level != "edges" and name not in _NOT_TARGETS and name not in NOT_KEPT
        },
        places=lambda index: f"graph {index}",
    )  # fmt: skip
    more = {"x": _concatenated("x", [each["x"] for each in columns])} if "x" in levels else {}
    return StructureSource(table) if edges is None else PyGSource(table, edges, more)


def _graphs(columns: Columns, sizes: _Sizes, levels: Mapping[str, str], edges: Level | None) -> RaggedSource:
    """Graphs that are no structures: rows of nodes, edges and graphs, by their own names."""
    rows: dict[str, Any] = {}
    atoms: dict[str, Any] = {}
    for name, level in levels.items():
        if level != "edges" and name not in NOT_KEPT:
            target = _target(name, level, columns, sizes, exact=True)
            (atoms if level == "atoms" else rows)[name] = target.values
            if not target.has.all():
                rows[f"has_{name}"] = target.has.astype(np.uint8)
    given = {"atoms": Level(sizes.atoms, atoms)} | ({} if edges is None else {"edges": edges})
    numbers = {} if edges is None else NUMBERS
    return RaggedSource(rows, given, numbers, {"atoms": "batch"}, lambda index: f"graph {index}")


def _target(name: str, level: str, columns: Columns, sizes: _Sizes, exact: bool = False) -> Target:
    """An attribute of all graphs; zeros where one lacks it. In its own type if `exact`, else as targets are held."""
    has = np.array([name in each for each in columns])
    given = {place: _row(each[name], level) for place, each in enumerate(columns) if name in each}
    first = next(iter(given))
    shape = given[first].shape[1:] if level == "atoms" else given[first].shape
    for place, values in given.items():
        if (values.shape[1:] if level == "atoms" else values.shape) != shape:
            raise UserError(
                f"{name} has the shape {given[first].shape} in graph {first}, but {values.shape} in graph {place}; it "
                "needs a row per atom, or one shape in all graphs"
            )
    dtype = np.result_type(*given.values())
    if not exact:
        dtype = np.dtype(np.float64 if dtype.kind == "f" else np.int64)
    parts = [
        given[place].astype(dtype)
        if place in given
        else np.zeros((int(sizes.atoms[place]), *shape) if level == "atoms" else shape, dtype)
        for place in range(len(columns))
    ]
    values = np.concatenate(parts) if level == "atoms" else np.stack(parts)
    return Target(values, "atom" if level == "atoms" else "structure", has)


def _row(values: NDArray[Any], level: str) -> NDArray[Any]:
    """Without the first dimension of 1 that PyG gives to what belongs to a graph."""
    return values[0] if level == "graph" and values.ndim and values.shape[0] == 1 else values


def _cell(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    return np.asarray(columns["cell"], np.float64).reshape(3, 3) if "cell" in columns else np.zeros((3, 3))


def _pbc(columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_]:
    if "pbc" in columns:
        return np.broadcast_to(np.asarray(columns["pbc"], np.bool_).reshape(-1), 3).copy()
    return np.asarray(_cell(columns).any(1), np.bool_)


def _concatenated(name: str, arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    shapes = {array.shape[1:] for array in arrays}
    if len(shapes) != 1:
        raise UserError(f"rows of {name} have different shapes in different graphs: {sorted(shapes)}")
    return np.concatenate(arrays)
