"""A model of crystals: heads, units, slopes wherever it is called, and the repulsion of nuclei."""

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from isoscale.errors import UserError
from isoscale.science.crystals.model import CrystalModel, Head, stresses
from isoscale.science.crystals.networks.graph import Graph
from isoscale.science.crystals.networks.painn import PaiNN
from isoscale.science.crystals.networks.pyg_network import PyGNetwork
from isoscale.science.crystals.networks.schnet import SchNet
from isoscale.science.crystals.networks.zbl import COULOMB, ZBL
from tests.science.crystals.graphs_made import Batch, Made, crystal, molecule, packed

CUTOFF = 4.0
ALL = [
    Head("energy", "energy"), Head("forces", "forces", "atom"), Head("stress", "stress"), Head("gap", "value"),
    Head("tensor", "value", shape=(2, 3)), Head("charges", "value", "atom"), Head("spins", "value", "atom", (3,)),
    Head("system", "classes", classes=7), Head("site", "classes", "atom", classes=3),
    Head("total", "value", pooling="sum"),
]  # fmt: skip


def painn(**options: Any) -> PaiNN:
    torch.manual_seed(0)
    return PaiNN(**{"width": 8, "layers": 2, "cutoff": CUTOFF, "basis": 5, **options})


@pytest.fixture
def batch() -> Batch:
    return packed([crystal(0), molecule(1, 3)], CUTOFF, atoms=2, padding_edges=3, room=1)


def test_heads_have_the_shapes_of_their_targets(batch: Batch) -> None:
    found = CrystalModel(painn(), ALL)(batch)
    shapes = {
        "energy": (3,), "forces": (10, 3), "stress": (3, 3, 3), "gap": (3,), "tensor": (3, 2, 3), "charges": (10,),
        "spins": (10, 3), "system": (3, 7), "site": (10, 3), "total": (3,),
    }  # fmt: skip
    assert {name: tuple(value.shape) for name, value in found.items()} == shapes
    assert found["energy"].dtype == torch.float64
    assert all(torch.isfinite(value).all() for value in found.values())


def test_targets_may_be_anything_that_has_the_fields_of_a_head(batch: Batch) -> None:
    targets = [SimpleNamespace(name="gap", kind="value", of="structure", shape=(), classes=0, loss="mse")]
    assert CrystalModel(painn(), targets).outputs == {"gap": "structure"}
    with pytest.raises(UserError, match="Head"):
        CrystalModel(painn(), ["band_gap"])


def test_forces_bring_an_energy_and_an_energy_brings_its_slopes(batch: Batch) -> None:
    model = CrystalModel(painn(), ["forces"])
    assert model.outputs == {"energy": "structure", "forces": "atom", "stress": "structure"}
    assert list(model(batch, wanted=["forces"])) == ["forces"]
    assert list(CrystalModel(painn(), [Head("gap", "value")])(batch)) == ["gap"]
    with pytest.raises(UserError, match="does not predict gap"):
        model(batch, wanted=["gap"])


def test_heads_that_are_added_later_leave_others_as_they_are() -> None:
    model = CrystalModel(painn(), ["energy"])
    before = copy.deepcopy(model.heads["energy"].state_dict())
    model.add_heads(ALL)
    assert set(model.outputs) == {head.name for head in ALL}
    after = model.heads["energy"].state_dict()
    assert all(torch.equal(after[key], before[key]) for key in before)


def test_units_are_undone_in_what_it_says(batch: Batch) -> None:
    model = CrystalModel(painn(), ALL)
    plain = model(batch)
    references = torch.zeros(119, dtype=torch.float64)
    references[torch.tensor([3, 8, 29])] = torch.tensor([-1.0, -2.0, -40000.0], dtype=torch.float64)
    model.set_units("energy", references, 2.0)
    model.set_units("gap", 1.5, 3.0)
    model.set_units("charges", references, 3.0)
    model.set_units("spins", np.array([1.0, 2.0, 3.0]), 1.0)
    found = model(batch)
    of_atoms = references[batch["z"]]
    of_structures = torch.stack([of_atoms[:5].sum(), of_atoms[5:8].sum(), torch.zeros(()).double()])
    torch.testing.assert_close(found["energy"], of_structures + 2 * plain["energy"], rtol=0, atol=1e-9)
    torch.testing.assert_close(found["forces"], 2 * plain["forces"])
    torch.testing.assert_close(found["stress"], 2 * plain["stress"])
    torch.testing.assert_close(found["gap"], 1.5 + 3 * plain["gap"])
    torch.testing.assert_close(found["charges"], of_atoms + 3 * plain["charges"])
    torch.testing.assert_close(found["spins"], torch.tensor([1.0, 2.0, 3.0]) + plain["spins"])
    torch.testing.assert_close(found["system"], plain["system"])


