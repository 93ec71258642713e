"""SchNet of PyTorch Geometric on crystals, trained by a plain loop: the peer's side of `crystals.py`.

The network is PyG's own, with periodic edges given through its `interaction_graph`; edges are found once, beforehand.
Energies are learned beyond a least-squares reference for every element, in units of the forces' root mean square.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import torch
import vesin
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn.models import SchNet

CUTOFF = 5.0
NUM_ELEMENTS = 100


@dataclass(frozen=True)
class Settings:
    """How the network is trained; isoscale's side is given the same."""

    batch: int
    steps: int
    lr: float = 1e-3
    energy_weight: float = 1.0
    force_weight: float = 10.0
    width: int = 128
    layers: int = 6
    gaussians: int = 50
    workers: int = 0
    resident: bool = False
    """Whether batches are made beforehand, on the device."""


def read(path: Path) -> list[Atoms]:
    """Structures with energies (eV) and forces (eV/Å), of a file that ASE reads or of LiPS in an .npz file."""
    if path.suffix != ".npz":
        return list(ase.io.read(path, ":"))
    stored = np.load(path)
    found = []
    for number, (start, end) in enumerate(zip(stored["ptr"][:-1], stored["ptr"][1:], strict=True)):
        atoms = Atoms(
            stored["z"][start:end], positions=stored["pos"][start:end].astype(np.float64),
            cell=stored["cell"][number].astype(np.float64), pbc=stored["pbc"][number],
        )  # fmt: skip
        forces = stored["force"][start:end].astype(np.float64)
        atoms.calc = SinglePointCalculator(atoms, energy=float(stored["energy"][number]), forces=forces)
        found.append(atoms)
    return found


def references(structures: Sequence[Atoms]) -> Tensor:
    """The energy of an atom of each element (NUM_ELEMENTS) by least squares."""
    counts = np.stack([np.bincount(atoms.numbers, minlength=NUM_ELEMENTS) for atoms in structures]).astype(float)
    energies = np.array([atoms.get_potential_energy() for atoms in structures])
    return torch.from_numpy(np.linalg.lstsq(counts, energies, rcond=None)[0])


def graph(atoms: Atoms, reference: Tensor) -> Data:
    """Atoms and their neighbours as PyG has them; the offset of an edge is that of the image of its source."""
    search = vesin.NeighborList(cutoff=CUTOFF, full_list=True)
    target, source, shifts = search.compute(
        points=atoms.positions, box=atoms.cell.array, periodic=list(atoms.pbc), quantities="ijS"
    )
    numbers = torch.from_numpy(atoms.numbers)
    return Data(
        z=numbers, pos=torch.from_numpy(atoms.positions).float(),
        edge_index=torch.from_numpy(np.stack([source, target]).astype(np.int64)),
        edge_offset=torch.from_numpy(shifts @ atoms.cell.array).float(),
        energy=(atoms.get_potential_energy() - reference[numbers].sum()).float().view(1),
        forces=torch.from_numpy(atoms.get_forces()).float(), count=torch.tensor([float(len(atoms))]),
    )  # fmt: skip


class Potential(nn.Module):
    """PyG's SchNet on periodic edges, with forces."""

    def __init__(self, settings: Settings, scale: float) -> None:
        super().__init__()
        self.edges: Tensor | None = None
        self.lengths: Tensor | None = None
        self.network = SchNet(
            settings.width, settings.width, settings.layers, settings.gaussians, CUTOFF,
            interaction_graph=lambda pos, batch: (self.edges, self.lengths), mean=0.0, std=scale,
        )  # fmt: skip

    def forward(self, batch: Any, training: bool) -> tuple[Tensor, Tensor]:
        """Energies (structures) and forces (atoms, 3)."""
        positions = batch.pos.detach().requires_grad_()
        source, target = batch.edge_index
        self.edges = batch.edge_index
        self.lengths = (positions[source] + batch.edge_offset - positions[target]).norm(dim=1)
        energy = self.network(batch.z, positions, batch.batch)[:, 0]
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=training)
        return energy, -slope


@dataclass(frozen=True)
class Trained:
    """What came of a training."""

    seconds: float
    """Of the timed steps."""
    num_steps: int
    errors: dict[str, float]
    """On the held-out structures: energy_mae (eV/atom), forces_mae (eV/Å)."""
    peak: int
    """Bytes of device memory; 0 on a CPU."""

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return self.seconds / self.num_steps


def train(training: list[Data], held_out: list[Data], settings: Settings, device: str, seed: int = 0) -> Trained:
    """The plain loop; the first tenth of its steps warm up, at least three, and are not timed."""
    torch.manual_seed(seed)
    scale = float(torch.cat([each.forces for each in training]).square().mean().sqrt())
    model = Potential(settings, scale).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    warm = max(3, settings.steps // 10)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for number, batch in enumerate(batches(training, settings, device)):
        if number == warm:
            wait(device)
            began = time.perf_counter()
        if number == settings.steps:
            break
        batch = batch.to(device, non_blocking=True)
        energy, forces = model(batch, training=True)
        of_energy = ((energy - batch.energy) / batch.count / scale).square().mean()
        of_forces = ((forces - batch.forces) / scale).square().mean()
        loss = settings.energy_weight * of_energy + settings.force_weight * of_forces
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
    wait(device)
    seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return Trained(seconds, settings.steps - warm, errors(model, held_out, device), peak)


def batches(structures: list[Data], settings: Settings, device: str) -> Iterator[Any]:
    """Without end, shuffled anew every epoch; incomplete ones are left out, so that every step has the same size."""
    loader = DataLoader(
        structures, settings.batch, shuffle=True, drop_last=True, num_workers=settings.workers,
        pin_memory=device == "cuda", persistent_workers=settings.workers > 0,
    )  # fmt: skip
    if settings.resident:
        kept = [batch.to(device) for batch in loader]
        while True:
            yield from kept
    while True:
        yield from loader


def errors(model: Potential, structures: list[Data], device: str) -> dict[str, float]:
    """Mean absolute errors, of energies per atom and of components of forces."""
    of_energy, of_forces = [], []
    for start in range(0, len(structures), 8):
        batch = Batch.from_data_list(structures[start : start + 8]).to(device)
        energy, forces = model(batch, training=False)
        of_energy.append(((energy - batch.energy).abs() / batch.count).detach().cpu())
        of_forces.append((forces - batch.forces).abs().flatten().cpu())
    if not structures:
        return {}
    return {"energy_mae": float(torch.cat(of_energy).mean()), "forces_mae": float(torch.cat(of_forces).mean())}


def wait(device: str) -> None:
    """Until the device has done everything."""
    if device == "cuda":
        torch.cuda.synchronize()
