"""Networks of PyTorch Geometric, and others that take what they do, with our periodic edges.

What is changed in a network, and why: its own search for neighbours, which knows no images, gives way to our edges; its
readout gives way to one that knows the number of structures, where PyG's asks the device for it; and the sums of
`MessagePassing` over targets become ours. What cannot be changed: a gather of sources is differentiated by
`index_add_`, which on CUDA repeats to the bit under `torch.use_deterministic_algorithms` (slower) and not without it;
networks that index by masks (ViSNet) or make triplets (DimeNet) wait for the host in every step and are not captured.
"""

import inspect
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isoscale.errors import UserError
from isoscale.science.crystals import sums
from isoscale.science.crystals.networks.graph import Graph
from isoscale.science.crystals.networks.radial import check_cutoff

BY_NAME = ("z", "atomic_numbers", "batch", "edge_index", "edge_weight", "edge_attr", "edge_vec", "pos", "shifts")
"""Arguments of a network that are known, besides `data`."""
OF_EDGES = ("edge_weight", "edge_attr", "edge_vec", "shifts")
"""Those that show periodic images."""


class PyGNetwork(nn.Module):
    """Any network of PyG as an energy, or as the encoder of several heads."""

    def __init__(
        self,
        network: nn.Module,
        cutoff: float | None = None,
        gives: Literal["structures", "atoms", "features"] = "structures",
        features_of: str | None = None,
        width: int | None = None,
    ) -> None:
        """`network` is called with what its `forward` names: z, pos, batch, edge_index, edge_weight (lengths, Å), ….

        edge_attr are lengths too, (E, 1), edge_vec vectors (E, 3) from target to source, shifts (E, 3) what images add
        to pos[source]; `data` is a PyG Data with all of that. `gives` says what it returns: a value for each structure,
        or each atom, or `width` features of each atom. With `features_of`, features are what the layer of that name
        gets, such as lin1 of SchNet. `cutoff` is by default the network's own.
        """
        super().__init__()
        own = getattr(network, "cutoff", None)
        own = own if own is not None else getattr(getattr(network, "representation_model", None), "cutoff", None)
        if cutoff is None and own is None:
            raise UserError(f"{type(network).__name__} has no attribute `cutoff`: give task.model.cutoff, in Å")
        self.cutoff = check_cutoff(float(own if cutoff is None else cutoff))  # type: ignore[arg-type]
        self._current = _Current()
        self._seen: list[Tensor] = []
        knows_images = _give_edges(network, self._current)
        self.network = network
        self._arguments = _arguments(network)
        takes_edges = "data" in self._arguments or any(name in OF_EDGES for name in self._arguments)
        self.is_periodic = knows_images or takes_edges
        """Whether it sees images of atoms."""
        self.by_positions = not knows_images and ("pos" in self._arguments or "data" in self._arguments)
        self.gives: str = "features" if features_of is not None else gives
        self.width = self._watch(features_of) if features_of is not None else width
        if self.gives == "features" and self.width is None:
            raise UserError("task.model.gives=features needs task.model.width, the number of features of an atom")

    def forward(self, graph: Graph) -> Tensor:
        """Values of structures (B, …) or of atoms (A, …), or features of atoms (A, width)."""
        self._current.graph = graph
        wrong = self._unseen_images(graph)
        try:
            found = self.network(**self._inputs(graph))
        finally:
            self._current.graph = None
        found = found[0] if isinstance(found, tuple) else found
        if self._seen:
            found = self._seen.pop()
            self._seen.clear()
        if self.gives == "structures":
            rows = len(found)
            found = found[: graph.num_structures]  # without the row of padding
            if rows < graph.num_structures:
                found = nn.functional.pad(found, (0, 0) * (found.dim() - 1) + (0, graph.num_structures - rows))
        return found if wrong is None else found + wrong

    def _inputs(self, graph: Graph) -> dict[str, Any]:
        edge_index = self._current.edge_index()
        known = {
            "z": graph.z, "atomic_numbers": graph.z, "batch": graph.batch, "edge_index": edge_index, "pos": graph.pos,
            "edge_weight": graph.lengths, "edge_attr": graph.lengths.unsqueeze(1), "edge_vec": graph.vectors,
            "shifts": graph.shifts,
        }  # fmt: skip
        if graph.pos is None:  # the network has its edges from us, and only asks for the dtype
            known["pos"] = graph.vectors.new_zeros(graph.num_atoms, 3)
        if "data" in self._arguments:
            from torch_geometric.data import Data

            return {"data": Data(num_nodes=graph.num_atoms, **{k: v for k, v in known.items() if k != "num_nodes"})}
        return {name: known[name] for name in self._arguments}

    def _unseen_images(self, graph: Graph) -> Tensor | None:
        """Not a number where edges go to images that the network cannot see; on a CPU, an error at once."""
        if self.is_periodic or graph.shifts is None:
            return None
        unseen = (graph.shifts != 0).any()
        if unseen.is_cpu:
            if unseen.item():
                raise UserError(
                    f"{type(self.network).__name__} computes distances from positions alone, and cannot see periodic "
                    "images: use it for molecules, or a network that takes edge_weight or edge_vec"
                )
            return None
        return torch.where(unseen, torch.nan, 0.0).to(graph.vectors.dtype)

    def _watch(self, name: str) -> int:
        """Keep what a layer gets; returns how many numbers that are."""
        layers = dict(self.network.named_modules())
        layer = layers.get(name)
        width = getattr(layer, "in_features", getattr(layer, "in_channels", None))
        if layer is None or not isinstance(width, int):
            linear = [each for each, module in layers.items() if isinstance(module, nn.Linear)]
            raise UserError(f"task.model.features_of is {name!r}, which is no linear layer: use one of {linear[-6:]}")
        layer.register_forward_pre_hook(_Keep(self._seen))
        return width


