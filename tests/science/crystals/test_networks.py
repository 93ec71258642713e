"""Networks: what they see does not depend on how a structure is written down, or on what else is in a batch."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from isoscale.errors import UserError
from isoscale.science.crystals.model import CrystalModel, Head
from isoscale.science.crystals.networks.painn import PaiNN
from isoscale.science.crystals.networks.pyg_network import PyGNetwork
from isoscale.science.crystals.networks.radial import BesselBasis, envelope
from isoscale.science.crystals.networks.schnet import SchNet
from isoscale.science.crystals.networks.smooth import shifted_softplus, silu
from tests.science.crystals.graphs_made import Made, crystal, molecule, one_sided, packed

CUTOFF = 4.0
NETWORKS = ("painn", "schnet", "pyg_schnet")


def network(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "painn":
        return PaiNN(width=8, layers=2, cutoff=CUTOFF, basis=5, neighbors=10)
    if name == "schnet":
        return SchNet(width=8, filters=8, layers=2, gaussians=6, cutoff=CUTOFF)
    return PyGNetwork(pyg("SchNet")(8, 8, 2, 6, CUTOFF))


def pyg(name: str) -> Any:
    return getattr(pytest.importorskip("torch_geometric.nn.models"), name)


def model(name: str) -> CrystalModel:
    """In float64, with references and a scale."""
    made = CrystalModel(network(name), ["energy"])
    made.set_units("energy", torch.linspace(-3, 5, 119), 1.7)
    return made.double()


def energies(of: CrystalModel, *structures: Made, **padding: int) -> dict[str, Tensor]:
    return of(packed(structures, CUTOFF, **padding), create_graph=False)


def turned(made: Made, seed: int = 0) -> tuple[Made, np.ndarray[Any, Any]]:
    """With a reflection, too: an odd seed of a random matrix."""
    turn, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return Made(made.numbers, made.positions @ turn, made.cell @ turn), turn


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("made", [crystal(0), molecule(2)], ids=["crystal", "molecule"])
def test_turning_mirroring_and_moving_a_structure_changes_forces_and_stress_with_it_and_nothing_else(
    name: str, made: Made
) -> None:
    own = model(name)
    before = energies(own, made)
    for seed in (0, 1):
        after, turn = turned(made, seed)
        found = energies(own, after._replace(positions=after.positions + np.array([0.3, -7.0, 2.0])))
        torch.testing.assert_close(found["energy"], before["energy"], rtol=1e-12, atol=1e-11)
        rotation = torch.from_numpy(turn)
        torch.testing.assert_close(found["forces"], before["forces"] @ rotation, rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(found["stress"], rotation.T @ before["stress"] @ rotation, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_order_of_atoms_does_not_matter(name: str) -> None:
    made, own = crystal(1, 6), model(name)
    order = np.random.default_rng(0).permutation(6)
    found = energies(own, Made(made.numbers[order], made.positions[order], made.cell))
    before = energies(own, made)
    torch.testing.assert_close(found["energy"], before["energy"], rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(found["forces"], before["forces"][order], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_choice_of_images_and_of_the_cell_does_not_matter(name: str) -> None:
    made, own = crystal(2, 4), model(name)
    before = energies(own, made)
    moved = made.positions + np.array([[1, 0, -1], [0, 0, 0], [0, 1, 0], [-1, 1, 0]]) @ made.cell
    other_cell = np.array([[1, 1, 0], [0, 1, 0], [0, 0, 1]]) @ made.cell
    for other in (made._replace(positions=moved), made._replace(cell=other_cell)):
        found = energies(own, other)
        for key in ("energy", "forces", "stress"):
            torch.testing.assert_close(found[key], before[key], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("num_atoms", [1, 2])
def test_a_supercell_has_the_same_energy_per_atom_and_the_same_stress(name: str, num_atoms: int) -> None:
    made, own = crystal(3, num_atoms, 2.6), model(name)
    shifts = np.array([[i, j, 0] for i in range(2) for j in range(3)])
    positions = (made.positions[None] + (shifts @ made.cell)[:, None]).reshape(-1, 3)
    large = Made(np.tile(made.numbers, 6), positions, np.diag([2, 3, 1]) @ made.cell)
    before, found = energies(own, made), energies(own, large)
    torch.testing.assert_close(found["energy"] / 6, before["energy"], rtol=1e-12, atol=1e-11)
    torch.testing.assert_close(found["forces"], before["forces"].repeat(6, 1), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(found["stress"], before["stress"], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_an_atom_alone_in_its_cell_has_no_force(name: str) -> None:
    found = energies(model(name), crystal(0, 1, 2.7))
    assert found["forces"].abs().max() < 1e-9
    assert found["stress"].abs().max() > 1e-4


@pytest.mark.parametrize("name", NETWORKS)
def test_an_atom_alone_in_space_has_an_energy_and_no_slopes(name: str) -> None:
    found = energies(model(name), molecule(0, 1))
    assert torch.isfinite(found["energy"]).all()
    assert not found["forces"].any() and not found["stress"].any()


@pytest.mark.parametrize("name", NETWORKS)
def test_energies_end_smoothly_at_the_cutoff(name: str) -> None:
    own = model(name)
    pair = Made(np.array([3, 8]), np.zeros((2, 3)), np.zeros((3, 3)))
    lengths = [CUTOFF - 2e-3, CUTOFF - 1e-3, CUTOFF + 1e-3]
    found = [energies(own, pair._replace(positions=np.array([[0, 0, 0], [0, 0, at]]))) for at in lengths]
    assert abs(found[1]["energy"] - found[2]["energy"]) < 1e-5
    assert found[1]["forces"].abs().max() < 1e-2
    assert found[0]["forces"].abs().max() > 0


def test_a_perfect_crystal_has_finite_second_derivatives() -> None:
    made = Made(np.full(1, 29), np.zeros((1, 3)), 1.8 * (np.ones((3, 3)) - np.eye(3)))
    own = model("painn")
    found = own(packed([made], CUTOFF), create_graph=True)
    (found["energy"].sum() + found["forces"].square().sum() + found["stress"].square().sum()).backward()
    assert all(torch.isfinite(each.grad).all() for each in own.parameters() if each.grad is not None)


@pytest.mark.parametrize("name", NETWORKS)
def test_energies_do_not_depend_on_what_else_is_in_a_batch(name: str) -> None:
    structures, own = [crystal(4, 3), molecule(5, 4), crystal(6, 1, 2.5)], model(name)
    together = energies(own, *structures)
    alone = [energies(own, each) for each in structures]
    for key in ("energy", "forces", "stress"):
        torch.testing.assert_close(together[key], torch.cat([each[key] for each in alone]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("padding", [{"atoms": 3, "padding_edges": 7}, {"atoms": 2}, {"atoms": 1, "room": 2}], ids=str)
def test_padding_weighs_nothing_in_values_and_gradients(name: str, padding: dict[str, int]) -> None:
    structures = [crystal(7, 3), crystal(8, 2)]
    found, gradients = [], []
    for given in ({}, padding):
        own = model(name)
        said = own(packed(structures, CUTOFF, **given), create_graph=True)
        found.append({"energy": said["energy"][:2], "forces": said["forces"][:5], "stress": said["stress"][:2]})
        for key, extra in (
            ("energy", said["energy"][2:]),
            ("forces", said["forces"][5:]),
            ("stress", said["stress"][2:]),
        ):
            assert not extra.any(), key
        (said["energy"].square().sum() + said["forces"].square().sum() + said["stress"].square().sum()).backward()
        gradients.append({key: each.grad for key, each in own.named_parameters() if each.grad is not None})
    for key in found[0]:
        torch.testing.assert_close(found[1][key], found[0][key], rtol=1e-12, atol=1e-12)
    assert gradients[0].keys() == gradients[1].keys()
    for key in gradients[0]:
        torch.testing.assert_close(gradients[1][key], gradients[0][key], rtol=1e-10, atol=1e-11)


def test_our_schnet_with_weights_of_pyg_gives_its_energies_and_forces() -> None:
    torch.manual_seed(0)
    theirs = pyg("SchNet")(cutoff=CUTOFF)
    state = copy.deepcopy(theirs.state_dict())
    ours = CrystalModel(SchNet(cutoff=CUTOFF), ["energy"])
    encoder, head = SchNet.from_pyg(state)
    ours.encoder.load_state_dict(encoder)
    ours.heads["energy"].readout.load_state_dict(head)
    by_path = CrystalModel(PyGNetwork(theirs), ["energy"])
    for dtype, close in ((torch.float64, 1e-6), (torch.float32, 1e-5)):
        batch = packed([crystal(0), crystal(1, 3)], CUTOFF, atoms=2, padding_edges=3)
        one, other = ours.to(dtype)(batch), by_path.to(dtype)(batch)
        torch.testing.assert_close(one["energy"], other["energy"], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one["forces"], other["forces"], rtol=close, atol=close)


def test_pyg_schnet_without_images_is_what_it_is_by_itself() -> None:
    theirs = pyg("SchNet")(8, 8, 2, 6, CUTOFF).double()
    made = molecule(1, 5)
    batch = packed([made], CUTOFF)
    pos = batch["pos"]
    index = torch.stack([batch["edge_source"], batch["edge_target"]])
    plain = copy.deepcopy(theirs)
    del plain.interaction_graph
    plain.__dict__["interaction_graph"] = lambda p, b: (index, (p[index[0]] - p[index[1]]).norm(dim=-1))
    expected = plain(batch["z"], pos, batch["batch"])[:, 0]
    found = CrystalModel(PyGNetwork(theirs), ["energy"]).double()(batch)
    torch.testing.assert_close(found["energy"], expected)


def test_features_of_a_layer_serve_several_heads() -> None:
    encoder = PyGNetwork(pyg("SchNet")(8, 8, 2, 6, CUTOFF), features_of="lin1")
    heads = [Head("energy", "energy"), Head("charge", "value", "atom"), Head("metal", "classes", classes=2)]
    found = CrystalModel(encoder, heads)(packed([crystal(0), crystal(1, 3)], CUTOFF, atoms=1, padding_edges=2))
    assert found["charge"].shape == (9,) and found["metal"].shape == (2, 2) and found["stress"].shape == (2, 3, 3)
    with pytest.raises(UserError, match="features_of"):
        CrystalModel(PyGNetwork(pyg("SchNet")(8, 8, 2, 6, CUTOFF)), heads)
    with pytest.raises(UserError, match="lin1"):
        PyGNetwork(pyg("SchNet")(8, 8, 2, 6, CUTOFF), features_of="embedding")


class FromPositions(nn.Module):
    """A user's network that finds distances itself, from positions and what images add."""

    cutoff = CUTOFF

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, pos: Tensor, edge_index: Tensor, shifts: Tensor, batch: Tensor) -> Tensor:
        vectors = pos[edge_index[0]] - pos[edge_index[1]] + shifts
        lengths = vectors.norm(dim=1, keepdim=True).clamp(min=0.5)
        energies = self.layers(lengths) * (1 - lengths / CUTOFF).clamp(min=0) ** 3
        return pos.new_zeros(len(pos), 1).index_add(0, edge_index[1], energies)


