"""A model of crystals in a file, used where this package is not."""

import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ase import Atoms
from torch import nn
from torch_geometric.nn.models import SchNet

import isoscale
from isoscale.errors import UserError
from isoscale.science.atoms.use import calculator
from isoscale.science.crystals.deploy import Deployed
from isoscale.science.crystals.edges import GraphSettings
from isoscale.science.crystals.model import CrystalModel, Head
from isoscale.science.crystals.networks.pyg_network import PyGNetwork
from isoscale.science.crystals.reading.structure import Structure
from isoscale.science.crystals.transforms import graph_of
from tests import warm
from tests.helpers import train
from tests.science.crystals.made_structures import many, write_extxyz
from tests.science.crystals.small_models import CUTOFF, NETWORKS, Own, small, trained
from tests.science.crystals.test_calculator import assert_same, several, skewed

HEADS = [Head("band_gap", "value"), Head("charges", "value", "atom"), Head("system", "classes", classes=3)]

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
import ase.io
import numpy as np
import torch
from ase.neighborlist import neighbor_list

said = {"elements": "", "cutoff": "", "units": ""}
model = torch.jit.load(sys.argv[2], _extra_files=said)
assert json.loads(said["elements"]) == [1, 3, 8, 29] and json.loads(said["units"])["stress"] == "eV/angstrom^3"
for atoms in ase.io.read(sys.argv[3], ":"):
    target, source, shift = neighbor_list("ijS", atoms, float(said["cutoff"]))
    found = model(
        torch.tensor(atoms.positions),
        torch.tensor(atoms.numbers),
        torch.tensor(atoms.cell.array[None]),
        torch.zeros(len(atoms), dtype=torch.long),
        torch.tensor(source),
        torch.tensor(target),
        torch.tensor(shift),
    )
    apart = [abs(float(found["energy"]) - atoms.get_potential_energy())]
    apart.append(np.abs(found["forces"].numpy() - atoms.get_forces()).max())
    if "stress" in atoms.calc.results:
        apart.append(np.abs(found["stress"][0].numpy() - atoms.get_stress(voigt=False)).max())
    assert max(apart) < 1e-6, apart
