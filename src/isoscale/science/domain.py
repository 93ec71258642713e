"""A science as the rest of the package sees it: one `DOMAIN` object that says what it adds.

Whatever takes time to import is named by its dotted path, so that looking at a domain imports nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any


def load(path: str) -> Any:
    """What a dotted path, `package.module.name`, stands for."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class Importer:
    """The files of another program that `isoscale recipe import` makes recipes of."""

    title: str
    """What such a file is, for messages: `an input of DeePMD-kit`."""
    files: str
    """What can be named, for `--help`: `an input of DeePMD-kit (.json, .yaml)`."""
    recognises: Callable[[Mapping[str, Any]], bool]
    """Whether values are those of such a file."""
    translate: str
    """The function that translates: (PeerFile, list of problems) -> Imported, both of `isoscale.science.importing`."""
    sections: tuple[str, ...] = ()
    """Sections of the file whose keys overrides may speak; with any, the file may stand in the place of a recipe."""
    changes: tuple[str, ...] = ()
    """Sections whose keys may be changed while a recipe is made of the file, and only then."""
    example: str = ""
    """Such an override, for `--help`."""
    aliases: str = ""
    """A table of other names of keys: {other name: name}."""
    holds_configs: bool = False
    """Whether a file holds configurations by name, of which `--config` says one; it is no place for a recipe then."""
    endings: tuple[str, ...] = ()
    """Names of files, alone or in a folder, that only `opens` can read."""
    opens: str = ""
    """The function that reads a file which is not simply JSON or YAML: (Path) -> PeerFile."""


@dataclass(frozen=True)
class Describer:
    """What `isoscale data info` says of data that only a science can read: the paths of four functions."""

    options: str
    """The arguments that it takes, for `--help`: `of systems of atoms, cutoff=6`."""
    recognises: str
    """(name) -> whether something that is there is such data."""
    of_paths: str
    """(paths, options) -> what is known of data at paths, as plain values."""
    of_recipe: str
    """(data, values of its recipe) -> the same of the data of a recipe; None where that is of another kind."""
    lines: str
    """(what is known) -> the same for people, line by line."""


@dataclass(frozen=True)
class Domain:
    """What a science adds to the package."""

    package: str
    """Its package, `isoscale.science.images`; the last part is the name of the science."""
    description: str
    homes: Mapping[str, str]
    """What can be imported from the package, and the module inside it where that is defined."""
    short_names: Mapping[str, str] = field(default_factory=dict)
    """What recipes may write in the place of a class, and the class, by its name in `homes`."""
    public: tuple[str, ...] = ()
    """Those of `homes` that `isoscale` itself offers: `isoscale.Classifier`."""
    presets: str = ""
    """The folder of its recipes, as a package and what is below it: `isoscale/recipes/images`."""
    downloads: str = ""
    """What `isoscale data get` fetches: the path of a mapping from names to entries."""
    generators: Mapping[str, str] = field(default_factory=dict)
    """What `isoscale data make` makes of nothing but arguments: names, and paths of functions (folder, report, …)."""
    importers: tuple[Importer, ...] = ()
    describers: tuple[Describer, ...] = ()
    calculator: str = ""
    """Of models of atoms, the path of what makes a calculator of ASE: (what was opened, device, skin) -> it or None."""
    applied_to: str = ""
    """What `isoscale test` and `predict` take after --data, for classes of data that have `from_paths`."""

    @property
    def name(self) -> str:
        """How presets and people call it."""
        return self.package.rpartition(".")[2]

    def find(self, name: str) -> Any:
        """What the package offers under a name; the package's `__getattr__`, so that it is imported on first use."""
        if name not in self.homes:
            raise AttributeError(f"module {self.package!r} has no attribute {name!r}")
        return load(f"{self.package}.{self.homes[name]}.{name}")

    def names(self) -> list[str]:
        """What the package offers; its `__dir__`."""
        return [*self.homes, "DOMAIN"]
