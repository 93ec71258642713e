"""`isoscale data info` of structures."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isoscale.cli.main import run as command
from isoscale.errors import UserError
from isoscale.science.crystals.reading.describe import lines, nearest_atoms, of_paths, of_recipe, of_table
from isoscale.science.crystals.reading.table import StructureTable
from isoscale.science.crystals.structures import Structures
from tests.science.crystals.made_structures import cubic, many, write_extxyz


def test_a_file_is_described_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elements, sizes, targets, units; the same as JSON."""
    structures = [*many(10), cubic((1, 1, 1), number=28, seed=99)]
    path = str(write_extxyz(tmp_path / "a.extxyz", structures))

    def printed(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["isoscale", "data", "info", path, *words])
        with pytest.raises(SystemExit) as end:
            command()
        assert not end.value.code
        return capsys.readouterr().out

    said = printed()
    for words in ("11 periodic", "Ni 4, Cu ", "atoms: 4 to 32", "eV (assumed)", "it is a total"):
        assert words in said
    facts = json.loads(printed("--json", "energy=eV/atom"))
    assert facts["units"]["energy"] == {"unit": "eV/atom", "known_by": "recipe"}
    assert facts["splits"]["structures"]["atoms"]["total"] == sum(map(len, structures))
    with pytest.raises(UserError, match="cutoff"):
        of_paths([path], {"cutoff": 6})


def test_outliers_are_listed_with_their_places() -> None:
    """The worst first."""
    structures = many(20)
    for at, size in ((3, 30.0), (7, 90.0)):
        forces = structures[at].targets["forces"].copy()
        forces[0] = [0, 0, size]
        structures[at] = replace(structures[at], targets={**structures[at].targets, "forces": forces})
    structures[5] = replace(structures[5], targets={"energy": structures[5].targets["energy"] + 200.0})
    facts = of_table(StructureTable.of(structures))
    found = {each["target"]: each for each in facts["outliers"]}
    assert [worst["place"] for worst in found["forces"]["worst"]] == ["made 7", "made 3"]
    assert [worst["place"] for worst in found["energy"]["worst"]] == ["made 5"]
    assert "stress" not in found
    assert facts["targets"]["forces"]["has"] == 19


def test_the_nearest_atoms_are_found_through_images() -> None:
    """Against all images, one by one."""
    pytest.importorskip("vesin")
    structures = many(6)
    found = nearest_atoms(StructureTable.of(structures))
    shifts = np.stack(np.meshgrid(*[[-1, 0, 1]] * 3), -1).reshape(-1, 3)
    smallest = []
    for each in structures:
        images = each.positions[None, :, None] + (shifts @ each.cell)[:, None, None] - each.positions[None, None]
        lengths = np.linalg.norm(images, axis=-1)
        smallest.append(lengths[lengths > 1e-9].min())
    assert found is not None
    assert found["distance"] == pytest.approx(min(smallest))
    assert found["place"] == f"made {int(np.argmin(smallest))}"
    alone = nearest_atoms(StructureTable.of([replace(cubic((1, 1, 1)), pbc=np.zeros(3, bool), cell=np.zeros((3, 3)))]))
    assert alone is not None


def test_the_data_of_a_recipe_is_described_by_splits(tmp_path: Path) -> None:
    """And data of another kind is left to others."""
    path = str(write_extxyz(tmp_path / "a.extxyz", many(20)))
    facts = of_recipe(Structures(path=path), {})
    assert facts is not None
    assert list(facts["splits"]) == ["train", "val", "test"]
    assert any("train: 16" in line for line in lines({"title": "a recipe", **facts}))
    assert of_recipe(object(), {}) is None


def test_structures_without_targets_or_cells_are_described(tmp_path: Path) -> None:
    """A molecule."""
    (tmp_path / "a.xyz").write_text("2\n\nO 0 0 0\nH 0 0 0.2\n")
    said = "\n".join(lines(of_paths([str(tmp_path / "a.xyz")], {})))
    assert "1 not periodic" in said
    assert "no targets" in said
    assert "on top of each other" in said
