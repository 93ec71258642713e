import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from isoscale.errors import UserError
from isoscale.science.crystals.edges import Edges, GraphSettings, _sorted, find_edges
from tests.science.crystals.made_tables import brute_force

PERIODIC = np.array([True, True, True])
CUBE = np.eye(3)
EDGES = GraphSettings(2.3456, allow_isolated=True)


def listed(edges: Edges) -> list[tuple[int, ...]]:
    """Source, target and image of every edge, in order."""
    return [(int(s), int(t), *map(int, shift)) for s, t, shift in zip(*edges[:3], strict=True)]


def lengths(edges: Edges, positions: Any, cell: Any) -> np.ndarray:
    return np.linalg.norm(positions[edges.source] + edges.shift @ cell - positions[edges.target], axis=1)


def check_order(edges: Edges) -> None:
    """By target, source and image; and the other order by source alone."""
    rows = [(t, s, *image) for s, t, *image in listed(edges)]
    assert rows == sorted(rows)
    assert np.array_equal(edges.by_source, np.argsort(edges.source, kind="stable"))
    assert [column.dtype.str[1:] for column in edges.columns] == ["i4", "i4", "i2", "i4"]


@st.composite
def structures(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Atoms in and out of cells of any shape and hand, from tiny to large, periodic along any of their vectors."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = draw(st.sampled_from([0.9, 1.7, 3.1, 8.0]))
    num_atoms = draw(st.integers(1, 5 if size > 1 else 2))
    pbc = np.array([draw(st.booleans()) for _ in range(3)])
    cell = np.eye(3) * size
    if draw(st.booleans()):
        cell = cell + random.uniform(-0.45, 0.45, (3, 3)) * size
        cell = cell[random.permutation(3)]
    if draw(st.booleans()):
        cell = np.where(pbc[:, None], cell, 0)  # as ASE writes what is not periodic
    if draw(st.booleans()):
        places = random.permutation(8)[:num_atoms]
        positions = np.stack([places // 4, places // 2 % 2, places % 2], 1) * size / 2 + 0.1  # many equal distances
    else:
        positions = random.uniform(-1.5, 1.5, (num_atoms, 3)) * size
    return positions, cell, pbc


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(structures())
def test_every_neighbour_is_found_once_through_any_images(made: tuple[Any, Any, Any]):
    positions, cell, pbc = made
    expected = brute_force(positions, cell, pbc, EDGES.cutoff)
    assume(all(length > 0.01 for length in expected.values()))
    edges = find_edges(positions, cell, pbc, EDGES)
    found = listed(edges)
    assert len(found) == len(set(found))
    assert set(found) == set(expected)
    assert np.allclose(lengths(edges, positions, cell), [expected[edge] for edge in found])
    check_order(edges)


def test_one_atom_sees_its_images_in_cells_that_the_cutoff_spans_many_times():
    skewed = np.array([[1.0, 0, 0], [0.9, 1.0, 0], [0.8, 0.7, 1.0]])
    edges = find_edges(np.zeros((1, 3)), skewed, PERIODIC, GraphSettings(5.05))
    assert set(listed(edges)) == set(brute_force(np.zeros((1, 3)), skewed, PERIODIC, 5.05))
    first_shell = find_edges(np.array([[7.3, -2, 0.5]]), CUBE * 3, PERIODIC, GraphSettings(3.1))
    images = [(0, 0, -1, 0, 0), (0, 0, 0, -1, 0), (0, 0, 0, 0, -1), (0, 0, 0, 0, 1), (0, 0, 0, 1, 0), (0, 0, 1, 0, 0)]
    assert listed(first_shell) == images


def test_a_supercell_has_the_neighbours_of_its_cell():
    random = np.random.default_rng(3)
    cell, positions = CUBE * 4 + random.uniform(-1, 1, (3, 3)), random.uniform(0, 4, (5, 3))
    large = np.concatenate([positions + np.array(image) @ cell for image in itertools.product(range(2), repeat=3)])
    small = find_edges(positions, cell, PERIODIC, GraphSettings(4.0))
    double = find_edges(large, 2 * cell, PERIODIC, GraphSettings(4.0))
    assert len(double.source) == 8 * len(small.source)
    assert np.allclose(np.sort(lengths(double, large, 2 * cell)), np.sort(np.tile(lengths(small, positions, cell), 8)))


def test_atoms_many_cells_away_have_the_neighbours_of_their_images():
    positions = np.array([[0, 0, 0], [300.5, 0, 0.0]])
    edges = find_edges(positions, CUBE * 2, PERIODIC, GraphSettings(0.9))
    assert [edge[2:] for edge in listed(edges)] == [(-150, 0, 0), (150, 0, 0)]
    with pytest.raises(UserError, match=r"wrap\(\)"):
        find_edges(np.array([[0, 0, 0], [70_000.5, 0, 0.0]]), CUBE * 2, PERIODIC, GraphSettings(0.9))


def test_an_adaptive_cutoff_grows_by_halves_until_every_atom_has_a_neighbour():
    positions = np.array([[0, 0, 0], [1.0, 0, 0], [5.2, 0, 0]])
    adaptive = GraphSettings(2.0, adaptive_cutoff=True)
    edges = find_edges(positions, np.zeros((3, 3)), ~PERIODIC, adaptive)
    assert edges.cutoff == 4.5
    assert set(listed(edges)) == set(brute_force(positions, np.zeros((3, 3)), ~PERIODIC, 4.5))
    assert find_edges(positions[:2], np.zeros((3, 3)), ~PERIODIC, adaptive).cutoff == 2.0
    lone = find_edges(np.zeros((1, 3)), CUBE * 7.2, PERIODIC, adaptive)
    assert (lone.cutoff, len(lone.source)) == (7.5, 6)


def test_an_adaptive_cutoff_ends_exactly_at_its_limit():
    lone, cell = np.zeros((1, 3)), CUBE * 7.2
    assert find_edges(lone, cell, PERIODIC, GraphSettings(2.0, True, limit=7.25)).cutoff == 7.25
    with pytest.raises(UserError, match=r"file\.xyz, frame 3: atom 0 .* no neighbour within limit=7 Å"):
        find_edges(lone, cell, PERIODIC, GraphSettings(2.0, True, limit=7.0), lambda: "file.xyz, frame 3")
    kept = find_edges(lone, cell, PERIODIC, GraphSettings(2.0, True, limit=7.0, allow_isolated=True))
    assert (kept.cutoff, len(kept.source)) == (2.0, 0)


def test_an_atom_without_neighbours_is_named_with_what_to_type():
    positions = np.array([[0, 0, 0], [1.0, 0, 0], [5.2, 0, 0]])
    with pytest.raises(
        UserError, match=r"here: atom 2 .* within 2 Å.*cutoff: 2, allow_isolated: true.*adaptive_cutoff: true"
    ):
        find_edges(positions, CUBE * 20, PERIODIC, GraphSettings(2.0), lambda: "here")
    allowed = find_edges(positions, CUBE * 20, PERIODIC, GraphSettings(2.0, allow_isolated=True))
    assert listed(allowed) == [(1, 0, 0, 0, 0), (0, 1, 0, 0, 0)]
    none = find_edges(np.zeros((1, 3)), np.zeros((3, 3)), ~PERIODIC, GraphSettings(2.0, allow_isolated=True))
    assert [len(column) for column in none.columns] == [0] * 4
    assert none.shift.shape == (0, 3)
    with pytest.raises(UserError, match="limit=30"):
        find_edges(np.zeros((1, 3)), np.zeros((3, 3)), ~PERIODIC, GraphSettings(2.0, adaptive_cutoff=True))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(structures(), st.integers(1, 8))
def test_max_neighbors_keeps_the_nearest_and_whole_shells(made: tuple[Any, Any, Any], most: int):
    positions, cell, pbc = made
    every = brute_force(positions, cell, pbc, EDGES.cutoff)
    assume(all(length > 0.02 for length in every.values()))
    edges = find_edges(positions, cell, pbc, EDGES._replace(max_neighbors=most))
    expected = set()
    for target in range(len(positions)):
        mine = {edge: length for edge, length in every.items() if edge[1] == target}
        reach = sorted(mine.values())[:most][-1] + 0.01 if mine else 0
        assume(all(abs(length - reach) > 1e-9 for length in mine.values()))
        expected |= {edge for edge, length in mine.items() if length <= reach}
    assert set(listed(edges)) == expected
    check_order(edges)


def test_a_shell_that_noise_has_split_stays_whole():
    noisy = CUBE * 3 + np.random.default_rng(0).uniform(-1e-4, 1e-4, (3, 3))
    edges = find_edges(np.zeros((1, 3)), noisy, PERIODIC, GraphSettings(5.0, max_neighbors=4))
    assert len(edges.source) == 6


def test_the_same_structure_gives_the_same_order_whatever_the_threads_and_the_numbering_of_pairs():
    random = np.random.default_rng(0)
    positions = random.uniform(0, 8, (60, 3))
    edges = find_edges(positions, CUBE * 8, PERIODIC, GraphSettings(3.0, allow_isolated=True))
    backwards = find_edges(positions[::-1], CUBE * 8, PERIODIC, GraphSettings(3.0, allow_isolated=True))
    check_order(edges)
    renamed = [(59 - s, 59 - t, *image) for s, t, *image in listed(backwards)]
    assert sorted(renamed, key=lambda edge: (edge[1], edge[0], *edge[2:])) == listed(edges)


def test_the_order_is_right_where_no_single_number_holds_it():
    random = np.random.default_rng(0)
    target, source = random.integers(0, 2, 50), random.integers(0, 2, 50)
    shift = random.integers(-30_000, 30_000, (50, 3)).astype(np.int32)
    for num_atoms in (2, 10**6):
        rows = [(target[at], source[at], *shift[at]) for at in _sorted(target, source, shift, num_atoms)]
        assert rows == sorted(rows)


def test_what_ignores_periodicity_finds_neighbours_inside_the_cell_alone():
    positions = np.array([[0.1, 0, 0], [2.9, 0, 0], [1.0, 0, 0]])
    edges = find_edges(positions, CUBE * 3, PERIODIC, GraphSettings(2.0, periodic=False))
    assert listed(edges) == [(2, 0, 0, 0, 0), (2, 1, 0, 0, 0), (0, 2, 0, 0, 0), (1, 2, 0, 0, 0)]


@pytest.mark.parametrize("shift", [0.0, 1.0])
def test_atoms_on_top_of_each_other_are_named(shift: float):
    positions = np.array([[0, 0, 0], [1.5, 0, 0], [1.5 + 4 * shift, 5e-4, 0]])
    with pytest.raises(UserError, match=r"frame 7: atoms 1 and 2 .* on top of each other, 0.0005 Å"):
        find_edges(positions, CUBE * 4, PERIODIC, GraphSettings(3.0), lambda: "frame 7")


@pytest.mark.parametrize(
    ("cell", "pbc"),
    [
        (np.zeros((3, 3)), [True, True, True]),
        (np.array([[3, 0, 0], [0, 3, 0], [3, 3, 0.0]]), [True, True, True]),
        (np.array([[3, 0, 0], [6, 0, 0], [0, 0, 3.0]]), [True, True, False]),
        (np.diag([3, 3, 0.0]), [False, False, True]),
        (np.diag([3, np.nan, 3]), [True, True, True]),
        (np.diag([0.3, 0.3, 0.3]), [True, True, True]),
    ],
)
def test_a_singular_cell_is_refused(cell: Any, pbc: list[bool]):
    with pytest.raises(UserError, match="frame 7: the cell is singular: it is periodic along"):
        find_edges(np.array([[0, 0, 0], [1.0, 0, 0]]), cell, np.array(pbc), GraphSettings(2.0), lambda: "frame 7")


def test_positions_that_are_no_numbers_are_refused():
    with pytest.raises(UserError, match="frame 7: the position of atom 1"):
        find_edges(np.array([[0, 0, 0], [np.nan, 0, 0]]), CUBE, PERIODIC, GraphSettings(2.0), lambda: "frame 7")
    with pytest.raises(UserError, match="no atoms"):
        find_edges(np.zeros((0, 3)), CUBE, PERIODIC, GraphSettings(2.0))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"cutoff": 0}, "cutoff is 0"),
        ({"cutoff": "6"}, "cutoff is '6'"),
        ({"cutoff": float("inf")}, "cutoff is inf"),
        ({"cutoff": 6.0, "max_neighbors": 0}, "max_neighbors is 0"),
        ({"cutoff": 6.0, "max_neighbors": 2.5}, "max_neighbors is 2.5"),
        ({"cutoff": 6.0, "adaptive_cutoff": True, "limit": 5}, "set limit to more"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any], expected: str):
    with pytest.raises(UserError, match=expected):
        GraphSettings(**wrong).checked()
