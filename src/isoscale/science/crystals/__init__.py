"""Crystals: energies, forces, stresses and properties of structures of any elements, learned by graph networks."""

from typing import TYPE_CHECKING

from isoscale.science.domain import Describer, Domain

if TYPE_CHECKING:
    from isoscale.science.crystals.alloys import Alloys
    from isoscale.science.crystals.model import CrystalModel
    from isoscale.science.crystals.networks.painn import PaiNN
    from isoscale.science.crystals.networks.pyg_network import PyGNetwork
    from isoscale.science.crystals.networks.schnet import SchNet
    from isoscale.science.crystals.structures import Structures
    from isoscale.science.crystals.task import Crystal
    from isoscale.science.crystals.transforms import GraphToPointCloud, PeriodicEdges, PointCloudToGraph

__all__ = [
    "Alloys", "Crystal", "CrystalModel", "GraphToPointCloud", "PaiNN", "PeriodicEdges", "PointCloudToGraph",
    "PyGNetwork", "SchNet", "Structures",
]  # fmt: skip

DOMAIN = Domain(
    package=__name__,
    description="crystals: energies, forces, stresses and properties of any elements, by graph networks",
    homes={
        "Alloys": "alloys", "Crystal": "task", "CrystalModel": "model", "GraphToPointCloud": "transforms",
        "PaiNN": "networks.painn",
        "PeriodicEdges": "transforms", "PointCloudToGraph": "transforms", "PyGNetwork": "networks.pyg_network",
        "SchNet": "networks.schnet", "Structures": "structures",
    },
    short_names={
        "structures": "Structures", "alloys": "Alloys", "crystal": "Crystal", "painn": "PaiNN", "schnet": "SchNet",
        "pyg_network": "PyGNetwork", "periodic_edges": "PeriodicEdges", "point_cloud_to_graph": "PointCloudToGraph",
        "graph_to_point_cloud": "GraphToPointCloud",
    },
    public=("Crystal", "Structures"),
    presets="isoscale/recipes/crystals",
    generators={"crystals/alloys": "isoscale.science.crystals.alloys.make_files"},
    describers=(
        Describer(
            options="of structures of atoms, energy=eV/atom stress=-kbar",
            recognises="isoscale.science.crystals.reading.describe.recognises",
            of_paths="isoscale.science.crystals.reading.describe.of_paths",
            of_recipe="isoscale.science.crystals.reading.describe.of_recipe",
            lines="isoscale.science.crystals.reading.describe.lines",
        ),
    ),
    calculator="isoscale.science.crystals.use.make_calculator",
    applied_to="structures of atoms, in files that ASE reads",
)  # fmt: skip

__getattr__, __dir__ = DOMAIN.find, DOMAIN.names
