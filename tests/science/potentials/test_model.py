"""Deep Potentials: derivatives, symmetries of space, and parity with another program's numbers."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from isoscale.errors import UserError
from isoscale.science.potentials.descriptor import Descriptor
from isoscale.science.potentials.geometry import Edges, Layout
from isoscale.science.potentials.layers import Curve, Score
from isoscale.science.potentials.model import DeepPotential, Prediction
from isoscale.science.potentials.se_e2_a import SeE2A, fade
from tests.science.potentials import parity
from tests.science.potentials.one_frame import frame_batch

Floats = NDArray[np.float64]
NUM_TYPES, CUTOFF = 3, 3.0


def small_model(seed: int = 0, **descriptor: Any) -> DeepPotential:
    """Three types, tiny networks, statistics that are not trivial."""
    torch.manual_seed(seed)
    settings = {"sel": [9, 9, 9], "cutoff": CUTOFF, "widths": [4, 8, 8], "axis_width": 3, **descriptor}
    model = DeepPotential(["A", "B", "C"], SeE2A(**settings), [6, 6]).double()
    described: Any = model.descriptor
    described.mean.copy_(torch.tensor([0.1, 0.05, 0.2]))
    described.scale.copy_(torch.tensor([[0.3, 0.2], [0.25, 0.15], [0.4, 0.3]]))
    model.energy_bias.copy_(torch.tensor([-1.0, 2.0, 0.5]))
    return model


class Atoms:
    """Some atoms in a box, not too close to each other."""

    def __init__(self, seed: int, num_atoms: int = 7, length: float = 4.3) -> None:
        random = np.random.default_rng(seed)
        grid = np.stack(np.meshgrid(*[np.arange(3)] * 3, indexing="ij"), -1).reshape(-1, 3)
        chosen = grid[random.permutation(len(grid))[:num_atoms]]
        self.box = length * np.eye(3) + random.uniform(-0.4, 0.4, (3, 3))
        self.coord = (chosen + random.uniform(-0.2, 0.2, chosen.shape)) / 3 @ self.box
        self.types = random.integers(0, NUM_TYPES, num_atoms)


def predict(model: DeepPotential, coord: Floats, types: Any, box: Floats | None) -> Prediction:
    """In the order of the atoms given."""
    batch = frame_batch(coord, types, box, model.cutoff, NUM_TYPES)
    with torch.no_grad():
        found = model(batch)
    order = torch.argsort(batch["places"][0])
    return found._replace(force=found.force[:, order], atom_energy=found.atom_energy[:, order])


ARCHITECTURES: dict[str, dict[str, Any]] = {
    "one side": {},
    "pairs": {"one_side": False},
    "dt": {"dt": True},
    "other widths": {"widths": [5, 7, 14], "axis_width": 14, "dt": True, "one_side": False},
    "one layer": {"widths": [4]},
}
architectures = pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES.keys())


def test_energies_forces_and_virials_are_those_of_another_program():
    model = parity.model()
    for frame in parity.frames():
        batch = frame_batch(frame["coord"], frame["types"], frame["box"], model.cutoff, 2)
        with torch.no_grad():
            found = model(batch)
        order = batch["places"][0].long()
        close = {"energy": 1e-10, "force": 1e-11, "virial": 1e-10, "atom_energy": 1e-11}
        for key, tolerance in close.items():
            expected = torch.as_tensor(frame[key])
            expected = expected[order] if key in ("force", "atom_energy") else expected
            assert float((getattr(found, key)[0] - expected).abs().max()) < tolerance, key


@architectures
def test_forces_are_the_slopes_of_the_energy(architecture: dict[str, Any]):
    model, atoms, step = small_model(**architecture), Atoms(3), 1e-5
    found = predict(model, atoms.coord, atoms.types, atoms.box).force[0].numpy()
    for atom in range(len(atoms.coord)):
        for axis in range(3):
            moved = [atoms.coord.copy(), atoms.coord.copy()]
            moved[0][atom, axis] += step
            moved[1][atom, axis] -= step
            high, low = (float(predict(model, each, atoms.types, atoms.box).energy) for each in moved)
            assert found[atom, axis] == pytest.approx(-(high - low) / (2 * step), abs=1e-7)


def test_virials_are_the_slopes_with_strain():
    model, atoms, step = small_model(one_side=False), Atoms(4), 1e-5
    found = predict(model, atoms.coord, atoms.types, atoms.box).virial[0].numpy()
    for a in range(3):
        for b in range(3):
            strain = np.zeros((3, 3))
            strain[a, b] = step
            high, low = (
                float(predict(model, atoms.coord @ turn, atoms.types, atoms.box @ turn).energy)
                for turn in (np.eye(3) + strain, np.eye(3) - strain)
            )
            assert found[a, b] == pytest.approx(-(high - low) / (2 * step), abs=1e-7)


@architectures
def test_written_out_derivatives_are_those_of_autograd(architecture: dict[str, Any]):
    """The descriptor's own way, and the way of a descriptor that knows none: also to learn from forces and virials."""
    model, atoms = small_model(**architecture), Atoms(5)
    batch = frame_batch(atoms.coord, atoms.types, atoms.box, model.cutoff, NUM_TYPES)
    own = learned(model, batch)
    by_autograd(model)
    for name, gradient in learned(model, batch).items():
        assert torch.allclose(own[name], gradient, rtol=1e-9, atol=1e-12), name