class FromData(FromPositions):
    def forward(self, data: Any) -> Tensor:  # type: ignore[override]
        lengths = data.edge_weight.unsqueeze(1)
        energies = self.layers(lengths) * (1 - lengths / CUTOFF).clamp(min=0) ** 3
        return data.pos.new_zeros(data.num_nodes, 1).index_add(0, data.edge_index[1], energies)


def test_networks_that_take_positions_or_data_have_the_right_slopes() -> None:
    pytest.importorskip("torch_geometric")
    batch = packed([crystal(0, 4), molecule(1, 3)], CUTOFF)
    found = []
    for kind in (FromPositions, FromData):
        torch.manual_seed(0)
        found.append(CrystalModel(PyGNetwork(kind(), gives="atoms"), ["energy"]).double()(batch))
    for key in ("energy", "forces", "stress"):
        torch.testing.assert_close(found[0][key], found[1][key])
    check_slopes(CrystalModel(PyGNetwork(FromPositions(), gives="atoms"), ["energy"]).double(), crystal(0, 4))


def check_slopes(own: CrystalModel, made: Made) -> None:
    """Forces and stress against finite differences of energies."""
    step = 1e-4

    def energy(positions: Any, cell: Any) -> float:
        return float(energies(own, made._replace(positions=positions, cell=cell))["energy"][0])

    found = energies(own, made)
    forces, stress = np.zeros_like(made.positions), np.zeros((3, 3))
    for place in np.ndindex(*forces.shape):
        away = np.zeros_like(forces)
        away[place] = step
        up, down = energy(made.positions + away, made.cell), energy(made.positions - away, made.cell)
        forces[place] = -(up - down) / 2 / step
    for i, j in np.ndindex(3, 3):
        strain = np.zeros((3, 3))
        strain[i, j] += step / 2
        strain[j, i] += step / 2
        both = [energy(made.positions @ (np.eye(3) + s), made.cell @ (np.eye(3) + s)) for s in (strain, -strain)]
        stress[i, j] = (both[0] - both[1]) / 2 / step / abs(np.linalg.det(made.cell))
    np.testing.assert_allclose(found["forces"].numpy(), forces, atol=2e-5)
    np.testing.assert_allclose(found["stress"][0].numpy(), stress, atol=2e-5)


