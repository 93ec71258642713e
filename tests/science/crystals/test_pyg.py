from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoscale.data.sources import Sources
from isoscale.errors import UserError
from isoscale.science.atoms.cache import Single
from isoscale.science.crystals import pyg
from isoscale.science.crystals.edges import GraphSettings
from isoscale.science.crystals.pyg import PyGGraphs, from_pyg, to_pyg, to_pyg_batch
from isoscale.science.crystals.reading.table import StructureTable
from isoscale.science.crystals.transforms import PeriodicEdges, StructureSource, graph_of, settings_of
from tests.science.crystals.made_tables import structure, table

data = pytest.importorskip("torch_geometric.data", reason="PyTorch Geometric is not installed")

SETTINGS = GraphSettings(4.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ISOSCALE_CACHE", str(tmp_path / "cache"))


def whole(source: Any) -> dict[str, torch.Tensor]:
    return source.fetch(torch.arange(len(source)))


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(one[key].equal(other[key]) for key in one.keys() & other.keys())


def test_there_and_back_is_the_same_graph():
    source = graph_of(table(6), SETTINGS)
    back = from_pyg(to_pyg(source))
    assert same(whole(source), whole(back))
    assert whole(source).keys() <= whole(back).keys()
    assert np.array_equal(back.table.pbc, source.table.pbc)
    assert settings_of(back) is None and "edges" in back.levels


def test_a_data_has_the_words_of_pyg():
    source = graph_of(table(6), SETTINGS)
    (one,) = to_pyg(source, [3])
    expected = source.table.structure(3)
    assert one.num_nodes == len(expected) and one.z.tolist() == expected.numbers.tolist()
    assert one.cell.shape == (1, 3, 3) and one.energy.shape == one.y.shape == (1,)
    sender, receiver = one.edge_index
    vectors = one.pos[sender] - one.pos[receiver] + one.edge_shift.double() @ one.cell[0]
    assert torch.allclose(vectors, one.edge_vec)
    assert torch.allclose(one.pos[sender] + one.shifts - one.pos[receiver], one.edge_vec)
    assert torch.allclose(vectors.norm(dim=1), one.edge_weight) and one.edge_attr.shape == (len(sender), 1)
    assert one.validate()


def test_batches_go_there_without_their_padding_and_back():
    source = graph_of(table(6), SETTINGS)
    indices = torch.tensor([5, 0, 2])
    tight = source.fetch(indices)
    padded = source.pack(indices, (len(tight["z"]) + 4, len(tight["edge_source"]) + 9))
    batch = to_pyg_batch(padded)
    listed = data.Batch.from_data_list(to_pyg(source, indices.tolist()))
    assert isinstance(batch, data.Batch) and batch.num_graphs == 3
    for key in ("z", "pos", "batch", "ptr", "edge_index", "edge_shift", "cell", "energy", "forces"):
        assert batch[key].equal(listed[key]), key
    assert same(tight, whole(from_pyg(batch)))


def test_a_name_that_holds_index_is_not_taken_for_one():
    tables = StructureTable.of([structure(n, n, refractive_index=np.array(1.5)) for n in (2, 3)])
    batch = to_pyg_batch(whole(graph_of(tables, SETTINGS)))
    assert batch.refractive_index.tolist() == [1.5, 1.5]


def test_structures_without_edges_and_bare_tables_go_too():
    points = to_pyg(table(3))
    assert "edge_index" not in points[0]
    back = from_pyg(points, names={"y": "copy"})
    assert isinstance(back, StructureSource)
    assert set(back.table.targets) == {"energy", "forces", "copy"}
    graphs = PeriodicEdges(4.0).adapt(Sources(train=back), Single(), [].append)
    assert same(whole(graphs.train), whole(graph_of(table(3), SETTINGS)))


def test_targets_that_some_lack_stay_so():
    some = StructureTable.of([structure(2, 1, energy=np.array(1.0)), structure(3, 2)])
    listed = to_pyg(graph_of(some, SETTINGS))
    assert "energy" in listed[0] and "energy" not in listed[1]
    assert whole(from_pyg(listed))["has_energy"].tolist() == [1, 0]


def molecule(num_atoms: int, seed: int, **more: Any) -> Any:
    """As datasets of molecules have them: floats of 32 bits, an energy as y, edges in no order."""
    random = torch.Generator().manual_seed(seed)
    pos = torch.randn(num_atoms, 3, generator=random)
    pairs = torch.combinations(torch.arange(num_atoms)).T
    edge_index = torch.cat([pairs, pairs.flip(0)], 1)
    edge_index = edge_index[:, torch.randperm(edge_index.shape[1], generator=random)]
    z = torch.randint(1, 9, (num_atoms,), generator=random)
    force = torch.randn(num_atoms, 3, generator=random)
    return data.Data(z=z, pos=pos, edge_index=edge_index, y=torch.tensor([float(seed)]), force=force, **more)


def test_a_dataset_of_molecules_is_a_source_with_sorted_edges():
    listed = [molecule(4, 0, name="water"), molecule(6, 1), molecule(4, 2)]
    source = from_pyg(listed, names={"y": "energy", "force": "forces"})
    batch = source.fetch(torch.tensor([1, 2]))
    assert batch["energy"].tolist() == [1.0, 2.0]
    assert batch["forces"].dtype == batch["pos"].dtype == torch.float64
    assert torch.equal(batch["forces"], torch.cat([listed[1].force, listed[2].force]).double())
    assert not batch["edge_shift"].any() and batch["edge_shift"].dtype == torch.int8
    assert (batch["edge_target"].diff() >= 0).all()
    assert (batch["edge_source"][batch["by_source"]].diff() >= 0).all()
    found = set(zip(batch["edge_source"].tolist(), batch["edge_target"].tolist(), strict=True))
    together = data.Batch.from_data_list(listed[1:]).edge_index
    assert found == set(map(tuple, together.T.tolist()))
    assert not source.table.pbc.any()
    assert source.locate(2) == "graph 2"


def test_attributes_of_edges_stay_with_their_edges():
    one = molecule(5, 3)
    one.edge_attr = (one.edge_index[0] * 10 + one.edge_index[1]).float()[:, None]
    batch = whole(from_pyg([one, one]))
    inside = batch["edge_source"] % 5 * 10 + batch["edge_target"] % 5
    assert torch.equal(batch["edge_attr"][:, 0], inside.float())


def test_bonds_can_be_left_out_for_edges_within_a_cutoff():
    listed = [molecule(4, k, edge_attr=torch.ones(12, 4)) for k in range(3)]
    source = from_pyg(listed, names={"y": "energy"}, edges=False)
    assert isinstance(source, StructureSource) and "edges" not in source.levels
    assert set(source.table.targets) == {"energy", "force"}


def test_a_dataset_is_split_and_each_graph_is_in_one_split():
    listed = [molecule(4 + k % 3, k) for k in range(10)]
    made = PyGGraphs(listed, names={"y": "energy"}, split={"train": 7, "val": 2, "test": 1})
    found = [whole(split)["energy"].tolist() for split in (made.train, made.val, made.test)]
    assert [len(each) for each in found] == [7, 2, 1]
    assert sorted(value for each in found for value in each) == list(range(10))
    again = PyGGraphs(listed, names={"y": "energy"}, split={"train": 7, "val": 2, "test": 1})
    assert whole(again.val)["energy"].tolist() == found[1]
    assert made.predict is made.test and "edges" in made.train.levels


@pytest.mark.parametrize(("name", "sign"), [("edge_shift", 1), ("cell_offsets", 1), ("unit_shifts", -1)])
def test_images_by_the_names_of_others(name: str, sign: int):
    listed = to_pyg(graph_of(table(4), SETTINGS))
    for each in listed:
        images = each.edge_shift
        del each.edge_shift
        each[name] = sign * images.float()
        each.natoms = each.num_nodes
    assert same(whole(from_pyg(listed)), whole(graph_of(table(4), SETTINGS)))


def test_graphs_that_are_no_structures_are_samples_too():
    def graph(num_nodes: int) -> Any:
        ring = torch.arange(num_nodes)
        return data.Data(
            x=torch.ones(num_nodes, 2) * num_nodes, edge_index=torch.stack([ring, ring.roll(1)]),
            y=torch.tensor([1, 0]), weight=num_nodes / 2,
        )  # fmt: skip

    source = from_pyg([graph(3), graph(5)])
    batch = whole(source)
    assert batch["x"].shape == (8, 2) and batch["x"].dtype == torch.float32
    assert batch["y"].tolist() == [[1, 0], [1, 0]] and batch["weight"].tolist() == [1.5, 2.5]
    assert batch["batch"].tolist() == [0] * 3 + [1] * 5
    assert batch["edge_target"].tolist() == list(range(8))


def test_single_atoms_keep_what_belongs_to_the_graph():
    listed = [data.Data(z=torch.tensor([k]), pos=torch.zeros(1, 3), y=torch.tensor([float(k)])) for k in (1, 6)]
    found = from_pyg(listed)
    assert found.table.targets["y"].per == "structure"
    assert whole(found)["y"].tolist() == [1.0, 6.0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda each: each.__delattr__("edge_index"), "graph 1 has no edge_index"),
        (lambda each: each.__delattr__("z"), "graph 1 has no z"),
        (lambda each: each.__setattr__("edge_index", each.edge_index + 1), "edge_index of graph 1 names atoms"),
        (
            lambda each: each.__setattr__("y", torch.zeros(1, 7)),
            r"y has the shape \(\) in graph 0, but \(7,\) in graph 1",
        ),
        (lambda each: each.__setattr__("cell", torch.eye(3)), "graph 1 is periodic, but its edges do not say"),
    ],
)
def test_graphs_that_do_not_fit_together_are_named(change: Any, expected: str):
    listed = [molecule(4, 0), molecule(5, 1)]
    change(listed[1])
    with pytest.raises(UserError, match=expected):
        from_pyg(listed)


def test_other_things_are_refused():
    with pytest.raises(UserError, match="no graphs"):
        from_pyg([])
    with pytest.raises(UserError, match="graph 0 is a dict"):
        from_pyg([{"pos": 1}])
    with pytest.raises(UserError, match="not as a int"):
        from_pyg(3)
    with pytest.raises(UserError, match="energy, but no graph has"):
        from_pyg([molecule(3, 0)], names={"u0": "energy"})
    with pytest.raises(UserError, match="a batch of structures has z"):
        to_pyg_batch({"x": torch.zeros(2)})


def test_without_pyg_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    def refuse(name: str) -> Any:
        raise ImportError(f"no {name} here")

    monkeypatch.setattr(pyg, "import_module", refuse)
    with pytest.raises(UserError, match=r"pip install 'isoscale\[pyg\]'"):
        from_pyg([])