def test_units_and_elements_are_kept_with_the_weights(batch: Batch) -> None:
    model, other = CrystalModel(painn(), ALL), CrystalModel(painn(width=8), ALL)
    model.set_units("energy", torch.arange(119.0), 2.0)
    model.set_elements([29, 3])
    other.load_state_dict(model.state_dict())
    assert other.elements == [3, 29]
    found, expected = other(batch), model(batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_means_do_not_grow_with_a_structure_and_sums_do() -> None:
    made = crystal(2, 2, 3.5)
    twice = Made(
        np.tile(made.numbers, 2), np.concatenate([made.positions, made.positions + made.cell[0]]),
        np.diag([2, 1, 1]) @ made.cell,
    )  # fmt: skip
    found = CrystalModel(painn(), ALL).double()(packed([made, twice], CUTOFF))
    for name in ("gap", "tensor", "system", "stress"):
        torch.testing.assert_close(found[name][1], found[name][0], rtol=1e-9, atol=1e-10)
    for name in ("energy", "total"):
        torch.testing.assert_close(found[name][1], 2 * found[name][0], rtol=1e-9, atol=1e-10)


def test_slopes_are_found_without_gradients_and_in_inference_mode(batch: Batch) -> None:
    model = CrystalModel(painn(), ALL)
    expected = model(batch)
    assert expected["forces"].requires_grad
    with torch.no_grad():
        found = model(batch)
    with torch.inference_mode():
        inferred = model({key: value.clone() for key, value in batch.items()})
    for name in expected:
        assert not found[name].requires_grad
        torch.testing.assert_close(found[name], expected[name].detach())
        assert torch.equal(inferred[name], found[name])
    assert not any(value.requires_grad for value in model(batch, create_graph=False).values())


def test_float32_is_close_to_float64_and_mixed_precision_to_both(batch: Batch) -> None:
    model = CrystalModel(painn(), ALL)
    found, fine = model(batch), copy.deepcopy(model).double()(batch)
    with torch.autocast("cpu", torch.bfloat16):
        coarse = model(batch)
        (coarse["energy"].sum() + coarse["forces"].square().sum()).backward()
    for name in found:
        torch.testing.assert_close(found[name].double(), fine[name], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(coarse[name].double(), fine[name], rtol=0.1, atol=0.1)


def test_gradients_of_a_loss_of_energy_forces_and_stress_are_right(batch: Batch) -> None:
    model = CrystalModel(painn(), ["energy"], zbl=True).double()

    def loss() -> Tensor:
        found = model(batch, create_graph=True)
        return found["energy"].square().sum() + found["forces"].square().sum() + 50 * found["stress"].square().sum()

    loss().backward()
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        away = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * 1e-5
        with torch.no_grad():
            weight += away
            up = loss().detach()
            weight -= 2 * away
            down = loss().detach()
            weight += away
        torch.testing.assert_close((weight.grad * away).sum() * 2, up - down, rtol=1e-4, atol=1e-9, msg=name)


class Forbidden(TorchDispatchMode):
    """Refuses operations that wait for the host, have shapes that depend on data, or add with atomics."""

    names = (
        "_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "repeat_interleave.Tensor",
        "is_nonzero", "index_add", "scatter_add", "index_put", "scatter_reduce", "embedding_dense_backward", "equal",
    )  # fmt: skip

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.refused = [name for name in self.names if name not in allowed]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).removeprefix("aten.")
        assert not any(name.startswith(each) for each in self.refused), name
        if name.startswith("index."):
            assert not any(each is not None and each.dtype == torch.bool for each in args[1]), "indexed by a mask"
        return func(*args, **(kwargs or {}))


def step(model: CrystalModel, batch: Batch) -> None:
    found = model(batch, create_graph=True)
    sum((value.double().square().sum() for value in found.values()), torch.zeros(())).backward()


@pytest.mark.parametrize("encoder", [painn, lambda: SchNet(8, 8, 2, 6, CUTOFF)], ids=["painn", "schnet"])
def test_a_training_step_waits_for_nobody_and_adds_without_atomics(encoder: Any, batch: Batch) -> None:
    model = CrystalModel(encoder(), ALL, zbl=True)
    with Forbidden():
        step(model, batch)


def test_a_training_step_of_pyg_schnet_waits_for_nobody(batch: Batch) -> None:
    models = pytest.importorskip("torch_geometric.nn.models")
    model = CrystalModel(PyGNetwork(models.SchNet(8, 8, 2, 6, CUTOFF)), ["energy"])
    with Forbidden(allowed=("index_add", "embedding_dense_backward")):
        step(model, batch)


class Own(nn.Module):
    """A user's encoder: a width, a cutoff, and features of a graph."""

    width, cutoff = 4, CUTOFF

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 4)

    def forward(self, graph: Graph) -> Tensor:
        messages = self.layer(torch.exp(-graph.lengths).unsqueeze(1))
        return messages.new_zeros(graph.num_atoms, 4).index_add(0, graph.edge_target, messages)


