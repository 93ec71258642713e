import builtins
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from isoscale.errors import UserError
from isoscale.science.atoms.neighbours import shift_type
from isoscale.science.potentials.neighbours import suggested_sel
from tests.science.potentials.made_systems import brute_force
from tests.science.potentials.one_frame import frame_batch

NUM_TYPES = 3


def edges(batch: dict[str, Any]) -> list[tuple[int, int, tuple[int, ...], float]]:
    """Centre, neighbour (as stored atoms), image and distance of every filled slot, in the order of slots."""
    neighbours = table(batch)
    places, coord, box = (batch[key][0].numpy() for key in ("places", "coord", "box"))
    found = []
    for centre, slot in np.argwhere(neighbours >= 0):
        shift = batch["shifts"][0, centre, slot].numpy()
        apart = coord[neighbours[centre, slot]] + shift @ box - coord[centre]
        found.append((places[centre], places[neighbours[centre, slot]], tuple(shift), float(np.linalg.norm(apart))))
    return found


def table(batch: dict[str, Any]) -> np.ndarray:
    parts = [batch[f"neighbours_{kind}"][0].numpy() for kind in range(NUM_TYPES) if f"neighbours_{kind}" in batch]
    return np.concatenate(parts, 1) if parts else np.zeros((batch["coord"].shape[1], 0), np.int32)


def check_reverse(neighbours: np.ndarray, shifts: np.ndarray, reverse: np.ndarray) -> None:
    """The way back of the way back is the way there; it leads from the neighbour, the other way round the box."""
    flat, num_slots = reverse.reshape(-1), neighbours.shape[1]
    places = np.arange(flat.size)
    assert np.array_equal(flat[flat], places)
    is_empty = neighbours.reshape(-1) < 0
    assert np.array_equal(flat[is_empty], places[is_empty])
    real = places[~is_empty]
    assert np.array_equal(flat[real] // num_slots, neighbours.reshape(-1)[real])
    assert np.array_equal(neighbours.reshape(-1)[flat[real]], real // num_slots)
    assert np.array_equal(shifts.reshape(-1, 3)[flat[real]], -shifts.reshape(-1, 3)[real])


@st.composite
def frames(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Atoms in and out of boxes of any shape, small ones too; some on a lattice, where many distances are equal."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_atoms = draw(st.integers(1, 7))
    types = random.integers(0, NUM_TYPES, num_atoms)
    if not draw(st.booleans()):
        return random.uniform(-3, 3, (num_atoms, 3)), types, None
    size = draw(st.sampled_from([1.4, 2.5, 6.0]))
    if draw(st.booleans()):
        cells = random.permutation(8)[:num_atoms]
        lattice = np.stack([cells // 4, cells // 2 % 2, cells % 2], 1) * size / 2
        return lattice[: len(cells)], types[: len(cells)], np.eye(3) * size
    box = np.eye(3) * size + random.uniform(-0.3, 0.3, (3, 3)) * size
    return random.uniform(-2, 2, (num_atoms, 3)) * size, types, box


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(frames())
def test_tables_hold_every_neighbour_once_sorted_and_lead_back(frame: tuple[Any, Any, Any]):
    positions, types, box = frame
    cutoff = 2.3456
    batch = frame_batch(positions, types, box, cutoff, NUM_TYPES)
    found = edges(batch)
    assert len(found) == len({each[:3] for each in found})
    assert {each[:3] for each in found} == brute_force(positions, box, cutoff)
    check_reverse(table(batch), batch["shifts"][0].numpy(), batch["reverse"][0].numpy())
    rows: dict[tuple[int, int], list[float]] = {}
    for centre, neighbour, _, distance in found:
        rows.setdefault((centre, types[neighbour]), []).append(distance)
    for distances in rows.values():
        assert (np.diff(distances) > -1e-12).all()


def test_atoms_are_sorted_by_type_and_slots_by_the_neighbours_type():
    batch = frame_batch(np.eye(3), np.array([2, 0, 2]), None, 2.0, NUM_TYPES)
    assert batch["places"].tolist() == [[1, 0, 2]]
    assert batch["coord"][0].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]
    assert {key for key in batch if key[-1].isdigit()} == {"atoms_0", "atoms_2", "neighbours_0", "neighbours_2"}
    assert batch["neighbours_0"].tolist() == [[[-1], [0], [0]]]
    assert batch["neighbours_2"].tolist() == [[[1, 2], [2, -1], [1, -1]]]
    assert batch["atoms_2"].tolist() == [[1, 1]]


def test_equal_distances_are_sorted_by_atom_then_image():
    cross = np.array([[0, 0, 0], [0, 0, 1], [1, 0, 0], [0, -1, 0], [-1, 0, 0.0]])
    assert frame_batch(cross, np.zeros(5, int), None, 1.1, 1)["neighbours_0"][0, 0].tolist() == [1, 2, 3, 4]
    images = frame_batch(np.zeros((1, 3)), np.zeros(1, int), np.eye(3), 1.1, 1)
    ordered = [[-1, 0, 0], [0, -1, 0], [0, 0, -1], [0, 0, 1], [0, 1, 0], [1, 0, 0]]
    assert images["shifts"][0, 0].tolist() == ordered


def test_the_order_of_pairs_does_not_depend_on_threads():
    random = np.random.default_rng(0)
    positions, types = random.uniform(0, 8, (60, 3)), random.integers(0, NUM_TYPES, 60)
    found = []
    for num_threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        found.append(frame_batch(positions, types, np.eye(3) * 8, 3.0, NUM_TYPES))
        torch.set_num_threads(before)
    assert all(found[0][key].equal(found[1][key]) for key in found[0])


def test_atoms_many_boxes_apart_get_larger_shifts():
    far = frame_batch(np.array([[0, 0, 0], [300.5, 0, 0]]), np.zeros(2, int), np.eye(3) * 2, 0.9, 1)
    assert far["shifts"].dtype.itemsize == 2
    assert sorted(far["shifts"][0, 0].tolist()) == [[-150, 0, 0]]
    assert shift_type(127) == np.int8
    assert shift_type(40_000) == np.int32


def test_a_lone_atom_has_no_slots():
    batch = frame_batch(np.zeros((1, 3)), np.array([1]), None, 2.0, NUM_TYPES)
    assert batch["shifts"].shape == (1, 1, 0, 3)
    assert batch["reverse"].shape == (1, 1, 0)
    assert batch["atoms_1"].tolist() == [[1]]


def test_a_suggested_sel_has_a_tenth_of_room_and_is_a_multiple_of_four():
    assert suggested_sel([38, 72, 0, 1, 40]) == [44, 80, 0, 4, 44]


def test_without_vesin_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "vesin":
            raise ImportError("no vesin here")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UserError, match=r"pip install 'isoscale\[potentials\]'"):
        frame_batch(np.eye(3), np.zeros(3, int), None, 2.0, 1)


@pytest.mark.slow
def test_importing_the_data_imports_neither_vesin_nor_ase():
    code = "import sys, isoscale.science.potentials.atomic_systems; print({'vesin', 'ase'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "set()"
