"""A model of crystals: a network that sees atoms and their neighbours, and heads that make of it what is asked for.

The energy of a structure is the sum of those of its atoms: E = Σ (reference of the element + scale · output), and what
is known of nuclei that touch where `zbl` is on. Forces and stress are its slopes, from dE/dvectors: atoms and cells are
stretched by stretching the vectors of edges, so that no derivative goes through positions and their images.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from isoscale.errors import UserError
from isoscale.science.crystals import sums
from isoscale.science.crystals.edges import GraphSettings
from isoscale.science.crystals.networks.graph import Graph
from isoscale.science.crystals.networks.radial import NUM_ELEMENTS, check_cutoff
from isoscale.science.crystals.networks.smooth import silu
from isoscale.science.crystals.networks.zbl import ZBL
from isoscale.science.crystals.sums import Side
from isoscale.science.models import Linear

Of = Literal["structure", "atom"]
SLOPES: dict[str, Of] = {"forces": "atom", "stress": "structure"}
"""What follows from an energy."""
Gives = Literal["features", "atoms", "structures"]
"""What a network gives: features of atoms, or at once the values of atoms or of structures that are asked for."""


class Head(NamedTuple):
    """What a model says of structures or atoms."""

    name: str
    kind: Literal["energy", "forces", "stress", "value", "classes"]
    of: Of = "structure"
    shape: tuple[int, ...] = ()
    """Of one value."""
    classes: int = 0
    pooling: Literal["mean", "sum"] = "mean"
    """How atoms make up the value of a structure."""


ENERGY = Head("energy", "energy")


class CrystalModel(nn.Module):
    """Energies, forces, stresses and properties of packed batches of structures, in the units of the data."""

    def __init__(self, encoder: nn.Module, targets: Sequence[Any] | None = None, zbl: bool = False) -> None:
        """`encoder` makes features of a graph, and has a `cutoff` and a `width`; `zbl` adds the repulsion of nuclei.

        `targets` are heads, or anything with their fields; a task gives its own by `add_heads`.
        """
        super().__init__()
        self.encoder = encoder
        if not hasattr(encoder, "cutoff"):
            raise UserError(f"{type(encoder).__name__} has no attribute `cutoff`, in Å: set it in its __init__")
        self.cutoff = check_cutoff(encoder.cutoff)  # type: ignore[arg-type]
        self.by_positions = bool(getattr(encoder, "by_positions", False))
        self.zbl = ZBL() if zbl else None
        self.heads = nn.ModuleDict()
        self._trained: Tensor
        self.register_buffer("_trained", torch.zeros(NUM_ELEMENTS + 1, dtype=torch.bool))
        self._edges: Tensor
        self.register_buffer("_edges", torch.tensor(GraphSettings(self.cutoff).as_numbers()))
        self.add_heads(targets or ())

    def add_heads(self, targets: Sequence[Any]) -> None:
        """A head for each target that has none yet; forces and stress need that of the energy."""
        wanted = [each if isinstance(each, Head) else _head(each) for each in targets]
        if any(each.kind in SLOPES for each in wanted) and not any(each.kind == "energy" for each in wanted):
            wanted = [ENERGY, *wanted]
        for each in wanted:
            if each.kind not in SLOPES and each.name not in self.heads:
                self.heads[each.name] = _Head(each, self.encoder)
        gives = _gives(self.encoder)
        if gives != "features" and len(self.heads) > 1:
            raise UserError(
                f"this network gives one value for each of its {gives}, but {', '.join(self.heads)} are asked of it: "
                "let it give features, with task.model.features_of=NAME of the layer that gets them, such as lin1"
            )

    @property
    def outputs(self) -> dict[str, Of]:
        """What it says, and whether of structures or of atoms."""
        own: dict[str, Of] = {name: _spec(head).of for name, head in self.heads.items()}
        return own | (SLOPES if "energy" in own else {})

    @property
    def elements(self) -> list[int]:
        """Atomic numbers that it was trained for."""
        return torch.nonzero(self._trained).flatten().tolist()

    def set_elements(self, numbers: Iterable[int]) -> None:
        """Remember for which atomic numbers it is trained, besides those it knows."""
        self._trained[torch.tensor(sorted(set(numbers)), dtype=torch.long, device=self._trained.device)] = True

    @property
    def edges(self) -> GraphSettings:
        """Those that it was trained with, and wants to be used with."""
        return GraphSettings.of_numbers(self._edges.tolist())

    def set_edges(self, settings: GraphSettings) -> None:
        """Remember with what edges it is trained."""
        self._edges.copy_(torch.tensor(settings.as_numbers()))

    def set_units(self, name: str, mean: Any, scale: float) -> None:
        """Let a head say `mean + scale * output`; the mean of energies, and of atoms' values, is one for each element.

        Means by element are arrays by atomic number, from 0 to 118.
        """
        head: Any = self.heads[name]
        head.mean.copy_(torch.as_tensor(mean, dtype=torch.float64).expand(head.mean.shape))
        head.scale.fill_(scale)

    def forward(
        self, batch: Mapping[str, Tensor], create_graph: bool | None = None, wanted: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        """What is `wanted` of a batch, by default all `outputs`; energies in eV and float64.

        Slopes are there without a graph too, as in `torch.no_grad()`; `create_graph` keeps what their own derivatives
        need, by default where gradients are on.
        """
        names = list(self.outputs if wanted is None else wanted)
        unknown = [name for name in names if name not in self.outputs]
        if unknown:
            raise UserError(f"this model does not predict {', '.join(unknown)}, only {', '.join(self.outputs)}")
        with_slopes = any(name in SLOPES for name in names)
        keep = torch.is_grad_enabled() if create_graph is None else create_graph
        with ExitStack() as stack:
            for context in _differentiable() if with_slopes else ():
                stack.enter_context(context)
            found = self._found(batch, names, keep, with_slopes)
        return found if keep and torch.is_grad_enabled() else {name: value.detach() for name, value in found.items()}

    def of_graph(self, graph: Graph, wanted: Sequence[str] | None = None) -> dict[str, Tensor]:
        """What heads say of a graph: everything but slopes."""
        made = self.encoder(graph)
        found: dict[str, Tensor] = {}
        for name, head in self.heads.items():
            if wanted is None or name in wanted:
                found[name] = head(made, graph)
                if name == "energy" and self.zbl is not None:
                    found[name] = found[name] + graph.per_structure(self.zbl(graph).to(found[name].dtype))
        return found

    def _found(
        self, batch: Mapping[str, Tensor], names: Sequence[str], keep: bool, with_slopes: bool
    ) -> dict[str, Tensor]:
        batch = {key: value.clone() if value.is_inference() else value for key, value in batch.items()}
        dtype = next(self.parameters()).dtype
        if not with_slopes:
            return self.of_graph(Graph.of(batch, self.cutoff, dtype, self.by_positions), names)
        find = _by_positions if self.by_positions else _by_vectors
        graph, slopes_of = find(batch, self.cutoff, dtype)
        found = self.of_graph(graph, [*names, "energy"])
        forces, virials = slopes_of(found["energy"].sum(), keep)
        found |= {"forces": forces, "stress": stresses(virials, batch["cell"])}
        return {name: found[name] for name in names}


Slopes = Callable[[Tensor, bool], tuple[Tensor, Tensor]]
"""From an energy, and whether its slopes are differentiated again, to forces (A, 3) and dE/dstrain (B, 3, 3)."""


def _by_vectors(batch: Mapping[str, Tensor], cutoff: float, dtype: torch.dtype) -> tuple[Graph, Slopes]:
    """Slopes with the vectors of edges: nothing is differentiated that lies before them."""
    graph = Graph.of(batch, cutoff, dtype)
    graph = graph.with_vectors(graph.vectors.detach().requires_grad_())

    def slopes(energy: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        (found,) = _grad(energy, [graph.vectors], keep)
        return graph.forces(found), graph.virials(found)

    return graph, slopes


def _by_positions(batch: Mapping[str, Tensor], cutoff: float, dtype: torch.dtype) -> tuple[Graph, Slopes]:
    """Slopes with positions, and with a strain of positions and cells: for networks that see these."""
    pos = batch["pos"].detach().requires_grad_()
    strain = torch.zeros_like(batch["cell"]).requires_grad_()
    stretch = (strain + strain.mT) / 2
    structures = Side.of_sorted(batch["batch"], len(strain) + 1)
    of_atoms = sums.gather(functional.pad(stretch, (0, 0, 0, 0, 0, 1)), structures)
    stretched = pos + (pos.unsqueeze(1) @ of_atoms).squeeze(1)
    cell = batch["cell"] + batch["cell"] @ stretch
    graph = Graph.of({**batch, "pos": stretched, "cell": cell}, cutoff, dtype, by_positions=True)

    def slopes(energy: Tensor, keep: bool) -> tuple[Tensor, Tensor]:
        of_pos, of_strain = _grad(energy, [pos, strain], keep)
        return -of_pos.to(dtype), of_strain.to(dtype)

    return graph, slopes


def _grad(energy: Tensor, inputs: list[Tensor], keep: bool) -> Sequence[Tensor]:
    return torch.autograd.grad(energy, inputs, create_graph=keep, retain_graph=True, materialize_grads=True)


def stresses(virials: Tensor, cells: Tensor) -> Tensor:
    """dE/dstrain over the volume (B, 3, 3), in eV/Å³, with the sign of ASE; 0 for structures without a cell."""
    a, b, c = cells.double().unbind(1)
    volumes = (a * torch.linalg.cross(b, c)).sum(1).abs().view(-1, 1, 1)
    has_cell = volumes > 1e-9
    return torch.where(has_cell, virials.double() / torch.where(has_cell, volumes, 1.0), 0.0)


def _differentiable() -> list[AbstractContextManager[Any]]:
    """So that slopes are found wherever the caller stands."""
    return [torch.inference_mode(False), torch.enable_grad()]


class _Head(nn.Module):
    """From what a network makes of a graph to one target, in the units of the data."""

    def __init__(self, spec: Head, encoder: nn.Module) -> None:
        super().__init__()
        self.spec = spec
        self.gives = _gives(encoder)
        of_elements = spec.kind == "energy" or (spec.of == "atom" and spec.kind == "value")
        shape = (NUM_ELEMENTS + 1, *spec.shape) if of_elements else spec.shape
        self.mean: Tensor
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.scale: Tensor
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.of_elements = of_elements
        self.readout: nn.Module | None = None
        if self.gives == "features":
            self.readout = Readout(_width(encoder), spec, getattr(encoder, "activation", silu))
        elif spec.of == "atom" and self.gives == "structures":
            raise UserError(
                f"{spec.name} is asked of atoms, but this network gives values of structures alone: let it give "
                "features, with task.model.features_of=NAME of the layer that gets them, such as lin1"
            )

    def forward(self, made: Tensor, graph: Graph) -> Tensor:
        """(B, …) or (A, …), in float64; of classes, their logits."""
        spec = self.spec
        if self.readout is not None:
            made = self.readout(made, graph)
        elif self.gives == "atoms" and spec.of == "structure":
            made = _pooled(made, graph, spec)
        made = made.double() * self.scale.double()
        if spec.kind == "classes":
            return made.view(-1, spec.classes)
        made = made.reshape(-1, *spec.shape)
        mean = self.mean.double()
        of_atoms = mean.index_select(0, graph.z) if self.of_elements else mean
        return made + (graph.per_structure(of_atoms) if spec.kind == "energy" else of_atoms)


class Readout(nn.Module):
    """Two layers on the features of atoms, whose outputs are added or averaged over a structure.

    Averages are taken between the layers, so that the last one sees the whole structure.
    """

    def __init__(self, width: int, spec: Head, activation: Callable[[Tensor], Tensor] = silu) -> None:
        """Of features of `width` numbers."""
        super().__init__()
        size = spec.classes or torch.Size(spec.shape).numel()
        self.spec, self.activation = spec, activation
        self.hidden = Linear(width, max(width // 2, 1))
        self.output = Linear(max(width // 2, 1), size)

    def forward(self, features: Tensor, graph: Graph) -> Tensor:
        """(A, width) to (A, size) or (B, size)."""
        spec, found = self.spec, self.activation(self.hidden(features))
        if spec.of == "atom":
            return self.output(found)
        if spec.kind != "energy" and spec.pooling == "mean":
            return self.output(_pooled(found, graph, spec))
        return _pooled(self.output(found), graph, spec)


def _pooled(values: Tensor, graph: Graph, spec: Head) -> Tensor:
    """Of structures from those of atoms (A, …); energies are added in float64."""
    if spec.kind == "energy" or spec.pooling == "sum":
        return graph.per_structure(values.double())
    counts = graph.num_atoms_of(values.dtype).clamp(min=1)
    return graph.per_structure(values) / counts.view(-1, *(1,) * (values.dim() - 1))


def _spec(head: Any) -> Head:
    found: Head = head.spec
    return found


def _head(target: Any) -> Head:
    """Of anything that has the fields of a head, or of the name of an energy or its slopes."""
    if isinstance(target, str):
        if target != "energy" and target not in SLOPES:
            raise UserError(f"target {target!r} is neither energy, forces nor stress: give it as a Head(name, kind, …)")
        return Head(target, target, SLOPES.get(target, "structure"))  # type: ignore[arg-type]
    given = {name: getattr(target, name) for name in Head._fields if hasattr(target, name)}
    return Head(**given)


def _gives(encoder: nn.Module) -> Gives:
    found: Gives = getattr(encoder, "gives", "features")
    return found


def _width(encoder: nn.Module) -> int:
    width = getattr(encoder, "width", None)
    if not isinstance(width, int):
        raise UserError(
            f"{type(encoder).__name__} has no attribute `width`, the number of features of an atom; set it in its "
            "__init__, or use the network by class: pyg_network"
        )
    return width