class _Keep:
    """A hook that keeps what a layer gets, in a list that is copied with the network."""

    def __init__(self, seen: list[Tensor]) -> None:
        self._seen = seen

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._seen.append(inputs[0])


class _Current:
    """The graph of the call that is under way."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self._stacked: tuple[Graph, Tensor] | None = None

    def edges(self) -> Graph:
        assert self.graph is not None
        return self.graph

    def edge_index(self) -> Tensor:
        """(2, E), the same tensor all along a call."""
        graph = self.edges()
        if self._stacked is None or self._stacked[0] is not graph:
            self._stacked = (graph, torch.stack([graph.edge_source, graph.edge_target]))
        return self._stacked[1]


class _InteractionGraph(nn.Module):
    """In the place of SchNet's search for neighbours."""

    def __init__(self, current: _Current) -> None:
        super().__init__()
        self._current = current

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        return self._current.edge_index(), self._current.edges().lengths


class _Distance(nn.Module):
    """In the place of ViSNet's search for neighbours: with an edge from every atom to itself behind the others."""

    def __init__(self, current: _Current, with_loops: bool) -> None:
        super().__init__()
        self._current, self._with_loops = current, with_loops

    def forward(self, pos: Tensor, batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        graph, edge_index = self._current.edges(), self._current.edge_index()
        to_itself = (graph.edge_source == graph.edge_target) & (graph.batch[graph.edge_target] < graph.num_structures)
        if to_itself.any():
            raise UserError(
                "ViSNet takes an edge from an atom to its own image for none at all: give it cells that are wider than "
                "its cutoff, such as supercells"
            )
        if not self._with_loops:
            return edge_index, graph.lengths, graph.vectors.clone()
        loops = torch.arange(graph.num_atoms, device=edge_index.device).expand(2, -1)
        zeros = graph.vectors.new_zeros(graph.num_atoms, 3)
        return (
            torch.cat([edge_index, loops], 1),
            torch.cat([graph.lengths, zeros[:, 0]]),
            torch.cat([graph.vectors, zeros]),
        )


class _Readout(nn.Module):
    """In the place of a sum or mean over structures whose number PyG asks the device for."""

    def __init__(self, current: _Current, is_mean: bool) -> None:
        super().__init__()
        self._current, self._is_mean = current, is_mean

    def forward(self, x: Tensor, index: Tensor | None = None, **unused: Any) -> Tensor:
        graph = self._current.edges()
        found = graph.per_structure(x)
        return found / graph.num_atoms_of(x.dtype).clamp(min=1).unsqueeze(1) if self._is_mean else found


class _Sum(nn.Module):
    """In the place of the sum of `MessagePassing`: over our targets in a fixed order, over anything else as it was."""

    def __init__(self, current: _Current, otherwise: nn.Module) -> None:
        super().__init__()
        self._current, self._otherwise = current, otherwise

    def forward(self, x: Tensor, index: Tensor | None = None, *rest: Any, **options: Any) -> Tensor:
        graph = self._current.graph
        is_ours = graph is not None and index is not None and x.dim() == 2
        if is_ours and graph is not None and index is not None:
            targets = self._current.edge_index()[1]
            if index.data_ptr() == targets.data_ptr() and index.shape == targets.shape:
                return sums.total(x, graph.target)
        found: Tensor = self._otherwise(x, index, *rest, **options)
        return found


def _give_edges(network: nn.Module, current: _Current) -> bool:
    """Put our edges and sums in the place of PyG's own; returns whether the network now sees periodic images."""
    try:
        from torch_geometric.nn import MeanAggregation, MessagePassing, SumAggregation
        from torch_geometric.nn.models.visnet import Distance
    except ImportError:
        raise UserError("networks of PyG need it installed: pip install 'isoscale[pyg]'") from None
    found = False
    for module in list(network.modules()):
        if isinstance(module, MessagePassing) and isinstance(module.aggr_module, SumAggregation):
            module.aggr_module = _Sum(current, module.aggr_module)
        for name, child in list(module.named_children()):
            if isinstance(child, Distance):
                setattr(module, name, _Distance(current, child.add_self_loops))
                found = True
    if hasattr(network, "interaction_graph"):
        network.interaction_graph = _InteractionGraph(current)
        found = True
    readout = getattr(network, "readout", None)
    if isinstance(readout, SumAggregation | MeanAggregation):
        network.readout = _Readout(current, isinstance(readout, MeanAggregation))
    return found


def _arguments(network: nn.Module) -> list[str]:
    """What to call a network with, by name."""
    found = []
    for name, parameter in inspect.signature(network.forward).parameters.items():
        if name in BY_NAME or name == "data":
            found.append(name)
        elif parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY,
        ):  # fmt: skip
            raise UserError(
                f"{type(network).__name__}.forward asks for {name!r}, which is not known here: it may take data, or "
                f"any of {', '.join(BY_NAME)}"
            )
    return found
