"""The data of a recipe: splits, units, names of targets, and what is said of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isoscale.errors import UserError
from isoscale.science.crystals.structures import Structures
from tests.science.crystals.made_structures import cubic, many, write_extxyz


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same structures as totals, per atom, with a header, and others."""
    found = tmp_path_factory.mktemp("structures")
    structures = many(30)
    write_extxyz(found / "totals.extxyz", structures)
    write_extxyz(found / "header.extxyz", structures, {"energy": 1 / 27.211386245988}, "energy_unit=Hartree")
    write_extxyz(found / "kbar.extxyz", structures, {"stress": -1602.1766208})
    write_extxyz(found / "nickel.extxyz", [cubic((1, 1, 1), number=28, seed=seed) for seed in range(4)])
    divided = [
        replace(each, targets={**each.targets, "energy": each.targets["energy"] / len(each)}) for each in structures
    ]
    write_extxyz(found / "per_atom.extxyz", divided)
    return found


def energies(data: Structures, split: str = "train") -> list[float]:
    return [round(float(value), 6) for value in data.tables[split].targets["energy"].values]


def test_a_path_is_cut_the_same_way_every_time(folder: Path) -> None:
    """Every structure is in one split, another seed cuts otherwise."""
    path = str(folder / "totals.extxyz")
    whole = energies(Structures(train=path))
    data = Structures(path=path)
    assert {name: len(table) for name, table in data.tables.items()} == {"train": 24, "val": 3, "test": 3}
    assert sorted(energies(data) + energies(data, "val") + energies(data, "test")) == sorted(whole)
    assert energies(data, "test") == energies(Structures(path=path), "test")
    assert energies(data, "test") != energies(Structures(path=path, split_seed=1), "test")
    assert len(data.train) == 24
    assert data.predict is data.test
    assert data.tables["test"].places(0).startswith(path)


def test_training_files_give_part_of_themselves_to_validation(folder: Path) -> None:
    """Where no files are named for it."""
    train, test = str(folder / "totals.extxyz"), str(folder / "nickel.extxyz")
    data = Structures(train=train, test=test, split={"val": 0.2})
    assert {name: len(table) for name, table in data.tables.items()} == {"train": 24, "val": 6, "test": 4}
    assert len(Structures(train=train, split={"val": 4, "test": 2}).tables["train"]) == 24
    for split in ({"test": 0.1}, {"train": 0.9}, {"val": 1.5}):
        with pytest.raises(UserError, match="split"):
            Structures(train=train, test=test, split=split)


def test_energies_per_atom_are_refused_until_they_are_declared(folder: Path) -> None:
    """The refusal says its evidence and what to type; what is typed then works."""
    path = str(folder / "per_atom.extxyz")
    with pytest.raises(UserError, match=r"per atom, not a total: .*\n.*data.units.energy=eV/atom"):
        Structures(train=path)
    right = energies(Structures(train=str(folder / "totals.extxyz")))
    np.testing.assert_allclose(energies(Structures(train=path, units={"energy": "eV/atom"})), right, atol=1e-5)
    as_they_stand = Structures(train=path, units={"energy": "eV"})
    assert not any("energy" in remark for remark in as_they_stand.remarks)
    detected = Structures(train=path, units="detect")
    np.testing.assert_allclose(energies(detected), right, atol=1e-5)
    assert any("energy is taken to be in eV/atom" in remark for remark in detected.remarks)


def test_a_stress_in_kbar_is_refused_until_it_is_declared(folder: Path) -> None:
    """And is the right one then."""
    with pytest.raises(UserError, match=r'"data.units.stress=-kbar"'):
        Structures(train=str(folder / "kbar.extxyz"))
    found = Structures(train=str(folder / "kbar.extxyz"), units={"stress": "-kbar"})
    right = Structures(train=str(folder / "totals.extxyz"))
    np.testing.assert_allclose(
        found.tables["train"].targets["stress"].values, right.tables["train"].targets["stress"].values, atol=1e-9
    )


