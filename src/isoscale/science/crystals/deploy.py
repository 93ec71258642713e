"""A trained model of crystals as TorchScript that runs where this package is not installed, for any structures.

The network is traced with plain sums (`index_add`) in the place of ours, whose fixed order matters in training alone;
around it stands a script that makes vectors of positions, and forces and stress of slopes by `torch.autograd.grad`. So
whatever network can be traced can be written, a user's own too.
"""

# mypy: disable-error-code="unreachable"
# TorchScript has other types than torch says.

import copy
import json
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from isoscale.errors import UserError
from isoscale.science.crystals.model import SLOPES, CrystalModel
from isoscale.science.crystals.networks.graph import Graph
from isoscale.science.crystals.sums import Side

KIND = "crystal"
"""What a file says that it is."""
UNITS = {"length": "angstrom", "energy": "eV", "forces": "eV/angstrom", "stress": "eV/angstrom^3"}
NO_ELEMENTS = "the model does not know any element yet: train it, or name them by model.set_elements"
INPUTS = "pos, z, cell, batch, edge_source, edge_target, edge_shift"
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Of the outputs of what was traced against those of the model, relative to the largest."""


class Deployed(nn.Module):
    """Energies, forces, stresses and properties of structures behind each other, from a list of their edges.

    Edges that are longer than the cutoff do no harm, unless the model was trained with `max_neighbors` or an adaptive
    cutoff: then those that it was trained with have to be given, and no others. Their order does not matter.
    """

    def __init__(self, model: CrystalModel) -> None:
        """Of a model on any device; what is trained afterwards does not change it."""
        super().__init__()
        if not model.elements:
            raise UserError(NO_ELEMENTS)
        edges = model.edges
        body = _Body(copy.deepcopy(model).cpu().eval().requires_grad_(False))
        self.names = body.names
        self.has_energy = "energy" in self.names
        self.energy_at = self.names.index("energy") if self.has_energy else 0
        self.elements = model.elements
        self.cutoff = edges.cutoff
        self.is_plain = edges.max_neighbors is None and not edges.adaptive_cutoff
        self._described = described(model)
        self.body = _traced(body, edges.cutoff)

    def described(self) -> dict[str, str]:
        """What a file of the model says about itself."""
        return {**self._described, "inputs": INPUTS}

    def forward(
        self, pos: Tensor, z: Tensor, cell: Tensor, batch: Tensor, edge_source: Tensor, edge_target: Tensor,
        edge_shift: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        """What the model says of B structures with A atoms and E edges: energy (B), forces (A, 3), stress (B, 3, 3), ….

        Of atoms at `pos` (A, 3) with atomic numbers `z` (A), in structures `batch` (A), ascending; the rows of `cell`
        (B, 3, 3) are cell vectors. The vector of an edge is pos[source] + shift @ cell - pos[target].
        """
        self._check(z)
        pos, cell = pos.detach().double().requires_grad_(), cell.detach().double()
        strain = torch.zeros_like(cell).requires_grad_()
        stretch = (strain + strain.transpose(1, 2)) / 2
        stretched = pos + torch.bmm(pos.unsqueeze(1), stretch[batch]).squeeze(1)
        cells = (cell + torch.bmm(cell, stretch))[batch[edge_target]]
        shifts = torch.bmm(edge_shift.double().unsqueeze(1), cells).squeeze(1)
        vectors = stretched[edge_source] - stretched[edge_target] + shifts
        kept = self._kept(vectors, edge_target)
        source, target = edge_source[kept].long(), edge_target[kept].long()
        by_source = torch.argsort(source, stable=True)
        said = self.body(z, stretched, vectors[kept], shifts[kept], source, target, by_source, batch, cell)
        found: dict[str, Tensor] = {}
        for place, name in enumerate(self.names):
            found[name] = said[place].detach()
        if self.has_energy:
            slopes = torch.autograd.grad([said[self.energy_at].sum()], [pos, strain], allow_unused=True)
            of_pos, of_strain = slopes[0], slopes[1]
            if of_pos is None or of_strain is None:  # a network that does not look at edges
                of_pos, of_strain = torch.zeros_like(pos), torch.zeros_like(strain)
            volume = torch.linalg.det(cell).abs().view(-1, 1, 1)
            found["forces"] = -of_pos
            found["stress"] = torch.where(volume > 1e-9, of_strain / volume, torch.zeros_like(strain))
        return found

    def _kept(self, vectors: Tensor, edge_target: Tensor) -> Tensor:
        """The places of edges that count, sorted by target."""
        order = torch.argsort(edge_target, stable=True)
        if not self.is_plain:
            return order
        is_near = vectors.detach().square().sum(1) <= self.cutoff * self.cutoff
        return order[is_near[order]]

    def _check(self, z: Tensor) -> None:
        known = torch.zeros(z.shape[0], dtype=torch.bool, device=z.device)
        for element in self.elements:
            known = known | (z == element)
        if not bool(known.all()):
            raise ValueError(f"some atoms are of elements that the model was not trained for; it knows {self.elements}")


def described(model: CrystalModel) -> dict[str, str]:
    """What files say of a model."""
    return {
        "kind": KIND, "elements": json.dumps(model.elements), "cutoff": str(model.edges.cutoff),
        "edges": json.dumps(model.edges._asdict()), "outputs": json.dumps(model.outputs), "units": json.dumps(UNITS),
    }  # fmt: skip


class _Body(nn.Module):
    """What is traced: from vectors of edges to everything that is no slope."""

    def __init__(self, model: CrystalModel) -> None:
        super().__init__()
        self.model = model
        self.dtype = next(model.parameters()).dtype
        self.names = [name for name in model.outputs if name not in SLOPES]

    def forward(
        self, z: Tensor, pos: Tensor, vectors: Tensor, shifts: Tensor, source: Tensor, target: Tensor,
        by_source: Tensor, batch: Tensor, cell: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """In the order of `names`."""
        num_atoms, num_structures = z.shape[0], cell.shape[0]
        pos, vectors, shifts = (tensor.to(self.dtype) for tensor in (pos, vectors, shifts))
        by_positions = self.model.by_positions
        said = self.model.of_graph(Graph(
            z, vectors, vectors.square().sum(1).sqrt(), source, target, by_source,
            _side(source, by_source, num_atoms), _side(target, torch.arange(target.shape[0]), num_atoms), batch,
            _side(batch, torch.arange(num_atoms), num_structures + 1), num_structures,
            pos if by_positions else None, shifts if by_positions else None,
        ))  # fmt: skip
        return tuple(said[name] for name in self.names)


def _side(index: Tensor, order: Tensor, num_rows: Any) -> Side:
    """Whose number of rows is not fixed by tracing."""
    ascending = index.index_select(0, order)
    return Side(index, order, torch.searchsorted(ascending, torch.arange(num_rows + 1, device=index.device)))


def _traced(body: _Body, cutoff: float) -> Any:
    """A body as TorchScript, compared with itself on other structures than those that it was traced with."""
    elements = body.model.elements
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit._trace.TracerWarning)  # what came out is compared
        try:
            traced = torch.jit.trace(body, _example(elements, cutoff, [3, 2]), check_trace=False)
        except Exception as error:
            words = (str(error).strip().splitlines() or [""])[0][:200]
            raise UserError(
                f"this network cannot be traced, nor written as TorchScript: {type(error).__name__}: {words}\n"
                "the weights alone can: --out FILE.safetensors"
            ) from error
    _follow_inputs(traced.graph)
    for counts in ([3, 2], [4, 1, 5], [2]):
        inputs = _example(elements, cutoff, counts)
        for name, wanted, found in zip(body.names, body(*inputs), traced(*inputs), strict=True):
            room = TOLERANCE.get(body.dtype, 1e-2) * max(1.0, float(wanted.abs().max()))
            if found.shape != wanted.shape or not float((found - wanted).abs().max()) <= room:
                raise UserError(
                    f"this network gives another {name} in the file than here: what it does depends on more than its "
                    "input, such as the number of atoms\nthe weights alone can be written: --out FILE.safetensors"
                )
    return traced


def _example(elements: list[int], cutoff: float, counts: list[int]) -> tuple[Tensor, ...]:
    """Inputs of a body: structures of some atoms each, in which all are joined to all."""
    random = torch.Generator().manual_seed(len(counts))
    batch = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    joined = (batch.unsqueeze(0) == batch.unsqueeze(1)) & ~torch.eye(len(batch), dtype=torch.bool)
    target, source = torch.nonzero(joined).unbind(1)
    z = torch.tensor(elements)[torch.randint(len(elements), batch.shape, generator=random)]
    pos = torch.rand(len(batch), 3, dtype=torch.float64, generator=random) * cutoff / 3**0.5
    vectors = pos[source] - pos[target]
    cell = 2 * cutoff * torch.eye(3, dtype=torch.float64).expand(len(counts), 3, 3)
    return z, pos, vectors, torch.zeros_like(vectors), source, target, torch.argsort(source, stable=True), batch, cell


def _follow_inputs(graph: Any) -> None:
    """Let what a traced graph makes lie on the device of its inputs, and not on that where it was traced."""
    torch._C._jit_pass_inline(graph)
    fixed = [node.output() for node in graph.findAllNodes("prim::Constant")]
    fixed = [value for value in fixed if value.type().kind() == "DeviceObjType"]
    if fixed:
        device = graph.create("prim::device", [list(graph.inputs())[1]], 1)  # after the module itself, the first one
        device.output().setType(fixed[0].type())
        graph.prependNode(device)
        for value in fixed:
            value.replaceAllUsesWith(device.output())
