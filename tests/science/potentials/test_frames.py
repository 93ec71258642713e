from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoscale.data.mixture import Mixture, system_batch_sizes
from isoscale.errors import UserError
from isoscale.science.potentials.describe import describe_systems
from isoscale.science.potentials.systems import find_systems
from tests.science.potentials.made_systems import CUTOFF, arrays, brute_force, opened, write, write_hdf5
from tests.science.potentials.test_neighbours import check_reverse

MIXED = np.array([[0, 1, 1, -1, 1], [1, -1, -1, 0, -1], [1, 1, 0, 0, 0]])
"""Types of three frames, with atoms that are not there."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "neighbours"


def with_types(types: np.ndarray = MIXED, **changed: np.ndarray) -> dict[str, np.ndarray]:
    return {**arrays(len(types)), "real_atom_types": types, **changed}


def check_frame(batch: dict[str, Any], row: int, stored: dict[str, np.ndarray], types: np.ndarray, frame: int) -> None:
    """One row of a batch is a frame of the files: the same atoms and labels, and all neighbours within the cutoff."""
    places = batch["places"][row].numpy()
    real = places >= 0
    assert sorted(places[real]) == np.flatnonzero(types >= 0).tolist()
    kinds = np.concatenate([np.full(batch[f"atoms_{kind}"].shape[1], kind) for kind in (0, 1)])
    assert np.array_equal(kinds[real], types[places[real]])
    assert np.array_equal(np.concatenate([batch[f"atoms_{kind}"][row] for kind in (0, 1)]), real)
    for key, sorted_key in (("coord", "coord"), ("force", "force")):
        expected = stored[key][frame].reshape(-1, 3)[np.maximum(places, 0)] * real[:, None]
        assert np.array_equal(batch[sorted_key][row].numpy(), expected)
    assert float(batch["energy"][row]) == stored["energy"][frame]
    neighbours = np.concatenate([batch[f"neighbours_{kind}"][row].numpy() for kind in (0, 1)], 1)
    shifts = batch["shifts"][row].numpy()
    check_reverse(neighbours, shifts, batch["reverse"][row].numpy())
    of_slots = np.concatenate([np.full(batch[f"neighbours_{kind}"].shape[2], kind) for kind in (0, 1)])
    found = set()
    for centre, slot in np.argwhere(neighbours >= 0):
        assert kinds[neighbours[centre, slot]] == of_slots[slot]
        found.add((places[centre], places[neighbours[centre, slot]], tuple(shifts[centre, slot].tolist())))
    atoms = np.flatnonzero(types >= 0)
    box = stored["box"][frame].reshape(3, 3).astype(float) if np.any(batch["box"][row].numpy()) else None
    pairs = brute_force(stored["coord"][frame].reshape(-1, 3)[atoms].astype(float), box, CUTOFF)
    assert found == {(atoms[centre], atoms[neighbour], shift) for centre, neighbour, shift in pairs}


@pytest.mark.parametrize("periodic", [True, False])
def test_rows_come_in_the_order_asked_with_all_neighbours(tmp_path: Path, periodic: bool):
    sets = [arrays(3, seed=1), arrays(2, seed=2)]
    source = opened(write(tmp_path / "a", sets, periodic=periodic)).train.systems[0]
    whole = {key: np.concatenate([each[key] for each in sets]) for key in sets[0]}
    rows = [4, 0, 4, 2]
    batch = source.fetch(torch.tensor(rows))
    for row, frame in enumerate(rows):
        check_frame(batch, row, whole, np.array([0, 1, 1, 0, 1]), frame)
    assert batch["coord"].dtype == torch.float32
    assert batch["reverse"].dtype == torch.int32
    assert bool(batch["box"].any()) == periodic


def test_a_source_says_what_it_has(tmp_path: Path):
    source = opened(write(tmp_path / "a")).train.systems[0]
    batch = source.fetch(torch.arange(3))
    assert (len(source), source.num_atoms, source.sample_size) == (3, 5, 5)
    assert source.name == str(tmp_path / "a")
    assert source.labels == {"energy", "force", "virial"}
    assert source.most_neighbours == [batch[f"neighbours_{kind}"].shape[2] for kind in (0, 1)]
    full = [int((batch[f"neighbours_{kind}"] >= 0).sum(2).max()) for kind in (0, 1)]
    assert source.most_neighbours == full  # no slot that nobody needs
    assert source.nbytes == sum(tensor.nbytes for tensor in batch.values())
    assert source.locate(2) == f"{tmp_path}/a, frame 2"


def test_the_nearest_atoms_are_known(tmp_path: Path):
    found = describe_systems({"train": find_systems(str(write(tmp_path / "a")))}, CUTOFF)["neighbours"]
    assert found["nearest"] == pytest.approx(min(distances(arrays(), frame).min() for frame in range(3)))


def distances(stored: dict[str, np.ndarray], frame: int) -> np.ndarray:
    coord, box = stored["coord"][frame].reshape(-1, 3).astype(float), stored["box"][frame].reshape(3, 3).astype(float)
    pairs = brute_force(coord, box, CUTOFF)
    return np.array([np.linalg.norm(coord[j] + np.array(shift) @ box - coord[i]) for i, j, shift in pairs])


def test_atoms_with_too_many_neighbours_are_counted_and_the_worst_is_named(tmp_path: Path):
    source = opened(write(tmp_path / "a")).train.systems[0]
    batch = source.fetch(torch.arange(3))
    counts = torch.stack([(batch[f"neighbours_{kind}"] >= 0).sum(2) for kind in (0, 1)], 2)
    assert source.count_over(source.most_neighbours) is None
    sel = [source.most_neighbours[0], source.most_neighbours[1] - 2]
    over = source.count_over(sel)
    more = counts[:, :, 1] > sel[1]
    assert (over.num_atoms, over.num_frames) == (int(more.sum()), int(more.any(1).sum()))
    place = (batch["places"][over.frame] == over.atom).nonzero().item()
    assert (over.type, over.found) == (1, int(counts[over.frame, place, 1])) == (1, source.most_neighbours[1])


def test_types_are_those_of_the_model_whatever_their_numbers(tmp_path: Path):
    path = write(tmp_path / "a", types=(1, 0, 0, 1, 0), names=["H", "O", "Xe"])
    source = opened(path, types=["C", "O", "H"]).train.systems[0]
    batch = source.fetch(torch.tensor([0]))
    assert batch["places"].tolist() == [[0, 3, 1, 2, 4]]
    assert "atoms_0" not in batch and "neighbours_0" not in batch
    assert (batch["atoms_1"].shape[1], batch["atoms_2"].shape[1]) == (2, 3)


def test_frames_may_have_types_of_their_own_and_virtual_atoms(tmp_path: Path):
    stored = with_types()
    source = opened(write(tmp_path / "a", [stored], types=(0,) * 5)).train.systems[0]
    batch = source.fetch(torch.tensor([2, 1, 0]))
    assert (batch["atoms_0"].shape[1], batch["atoms_1"].shape[1]) == (3, 3)
    for row, frame in enumerate([2, 1, 0]):
        check_frame(batch, row, stored, MIXED[frame], frame)
    with pytest.raises(UserError, match=r"a, frame 1, atom 0 has type 7 in real_atom_types.npy"):
        bad = np.where(np.arange(3)[:, None] == 1, 7, MIXED)
        opened(write(tmp_path / "a", [with_types(bad)], types=(0,) * 5))
    with pytest.raises(UserError, match="without atoms"):
        opened(write(tmp_path / "a", [with_types(np.full((3, 5), -1))], types=(0,) * 5))


def test_frames_of_all_systems_may_share_a_batch(tmp_path: Path):
    small = {key: values.astype(np.float64) for key, values in arrays(2, (1, 0), seed=5).items() if key != "virial"}
    mixed, plain = with_types(), arrays(4, seed=3)
    paths = [
        write(tmp_path / "small", [small], types=(1, 0)),
        write(tmp_path / "mixed", [mixed], types=(0,) * 5),
        write(tmp_path / "plain", [plain], periodic=False),
    ]
    train = opened(*paths, batches="mixed").train
    (source,) = train.systems
    rows = [8, 0, 3, 2, 8, 1]
    batch = source.fetch(torch.tensor(rows))
    expected = [(plain, np.array([0, 1, 1, 0, 1]), 3), (small, np.array([1, 0]), 0), (mixed, MIXED[1], 1),
                (mixed, MIXED[0], 0), (plain, np.array([0, 1, 1, 0, 1]), 3), (small, np.array([1, 0]), 1)]  # fmt: skip
    for row, (stored, types, frame) in enumerate(expected):
        check_frame(batch, row, stored, types, frame)
    assert batch["has_virial"].tolist() == [1, 0, 1, 1, 1, 0]
    assert "has_energy" not in batch
    assert not batch["virial"][1].any()
    assert batch["coord"].dtype == torch.float64
    assert source.names == [str(path) for path in paths]
    assert [source.locate(index) for index in (0, 4)] == [f"{paths[0]}, frame 0", f"{paths[1]}, frame 2"]
    assert (len(source), source.num_atoms) == (9, 5)
    over = source.count_over([0, 0])
    each = [opened(path).train.systems[0].count_over([0, 0]) for path in paths]
    assert over.num_atoms == sum(one.num_atoms for one in each)
    assert over.found == max(one.found for one in each)


def test_systems_make_a_mixture_also_when_there_is_one(tmp_path: Path):
    write_hdf5(tmp_path / "data.hdf5", "a", [arrays(4)])
    data = opened(f"{tmp_path}/data.hdf5#/a", val=str(write(tmp_path / "b")), probabilities=[1.0])
    assert isinstance(data.train, Mixture) and isinstance(data.val, Mixture)
    assert data.test is None
    assert system_batch_sizes(data.train, "auto:12") == [3]  # of five atoms each
    assert system_batch_sizes(data.train, [2]) == [2]
    assert data.train.locate(1) == f"system 0, {tmp_path}/data.hdf5#/a, frame 1"


def test_atoms_without_neighbours_have_no_slots(tmp_path: Path):
    far = {**arrays(2, (0, 1)), "coord": np.array([[0, 0, 0, 9, 9, 9.0]] * 2)}
    source = opened(write(tmp_path / "a", [far], types=(0, 1), periodic=False)).train.systems[0]
    batch = source.fetch(torch.tensor([1, 0]))
    assert batch["shifts"].shape == (2, 2, 0, 3)
    assert not any(key.startswith("neighbours") for key in batch)
    assert describe_systems({"train": [source.system]}, CUTOFF)["neighbours"]["nearest"] is None
    both = opened(tmp_path / "a", write(tmp_path / "b"), batches="mixed").train.systems[0]
    assert (both.fetch(torch.tensor([0]))["neighbours_1"] == -1).all()


def test_data_needs_a_system():
    with pytest.raises(UserError, match=r"data names no system"):
        opened()
