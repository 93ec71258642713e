"""Electronic structure: learning the local density of states, and the physics that follows from it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isoscale.science.domain import Domain, Importer

if TYPE_CHECKING:
    from isoscale.science.electronic.ldos import Ldos
    from isoscale.science.electronic.snapshots import Snapshots

__all__ = ["Ldos", "Snapshots"]


def is_mala(values: Mapping[str, Any]) -> bool:
    """Whether a file is one of MALA's."""
    running = values.get("running")
    return isinstance(running, Mapping) and running.get("_parameters_type") == "ParametersRunning"


DOMAIN = Domain(
    package=__name__,
    description="electronic structure: the local density of states, and the physics that follows from it",
    homes={"Ldos": "ldos", "Snapshots": "snapshots"},
    short_names={"ldos": "Ldos", "snapshots": "Snapshots"},
    public=("Ldos",),
    presets="isoscale/recipes/electronic",
    generators={"electronic/box": "isoscale.science.electronic.synthetic_files.make_boxes"},
    importers=(
        Importer(
            title="a parameter file of MALA",
            files="a parameter file of MALA (.params.json), or the folder or .zip of a run",
            recognises=is_mala,
            translate="isoscale.science.electronic.mala.translation.translate",
            endings=(".params.json", ".zip", ".pkl"),
            opens="isoscale.science.electronic.mala.files.read_parameters",
        ),
    ),
)

__getattr__, __dir__ = DOMAIN.find, DOMAIN.names
