import json
from pathlib import Path

import numpy as np
import pytest

from tests.science.potentials.made_systems import arrays, brute_force, write, write_hdf5

RECIPE = """
task:
  class: potential
  model:
    class: deep_potential
    types: [H, O]
    descriptor: {class: se_e2_a, sel: [1, 50], cutoff: 2.5}
data: {class: atomic_systems, train: all/a, val: [all/b]}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ISOSCALE_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "all" / "a", [arrays(3, seed=1), arrays(2, seed=2)])
    write(tmp_path / "all" / "b", [arrays(2, (1, 1, 0), seed=3)], types=(1, 1, 0), periodic=False)
    return tmp_path


def most(stored: dict[str, np.ndarray], types: tuple[int, ...], kind: int, cutoff: float, periodic: bool) -> int:
    """Neighbours of a type that the atom with most of them has."""
    counts = []
    for coord, box in zip(stored["coord"], stored["box"], strict=True):
        cell = box.reshape(3, 3).astype(float) if periodic else None
        pairs = [
            pair for pair in brute_force(coord.reshape(-1, 3).astype(float), cell, cutoff) if types[pair[1]] == kind
        ]
        counts.append(np.bincount([pair[0] for pair in pairs], minlength=1).max())
    return int(max(counts))


def test_systems_of_a_folder_are_described(isoscale, here: Path):
    done = isoscale("data", "info", "all/", "cutoff=2", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["systems"]["system"] == [
        {"name": "all/a", "frames": 5, "atoms": 5, "formula": "O2 H3", "periodic": True,
         "labels": ["energy", "force", "virial"]},
        {"name": "all/b", "frames": 2, "atoms": 3, "formula": "O1 H2", "periodic": False,
         "labels": ["energy", "force", "virial"]},
    ]  # fmt: skip
    types = {each["name"]: each for each in found["neighbours"]["types"]}
    for kind, name in enumerate("OH"):
        of_a = (most(arrays(count, seed=seed), (0, 1, 1, 0, 1), kind, 2.0, True) for count, seed in ((3, 1), (2, 2)))
        of_b = most(arrays(2, (1, 1, 0), seed=3), (1, 1, 0), kind, 2.0, False)
        assert types[name]["most"] == max(*of_a, of_b)
        assert types[name]["most"] < types[name]["suggested"]
    assert not (here / "cache").exists()  # looking writes nothing


def test_a_recipes_systems_stand_beside_what_its_model_has_room_for(isoscale, here: Path):
    (here / "recipe.yaml").write_text(RECIPE)
    done = isoscale("data", "info", "recipe.yaml")
    assert done.code == 0, done.err
    assert "train  frames  atoms  formula  periodic  labels" in done.out
    assert "all/b  2       3      H2 O1    no        energy, force, virial" in done.out
    assert "neighbours within 2.5 Å (task.model.descriptor.cutoff)" in done.out
    assert "1 too few" in done.out and "50 too few" not in done.out


def test_groups_of_hdf5_files_and_types_without_names_are_described(isoscale, here: Path):
    write_hdf5(here / "data.hdf5", "ice", [arrays()])
    write(here / "unnamed", names=None)
    assert "data.hdf5#/ice" in isoscale("data", "info", "data.hdf5#/ice").out
    assert isoscale("data", "info", "data.hdf5", "cutoff=2").out.count("data.hdf5#/ice") == 2
    assert "0×2 1×3" in isoscale("data", "info", "unnamed").out
    assert "(the default; cutoff=8 takes another)" in isoscale("data", "info", "unnamed").out


def test_other_words_and_bad_systems_are_the_users_to_fix(isoscale, here: Path):
    done = isoscale("data", "info", "all", "cutof=2")
    assert (done.code, "cutoff=NUMBER" in done.err) == (2, True)
    (here / "all" / "b" / "type.raw").write_text("1 1")
    done = isoscale("data", "info", "all")
    assert done.code == 2
    assert "all/b/set.000/coord.npy has 9 numbers per frame" in done.err
