"""The registry of sciences: a line for each, and what all of them together offer to the rest of the package."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from isoscale.science.domain import Describer, Domain, Importer, load

if TYPE_CHECKING:
    from isoscale.data.tools.published import Entry

SCIENCES = (
    "isoscale.science.images",
    "isoscale.science.electronic",
    "isoscale.science.potentials",
    "isoscale.science.cosmology",
    "isoscale.science.crystals",
)
"""Packages that have a DOMAIN."""
DEFAULT_PRESET = "images/digits"
"""What is trained where no recipe is named."""
SHARED = {"mlp": "isoscale.science.models.MLP"}
"""Short names of what belongs to no single science."""
SHARED_PUBLIC = {"calculator": "isoscale.science.atoms.use.calculator"}
"""What `isoscale` itself offers of what several sciences share, and its path."""


def domains() -> list[Domain]:
    """All sciences."""
    return [import_module(package).DOMAIN for package in SCIENCES]


def short_names() -> dict[str, str]:
    """What recipes may write in the place of a class, and the path of the class."""
    return SHARED | {
        short: f"{domain.package}.{name}" for domain in domains() for short, name in domain.short_names.items()
    }


def public_names() -> dict[str, Callable[[str], Any]]:
    """What `isoscale` itself offers of the sciences, and how each is found."""
    shared = {name: lambda name: load(SHARED_PUBLIC[name]) for name in SHARED_PUBLIC}
    return shared | {name: domain.find for domain in domains() for name in domain.public}


def downloads() -> "dict[str, Entry]":
    """What `isoscale data get` fetches."""
    return {name: entry for domain in domains() if domain.downloads for name, entry in load(domain.downloads).items()}


def generators() -> dict[str, str]:
    """What `isoscale data make` makes of nothing, and the paths of the functions that do."""
    return {name: path for domain in domains() for name, path in domain.generators.items()}


def importers() -> Iterator[Importer]:
    """Files of other programs that recipes are made of."""
    return (importer for domain in domains() for importer in domain.importers)


def describers() -> Iterator[Describer]:
    """Data that only a science can describe."""
    return (describer for domain in domains() for describer in domain.describers)


def calculators() -> Iterator[Callable[..., Any]]:
    """What makes calculators of ASE of trained models, science by science; each returns None for what it is not."""
    return (load(domain.calculator) for domain in domains() if domain.calculator)


def applied_to() -> str:
    """What trained models can be applied to by path, in words."""
    return ", or ".join(domain.applied_to for domain in domains() if domain.applied_to)
