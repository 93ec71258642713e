import os
from pathlib import Path

import numpy as np
import pytest
import torch

from isoscale.errors import UserError
from isoscale.science.potentials import AtomicSystems
from isoscale.science.potentials.systems import find_systems, has_systems
from tests.science.potentials.made_systems import arrays, opened, write, write_hdf5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOSCALE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "neighbours"


def test_sets_are_numbered_through(tmp_path: Path):
    sets = [arrays(3, seed=1), arrays(2, seed=2)]
    (system,) = find_systems(str(write(tmp_path / "water", sets)))
    assert (len(system), system.num_atoms, system.is_periodic) == (5, 5, True)
    assert system.labels == {"energy", "force", "virial"}
    batch = system.fetch(torch.tensor([4, 0, 4]))
    expected = np.concatenate([each["coord"] for each in sets])[[4, 0, 4]].reshape(3, 5, 3)
    assert np.array_equal(batch["coord"].numpy(), expected)
    assert batch["types"].tolist() == [[0, 1, 1, 0, 1]] * 3
    assert system.locate(4) == f"{tmp_path}/water, frame 4"
    assert system.file_of("force", 4) == f"{tmp_path}/water/set.001/force.npy, row 1"


def test_arrays_may_be_flat_or_shaped_and_of_any_float(tmp_path: Path):
    flat = arrays(2)
    shaped = {
        "coord": flat["coord"].reshape(2, 5, 3).astype(np.float16),
        "box": flat["box"].reshape(2, 3, 3),
        "energy": flat["energy"].reshape(2, 1).astype(np.float32),
        "force": flat["force"].reshape(2, 5, 3),
    }
    (system,) = find_systems(f"{write(tmp_path / 'a', [shaped])}/")
    batch = system.fetch(torch.arange(2))
    assert batch["coord"].dtype == torch.float32  # half precision is for storing
    assert np.array_equal(batch["force"].numpy(), flat["force"].reshape(2, 5, 3))
    assert batch["energy"].shape == (2,)


def test_sets_of_different_precision_are_read_in_the_larger(tmp_path: Path):
    second = {key: values.astype(np.float64) for key, values in arrays(2).items()}
    (system,) = find_systems(str(write(tmp_path / "a", [arrays(1), second])))
    assert system.fetch(torch.arange(3))["coord"].dtype == torch.float64


def test_one_frame_may_be_stored_without_a_dimension_for_frames(tmp_path: Path):
    one = {key: values[0] if key != "energy" else values for key, values in arrays(1).items()}
    (system,) = find_systems(str(write(tmp_path / "a", [one])))
    assert len(system) == 1
    assert system.fetch(torch.tensor([0]))["force"].shape == (1, 5, 3)


def test_hdf5_groups_hold_the_same(tmp_path: Path):
    sets = [arrays(3, seed=1), arrays(2, seed=2)]
    write_hdf5(tmp_path / "data.hdf5", "liquid/water", sets)
    (system,) = find_systems(f"{tmp_path}/data.hdf5#/liquid/water")
    (same,) = find_systems(str(write(tmp_path / "water", sets)))
    rows = torch.tensor([4, 1])
    found, expected = system.fetch(rows), same.fetch(rows)
    assert all(found[key].equal(expected[key]) for key in expected)
    assert system.type_names == ["O", "H"]
    assert system.locate(1) == f"{tmp_path}/data.hdf5#/liquid/water, frame 1"


def test_a_folder_or_file_without_types_is_searched(tmp_path: Path):
    for name in ("b/deep", "a"):
        write(tmp_path / "all" / name)
    (tmp_path / "all" / "link").symlink_to(tmp_path / "all" / "b")
    (tmp_path / "all" / "b" / "round").symlink_to(tmp_path / "all")
    names = [Path(system.name).relative_to(tmp_path / "all") for system in find_systems(str(tmp_path / "all"))]
    assert list(map(str, names)) == ["a", "b/deep"]
    for group in ("second", "first"):
        write_hdf5(tmp_path / "data.h5", group, [arrays()])
    assert [system.name[-6:] for system in find_systems(f"{tmp_path}/data.h5")] == ["/first", "second"]
    assert has_systems(str(tmp_path / "all"))
    assert not has_systems(str(tmp_path / "all" / "a" / "set.000"))


def test_paths_are_relative_to_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "water")
    monkeypatch.chdir(tmp_path)
    assert find_systems("water/")[0].name == "water"


def without(key: str, **changed: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values for name, values in (arrays() | changed).items() if name != key}


