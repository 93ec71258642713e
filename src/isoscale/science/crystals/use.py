"""A trained model of crystals as a calculator of ASE."""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isoscale.errors import UserError
from isoscale.science.atoms.use import Script
from isoscale.science.crystals.deploy import KIND, NO_ELEMENTS
from isoscale.science.crystals.edges import GraphSettings
from isoscale.science.crystals.model import CrystalModel

if TYPE_CHECKING:
    from isoscale.science.crystals.ase_calculator import CrystalCalculator, Usable


def make_calculator(found: Any, device: torch.device, skin: float) -> "CrystalCalculator | None":
    """The calculator of what `isoscale.calculator` has opened; None where that is no model of crystals."""
    from isoscale.science.crystals.ase_calculator import CrystalCalculator

    usable = _usable(found)
    if usable is None:
        return None
    if not usable.elements:
        raise UserError(NO_ELEMENTS)
    return CrystalCalculator(usable, device, skin)


def _usable(found: Any) -> "Usable | None":
    from isoscale.science.crystals.ase_calculator import Usable

    if isinstance(found, Script):
        said = found.said
        if said["kind"] != KIND:
            return None
        edges = GraphSettings(**json.loads(said["edges"]))
        return Usable(found.module, edges, json.loads(said["elements"]), json.loads(said["outputs"]))
    model = found if isinstance(found, CrystalModel) else getattr(found, "model", None)
    if not isinstance(model, CrystalModel):
        return None
    return Usable(Direct(model.eval()), model.edges, model.elements, dict(model.outputs))


class Direct(nn.Module):
    """A model that is called as one in a file is, see `deploy.py`."""

    def __init__(self, model: CrystalModel) -> None:
        """Of any precision."""
        super().__init__()
        self.model, edges = model, model.edges
        self._cutoff = edges.cutoff
        self._is_plain = edges.max_neighbors is None and not edges.adaptive_cutoff

    def forward(
        self, pos: Tensor, z: Tensor, cell: Tensor, batch: Tensor, edge_source: Tensor, edge_target: Tensor,
        edge_shift: Tensor,
    ) -> dict[str, Tensor]:  # fmt: skip
        """What the model says of structures behind each other; edges are sorted by target, and may be too long."""
        edges = {"edge_source": edge_source.long(), "edge_target": edge_target.long(), "edge_shift": edge_shift}
        if self._is_plain:
            shift = edge_shift.to(pos.dtype).unsqueeze(1) @ cell[batch[edges["edge_target"]]]
            vectors = pos[edges["edge_source"]] - pos[edges["edge_target"]] + shift.squeeze(1)
            near = torch.nonzero(vectors.square().sum(1) <= self._cutoff**2).squeeze(1)
            edges = {name: values[near] for name, values in edges.items()}
        edges["by_source"] = torch.argsort(edges["edge_source"], stable=True)
        return self.model({"pos": pos, "z": z, "cell": cell, "batch": batch, **edges}, create_graph=False)