@pytest.mark.parametrize("name", NETWORKS)
def test_forces_and_stress_are_slopes_of_the_energy(name: str) -> None:
    check_slopes(model(name), crystal(9, 3, 3.5))


def test_forces_are_slopes_with_edges_that_do_not_all_go_both_ways() -> None:
    own = model("painn")
    batch = one_sided(packed([crystal(1, 4)], CUTOFF))
    found = own(batch)
    for place in ((0, 0), (2, 1)):
        away = torch.zeros_like(batch["pos"])
        away[place] = 1e-4
        up, down = (own(batch | {"pos": batch["pos"] + each})["energy"] for each in (away, -away))
        torch.testing.assert_close(found["forces"][place], -(up - down)[0] / 2e-4, rtol=1e-5, atol=1e-6)


def test_visnet_sees_images_and_has_the_right_slopes() -> None:
    torch.manual_seed(0)
    visnet = pyg("ViSNet")(hidden_channels=16, num_heads=2, num_layers=2, num_rbf=6, cutoff=CUTOFF)
    own = CrystalModel(PyGNetwork(visnet), ["energy"]).double()
    made = crystal(2, 4, 5.0)
    assert not (torch.linalg.norm(torch.from_numpy(made.cell), dim=1) < CUTOFF).any()
    check_slopes(own, made)
    with pytest.raises(UserError, match="own image"):
        own(packed([crystal(0, 1, 2.5)], CUTOFF))