print("the same")
"""


def written(model: CrystalModel, path: Path) -> Path:
    """A file as `isoscale export` writes it."""
    module = Deployed(model)
    script = torch.jit.script(module)
    script.save(path, _extra_files={name: text.encode() for name, text in module.described().items()})
    return path


@pytest.mark.slow
def test_a_file_gives_the_same_numbers_where_isoscale_is_not_installed(tmp_path: Path) -> None:
    import ase.io
    from ase.calculators.singlepoint import SinglePointCalculator

    path, structures = written(small(), tmp_path / "copper.pt"), several()
    for atoms, found in zip(structures, calculator(small(), "cpu").calculate_many(structures), strict=True):
        atoms.calc = SinglePointCalculator(atoms, **found)
    ase.io.write(tmp_path / "structures.traj", structures)
    words = [sysconfig.get_path("purelib"), str(path), str(tmp_path / "structures.traj")]
    done = warm.run([sys.executable, "-I", "-S", "-c", ELSEWHERE, *words], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "the same\n"), done.stderr


def own() -> CrystalModel:
    """A network of a user."""
    torch.manual_seed(5)
    return trained(CrystalModel(Own(), ["energy", "forces", "stress"]))


def features_of_pyg() -> CrystalModel:
    """A network of PyG with a head of its own, and a second one."""
    network = PyGNetwork(SchNet(8, 8, 2, 10, CUTOFF), features_of="lin1")
    return trained(CrystalModel(network, ["energy", HEADS[1]]))


class OfPositions(nn.Module):
    """A network that looks at positions, and at where images are."""

    def __init__(self) -> None:
        """With weights of its own."""
        super().__init__()
        self.embedding = nn.Embedding(119, 1)

    def forward(self, z: torch.Tensor, pos: torch.Tensor, edge_index: torch.Tensor, shifts: torch.Tensor) -> Any:
        """Energies of atoms."""
        source, target = edge_index
        lengths = (pos[source] + shifts - pos[target]).square().sum(1, keepdim=True)
        sent = (1 - lengths / CUTOFF**2).clamp(min=0).pow(3) * self.embedding(z[source])
        return self.embedding(z).index_add(0, target, sent)


MODELS: dict[str, Any] = {
    **{network: lambda network=network: small(network) for network in NETWORKS},
    "own": own,
    "heads": lambda: small("painn", *HEADS),
    "pyg": lambda: trained(CrystalModel(PyGNetwork(SchNet(8, 8, 2, 10, CUTOFF)), ["energy", "forces", "stress"])),
    "features of pyg": features_of_pyg,
    "positions": lambda: trained(CrystalModel(PyGNetwork(OfPositions(), CUTOFF, "atoms"), ["energy", "forces"])),
    "zbl": lambda: small("painn", zbl=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_file_is_the_model_that_was_trained(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    found = calculator(written(model, tmp_path / "model.pt"), "cpu")
    wanted = calculator(model, "cpu")
    for one, other in zip(found.calculate_many(several()), wanted.calculate_many(several()), strict=True):
        assert_same(one, other)
    assert set(found.implemented_properties) == {*model.outputs, "free_energy"}
    atoms = skewed()
    for calculating in (found, wanted):
        atoms.calc = calculating
        for name in model.outputs:
            atoms.calc.get_property(name, atoms)
    assert_same(found.results, wanted.results)


def test_a_file_keeps_the_precision_of_the_model(tmp_path: Path) -> None:
    model = small().float()
    found, wanted = calculator(written(model, tmp_path / "model.pt"), "cpu"), calculator(model, "cpu")
    for one, other in zip(found.calculate_many(several()), wanted.calculate_many(several()), strict=True):
        assert_same(one, other, 1e-4)
    scripted = torch.jit.load(tmp_path / "model.pt")
    assert {each.dtype for each in scripted.parameters()} == {torch.float32}


def inputs() -> list[torch.Tensor]:
    """Of one structure, with edges up to the cutoff."""
    from ase.neighborlist import neighbor_list

    atoms = skewed()
    target, source, shift = neighbor_list("ijS", atoms, CUTOFF)
    arrays = [atoms.positions, atoms.numbers, atoms.cell.array[None], np.zeros(6, np.int64), source, target, shift]
    return [torch.tensor(array) for array in arrays]


def test_edges_beyond_the_cutoff_and_their_order_do_not_matter() -> None:
    from ase.neighborlist import neighbor_list

    module, given = Deployed(small()), inputs()
    target, source, shift = (torch.tensor(each) for each in neighbor_list("ijS", skewed(), CUTOFF + 1))
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))
    assert len(source) > len(given[4])
    plain, other = module(*given), module(*given[:4], source[order], target[order], shift[order])
    for name, values in plain.items():
        torch.testing.assert_close(other[name], values, atol=1e-11, rtol=0)


def test_a_file_runs_on_the_device_of_its_inputs() -> None:
    module = torch.jit.script(Deployed(small("painn", *HEADS)))
    assert "cpu" not in module.body.code and "prim.device" in module.body.code


def test_elements_that_the_model_was_not_trained_for_are_an_error() -> None:
    given = inputs()
    given[1][2] = 92
    with pytest.raises(ValueError, match="elements that the model was not trained for"):
        Deployed(small())(*given)


@pytest.mark.parametrize("settings", [GraphSettings(CUTOFF, max_neighbors=4), GraphSettings(2.2, adaptive_cutoff=True)])
def test_edges_are_those_that_the_model_was_trained_with(settings: GraphSettings, tmp_path: Path) -> None:
    model, plain, atoms = small(), small(), skewed()
    model.set_edges(settings)
    for given in (model, written(model, tmp_path / "model.pt")):
        calculating = calculator(given, "cpu", skin=1.0)
        for move in range(3):
            atoms.positions[0] += 0.1
            atoms.calc = calculating
            found, many = atoms.get_potential_energy(), calculating.calculate_many([atoms])
            assert found == pytest.approx(many[0]["energy"], abs=1e-10)
            assert found == pytest.approx(by_hand(model, atoms), abs=1e-10)
            assert calculating.num_lists == move + 1
    atoms.calc = calculator(plain, "cpu")
    assert found != pytest.approx(atoms.get_potential_energy(), abs=1e-6)


def by_hand(model: CrystalModel, atoms: Any) -> float:
    """The energy as training sees it."""
    structure = Structure(atoms.numbers, atoms.positions, np.array(atoms.cell), atoms.pbc, {}, "here")
    batch = graph_of([structure], model.edges).fetch(torch.tensor([0]))
    return float(model(batch, create_graph=False)["energy"])


class Fixed(Own):
    """A network that only works for the number of atoms that it first sees."""

    def forward(self, graph: Any) -> torch.Tensor:
        """Features of atoms, spoilt."""
        found = super().forward(graph)
        return found * len(found)


def test_a_network_that_tracing_changes_is_refused() -> None:
    with pytest.raises(UserError, match="gives another energy in the file than here"):
        Deployed(trained(CrystalModel(Fixed(), ["energy", "forces"])))


class Unseen(Own):
    """A network that torch cannot see into."""

    def forward(self, graph: Any) -> torch.Tensor:
        """Features of atoms."""
        if torch.jit.is_tracing():
            raise RuntimeError("not while somebody watches")
        return super().forward(graph)


def test_a_network_that_cannot_be_traced_is_refused() -> None:
    with pytest.raises(UserError, match=r"cannot be traced.*\nthe weights alone can: --out FILE.safetensors"):
        Deployed(trained(CrystalModel(Unseen(), ["energy", "forces"])))


def test_a_model_that_knows_no_element_is_refused() -> None:
    with pytest.raises(UserError, match="does not know any element yet"):
        Deployed(CrystalModel(Own(), ["energy"]))
    with pytest.raises(UserError, match="does not know any element yet"):
        calculator(CrystalModel(Own(), ["energy"]))


def test_a_file_says_what_it_is() -> None:
    said = Deployed(small("painn", *HEADS)).described()
    assert said["kind"] == "crystal" and json.loads(said["outputs"])["charges"] == "atom"
    assert json.loads(said["units"])["energy"] == "eV" and said["inputs"].split(", ")[:3] == ["pos", "z", "cell"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    """Trained for a moment, on edges that depend on more than the cutoff."""
    folder = tmp_path_factory.mktemp("run")
    write_extxyz(folder / "made.extxyz", many(8, ((1, 1, 1), (2, 1, 1))))
    edges = {"class": "periodic_edges", "cutoff": CUTOFF, "max_neighbors": 13}
    recipe = {
        "task": {"class": "crystal", "model": {"class": "painn", "width": 8, "layers": 2, "cutoff": CUTOFF}},
        "data": {"class": "structures", "train": str(folder / "made.extxyz"), "batch_size": 4, "transforms": [edges]},
        "train": {"steps": 4, "epochs": None, "precision": "64"},
    }
    return train(folder / "run", recipe)


@pytest.mark.slow
def test_an_exported_run_is_the_same_model(run: isoscale.Run, tmp_path: Path) -> None:
    for ending in ("pt", "safetensors"):
        isoscale.export(run, tmp_path / f"made.{ending}")
    structures = [Atoms(each.numbers, each.positions, cell=each.cell, pbc=True) for each in many(5, ((1, 1, 1),))]
    assert run.model().edges == GraphSettings(CUTOFF, max_neighbors=13)
    wanted = [by_hand(run.model(), atoms) for atoms in structures]
    for given in (run, str(run.path), run.model(), tmp_path / "made.pt", tmp_path / "made.safetensors"):
        calculating = isoscale.calculator(given, device="cpu")
        found = calculating.calculate_many(structures)
        np.testing.assert_allclose([each["energy"] for each in found], wanted, rtol=0, atol=1e-9)
        assert calculating.elements == ["Cu"]
    with pytest.raises(UserError, match=r"written as .pt \(TorchScript\) or .safetensors"):
        isoscale.export(run, tmp_path / "made.pt2")
