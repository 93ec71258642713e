"""Units as people write them, and what the numbers say of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from isoscale.errors import UserError
from isoscale.science.crystals.reading.checks import Finding, examine
from isoscale.science.crystals.reading.loading import load
from isoscale.science.crystals.reading.opening import open_files
from isoscale.science.crystals.reading.structure import Structure
from isoscale.science.crystals.reading.table import StructureTable
from isoscale.science.crystals.reading.units import DEFAULTS, EXAMPLES, declared, parse
from tests.science.crystals.made_structures import cubic, many

units = pytest.importorskip("ase.units")


@pytest.mark.parametrize(
    ("text", "target", "factor"),
    [
        ("eV", "energy", 1.0), ("ev / atom", "energy", 1.0), ("meV/atom", "energy", 1e-3),
        ("kcal/mol", "energy", units.kcal / units.mol), ("kJ/mol/atom", "energy", units.kJ / units.mol),
        ("Hartree", "energy", units.Hartree), ("Ha", "energy", units.Ha), ("Ry", "energy", units.Ry),
        ("eV/A", "forces", 1.0), ("eV/Ang", "forces", 1.0), ("eV / Å", "forces", 1.0), ("-eV/Å", "forces", -1.0),
        ("kcal/mol/Å", "forces", units.kcal / units.mol), ("Hartree/Bohr", "forces", units.Ha / units.Bohr),
        ("eV/A^3", "stress", 1.0), ("eV/Å³", "stress", 1.0), ("eV/Ang**3", "stress", 1.0), ("GPa", "stress", units.GPa),
        ("kbar", "stress", 0.1 * units.GPa), ("-kB", "stress", -0.1 * units.GPa),
        ("Ha/Bohr^3", "stress", units.Ha / units.Bohr**3), ("Bohr", "length", units.Bohr), ("nm", "length", 10.0),
    ],
)  # fmt: skip
def test_units_are_those_of_ase(text: str, target: str, factor: float) -> None:
    """To seven digits."""
    found = parse(text, target)
    assert found.factor == pytest.approx(factor, rel=1e-7)
    assert found.per_atom == text.endswith("atom")
    assert parse(found.name, target) == found


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"energy": "eV per atom"}, r'expected one of eV, .*did you mean "eV/atom"\?'),
        ({"energy": "eV/Å"}, "expected one of"),
        ({"forces": "eV/Å^3"}, "expected one of"),
        ({"stress": "eV/Å"}, "expected one of"),
        ({"length": "-Å"}, "expected one of"),
        ({"energy": 3}, "expected one of"),
        ({"force": "eV/Å"}, r'unknown key "force".*did you mean "forces"\?'),
        ({"band_gap": "eV"}, r'unknown key "band_gap".*there is energy, forces, stress, length'),
    ],
)
def test_units_that_nobody_knows_are_refused(given: dict[str, str], message: str) -> None:
    """With what was probably meant."""
    with pytest.raises(UserError, match=message):
        declared(given)


@pytest.mark.parametrize("target", DEFAULTS)
def test_every_example_is_understood(target: str) -> None:
    """What messages list can be typed."""
    for example in EXAMPLES[target]:
        assert parse(example.partition(" ")[0], target)


def scaled(structures: list[Structure], **factors: float) -> StructureTable:
    """The same with other units: a factor for each target; `per_atom` divides energies."""
    made = []
    for structure in structures:
        targets = {name: values * factors.get(name, 1.0) for name, values in structure.targets.items()}
        if factors.get("per_atom"):
            targets["energy"] = targets["energy"] / len(structure)
        made.append(replace(structure, targets={name: np.asarray(values) for name, values in targets.items()}))
    return StructureTable.of(made)


def verdict(table: StructureTable, target: str) -> Finding:
    return next(each for each in examine(table) if each.target == target)


ONE_SIZE = ((2, 2, 2),)


@pytest.mark.parametrize("sizes", [ONE_SIZE, ((2, 2, 2), (1, 1, 1), (3, 1, 1))])
@pytest.mark.parametrize("strain", [0.0, 0.02])
def test_energies_per_atom_are_told_from_totals_by_the_work_of_forces(
    sizes: tuple[tuple[int, ...], ...], strain: float
) -> None:
    """Also where all structures have one size, and where cells differ."""
    structures = many(40, sizes=sizes, strain=strain)
    right = verdict(scaled(structures), "energy")
    assert right.verdict == "right"
    wrong = verdict(scaled(structures, per_atom=True), "energy")
    assert (wrong.verdict, wrong.unit) == ("wrong", "eV/atom")
    assert "work of the forces" in wrong.evidence or (strain and len(sizes) > 1)


def test_energies_per_atom_are_told_from_totals_by_sizes_alone() -> None:
    """Without forces, energies that do not grow with the number of atoms are per atom."""
    structures = [
        replace(each, targets={"energy": each.targets["energy"]})
        for each in [*many(20), *[cubic((2, 1, 1), number=28, seed=seed) for seed in range(20)]]
    ]
    assert verdict(scaled(structures), "energy").verdict == "right"
    wrong = verdict(scaled(structures, per_atom=True), "energy")
    assert wrong.verdict == "wrong"
    assert "do not grow with the number of atoms (4 to 32 atoms)" in wrong.evidence


def test_what_cannot_be_told_is_said_to_be_so() -> None:
    """Of one size and without forces, nobody knows; adsorption energies say nothing either."""
    alike = [replace(each, targets={"energy": each.targets["energy"]}) for each in many(20, sizes=ONE_SIZE)]
    assert verdict(scaled(alike), "energy").verdict == "unknown"
    assert "all have 32 atoms" in verdict(scaled(alike), "energy").evidence
    random = np.random.default_rng(0)
    other = [replace(each, targets={"energy": np.array(random.normal())}) for each in many(30)]
    assert verdict(StructureTable.of(other), "energy").verdict == "unknown"


@pytest.mark.parametrize(
    ("factor", "unit"),
    [(160.21766, "GPa"), (1602.1766, "kbar"), (-1602.1766, "-kbar"), (-160.21766, "-GPa"), (-1.0, "-eV/Å^3")],
)
@pytest.mark.parametrize("per_atom", [False, True])
def test_stress_in_other_units_or_of_the_other_sign_is_told_by_its_work(
    factor: float, unit: str, per_atom: bool
) -> None:
    """Even where energies are per atom."""
    table = scaled(many(40, sizes=ONE_SIZE), stress=factor, per_atom=per_atom)
    found = verdict(table, "stress")
    assert (found.verdict, found.unit) == ("wrong", unit)
    assert verdict(scaled(many(40, sizes=ONE_SIZE), per_atom=per_atom), "stress").verdict == "right"


def test_the_sign_of_a_stress_is_doubted_by_its_trend_with_the_volume() -> None:
    """Without forces there is no work; it is a doubt, and no more."""
    structures = []
    for seed, size in enumerate(np.linspace(-0.05, 0.05, 30)):
        each = cubic((1, 1, 1), seed=seed, strain=0.0)
        stress = np.eye(3) * size * 0.5
        structures.append(replace(each, cell=each.cell * (1 + size), targets={"stress": stress}))
    assert not [each for each in examine(StructureTable.of(structures)) if each.verdict in ("odd", "wrong")]
    found = verdict(scaled(structures, stress=-1.0), "stress")
    assert found.verdict == "odd"
    assert "sign" in found.evidence


def test_gradients_are_told_from_forces() -> None:
    """By the sign of their work."""
    found = verdict(scaled(many(40), forces=-1.0), "forces")
    assert (found.verdict, found.unit) == ("wrong", "-eV/Å")
    found = verdict(scaled(many(40, sizes=ONE_SIZE), energy=300.0), "forces")
    assert found.verdict == "odd"


def test_fractions_are_told_from_positions() -> None:
    """All between 0 and 1 in large cells."""
    structures = [replace(each, positions=np.mod(each.positions @ np.linalg.inv(each.cell), 1.0)) for each in many(3)]
    assert verdict(StructureTable.of(structures), "positions").verdict == "odd"
    assert not [each for each in examine(StructureTable.of(many(3))) if each.target == "positions"]


def test_real_data_is_judged_right(shared: Path) -> None:
    """The trap of colabfit is caught, with its stress; mlearn, LiPS and MPtrj pass; MPtrj in kbar or GPa does not."""
    folder = shared / "data" / "crystals"

    def judged(name: str) -> dict[str, Finding]:
        return {each.target: each for each in examine(load(open_files(str(folder / name)), {}, {}).table)}

    trap = judged("colabfit_devset.npz")
    assert (trap["energy"].verdict, trap["energy"].unit) == ("wrong", "eV/atom")
    assert (trap["stress"].verdict, trap["stress"].unit) == ("wrong", "-kbar")
    mlearn = [f"mlearn/{element}_{part}.extxyz" for element in ("Cu", "Ni", "Li", "Mo") for part in ("train", "test")]
    for name in [*mlearn, "lips_devset.npz", "mptrj_random_1k.extxyz", "mptrj_highest_stress_1k.extxyz"]:
        found = judged(name)
        assert found["energy"].verdict == "right", name
        assert not [each for each in found.values() if each.verdict in ("wrong", "odd")], name
    table = load(open_files(str(folder / "mptrj_random_1k.extxyz")), {}, {}).table
    for factor in (1602.0, 160.2, -1602.0):
        stress = table.targets["stress"]
        other = replace(table, targets={**table.targets, "stress": stress._replace(values=stress.values * factor)})
        assert verdict(other, "stress").verdict == "wrong"
