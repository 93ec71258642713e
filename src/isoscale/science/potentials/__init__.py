"""Interatomic potentials: energies and forces of atoms, learned from frames of molecular dynamics."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from isoscale.science.domain import Describer, Domain, Importer

if TYPE_CHECKING:
    from isoscale.science.potentials.atomic_systems import AtomicSystems
    from isoscale.science.potentials.model import DeepPotential
    from isoscale.science.potentials.se_e2_a import SeE2A
    from isoscale.science.potentials.task import Potential

__all__ = ["AtomicSystems", "DeepPotential", "Potential", "SeE2A"]


def is_input(values: Mapping[str, Any]) -> bool:
    """Whether a file is an input of DeePMD-kit."""
    return all(isinstance(values.get(section), Mapping) for section in ("model", "training"))


DOMAIN = Domain(
    package=__name__,
    description="interatomic potentials: energies and forces of atoms",
    homes={
        "AtomicSystems": "atomic_systems", "DeepPotential": "model", "Potential": "task", "SeE2A": "se_e2_a",
    },
    short_names={
        "potential": "Potential", "deep_potential": "DeepPotential", "se_e2_a": "SeE2A",
        "atomic_systems": "AtomicSystems",
    },
    public=("Potential",),
    presets="isoscale/recipes/potentials",
    importers=(
        Importer(
            title="an input of DeePMD-kit",
            files="an input of DeePMD-kit (.json, .yaml)",
            recognises=is_input,
            translate="isoscale.science.potentials.deepmd.translation.translate",
            sections=("model", "learning_rate", "loss", "training"),
            example="training.numb_steps=240",
            aliases="isoscale.science.potentials.deepmd.tables.ALIASES",
        ),
    ),
    describers=(
        Describer(
            options="of systems of atoms, cutoff=6",
            recognises="isoscale.science.potentials.systems.has_systems",
            of_paths="isoscale.science.potentials.describe.of_paths",
            of_recipe="isoscale.science.potentials.describe.of_recipe",
            lines="isoscale.science.potentials.describe.lines",
        ),
    ),
    calculator="isoscale.science.potentials.use.make_calculator",
    applied_to="systems of atoms, in folders or HDF5 files",
)  # fmt: skip

__getattr__, __dir__ = DOMAIN.find, DOMAIN.names
