"""Cosmology: fields of the universe in boxes, learned from cheaper ones."""

from typing import TYPE_CHECKING

from isoscale.science.cosmology.nersc import IMPORTER
from isoscale.science.domain import Domain

if TYPE_CHECKING:
    from isoscale.science.cosmology.loss import FieldLoss
    from isoscale.science.cosmology.network import UNet3d
    from isoscale.science.cosmology.sources import Boxes, SimulatedBoxes
    from isoscale.science.cosmology.symmetries import CubeSymmetry
    from isoscale.science.cosmology.task import FieldRegression

__all__ = ["Boxes", "CubeSymmetry", "FieldLoss", "FieldRegression", "SimulatedBoxes", "UNet3d"]

DOMAIN = Domain(
    package=__name__,
    description="cosmology: fields of the universe in boxes",
    homes={
        "Boxes": "sources", "CubeSymmetry": "symmetries", "FieldLoss": "loss", "FieldRegression": "task",
        "SimulatedBoxes": "sources", "UNet3d": "network",
    },
    short_names={
        "boxes": "Boxes", "simulated_boxes": "SimulatedBoxes", "cube_symmetry": "CubeSymmetry",
        "field_regression": "FieldRegression", "unet3d": "UNet3d",
    },
    presets="isoscale/recipes/cosmology",
    applied_to="boxes of fields, in HDF5, Zarr or .npz files or folders of .npy files",
    generators={"cosmology/box": "isoscale.science.cosmology.boxes.make_files"},
    importers=(IMPORTER,),
)  # fmt: skip

__getattr__, __dir__ = DOMAIN.find, DOMAIN.names