def by_autograd(model: DeepPotential) -> None:
    """Let the descriptor forget that it knows its own derivatives."""
    for name in ("prepare", "forward"):
        setattr(model.descriptor, name, partial(getattr(Descriptor, name), model.descriptor))


def learned(model: DeepPotential, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of a loss of everything, and the prediction."""
    found = model(batch)
    loss = found.energy.square().sum() + found.force.square().sum() + found.virial.pow(3).sum()
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters)
    return {**dict(zip(names, gradients, strict=True)), "force": found.force.detach()}


def test_a_descriptor_that_is_differentiated_predicts_without_training():
    model, atoms = small_model(), Atoms(5)
    batch = frame_batch(atoms.coord, atoms.types, atoms.box, model.cutoff, NUM_TYPES)
    with torch.no_grad():
        expected = model(batch)
        by_autograd(model)
        found = model(batch)
    assert torch.allclose(found.force, expected.force) and not found.force.requires_grad


seeds = st.integers(0, 2**31)


@given(seeds, st.sampled_from(sorted(ARCHITECTURES)))
@settings(max_examples=25)
def test_nothing_changes_when_space_is_turned(seed: int, architecture: str):
    model, atoms = small_model(**ARCHITECTURES[architecture]), Atoms(seed)
    turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))[0]
    before = predict(model, atoms.coord, atoms.types, atoms.box)
    after = predict(model, atoms.coord @ turn, atoms.types, atoms.box @ turn)
    turned = torch.from_numpy(turn)
    assert torch.allclose(after.energy, before.energy, atol=1e-9)
    assert torch.allclose(after.force, before.force @ turned, atol=1e-9)
    assert torch.allclose(after.virial, turned.t() @ before.virial @ turned, atol=1e-9)


@given(seeds)
@settings(max_examples=25)
def test_nothing_changes_when_all_atoms_move_or_some_by_whole_boxes(seed: int):
    model, atoms = small_model(), Atoms(seed)
    random = np.random.default_rng(seed)
    moved = atoms.coord + random.normal(size=3) + random.integers(-2, 3, atoms.coord.shape) @ atoms.box
    before, after = (predict(model, coord, atoms.types, atoms.box) for coord in (atoms.coord, moved))
    assert torch.allclose(after.energy, before.energy, atol=1e-9)
    assert torch.allclose(after.force, before.force, atol=1e-9)
    assert torch.allclose(after.virial, before.virial, atol=1e-9)


@given(seeds)
@settings(max_examples=25)
def test_atoms_may_be_named_in_any_order(seed: int):
    model, atoms = small_model(one_side=False), Atoms(seed)
    order = np.random.default_rng(seed).permutation(len(atoms.coord))
    before = predict(model, atoms.coord, atoms.types, atoms.box)
    after = predict(model, atoms.coord[order], atoms.types[order], atoms.box)
    assert torch.allclose(after.energy, before.energy, atol=1e-10)
    assert torch.allclose(after.force, before.force[:, torch.from_numpy(order)], atol=1e-10)


@given(seeds)
@settings(max_examples=10)
def test_a_box_twice_as_long_has_twice_the_energy(seed: int):
    """The box is smaller than the cutoff: atoms are neighbours of their own images."""
    model, atoms = small_model(sel=[60, 60, 60]), Atoms(seed, num_atoms=3, length=2.5)
    longer = atoms.box * np.array([[2], [1], [1]])
    doubled = np.concatenate([atoms.coord, atoms.coord + atoms.box[0]])
    once = predict(model, atoms.coord, atoms.types, atoms.box)
    twice = predict(model, doubled, np.tile(atoms.types, 2), longer)
    assert float(twice.energy) == pytest.approx(2 * float(once.energy), abs=1e-9)
    assert torch.allclose(twice.force, once.force.repeat(1, 2, 1), atol=1e-9)


def test_a_lone_atom_feels_nothing():
    found = predict(small_model(), np.zeros((1, 3)), np.array([1]), None)
    assert torch.equal(found.force, torch.zeros(1, 1, 3, dtype=torch.float64))
    assert torch.isfinite(found.energy).all()


def wider(batch: Mapping[str, Tensor], more: int) -> dict[str, Tensor]:
    """The same frame with empty slots behind those of each type."""
    layout = Layout.of(batch, NUM_TYPES)
    places, start = [], 0
    for width in layout.slots:
        places += range(start, start + width)
        start += width + more
    kept = torch.tensor(places)
    num_atoms = sum(layout.atoms)
    reverse = torch.arange(num_atoms * start, dtype=torch.int32).view(1, num_atoms, start)
    shifts = torch.zeros(1, num_atoms, start, 3, dtype=torch.int8)
    old, old_width = batch["reverse"][0].long(), sum(layout.slots)
    reverse[0][:, kept] = (old // old_width * start + kept[old % old_width]).int()
    shifts[0][:, kept] = batch["shifts"][0]
    pad = torch.full((1, num_atoms, more), -1, dtype=torch.int32)
    slots = {f"neighbours_{t}": torch.cat([batch[f"neighbours_{t}"], pad], -1) for t in range(NUM_TYPES)}
    return {**batch, **slots, "reverse": reverse, "shifts": shifts}


@architectures
def test_empty_slots_change_nothing(architecture: dict[str, Any]):
    model, atoms = small_model(**{**architecture, "sel": [12, 12, 12]}), Atoms(6, num_atoms=9)
    batch = frame_batch(atoms.coord, atoms.types, atoms.box, model.cutoff, NUM_TYPES)
    more = 12 - max(Layout.of(batch, NUM_TYPES).slots)
    assert more > 0
    before, after = model(batch), model(wider(batch, more))
    assert torch.allclose(before.energy, after.energy, atol=1e-12)
    assert torch.allclose(before.force, after.force, atol=1e-12)


def test_neighbours_beyond_sel_are_as_if_they_were_not_there():
    """The farthest of each type are left out; what pulls at them is no force on anybody."""
    atoms = Atoms(7, num_atoms=9)
    model, roomy = small_model(sel=[2, 2, 2]), small_model(sel=[9, 9, 9])
    batch = frame_batch(atoms.coord, atoms.types, atoms.box, model.cutoff, NUM_TYPES)
    assert max(Layout.of(batch, NUM_TYPES).slots) > 2
    found, all_of_them = model(batch), roomy(batch)
    assert not torch.allclose(found.energy, all_of_them.energy)
    assert torch.allclose(found.force.sum(1), torch.zeros(1, 3, dtype=torch.float64), atol=1e-12)


@architectures
def test_a_type_that_is_nobodys_neighbour_needs_no_room(architecture: dict[str, Any]):
    """As where a model knows more types than its data has: nothing is left out, and everything can be learned."""
    model, atoms = small_model(**{**architecture, "sel": [9, 9, 0]}), Atoms(6, num_atoms=9)
    atoms.types %= 2
    batch = frame_batch(atoms.coord, atoms.types, atoms.box, model.cutoff, NUM_TYPES)
    found = model(batch)
    found.force.square().sum().backward()
    assert all(each.grad is None or each.grad.isfinite().all() for each in model.parameters())
    model.descriptor.sel[:] = [9, 8, 1]  # the same number of slots, one of them never used
    other = model(batch)
    assert found.energy.isfinite().all()
    assert not torch.equal(found.energy, other.energy)


def test_virtual_atoms_have_no_energy_and_no_force():
    model, atoms = small_model(one_side=False), Atoms(8)
    batch = frame_batch(atoms.coord, atoms.types, atoms.box, model.cutoff, NUM_TYPES)
    before = model(batch)
    present = int(atoms.types.max())
    padded = with_virtual_atom(batch, present)
    after = model(padded)
    assert torch.allclose(after.energy, before.energy, atol=1e-12)
    assert torch.equal(after.force[:, -1], torch.zeros(1, 3, dtype=torch.float64))
    assert torch.allclose(after.force[:, :-1], before.force, atol=1e-12)


def with_virtual_atom(batch: Mapping[str, Tensor], kind: int) -> dict[str, Tensor]:
    """One more place for an atom of the last type that there is."""
    num_slots = batch["reverse"].shape[-1]
    last = torch.arange(num_slots, dtype=torch.int32).view(1, 1, -1) + batch["reverse"].shape[1] * num_slots
    more = {f"neighbours_{t}": -1 for t in range(NUM_TYPES)} | {"coord": 0, "shifts": 0}
    found = dict(batch)
    for key, value in more.items():
        if key in batch:
            found[key] = torch.cat([batch[key], torch.full_like(batch[key][:, :1], value)], 1)
    found["reverse"] = torch.cat([batch["reverse"], last], 1)
    found[f"atoms_{kind}"] = torch.cat([batch[f"atoms_{kind}"], torch.zeros(1, 1, dtype=torch.uint8)], 1)
    return found


def test_frames_of_a_batch_do_not_see_each_other():
    model, atoms = small_model(), Atoms(9)
    batch = frame_batch(atoms.coord, atoms.types, atoms.box, model.cutoff, NUM_TYPES)
    other = {**batch, "coord": batch["coord"] * 1.01, "box": batch["box"] * 1.01}
    together = model({key: torch.cat([batch[key], other[key]]) for key in batch})
    for place, alone in enumerate((model(batch), model(other))):
        assert torch.allclose(together.energy[place], alone.energy[0], atol=1e-12)
        assert torch.allclose(together.force[place], alone.force[0], atol=1e-12)
        assert torch.allclose(together.virial[place], alone.virial[0], atol=1e-12)


def test_single_precision_keeps_large_energies_exact():
    """Energies of lone atoms are thousands of eV, what is learned are parts of one."""
    model, atoms = small_model().float(), Atoms(10)
    model.energy_bias = torch.tensor([-12345.678901, -2345.6789012, 0.5], dtype=torch.float64)
    exact = small_model()
    exact.energy_bias.copy_(model.energy_bias)
    found, expected = (float(predict(each, atoms.coord, atoms.types, atoms.box).energy) for each in (model, exact))
    assert found == pytest.approx(expected, abs=1e-4)
    assert predict(model, atoms.coord, atoms.types, atoms.box).force.dtype == torch.float32


@pytest.mark.parametrize(("precision", "tolerance"), [("32", 1e-4), ("bf16", 0.3)])
def test_networks_may_compute_in_fewer_digits(precision: str, tolerance: float):
    coarse, fine, atoms = small_model(precision=precision), small_model(), Atoms(11)
    found, expected = (predict(each, atoms.coord, atoms.types, atoms.box).force for each in (coarse, fine))
    assert 0 < float((found - expected).norm() / expected.norm()) < tolerance


def test_mixed_precision_reaches_the_networks_alone():
    model, atoms = small_model().float(), Atoms(11)
    exact = predict(model, atoms.coord, atoms.types, atoms.box)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = predict(model, atoms.coord, atoms.types, atoms.box)
    assert found.force.dtype == torch.float32
    assert 0 < float((found.force - exact.force).norm() / exact.force.norm()) < 0.3


@pytest.mark.parametrize(("widths", "has_dt"), [([8, 8, 16, 7], True), ([8, 8], False), ([5], True)])
def test_gradients_of_a_network_and_of_its_slopes(widths: list[int], has_dt: bool):
    torch.manual_seed(0)
    network, features = Score(4, widths, has_dt).double(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    inputs = [features, *network.parameters()]
    assert torch.autograd.gradcheck(lambda *_: tuple(network(features)), inputs)
    found = network(features)
    (slopes,) = torch.autograd.grad(found.values.sum(), features)
    assert torch.allclose(found.slopes, slopes, atol=1e-14)


@pytest.mark.parametrize(("widths", "has_dt"), [([3, 6, 6], True), ([2, 4, 5], False), ([1], True)])
def test_gradients_of_a_curve_and_of_its_slopes(widths: list[int], has_dt: bool):
    torch.manual_seed(0)
    curve, numbers = Curve(widths, has_dt).double(), torch.randn(5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *_: curve(numbers.detach()), list(curve.parameters()))
    values, slopes = curve(numbers)
    plain = curve.values(numbers)
    assert torch.allclose(values, plain, atol=1e-14)
    for place in range(widths[-1]):
        (slope,) = torch.autograd.grad(plain[:, place].sum(), numbers, retain_graph=True)
        assert torch.allclose(slopes[:, place], slope, atol=1e-13)


def test_neighbours_fade_without_a_kink():
    distance = torch.linspace(0.1, 7, 2000, dtype=torch.float64, requires_grad=True)
    found = fade(distance, 0.5, 6.0)
    (rise,) = torch.autograd.grad(found.weight.sum(), distance)
    assert torch.allclose(found.rise, rise, atol=1e-12)
    assert float(found.weight[0].detach()) == 1 and float(found.weight[-1].detach()) == 0
    assert float(found.rise.detach().diff().abs().max()) < 0.01


def test_an_edge_of_each_frame_finds_its_way_back():
    atoms = Atoms(12)
    batch = frame_batch(atoms.coord, atoms.types, atoms.box, CUTOFF, NUM_TYPES)
    edges = Edges.of({key: torch.cat([value, value]) for key, value in batch.items()}, NUM_TYPES, CUTOFF)
    flat = edges.vectors.view(2, -1, 3)
    lists = [batch[key] for key in sorted(batch) if key.startswith("neighbours_")]
    is_real = torch.cat(lists, -1).view(-1) >= 0
    back = flat[0][edges.reverse[0].view(-1).long()]
    assert torch.allclose(back[is_real], -flat[0][is_real], atol=1e-12)
    assert torch.equal(flat[0], flat[1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sel": []}, "sel is"),
        ({"sel": [0, 0]}, "sel is"),
        ({"sel": [-1, 5]}, "sel is"),
        ({"sel": [5], "smooth": 6.0}, "smooth must be less than cutoff"),
        ({"sel": [5], "axis_width": 200}, "axis_width is 200"),
        ({"sel": [5], "widths": []}, "widths is"),
        ({"sel": [5], "precision": "8"}, "precision"),
    ],
)
def test_a_descriptor_says_what_it_cannot_be(arguments: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        SeE2A(**arguments)


def test_every_type_has_a_name_and_a_place_in_sel():
    with pytest.raises(UserError, match="types are"):
        DeepPotential(["O", "H"], SeE2A([5]))
    with pytest.raises(UserError, match="only once"):
        DeepPotential(["O", "O"], SeE2A([5, 5]))
