"""Which classes a recipe may have built: all of one's own, but only harmless ones where others have chosen them.

A recipe is one's own that was written or named by the user, and so is a run that the user has trained: it has a seal. A
run or a file from elsewhere may name components of isoscale, layers of torch and code of the current project. Nothing
else is even imported, unless the user says that it is to be trusted.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from importlib.resources import files as package_files
from pathlib import Path
from types import FunctionType
from typing import Any

from isoscale.errors import KeyPath, Problem, nearest
from isoscale.recipe.components import FUNCTIONS, UnknownComponent, as_written, is_path, parted_name, resolve
from isoscale.recipe.formats.tree import children
from isoscale.recipe.names import class_path, full_name, no_module, parted, short_names
from isoscale.recipe.outline import NotCallable, NotThere, find_module, outline
from isoscale.recipe.seal import has_seal

RECORDS = ("run.json", "sweep.json", "scale.json")
"""Beside these, a recipe is what a program has written, and need not be of this user."""
OURS = "isoscale"
LAYERS = "torch.nn.modules"
FUNCTIONAL = "torch.nn.functional"
OPTIMIZERS = "torch.optim"
METRICS = tuple(f"torchmetrics.{part}" for part in ("aggregation", "classification", "regression"))
NETWORKS = "torchvision.models"
INSTALLED = ("site-packages", "dist-packages")
"""Folders of code that may lie in a project without being of it."""

RUN_BY_JOBS = ("activate", "container", "directives", "env", "modules")
"""Keys of `launch` with which a recipe decides what the script of a job does."""
_WHAT_TO_TYPE = "If you trust whoever wrote it, add --trust (in Python: trust=True)"


class Trust(Enum):
    """Whose choice of classes is followed."""

    CHECKED = "checked"
    """Nobody's: nothing is to be built, and names are looked up without importing what others may have written."""
    PROJECT = "project"
    """Recipes in the current project, and one's own runs: for commands that only look."""
    NAMED = "named"
    """Recipes that the user has named, and one's own runs: for commands that train."""
    ALL = "all"
    """Everybody's: the user has said so."""

    @classmethod
    def of(cls, said: bool) -> "Trust":
        """What the user said of a run or a file."""
        return cls.ALL if said else cls.NAMED


def trust_problems(values: Mapping[str, Any], files: Iterable[str], trust: Trust) -> list[Problem]:
    """The classes of a recipe that must not be built, because others have written one of the files it comes from."""
    foreign = [Path(file) for file in files if not _is_own(Path(file), trust)]
    return problems_of_foreign(values, foreign) if foreign else []


def writing_problems(values: Mapping[str, Any], files: Iterable[str], trust: Trust) -> list[Problem]:
    """What others have chosen that a training would write to, wherever it lies."""
    path = values.get("observe", {}).get("log_file")
    foreign = [Path(file) for file in files if not _is_own(Path(file), trust)] if path is not None else []
    return [
        Problem(("observe", "log_file"), f"a training would write to {path}, and {_stranger(file)}. {_WHAT_TO_TYPE}")
        for file in foreign[:1]
    ]


def job_problems(values: Mapping[str, Any], files: Iterable[str], trust: Trust) -> list[Problem]:
    """What others have chosen that a job would run or obey: lines of its script, variables and containers."""
    foreign = [Path(file) for file in files if not _is_own(Path(file), trust)]
    section = values.get("launch", {}) if foreign else {}
    return [
        Problem(("launch", key), f"{_stranger(foreign[0])}, and a job would run what it says. {_WHAT_TO_TYPE}")
        for key in RUN_BY_JOBS
        if section.get(key)
    ]


def problems_of_foreign(values: Mapping[str, Any], foreign: Sequence[Path]) -> list[Problem]:
    """The classes that files of somebody else name and that are not known to be harmless."""
    project = _Project(foreign)
    return [
        Problem(path, _refusal(name, foreign[0])) for path, name in component_names(values) if not project.allows(name)
    ]


def _refusal(name: str, file: Path) -> str:
    module = parted(full_name(name))[0]
    if module.partition(".")[0] not in sys.modules and not find_module(module).files:
        return no_module(module, name)
    return (
        f'"{name}" is not a class of isoscale or torch, nor of this project ({Path.cwd()}), and {_stranger(file)}: '
        f"to build it could run any code. {_WHAT_TO_TYPE}"
    )


def _stranger(file: Path) -> str:
    return f"{file.parent if file.name == 'recipe.yaml' else file} was not written by you"


def is_harmless(name: str) -> bool:
    """Whether a name stands for a component of isoscale or torch, which runs no code that a recipe chooses."""
    return _Project(()).is_known(name)


def read(name: str) -> Callable[..., Any] | None:
    """A function with the signature of what a name stands for, of which nothing is imported; None if it is not known.

    Components of isoscale and layers of torch are those themselves.
    """
    if is_harmless(name):
        return resolve(name)
    module_name, attribute = parted_name(name)
    missing = find_module(module_name).missing
    if missing is not None and module_name not in sys.modules:
        raise UnknownComponent(no_module(missing, name))
    try:
        return outline(module_name, attribute, lambda path: resolve(path) if is_harmless(path) else None)
    except NotThere as error:
        raise UnknownComponent(str(error), as_written(nearest(error.part, error.others), name)) from None
    except NotCallable as error:
        raise UnknownComponent(f'"{name}" {error}') from None