class OnlyPositions(nn.Module):
    cutoff = CUTOFF

    def forward(self, z: Tensor, pos: Tensor, batch: Tensor) -> Tensor:
        return pos.square().sum(1, keepdim=True)


def test_a_network_that_cannot_see_images_refuses_them() -> None:
    pytest.importorskip("torch_geometric")
    own = CrystalModel(PyGNetwork(OnlyPositions(), gives="atoms"), ["energy"])
    own.register_parameter("any", nn.Parameter(torch.zeros(1)))
    batch = packed([molecule(1, 3)], CUTOFF)
    torch.testing.assert_close(own(batch)["forces"].double(), -2 * batch["pos"], rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match="periodic images"):
        own(packed([crystal(0)], CUTOFF))


class Asks(nn.Module):
    def forward(self, z: Tensor, charges: Tensor) -> Tensor:
        return charges


def test_what_a_network_lacks_is_said() -> None:
    pytest.importorskip("torch_geometric")
    with pytest.raises(UserError, match=r"task\.model\.cutoff"):
        PyGNetwork(OnlyPositions.__base__())
    with pytest.raises(UserError, match="charges"):
        PyGNetwork(Asks(), cutoff=3.0)
    with pytest.raises(UserError, match="cutoff"):
        PaiNN(cutoff=-1)
    with pytest.raises(UserError, match="width"):
        PaiNN(width=0)
    with pytest.raises(UserError, match="`cutoff`"):
        CrystalModel(nn.Linear(1, 1), ["energy"])


def test_the_basis_and_its_envelope_end_with_two_derivatives() -> None:
    r = torch.tensor([0.3, 2.0, 3.999, 4.0, 4.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: envelope(x, 4.0), (r[:2].detach().requires_grad_(),))
    found = BesselBasis(4, 4.0).double()(r)
    assert found.shape == (5, 5) and not found[3:].abs().gt(1e-30).any()
    (slope,) = torch.autograd.grad(found.sum(), r, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), r)
    assert slope[3:].abs().max() < 1e-14 and curve[3:].abs().max() < 1e-14 and curve[2].abs() < 0.1


def test_activations_are_those_of_torch_with_their_derivatives() -> None:
    x = torch.linspace(-8, 30, 40, dtype=torch.float64, requires_grad=True)
    for own, theirs in (
        (silu, nn.functional.silu),
        (shifted_softplus, lambda x: nn.functional.softplus(x) - np.log(2)),
    ):
        torch.testing.assert_close(own(x), theirs(x))
        assert torch.autograd.gradcheck(own, (x,))
        assert torch.autograd.gradgradcheck(own, (x,))
