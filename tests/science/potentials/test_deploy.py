"""A potential in a file, used where this package is not."""

import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isoscale.science.potentials.deploy import Deployed
from isoscale.science.potentials.model import DeepPotential
from isoscale.science.potentials.neighbours import find_pairs
from isoscale.science.potentials.se_e2_a import SeE2A
from tests import warm
from tests.science.potentials import parity
from tests.science.potentials.one_frame import frame_batch

ELSEWHERE = """
import sys
sys.path.insert(0, sys.argv[1])
try:
    import isoscale
except ImportError:
    pass
else:
    raise SystemExit("isoscale is there")
import json
import numpy as np
import torch
import vesin

said = {"types": "", "cutoff": "", "units": ""}
potential = torch.jit.load(sys.argv[2], _extra_files=said)
assert json.loads(said["types"]) == ["O", "H"] and json.loads(said["units"])["energy"] == "eV"
frame = np.load(sys.argv[3])
search = vesin.NeighborList(cutoff=float(said["cutoff"]), full_list=True)
pairs = search.compute(points=frame["coord"], box=frame["box"], periodic=True, quantities="ijS")
inputs = [torch.tensor(frame[name]) for name in ("coord", "types", "box")]
found = potential(*inputs, *(torch.tensor(each.astype(np.int64)) for each in pairs))
for name in ("energy", "atom_energy", "force", "virial"):
    apart = np.abs(found[name].numpy() - frame[name]).max()
    assert apart < 1e-10, (name, apart)
print("the same")
"""


@pytest.mark.slow
def test_a_file_gives_the_numbers_of_another_program_where_isoscale_is_not_installed(tmp_path: Path) -> None:
    module = Deployed(parity.model())
    torch.jit.script(module).save(
        tmp_path / "water.pt", _extra_files={name: text.encode() for name, text in module.described().items()}
    )
    np.savez(tmp_path / "frame.npz", **parity.frames()[1])
    words = [sysconfig.get_path("purelib"), str(tmp_path / "water.pt"), str(tmp_path / "frame.npz")]
    done = warm.run([sys.executable, "-I", "-S", "-c", ELSEWHERE, *words], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr


def made(**descriptor: Any) -> DeepPotential:
    """A small potential of three types with made-up weights and statistics."""
    torch.manual_seed(1)
    found = DeepPotential(["A", "B", "C"], SeE2A([9, 14, 11], 3.0, 0.4, [3, 6, 6], 2, **descriptor), [5, 10], True)
    found.descriptor.mean.copy_(torch.tensor([0.1, 0.3, -0.2]))
    found.descriptor.scale.copy_(torch.tensor([[0.3, 0.2], [0.4, 0.1], [0.2, 0.5]]))
    found.energy_bias.copy_(torch.tensor([-3.0, 0.7, 2.0]))
    for name, values in found.named_parameters():
        if name.endswith("dt"):  # as after training, when they have grown
            values.data.uniform_(0.5, 1.5)
    return found.double()


def atoms(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, types and box of eleven atoms."""
    random = np.random.default_rng(seed)
    box = np.array([[4.0, 0.0, 0.0], [0.5, 4.4, 0.0], [-0.6, 0.3, 4.2]])
    types = np.array([2, 0, 1, 1, 0, 2, 1, 0, 1, 2, 2])
    return torch.tensor(random.random((11, 3)) @ box), torch.tensor(types), torch.tensor(box)


def pairs(positions: Tensor, types: Tensor, box: Tensor, cutoff: float) -> list[Tensor]:
    found = find_pairs(positions.numpy(), types.numpy(), box.numpy(), cutoff)
    return [torch.tensor(each) for each in (found.centres, found.neighbours, found.shifts)]


def assert_is_the_model(found: dict[str, Tensor], model: DeepPotential, frame: Any, room: float = 1e-11) -> None:
    """Energies, forces and virial of a frame (positions, types, box) are those of the model as it is trained."""
    positions, types, box = (values.numpy() for values in frame)
    batch = frame_batch(positions, types, box, 3.0, 3)
    with torch.no_grad():
        wanted = model(batch)
    order = batch["places"][0].long()
    assert float((found["energy"] - wanted.energy[0]).abs()) < room
    assert float((found["atom_energy"][order] - wanted.atom_energy[0]).abs().max()) < room
    assert float((found["force"][order] - wanted.force[0]).abs().max()) < room
    assert float((found["virial"] - wanted.virial[0]).abs().max()) < 10 * room
    assert float(found["force"].abs().max()) > 1e-3 and float(found["virial"].abs().max()) > 1e-3


@pytest.mark.parametrize(
    "descriptor", [{}, {"one_side": False}, {"dt": True}, {"one_side": False, "dt": True}, {"precision": "32"}], ids=str
)
def test_it_is_the_model_that_was_trained(descriptor: dict[str, Any]) -> None:
    model = made(**descriptor)
    model.descriptor.sel[:] = [50, 60, 70]
    positions, types, box = atoms()
    found = Deployed(model)(positions, types, box, *pairs(positions, types, box, 3.0))
    assert_is_the_model(found, model, (positions, types, box), 1e-5 if "precision" in descriptor else 1e-11)


def test_a_type_that_is_nobodys_neighbour_needs_no_room() -> None:
    model = made()
    model.descriptor.sel[:] = [50, 60, 0]
    positions, types, box = atoms()
    types %= 2
    found = Deployed(model)(positions, types, box, *pairs(positions, types, box, 3.0))
    assert_is_the_model(found, model, (positions, types, box))


def test_pairs_beyond_the_cutoff_and_their_order_do_not_matter() -> None:
    module = Deployed(made())
    module.allow_more_neighbours = True
    positions, types, box = atoms()
    plain = module(positions, types, box, *pairs(positions, types, box, 3.0))
    first, second, shifts = pairs(positions, types, box, 4.5)
    order = torch.randperm(len(first), generator=torch.Generator().manual_seed(0))
    other = module(positions, types, box, first[order], second[order], shifts[order])
    for name, values in plain.items():
        torch.testing.assert_close(other[name], values, atol=1e-12, rtol=0)


def test_neighbours_beyond_sel_are_left_out_farthest_first_where_the_model_was_trained_so() -> None:
    model = made()
    model.descriptor.sel[:] = [5, 4, 3]
    positions, types, box = atoms()
    first, second, shifts = pairs(positions, types, box, 3.0)
    with pytest.raises(ValueError, match="at most"):
        Deployed(model)(positions, types, box, first, second, shifts)
    found = Deployed(model, allow_more_neighbours=True)(positions, types, box, first, second, shifts)
    distance = (positions[second] + shifts.double() @ box - positions[first]).norm(dim=1)
    kept = []
    for atom in range(len(types)):
        for kind, most in enumerate(model.sel):
            own = torch.nonzero((first == atom) & (types[second] == kind)).flatten()
            kept.append(own[distance[own].argsort()[:most]])
    near = torch.cat(kept)
    alone = Deployed(model)(positions, types, box, first[near], second[near], shifts[near])
    assert len(near) < len(first)
    for name, values in alone.items():
        torch.testing.assert_close(found[name], values, atol=1e-12, rtol=0)
    assert_is_the_model(found, model, (positions, types, box))


def test_a_type_that_the_model_does_not_have_is_an_error() -> None:
    positions, types, box = atoms()
    types[3] = 3
    with pytest.raises(ValueError, match="types are places"):
        Deployed(made())(positions, types, box, *pairs(positions, types, box, 1.0))
