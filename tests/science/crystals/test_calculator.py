"""A model of crystals in ASE: against differences of its energies, one structure at a time and many at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoscale.errors import UserError
from isoscale.science.atoms.use import calculator
from isoscale.science.crystals.ase_calculator import CrystalCalculator
from tests.science.crystals.small_models import ELEMENTS, NETWORKS, small

ase = pytest.importorskip("ase")
from ase import Atoms, units  # noqa: E402
from ase.build import bulk, molecule  # noqa: E402
from ase.calculators.calculator import PropertyNotImplementedError  # noqa: E402
from ase.filters import FrechetCellFilter  # noqa: E402
from ase.md.velocitydistribution import thermalize_momenta  # noqa: E402
from ase.md.verlet import VelocityVerlet  # noqa: E402
from ase.optimize import BFGS  # noqa: E402


def skewed(seed: int = 0) -> Atoms:
    """Six atoms in a skewed cell that is smaller than twice the cutoff."""
    cell = np.array([[5.0, 0.0, 0.0], [0.7, 5.3, 0.0], [-0.4, 0.9, 4.8]])
    places = np.array([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5], [0.25, 0.25, 0.25], [0.75, 0.75, 0.7]])
    places = places + 0.05 * np.random.default_rng(seed).standard_normal((6, 3))
    return Atoms("CuOCuOLiLi", positions=places @ cell, cell=cell, pbc=True)


def several() -> list[Atoms]:
    """Structures of every kind: small, large, of one atom, a slab, molecules with and without a cell, far outside."""
    slab = skewed(1)
    slab.pbc = [True, True, False]
    outside = skewed(2)
    outside.positions += [[3, -2, 1]] @ np.array(outside.cell) * (np.arange(6) % 2)[:, None]
    boxed = molecule("H2O")
    boxed.set_cell([9.0, 8.0, 7.0])
    return [
        bulk("Cu"), skewed() * (2, 1, 1), molecule("H2O"), Atoms("O"), slab, boxed, bulk("Cu", cubic=True), outside,
        bulk("Cu", a=20.0),
    ]  # fmt: skip


def with_model(atoms: Atoms, model: Any, **options: Any) -> Atoms:
    """A copy of atoms whose neighbours nobody has looked for yet."""
    found = atoms.copy()
    found.calc = calculator(model, device="cpu", **options)
    return found


def assert_same(one: dict[str, Any], two: dict[str, Any], room: float = 1e-10) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, two[name], rtol=0, atol=room, err_msg=name)


@pytest.mark.parametrize("network", NETWORKS)
def test_forces_are_the_derivatives_of_the_energy(network: str) -> None:
    atoms, step = with_model(skewed(), small(network)), 1e-5
    found = atoms.get_forces()
    assert np.abs(found).max() > 1e-3
    for atom, axis in ((0, 0), (3, 1), (5, 2)):
        energies = []
        for sign in (1, -1):
            moved = with_model(atoms, small(network))
            moved.positions[atom, axis] += sign * step
            energies.append(moved.get_potential_energy())
        assert found[atom, axis] == pytest.approx(-(energies[0] - energies[1]) / (2 * step), abs=1e-7)


@pytest.mark.parametrize("network", NETWORKS)
def test_stress_is_the_derivative_of_the_energy_with_strain(network: str) -> None:
    atoms, step = with_model(skewed(), small(network)), 1e-5
    wanted = np.zeros((3, 3))
    for row, column in ((0, 0), (1, 1), (2, 2), (0, 1), (1, 2), (0, 2)):
        energies = []
        for sign in (1, -1):
            strain = np.eye(3)
            strain[row, column] += sign * step / 2
            strain[column, row] += sign * step / 2
            strained = with_model(atoms, small(network))
            strained.set_cell(atoms.cell @ strain, scale_atoms=True)
            energies.append(strained.get_potential_energy())
        wanted[row, column] = wanted[column, row] = (energies[0] - energies[1]) / (2 * step) / atoms.get_volume()
    assert np.abs(wanted).max() > 1e-5
    np.testing.assert_allclose(atoms.get_stress(voigt=False), wanted, atol=1e-8)


@pytest.mark.parametrize(
    "options", [{"batch_size": 2}, {"max_atoms": 7}, {"batch_size": 3, "max_atoms": 100}, {}], ids=str
)
def test_many_structures_at_once_are_what_they_are_one_by_one(options: dict[str, int]) -> None:
    calculating = calculator(small(), device="cpu")
    assert isinstance(calculating, CrystalCalculator)
    found = calculating.calculate_many(several(), **options)
    assert len(found) == len(several())
    for atoms, own in zip(several(), found, strict=True):
        alone = calculator(small(), device="cpu")
        alone.calculate(atoms)
        assert_same(own, alone.results)
        assert ("stress" in own) == (atoms.cell.rank == 3 and bool(atoms.pbc.any()))
    assert calculating.calculate_many([]) == []


def test_a_list_serves_until_an_atom_has_moved_half_the_skin() -> None:
    atoms = with_model(skewed(), small(), skin=0.4)
    random = np.random.default_rng(1)
    for _ in range(8):
        atoms.positions += 0.04 * random.standard_normal((6, 3))
        fresh = with_model(atoms, small(), skin=0)
        for each in (atoms, fresh):
            each.get_potential_energy()
        assert_same(atoms.calc.results, fresh.calc.results)
    assert 1 < atoms.calc.num_lists < 8
    before = atoms.calc.num_lists
    atoms.set_cell(1.001 * np.array(atoms.cell))
    atoms.get_potential_energy()
    assert atoms.calc.num_lists == before + 1


def test_molecules_need_no_cell_and_have_no_stress() -> None:
    water = molecule("H2O")
    far = Atoms(water, cell=[30.0] * 3, pbc=True)
    water, far = with_model(water, small()), with_model(far, small())
    assert water.get_potential_energy() == pytest.approx(far.get_potential_energy(), abs=1e-10)
    np.testing.assert_allclose(water.get_forces(), far.get_forces(), atol=1e-10)
    with pytest.raises(PropertyNotImplementedError):
        water.get_stress()
    pull = far.positions.T @ far.get_forces()
    assert np.abs(pull).max() > 1e-3
    np.testing.assert_allclose(far.get_stress(voigt=False) * far.get_volume(), -pull, atol=1e-10)


def test_a_slab_is_periodic_where_it_says_so() -> None:
    slab = skewed()
    slab.pbc = [True, True, False]
    thick = skewed()
    thick.set_cell([slab.cell[0], slab.cell[1], 5 * slab.cell[2]])
    slab, thick, whole = (with_model(each, small()) for each in (slab, thick, skewed()))
    assert slab.get_potential_energy() == pytest.approx(thick.get_potential_energy(), abs=1e-10)
    assert slab.get_potential_energy() != pytest.approx(whole.get_potential_energy(), abs=1e-4)


def test_a_cell_of_one_atom_is_its_supercell() -> None:
    one, eight = with_model(bulk("Cu"), small()), with_model(bulk("Cu") * 2, small())
    assert 8 * one.get_potential_energy() == pytest.approx(eight.get_potential_energy(), abs=1e-9)
    np.testing.assert_allclose(one.get_stress(), eight.get_stress(), atol=1e-10)


def test_elements_that_the_model_was_not_trained_for_are_named() -> None:
    atoms = with_model(Atoms("NaClO", positions=np.eye(3)), small())
    known = ", ".join(ELEMENTS)
    with pytest.raises(UserError, match=f"hold Cl, Na, and the model was trained for {known}"):
        atoms.get_potential_energy()
    with pytest.raises(UserError, match=r"structure 1 \(counted from 0\) holds Na"):
        atoms.calc.calculate_many([bulk("Cu"), bulk("Na")])


@pytest.mark.parametrize(
    ("atoms", "words"),
    [
        (Atoms("Cu2", positions=np.zeros((2, 3))), "on top of each other"),
        (Atoms("Cu", cell=[4, 4, 0], pbc=True), "singular"),
        (Atoms("Cu", positions=[[np.nan, 0, 0]]), "not a finite number"),
    ],
)
def test_what_has_no_neighbours_that_could_be_counted_is_an_error(atoms: Atoms, words: str) -> None:
    calculating = calculator(small(), device="cpu")
    with pytest.raises(UserError, match=words):
        calculating.calculate(atoms)
    with pytest.raises(UserError, match=rf"structure 1 \(counted from 0\): .*{words}"):
        calculating.calculate_many([bulk("Cu"), atoms])


@pytest.mark.parametrize("option", ["batch_size", "max_atoms"])
def test_a_batch_of_nothing_is_refused(option: str) -> None:
    with pytest.raises(UserError, match=f"{option} is 0"):
        calculator(small(), device="cpu").calculate_many([bulk("Cu")], **{option: 0})


def test_the_total_energy_is_conserved() -> None:
    atoms = with_model(skewed(), small(), skin=0.5)
    thermalize_momenta(atoms, temperature_K=300, rng=np.random.default_rng(0))
    energies: list[tuple[float, float]] = []
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    dynamics.attach(lambda: energies.append((atoms.get_total_energy(), atoms.get_potential_energy())))
    dynamics.run(100)
    total, potential = np.array(energies).T
    assert np.ptp(potential) > 0.05
    assert np.ptp(total) < 1e-3 * np.ptp(potential)
    assert 1 < atoms.calc.num_lists < 20


def test_relaxation_of_atoms_and_cell_lowers_the_energy() -> None:
    atoms = with_model(skewed(), small(zbl=True))
    energy, cell = atoms.get_potential_energy(), atoms.cell.copy()
    converged = BFGS(FrechetCellFilter(atoms), logfile=None).run(fmax=0.02, steps=100)
    assert converged and np.abs(atoms.get_forces()).max() < 0.02
    assert atoms.get_potential_energy() < energy - 0.1
    assert np.abs(atoms.cell - cell).max() > 0.05


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a Linear is not a potential"):
        calculator(torch.nn.Linear(2, 2))
