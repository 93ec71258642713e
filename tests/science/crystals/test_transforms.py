import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoscale.data.sources import Sources, Subset, TensorSource, split_source
from isoscale.errors import UserError
from isoscale.science.atoms.cache import Single
from isoscale.science.crystals.edges import GraphSettings
from isoscale.science.crystals.reading.structure import Structure
from isoscale.science.crystals.reading.table import StructureTable
from isoscale.science.crystals.transforms import (
    GraphToPointCloud,
    PeriodicEdges,
    PointCloudToGraph,
    StructureSource,
    graph_of,
    graph_sources,
    settings_of,
)
from isoscale.science.registry import short_names
from tests.science.crystals.made_tables import brute_force, structure, table, together

SETTINGS = GraphSettings(4.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphs"


def clouds(**splits: StructureTable) -> Sources:
    """Structures by split, as data of a recipe has them."""
    return Sources(**{split: StructureSource(each) for split, each in splits.items()})


def adapted(data: Any, *transforms: Any, said: list[str] | None = None) -> Any:
    for transform in transforms:
        data = transform.adapt(data, Single(), [].append if said is None else said.append)
    return data


def whole(source: Any) -> dict[str, torch.Tensor]:
    return source.fetch(torch.arange(len(source)))


def test_a_batch_has_the_atoms_targets_and_edges_of_its_structures():
    structures = table(6)
    source = adapted(clouds(train=structures), PeriodicEdges(4.0)).train
    chosen = [4, 0, 3]
    batch = source.fetch(torch.tensor(chosen))
    assert {key: values.dtype for key, values in batch.items()} == {
        "z": torch.int64, "pos": torch.float64, "batch": torch.int64, "cell": torch.float64, "energy": torch.float64,
        "forces": torch.float64, "edge_source": torch.int64, "edge_target": torch.int64, "edge_shift": torch.int8,
        "by_source": torch.int64,
    }  # fmt: skip
    atoms_before, found = 0, set()
    for place, index in enumerate(chosen):
        one = structures.structure(index)
        mine = batch["batch"] == place
        assert np.array_equal(batch["pos"][mine], one.positions) and np.array_equal(batch["z"][mine], one.numbers)
        assert np.array_equal(batch["forces"][mine], one.targets["forces"])
        assert float(batch["energy"][place]) == one.targets["energy"]
        for source_, target, *image in brute_force(one.positions, one.cell, one.pbc, 4.0):
            found.add((source_ + atoms_before, target + atoms_before, *image))
        atoms_before += len(one)
    edges = zip(batch["edge_source"].tolist(), batch["edge_target"].tolist(), batch["edge_shift"].tolist(), strict=True)
    assert {(s, t, *image) for s, t, image in edges} == found
    assert len(batch["edge_source"]) == len(found)
    assert (batch["edge_target"].diff() >= 0).all()
    assert (batch["edge_source"][batch["by_source"]].diff() >= 0).all()


def test_the_seeds_order_of_transforms_gives_a_graph(cache: Path):
    said: list[str] = []
    data = adapted(clouds(train=table(5), val=table(2, first=7)), PeriodicEdges(4.0), PointCloudToGraph(), said=said)
    assert data.graph == settings_of(data) == SETTINGS
    assert (len(data.train), len(data.val), data.test) == (5, 2, None)
    assert data.train.table.num_atoms == data.train.sizes[:, 0].sum()
    assert len(said) == 1
    num_edges = sum(int(split.sizes[:, 1].sum()) for split in (data.train, data.val))
    assert said[0].startswith(f"graphs of 7 structures: {num_edges:,} edges within 4 Å, ")
    assert re.search(rf" per atom; made in [\d.]+ s, kept in {cache}$", said[0])
    adapted(clouds(train=table(5), val=table(2, first=7)), PeriodicEdges(4.0, False), said=said)
    assert said[1].endswith(f"read from {cache}")


def test_the_line_says_how_far_cutoffs_had_to_grow():
    said: list[str] = []
    far = StructureTable.of(
        [structure(4, 0), Structure(np.array([3]), np.zeros((1, 3)), 7.2 * np.eye(3), np.ones(3, bool))]
    )
    adapted(clouds(train=far), PeriodicEdges(4.0, adaptive_cutoff=True), said=said)
    adapted(clouds(train=table(3)), PeriodicEdges(4.0, adaptive_cutoff=True), said=said)
    assert "within 4 Å (adapted for 1, up to 7.5 Å), " in said[0]
    assert "within 4 Å (none had to be adapted), " in said[1]


def test_without_periodic_edges_a_graph_knows_no_images_and_says_so():
    said: list[str] = []
    data = adapted(clouds(train=table(5)), PointCloudToGraph(4.0, allow_isolated=True), said=said)
    assert not whole(data.train)["edge_shift"].any()
    expected = sum(len(brute_force(each.positions, each.cell, [False] * 3, 4.0)) for each in table(5))
    assert int(data.train.sizes[:, 1].sum()) == expected
    assert said[0].startswith("5 structures are periodic, which point_cloud_to_graph ignores")
    said.clear()
    molecules = table(4, first=1, pbc=(False, False, False)).subset([0, 1, 2])
    adapted(clouds(train=molecules), PointCloudToGraph(4.0), said=said)
    assert len(said) == 1


def test_a_cutoff_that_periodic_edges_makes_useless_is_said():
    said: list[str] = []
    data = adapted(clouds(train=table(5)), PeriodicEdges(4.0), PointCloudToGraph(5.0), said=said)
    assert data.graph.cutoff == 4.0
    assert said[1] == "point_cloud_to_graph takes the edges of periodic_edges, within 4 Å: its cutoff=5 is not used"


def test_back_to_points_and_again_to_a_graph():
    data = adapted(clouds(train=table(5)), PeriodicEdges(4.0), PointCloudToGraph(), GraphToPointCloud())
    assert settings_of(data) is None
    assert set(whole(data.train)) == {"z", "pos", "batch", "cell", "energy", "forces"}
    again = adapted(data, PeriodicEdges(3.0, max_neighbors=4))
    assert again.graph == GraphSettings(3.0, max_neighbors=4)
    assert "edge_source" in whole(again.train)


@pytest.mark.parametrize(
    ("transforms", "expected"),
    [
        ([PeriodicEdges(), PeriodicEdges()], "periodic_edges stands twice"),
        ([PeriodicEdges(), PointCloudToGraph(), PointCloudToGraph()], "point_cloud_to_graph stands twice"),
        ([PointCloudToGraph(9.0, allow_isolated=True), PeriodicEdges()], "must come before it"),
        ([PointCloudToGraph()], "needs the edges of periodic_edges.*cutoff=6.0"),
        ([GraphToPointCloud()], "goes after periodic_edges"),
        ([PeriodicEdges(), GraphToPointCloud(), GraphToPointCloud()], "goes after periodic_edges"),
    ],
)
def test_a_wrong_order_is_refused_with_the_right_one(transforms: list[Any], expected: str):
    with pytest.raises(UserError, match=expected):
        adapted(clouds(train=table(3)), *transforms)


def test_other_data_is_refused():
    with pytest.raises(UserError, match=r"periodic_edges needs structures, but data\.train is a TensorSource"):
        adapted(Sources(train=TensorSource({"input": torch.zeros(3, 2)})), PeriodicEdges())
    with pytest.raises(UserError, match="no structures"):
        adapted(Sources(), PeriodicEdges())
    with pytest.raises(UserError, match="cutoff is -1"):
        PeriodicEdges(cutoff=-1)


def test_parts_of_a_source_and_bare_structures_have_graphs_too():
    parts = split_source(StructureSource(table(8)), {"train": 5, "val": 2})
    assert isinstance(parts.train, Subset)
    data = adapted(parts, PeriodicEdges(4.0))
    assert np.array_equal(data.train.table.counts, table(8).counts[parts.train.indices.numpy()])
    assert data.train.locate(1) == parts.train.locate(1) == f"made {int(parts.train.indices[1])}"
    alone = adapted(StructureSource(table(3)), PeriodicEdges(4.0))
    assert len(alone.predict) == 3


def test_data_that_keeps_its_structures_apart_from_its_sources_is_asked_for_them():
    class Files(Sources):
        def __init__(self) -> None:
            self.tables = {"train": table(3), "test": table(2)}
            super().__init__(**{split: TensorSource({"z": torch.zeros(len(t))}) for split, t in self.tables.items()})
            self.predict = self.test
            self.remarks = ["units are odd"]

    said: list[str] = []
    data = adapted(Files(), PeriodicEdges(4.0), said=said)
    assert len(data.train) == 3 and data.test is data.predict
    assert said[0] == "units are odd"


def test_what_is_tested_and_predicted_is_read_once():
    source = StructureSource(table(3))
    data = adapted(Sources(test=source, predict=source), PeriodicEdges(4.0))
    assert data.test is data.predict


def test_targets_that_some_lack_are_marked_in_every_split():
    with_all = table(3)
    some = StructureTable.of([structure(2, 1, energy=np.array(1.0)), structure(3, 2)])
    data = adapted(clouds(train=some, val=with_all), PeriodicEdges(4.0))
    assert whole(data.train)["has_energy"].tolist() == [1, 0]
    assert whole(data.train)["energy"].tolist() == [1.0, 0.0]
    batch = whole(data.val)
    assert batch["has_energy"].tolist() == [1, 1, 1] and batch["has_energy"].dtype == torch.uint8
    assert "has_forces" not in batch
    unmarked = adapted(clouds(train=with_all), PeriodicEdges(4.0))
    assert "has_energy" not in whole(unmarked.train)


def test_a_target_with_the_name_of_something_else_is_refused():
    taken = StructureTable.of([structure(2, 1, pos=np.zeros((2, 3)))])
    with pytest.raises(UserError, match="a target cannot be called 'pos'"):
        StructureSource(taken)


def test_calculators_get_the_same_graph_without_the_cache(cache: Path):
    structures = table(4)
    direct = graph_of(list(structures), SETTINGS)
    assert not cache.exists()
    kept = graph_sources({"train": structures}, SETTINGS, Single(), [].append).train
    one, other = whole(direct), whole(kept)
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)
    assert not direct.on_disk and kept.on_disk