def test_an_encoder_of_ones_own_needs_a_width_and_a_cutoff(batch: Batch) -> None:
    assert torch.isfinite(CrystalModel(Own(), ALL)(batch)["forces"]).all()
    lacking = Own()
    lacking.width = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="width"):
        CrystalModel(lacking, ["energy"])


def pair(first: int, second: int, distance: float) -> Made:
    return Made(np.array([first, second]), np.array([[0, 0, 0], [0, 0, distance]]), np.zeros((3, 3)))


def test_nuclei_repel_each_other_as_charges_do_when_they_touch() -> None:
    for first, second in ((1, 1), (29, 8), (92, 92)):
        distance = 1e-5
        graph = Graph.of(packed([pair(first, second, distance)], CUTOFF), CUTOFF)
        found = ZBL().double()(graph)
        torch.testing.assert_close(found[0], found[1])
        assert float(found.sum()) == pytest.approx(COULOMB * first * second / distance, rel=2e-3)


def test_repulsion_agrees_with_a_published_formula_and_ends_at_the_bond() -> None:
    z1, z2, r = 29, 8, 0.5
    a = 0.8854 * 0.529177 / (z1**0.23 + z2**0.23)
    terms = ((0.18175, 3.19980), (0.50986, 0.94229), (0.28022, 0.40290), (0.02817, 0.20162))
    bond = 1.32 + 0.66
    x = r / bond
    expected = (
        COULOMB * z1 * z2 / r * sum(c * np.exp(-d * r / a) for c, d in terms) * (1 - 10 * x**3 + 15 * x**4 - 6 * x**5)
    )
    energies = [ZBL().double()(Graph.of(packed([pair(z1, z2, at)], CUTOFF), CUTOFF)).sum() for at in (r, bond, 2.5)]
    assert float(energies[0]) == pytest.approx(expected, rel=1e-9)
    assert abs(energies[1]) < 1e-12 and energies[2] == 0


def test_repulsion_is_added_to_what_is_learned_and_pushes_atoms_apart() -> None:
    with_zbl, without = CrystalModel(painn(), ["energy"], zbl=True), CrystalModel(painn(), ["energy"])
    without.load_state_dict(with_zbl.state_dict(), strict=False)
    batch = packed([pair(29, 29, 0.4)], CUTOFF, atoms=1, padding_edges=2)
    found, plain = with_zbl(batch), without(batch)
    repulsion = with_zbl.zbl(Graph.of(batch, CUTOFF))
    assert not repulsion[2:].any()
    torch.testing.assert_close(found["energy"] - plain["energy"], repulsion.sum(0, keepdim=True), rtol=1e-5, atol=1e-3)
    assert found["forces"][0, 2] < -100 and found["forces"][1, 2] > 100


def test_structures_without_a_cell_have_no_stress() -> None:
    cells = torch.stack([torch.zeros(3, 3), torch.eye(3) * 2, torch.diag(torch.tensor([1.0, 1.0, 0.0]))]).double()
    virials = torch.ones(3, 3, 3, dtype=torch.float64, requires_grad=True)
    found = stresses(virials, cells)
    assert found[:, 0, 0].tolist() == [0, 0.125, 0]
    found.sum().backward()
    assert torch.isfinite(virials.grad).all()