def test_a_file_may_say_its_units(folder: Path) -> None:
    """The recipe goes before it, but not before other files than its own."""
    path = str(folder / "header.extxyz")
    right = energies(Structures(train=str(folder / "totals.extxyz")))
    np.testing.assert_allclose(energies(Structures(train=path)), right, atol=1e-5)
    contradicted = Structures(train=path, units={"energy": "eV"})
    assert energies(contradicted)[0] == pytest.approx(right[0] / 27.211386, abs=1e-5)
    assert any("says that energy is in Hartree" in remark for remark in contradicted.remarks)
    applied = Structures.from_paths([path], units={"energy": "eV/atom"})
    np.testing.assert_allclose(energies(applied, "test"), right, atol=1e-5)


def test_other_data_needs_no_targets_and_is_not_refused(folder: Path, tmp_path: Path) -> None:
    """Whoever predicts has none, and who tests reads what is odd."""
    (tmp_path / "a.xyz").write_text("1\n\nCu 0 0 0\n")
    data = Structures.from_paths([str(tmp_path / "a.xyz")], targets={"band_gap": "gap"})
    assert len(data.predict) == 1
    odd = Structures.from_paths([str(folder / "per_atom.extxyz")])
    assert any("per atom, not a total" in remark for remark in odd.remarks)


def test_targets_are_renamed_and_left_out(folder: Path, tmp_path: Path) -> None:
    """By the names of the recipe; one that no file has is refused with the nearest."""
    text = '1\nLattice="3 0 0 0 3 0 0 0 3" gap=0.5 energy=1\nCu 0 0 0\n'
    (tmp_path / "a.xyz").write_text(text)
    (tmp_path / "b.xyz").write_text(text.replace("gap=0.5", ""))
    data = Structures(
        train=[str(tmp_path / "a.xyz"), str(tmp_path / "b.xyz")], targets={"band_gap": "gap", "energy": None}
    )
    assert data.tables["train"].targets.keys() == {"band_gap"}
    assert data.tables["train"].targets["band_gap"].has.tolist() == [True, False]
    with pytest.raises(UserError, match=r'targets.band_gap is "gpa".*did you mean "gap"\?'):
        Structures(train=str(tmp_path / "a.xyz"), targets={"band_gap": "gpa"})


def test_what_other_splits_have_is_said(folder: Path) -> None:
    """Elements that training never sees, and structures that it has seen."""
    train = str(folder / "totals.extxyz")
    data = Structures(train=train, val=train, test=str(folder / "nickel.extxyz"))
    assert "30 of 30 structures of val are in the training data too" in data.remarks
    assert "test has Ni, which the training data has not" in data.remarks
    assert not Structures(path=train).remarks


def test_forces_missing_in_some_frames_are_allowed_and_said(folder: Path, tmp_path: Path) -> None:
    """The frames that have them are known."""
    structures = many(6)
    path = write_extxyz(tmp_path / "a.extxyz", structures)
    bare = [replace(each, targets={"energy": each.targets["energy"]}) for each in structures[:2]]
    other = write_extxyz(tmp_path / "b.extxyz", bare)
    data = Structures(train=[str(path), str(other)])
    assert data.tables["train"].targets["forces"].has.tolist() == [True] * 6 + [False] * 2
    assert any(remark.startswith("forces is missing in 2 of 8 structures") for remark in data.remarks)
    assert set(data.tables["train"].names) == {"a.extxyz", "b.extxyz"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "names no file"),
        ({"train": "a", "path": "b"}, "in path and in train"),
        ({"train": "nowhere.extxyz"}, "data.train"),
        ({"train": "TOTALS", "units": "detcet"}, "expected detect"),
        ({"train": "TOTALS", "units": "eV"}, "or the like"),
        ({"train": "TOTALS", "units": {"energy": "eV/Atoms"}}, None),
    ],
)
def test_arguments_that_make_no_sense_are_refused(folder: Path, arguments: dict[str, str], message: str | None) -> None:
    """With what to write."""
    given = {key: str(folder / "totals.extxyz") if value == "TOTALS" else value for key, value in arguments.items()}
    if message is None:
        assert Structures(**given)  # type: ignore[arg-type]
        return
    with pytest.raises(UserError, match=message):
        Structures(**given)  # type: ignore[arg-type]