def test_room_that_is_left_over_holds_nothing_but_padding():
    source = graph_of(table(4), SETTINGS)
    indices = torch.tensor([1, 3])
    tight = source.fetch(indices)
    num_atoms, num_edges = len(tight["z"]), len(tight["edge_source"])
    padded = source.pack(indices, (num_atoms + 3, num_edges + 5))
    for key in ("z", "pos", "forces", "batch"):
        assert padded[key][:num_atoms].equal(tight[key])
    assert padded["z"][num_atoms:].tolist() == [0] * 3 and padded["batch"][num_atoms:].tolist() == [2] * 3
    for key in ("edge_source", "edge_target", "edge_shift", "by_source"):
        assert padded[key][:num_edges].equal(tight[key])
    assert padded["edge_source"][num_edges:].tolist() == [num_atoms + 2] * 5
    assert padded["edge_source"][padded["by_source"]].diff().min() >= 0


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_get_the_same_and_one_of_them_speaks(world: int):
    said: list[str] = []
    alone = whole(graph_of(table(5), SETTINGS))
    everyone = together(world, lambda ranks: PeriodicEdges(4.0).adapt(clouds(train=table(5)), ranks, said.append))
    for data in everyone:
        assert all(whole(data.train)[key].equal(alone[key]) for key in alone)
    assert len(said) == 1


def test_recipes_know_the_transforms_by_short_names():
    names = short_names()
    for short, name in (("periodic_edges", "PeriodicEdges"), ("point_cloud_to_graph", "PointCloudToGraph")):
        assert names[short] == f"isoscale.science.crystals.{name}"
