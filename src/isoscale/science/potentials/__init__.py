"""Interatomic potentials: energies and forces of atoms, learned from frames of molecular dynamics."""

from isoscale.science.potentials.atomic_systems import AtomicSystems
from isoscale.science.potentials.model import DeepPotential
from isoscale.science.potentials.se_e2_a import SeE2A
from isoscale.science.potentials.task import Potential
from isoscale.science.potentials.use import calculator

__all__ = ["AtomicSystems", "DeepPotential", "Potential", "SeE2A", "calculator"]