FORCE = arrays()["force"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ([without("", coord=arrays()["coord"][:, :12])], r"set.000/coord.npy has 12 numbers per frame.* 15.*5 atoms"),
        ([without("", force=FORCE[:, :14])], r"set.000/force.npy has 14 numbers per frame.*a/?"),
        ([without("", box=np.ones((3, 6)))], r"set.000/box.npy has 6 numbers per frame, expected 9"),
        ([arrays(), without("", energy=np.ones(2))], r"set.001/energy.npy has 2 frames, but coord.npy .* has 3"),
        ([without("coord")], r"a has no set.000/coord.npy"),
        ([without("box")], r"a has no set.000/box.npy.* nopbc"),
        ([arrays(), without("force")], r"a has no set.001/force.npy, but other sets have"),
        ([arrays(0)], r"a is empty"),
        ([], r"a has no set.\* .*numpy.save"),
        ([without("", energy=np.array(["x"] * 3))], r"energy.npy holds text"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_together_are_named(tmp_path: Path, sets: list[dict[str, np.ndarray]], message: str):
    with pytest.raises(UserError, match=message):
        find_systems(str(write(tmp_path / "a", sets)))


def test_text_files_are_told_how_to_become_arrays(tmp_path: Path):
    (write(tmp_path / "a", []) / "coord.raw").write_text("0 0 0")
    with pytest.raises(UserError, match=r"only coord.raw.*numpy.loadtxt\('coord.raw'"):
        find_systems(str(tmp_path / "a"))


def test_truncated_and_damaged_files_are_named(tmp_path: Path):
    path = write(tmp_path / "a") / "set.000" / "force.npy"
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(UserError, match=r"set.000/force.npy is truncated"):
        find_systems(str(tmp_path / "a"))
    path.write_bytes(b"not an array")
    with pytest.raises(UserError, match=r"force.npy is not a complete .npy file"):
        find_systems(str(tmp_path / "a"))


def test_a_path_without_a_system_says_where_was_looked(tmp_path: Path):
    with pytest.raises(UserError, match=r"there is no system .*nowhere"):
        find_systems(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no system found in .*looked for type.raw"):
        find_systems(str(tmp_path))
    with pytest.raises(UserError, match=r'there is no system .*nowhere.*; name yours: "data.val=\[FOLDER, …\]"'):
        AtomicSystems(val=[str(tmp_path / "nowhere")])
    with pytest.raises(UserError, match=r"there is no system .*\)$"):
        AtomicSystems(test=[str(tmp_path / "nowhere")])


@pytest.mark.parametrize("text", ["O H", "", "0 -1"])
def test_types_that_are_no_numbers_are_refused(tmp_path: Path, text: str):
    (write(tmp_path / "a") / "type.raw").write_text(text)
    with pytest.raises(UserError, match=r"a/type.raw (has|is empty)"):
        find_systems(str(tmp_path / "a"))


@pytest.mark.parametrize(
    ("names", "types", "message"),
    [
        (["O", "H"], (0, 1, 2, 0, 1), r"a, atom 2 has type 2 in type.raw, but type_map.raw has 2 types"),
        (["O", "He"], (0, 1, 1, 0, 1), r"a, atom 1 is He, which the model does not know: its types are O, H"),
        (None, (0, 1, 2, 0, 1), r"a, atom 2 has type 2 in type.raw, but task.model.types .* has 2 types"),
    ],
)
def test_types_that_nobody_knows_are_named(
    tmp_path: Path, names: list[str] | None, types: tuple[int, ...], message: str
):
    with pytest.raises(UserError, match=message):
        opened(write(tmp_path / "a", types=types, names=names))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("coord", np.nan, r"a, frame 1: coord is not a finite number \(.*set.000/coord.npy, row 1\)"),
        ("energy", np.inf, r"a, frame 1: energy is not a finite number"),
        ("force", -np.inf, r"a, frame 1: force is not a finite number"),
        ("virial", np.nan, r"a, frame 1: virial is not a finite number"),
        ("box", np.nan, r"a, frame 1: box is not a finite number"),
        ("box", 0.0, r"a, frame 1: the box has no volume"),
    ],
)
def test_values_that_are_no_numbers_are_named(tmp_path: Path, key: str, value: float, message: str):
    values = arrays()
    values[key][1, ...] = value
    with pytest.raises(UserError, match=message):
        opened(write(tmp_path / "a", [values]))


def test_two_atoms_at_one_place_are_refused(tmp_path: Path):
    values = arrays()
    values["coord"][2, 3:6] = values["coord"][2, :3]
    with pytest.raises(UserError, match=r"a, frame 2: two atoms are at the same place"):
        opened(write(tmp_path / "a", [values]))
