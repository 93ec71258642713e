"""Structures in ragged arrays: what goes in comes out, whole or in part."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isoscale.errors import UserError
from isoscale.science.crystals.reading.ragged import source_of
from isoscale.science.crystals.reading.structure import Structure
from isoscale.science.crystals.reading.table import StructureTable


def any_structure(seed: int) -> Structure:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 6))
    targets = {
        "energy": random.normal(size=()), "forces": random.normal(size=(count, 3)), "dipole": random.normal(size=3),
        "charges": random.normal(size=count), "stress": random.normal(size=(3, 3)), "kind": np.array(seed % 3),
    }  # fmt: skip
    kept = {name: np.asarray(values) for name, values in targets.items() if random.random() < 0.7}
    return Structure(
        random.integers(1, 90, count), random.normal(size=(count, 3)), np.eye(3) * 5, random.random(3) < 0.5, kept,
        f"place {seed}", f"system {seed % 2}", frozenset({"forces", "charges"}),
    )  # fmt: skip


def assert_equal(one: Structure, other: Structure) -> None:
    assert (one.place, one.name) == (other.place, other.name)
    for name in ("numbers", "positions", "cell", "pbc"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.targets.keys() == other.targets.keys()
    for name in one.targets:
        np.testing.assert_array_equal(one.targets[name], other.targets[name])


@given(seeds=st.lists(st.integers(0, 10_000), min_size=1, max_size=8), data=st.data())
def test_a_table_gives_back_its_structures_in_any_order(seeds: list[int], data: st.DataObject) -> None:
    """With the targets that each of them has, and no others."""
    structures = [any_structure(seed) for seed in seeds]
    table = StructureTable.of(structures)
    assert len(table) == len(structures)
    for one, other in zip(table, structures, strict=True):
        assert_equal(one, other)
    rows = data.draw(st.lists(st.integers(0, len(seeds) - 1), min_size=1, max_size=10))
    part = table.subset(rows)
    for place, row in enumerate(rows):
        assert_equal(part.structure(place), structures[row])
    twice = part.subset([len(rows) - 1])
    assert_equal(twice.structure(0), structures[rows[-1]])


def test_what_is_missing_is_zero_and_said(tmp_path: object) -> None:
    """Targets of some structures only."""
    given = [Structure(np.array([1]), np.zeros((1, 3)), np.zeros((3, 3)), np.zeros(3, bool), targets) for targets in (
        {"energy": np.array(2.0)}, {"forces": np.ones((1, 3))})]  # fmt: skip
    table = StructureTable.of(given)
    assert table.targets["energy"].values.tolist() == [2, 0]
    assert table.targets["energy"].has.tolist() == [True, False]
    assert table.targets["forces"].values.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert table.targets["forces"].has.tolist() == [False, True]


def test_whole_numbers_stay_whole_unless_others_are_not() -> None:
    """Classes are whole numbers."""

    def structure(value: float) -> Structure:
        return Structure(np.array([1]), np.zeros((1, 3)), np.zeros((3, 3)), np.zeros(3, bool), {"a": np.array(value)})

    assert StructureTable.of([structure(1), structure(2)]).targets["a"].values.dtype == np.int64
    assert StructureTable.of([structure(1), structure(2.5)]).targets["a"].values.dtype == np.float64


def test_no_structures_make_no_table() -> None:
    """An empty list is refused."""
    with pytest.raises(UserError, match="at least one"):
        StructureTable.of([])


def test_samples_have_the_words_of_pyg() -> None:
    """Atoms one structure after the other, and which they belong to."""
    structures = [any_structure(seed) for seed in (3, 1, 2)]
    structures[1] = replace(structures[1], targets={})
    table = StructureTable.of(structures)
    source = source_of(table)
    torch = pytest.importorskip("torch")
    batch = source.fetch(torch.tensor([2, 0]))
    expected = [structures[2], structures[0]]
    assert batch["z"].tolist() == [number for each in expected for number in each.numbers.tolist()]
    assert batch["batch"].tolist() == [0] * len(expected[0]) + [1] * len(expected[1])
    assert batch["has_energy"].tolist() == ["energy" in each.targets for each in expected]
    assert source.locate(1) == "place 1"