def component_names(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Where a recipe names classes, and which: in every mapping with a class, and where a name alone is enough."""
    for path, spec in _specs(values):
        if isinstance(spec, str):
            yield path, spec
    yield from _classes(values, ())


def _specs(values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    sections = {name: values.get(name) for name in ("task", "data", "observe", "train")}
    found = {name: section for name, section in sections.items() if isinstance(section, Mapping)}
    yield ("task", "model"), found.get("task", {}).get("model")
    for key in FUNCTIONS:
        value = found.get("task", {}).get(key)
        for place, spec in [(("task", key), value)] if isinstance(value, str) else _numbered(value, ("task", key)):
            if is_path(spec):
                yield place, spec
    for section, key in (("data", "transforms"), ("observe", "loggers"), ("train", "callbacks")):
        yield from _numbered(found.get(section, {}).get(key), (section, key))


def _numbered(listed: Any, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    for position, spec in enumerate(listed if isinstance(listed, list) else []):
        yield (*path, position), spec


def _classes(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    for key, child in children(value):
        if key == "class" and isinstance(child, str):
            yield (*path, key), child
        yield from _classes(child, (*path, key))


def _is_own(file: Path, trust: Trust) -> bool:
    if trust is Trust.ALL or _contains(Path(str(package_files(OURS))), file):
        return True
    if any((file.parent / record).exists() for record in RECORDS):
        return has_seal(file.read_text(encoding="utf-8", errors="replace"))
    return trust is not Trust.PROJECT or any(_contains(root, file) for root in _roots())


def _roots() -> list[Path]:
    """The working directory, and the top of the git repository that it belongs to."""
    here = Path.cwd()
    return [here, *(folder for folder in here.parents if (folder / ".git").exists())][:2]


def _contains(folder: Path, file: Path) -> bool:
    return file.resolve().is_relative_to(folder.resolve())


class _Project:
    """Code that may be built from the names of others: of isoscale and torch, and of the current project."""

    def __init__(self, foreign: Sequence[Path]) -> None:
        self._roots = [root.resolve() for root in _roots()]
        self._foreign = [self._around(file) for file in foreign]

    def _around(self, file: Path) -> Path:
        """What came together with a file of somebody else, as far as that can be told."""
        here, place = self._roots[0], file.resolve()
        place = place.parent if any((place.parent / record).exists() for record in RECORDS) else place
        if place.is_relative_to(here) and place != here:
            return here / place.relative_to(here).parts[0]
        above = place.parent
        return place if any(root.is_relative_to(above) for root in self._roots) else above

    def allows(self, name: str) -> bool:
        """Whether what a name stands for may be built; it is imported only where that may be."""
        module, attribute = parted(full_name(name))
        if not module or not attribute or self.is_known(name):
            return True  # or leads nowhere, and whoever builds it says so
        found = find_module(module)
        return bool(found.files) and all(map(self._is_of_project, found.files)) and self._is_own_target(name)

    def is_known(self, name: str) -> bool:
        """Whether a name stands for a component of isoscale, a layer, a metric or a network of torch's family."""
        path = class_path(name)
        if path in short_names().values():
            return True
        return any(path.startswith(f"{root}.") for root in _KNOWN) and self._is_installed(path) and _is_known(name)

    def _is_installed(self, path: str) -> bool:
        """Whether a package is the one that everybody knows, and not a file of its name that lies in the way."""
        root = path.partition(".")[0]
        if root in sys.modules:
            return True
        files = [file.resolve() for file in find_module(root).files]
        came = any(file.is_relative_to(area) for area in self._foreign for file in files)
        return not came and all(set(INSTALLED) & set(file.parts) for file in files)

    def _is_of_project(self, file: Path) -> bool:
        place = file.resolve()
        if any(place.is_relative_to(area) for area in self._foreign) or set(INSTALLED) & set(place.parts):
            return False
        if place.is_relative_to(sys.prefix) or place.is_relative_to(Path(str(package_files(OURS))).resolve()):
            return False
        return any(place.is_relative_to(root) for root in self._roots)

    def _is_own_target(self, name: str) -> bool:
        """Whether code of the project is what a name in it leads to, and not what it has imported."""
        target = _target(name)
        if target is None or _is_component(target):
            return True
        home = sys.modules.get(str(getattr(target, "__module__", None)))
        file = getattr(home, "__file__", None)
        return file is not None and self._is_of_project(Path(file))


def _target(name: str) -> Callable[..., Any] | None:
    try:
        return resolve(name)
    except UnknownComponent:
        return None  # whoever builds it says why


def _is_known(name: str) -> bool:
    target = _target(name)
    return target is None or _is_component(target)


def _is_component(target: Callable[..., Any]) -> bool:
    """Whether something is made to stand in recipes, and does nothing but compute when it is built."""
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from isoscale.data.sources import Sources

    home = f"{getattr(target, '__module__', '')}."
    if isinstance(target, FunctionType) and home == f"{FUNCTIONAL}.":
        return True
    if not isinstance(target, type):
        return home.startswith(f"{NETWORKS}.") and _is_network(target)
    if issubclass(target, Optimizer | LRScheduler):
        return home.startswith(f"{OPTIMIZERS}.")
    if home.startswith(f"{OURS}."):
        return issubclass(target, nn.Module | Sources)
    return issubclass(target, nn.Module) and home.startswith((f"{LAYERS}.", *(f"{part}." for part in METRICS)))


def _is_network(target: Callable[..., Any]) -> bool:
    """Whether a function is one of those by which torchvision makes networks."""
    try:
        made = sys.modules[NETWORKS].get_model_builder(target.__name__)
        return made in (target, getattr(target, "__wrapped__", None))
    except (KeyError, AttributeError, ValueError):  # it has no name, or is none of them
        return False


_KNOWN = (OURS, "torch.nn", OPTIMIZERS, *METRICS, "torchmetrics", NETWORKS)
