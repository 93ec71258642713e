"""A potential in ASE, against another program and against differences of energies."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoscale.errors import UserError
from isoscale.science.atoms.use import calculator
from isoscale.science.potentials.deploy import Deployed
from isoscale.science.potentials.model import DeepPotential
from isoscale.science.potentials.se_e2_a import SeE2A
from tests.science.potentials import parity
from tests.science.potentials.one_frame import frame_batch

ase = pytest.importorskip("ase")
from ase import Atoms, units  # noqa: E402
from ase.calculators.calculator import PropertyNotImplementedError  # noqa: E402
from ase.md.velocitydistribution import thermalize_momenta  # noqa: E402
from ase.md.verlet import VelocityVerlet  # noqa: E402


def small() -> DeepPotential:
    """A potential with made-up weights, fast enough for differences."""
    torch.manual_seed(3)
    model = DeepPotential(["O", "H"], SeE2A([40, 80], 4.0, 0.5, [4, 8], 3), [6, 6]).double()
    model.descriptor.mean.copy_(torch.tensor([0.1, 0.2]))
    model.descriptor.scale.copy_(torch.tensor([[0.3, 0.2], [0.4, 0.1]]))
    model.energy_bias.copy_(torch.tensor([-3.0, 0.7]))
    return model


def crystal() -> Atoms:
    """Nine atoms in a skewed cell that is smaller than twice the cutoff."""
    random = np.random.default_rng(0)
    cell = np.array([[5.0, 0.0, 0.0], [0.7, 5.3, 0.0], [-0.4, 0.9, 4.8]])
    return Atoms("OH2OH2OH2", positions=random.random((9, 3)) @ cell, cell=cell, pbc=True)


def frame(number: int = 0) -> tuple[Atoms, dict[str, np.ndarray]]:
    """A frame of water, and what another program found for it."""
    found = parity.frames()[number]
    symbols = [parity.TYPES[kind] for kind in found["types"]]
    return Atoms(symbols, positions=found["coord"], cell=found["box"], pbc=True), found


@pytest.mark.parametrize("skin", [0.0, 1.0])
def test_energies_forces_and_stress_are_those_of_another_program(skin: float) -> None:
    atoms, wanted = frame()
    atoms.calc = calculator(parity.model(), skin=skin)
    assert atoms.get_potential_energy() == pytest.approx(float(wanted["energy"]), abs=1e-9)
    assert atoms.get_potential_energy(force_consistent=True) == atoms.get_potential_energy()
    np.testing.assert_allclose(atoms.get_forces(), wanted["force"], atol=1e-11)
    np.testing.assert_allclose(atoms.get_potential_energies(), wanted["atom_energy"], atol=1e-10)
    stress = -(wanted["virial"] + wanted["virial"].T) / 2 / atoms.get_volume()
    np.testing.assert_allclose(atoms.get_stress(voigt=False), stress, atol=1e-12)


def energy_of(atoms: Atoms, model: DeepPotential) -> float:
    atoms.calc = calculator(model)
    return float(atoms.get_potential_energy())


def assert_same(one: Atoms, two: Atoms) -> None:
    """Energy, forces and stress of two ways to say the same."""
    assert one.get_potential_energy() == pytest.approx(two.get_potential_energy(), abs=1e-10)
    np.testing.assert_allclose(one.get_forces(), two.get_forces(), rtol=0, atol=1e-10)
    if one.cell.rank == two.cell.rank == 3:
        pulls = [atoms.get_stress() * atoms.get_volume() for atoms in (one, two)]
        np.testing.assert_allclose(*pulls, rtol=0, atol=1e-10)


def with_potential(atoms: Atoms, model: DeepPotential) -> Atoms:
    """A copy of atoms whose neighbours nobody has looked for yet."""
    found = atoms.copy()
    found.calc = calculator(model)
    return found


def test_stress_is_the_derivative_of_the_energy_with_strain() -> None:
    model, atoms, step = small(), crystal(), 1e-5
    atoms.calc = calculator(model)
    wanted = np.zeros((3, 3))
    for row, column in np.ndindex(3, 3):
        energies = []
        for sign in (1, -1):
            strain = np.eye(3)
            strain[row, column] += sign * step / 2
            strain[column, row] += sign * step / 2
            strained = atoms.copy()
            strained.set_cell(atoms.cell @ strain, scale_atoms=True)
            energies.append(energy_of(strained, model))
        wanted[row, column] = (energies[0] - energies[1]) / (2 * step) / atoms.get_volume()
    found = atoms.get_stress(voigt=False)
    assert np.abs(found).max() > 1e-4
    np.testing.assert_allclose(found, wanted, atol=1e-8)


def test_forces_are_the_derivatives_of_the_energy() -> None:
    model, atoms, step = small(), crystal(), 1e-5
    atoms.calc = calculator(model)
    found = atoms.get_forces()
    for atom, axis in ((0, 0), (4, 1), (8, 2)):
        energies = []
        for sign in (1, -1):
            moved = atoms.copy()
            moved.positions[atom, axis] += sign * step
            energies.append(energy_of(moved, model))
        assert found[atom, axis] == pytest.approx(-(energies[0] - energies[1]) / (2 * step), abs=1e-8)


def test_a_list_serves_until_an_atom_has_moved_half_the_skin() -> None:
    atoms, model = crystal(), small()
    atoms.calc = calculator(model, skin=0.4)
    random = np.random.default_rng(1)
    for _ in range(8):
        atoms.positions += 0.05 * random.standard_normal((9, 3))
        assert_same(atoms, with_potential(atoms, model))
    assert 1 < atoms.calc.num_lists < 8
    before = atoms.calc.num_lists
    atoms.positions += [0.21, 0, 0]
    atoms.get_potential_energy()
    assert atoms.calc.num_lists == before + 1
    atoms.set_cell(1.001 * np.array(atoms.cell))
    atoms.get_potential_energy()
    assert atoms.calc.num_lists == before + 2


def test_atoms_may_be_outside_of_the_cell() -> None:
    atoms, model = crystal(), small()
    moved = atoms.copy()
    moved.positions += [[3, -2, 1]] @ np.array(atoms.cell) * (np.arange(9) % 2)[:, None]
    assert_same(with_potential(moved, model), with_potential(atoms, model))


def test_a_molecule_needs_no_cell_and_has_no_stress() -> None:
    molecule = Atoms("OH2", positions=[[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
    far = Atoms(molecule, cell=[30.0] * 3, pbc=True)
    molecule, far = with_potential(molecule, small()), with_potential(far, small())
    assert_same(molecule, far)
    with pytest.raises(PropertyNotImplementedError):
        molecule.get_stress()
    pull = far.positions.T @ far.get_forces()
    assert np.abs(pull).max() > 1e-3
    np.testing.assert_allclose(far.get_stress(voigt=False) * far.get_volume(), -pull, rtol=0, atol=1e-10)


def test_a_single_atom_has_the_energy_of_empty_slots() -> None:
    model, empty = small(), []
    for symbol in ("O", "H"):
        lone, two = Atoms(symbol, positions=[[0, 0, 0]]), Atoms(f"{symbol}2", positions=[[0, 0, 0], [50, 0, 0]])
        empty.append(energy_of(lone, model))
        assert energy_of(two, model) == pytest.approx(2 * empty[-1], abs=1e-12)
        np.testing.assert_array_equal(two.get_forces(), np.zeros((2, 3)))
    mixed = Atoms("OH", positions=[[0, 0, 0], [50, 0, 0]])
    assert energy_of(mixed, model) == pytest.approx(sum(empty), abs=1e-12)
    batch = frame_batch(np.zeros((1, 3)), np.array([1]), None, 4.0, 2)
    with torch.no_grad():
        assert empty[1] == pytest.approx(model(batch).energy.item(), abs=1e-12)


def test_a_slab_is_periodic_where_it_says_so() -> None:
    atoms, model = crystal(), small()
    slab = atoms.copy()
    slab.pbc = [True, True, False]
    thick = atoms.copy()
    thick.set_cell([atoms.cell[0], atoms.cell[1], 5 * atoms.cell[2]])
    assert_same(with_potential(slab, model), with_potential(thick, model))
    assert energy_of(slab, model) != pytest.approx(energy_of(atoms, model), abs=1e-4)


def test_atoms_that_the_potential_does_not_know_are_named() -> None:
    atoms = Atoms("NaClO", positions=np.eye(3))
    atoms.calc = calculator(small())
    with pytest.raises(UserError, match="hold Cl, Na, and the potential knows O, H"):
        atoms.get_potential_energy()


def test_more_neighbours_than_the_model_was_made_for_are_an_error(tmp_path: Path) -> None:
    model = small()
    model.descriptor.sel[1] = 3
    model.descriptor.sel[0] = 2
    atoms = crystal()
    torch.jit.script(Deployed(model)).save(
        tmp_path / "few.pt", _extra_files={name: text.encode() for name, text in Deployed(model).described().items()}
    )
    for potential in (model, tmp_path / "few.pt"):
        atoms.calc = calculator(potential)
        with pytest.raises(UserError, match=r"atom \d has \d+ neighbours O within 4.0? angstrom, .* 2 at most"):
            atoms.get_potential_energy()


def test_two_atoms_at_one_place_are_an_error() -> None:
    atoms = Atoms("OH2", positions=[[0, 0, 0], [1, 0, 0], [1, 0, 0]])
    atoms.calc = calculator(small())
    with pytest.raises(UserError, match="two of them at the same place"):
        atoms.get_potential_energy()


def test_atoms_that_are_periodic_need_a_cell_there() -> None:
    atoms = Atoms("OH2", positions=np.eye(3), pbc=[False, False, True], cell=[5, 5, 0])
    atoms.calc = calculator(small())
    with pytest.raises(UserError, match=r"set atoms.cell, or atoms.pbc = False"):
        atoms.get_potential_energy()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (torch.nn.Linear(2, 2), "a Linear is not a potential"),
        ("nowhere", "no run"),
        ("nothing.safetensors", "there is no file nothing.safetensors"),
        ("nothing.pt", "there is no file nothing.pt"),
    ],
)
def test_what_is_no_potential_is_refused(
    wrong: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        calculator(wrong)


@pytest.mark.full
def test_the_total_energy_of_water_is_conserved() -> None:
    atoms, _ = frame()
    thermalize_momenta(atoms, temperature_K=300, rng=np.random.default_rng(0))
    atoms.calc = calculator(parity.model())
    dynamics = VelocityVerlet(atoms, 0.5 * units.fs)
    energies = []
    dynamics.attach(lambda: energies.append(atoms.get_total_energy()))
    dynamics.run(100)
    kinetic = atoms.get_kinetic_energy()
    apart = np.array(energies) - energies[0]
    assert np.abs(apart).max() < 0.01 * kinetic
    assert atoms.calc.num_lists < 20
