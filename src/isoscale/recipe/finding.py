"""Find the files of a module as Python would, without running any of them."""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple


class Found(NamedTuple):
    """What is there of a module."""

    files: list[Path]
    """What Python would run to import it, in this order: those of the packages around it, and its own."""
    missing: str | None
    """The first module on the way that is not there; None where all are."""
    is_package: bool = False
    """Whether there may be modules inside it."""


def find_module(name: str) -> Found:
    """The files of a module and of the packages around it."""
    files: list[Path] = []
    folders: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        here = ".".join(parts[:depth])
        path = search_path() if folders is None else folders
        spec = _spec(here, path, top=folders is None) if all(parts[:depth]) else None
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return Found(files, here if spec is None else ".".join(parts[: depth + 1]))
        if spec.origin is not None and spec.has_location:
            files.append(Path(spec.origin))
        elif spec.submodule_search_locations is None:
            files.append(Path(f"<{spec.origin or here}>"))  # inside the interpreter
        folders = _folders(spec, parts[depth - 1], path)
    return Found(files, None, bool(folders))


def search_path() -> list[str]:
    """Where Python looks for modules of recipes: in the working directory too."""
    here = os.getcwd()
    path = [entry or here for entry in sys.path]
    return path if here in path else [*path, here]


def _spec(name: str, path: Sequence[str], top: bool) -> ModuleSpec | None:
    """What a finder says: those that an installed package has added know it only by its name."""
    for finder in sys.meta_path:
        asked = path if finder is PathFinder or not top else None
        try:
            spec = finder.find_spec(name, asked)
        except Exception:  # whatever a finder of somebody else's raises
            if finder is not PathFinder:
                continue
            # For a package without a file, it asks the package around it, which nobody has imported.
            spec = ModuleSpec(name, None)
            spec.submodule_search_locations = _folders_called(name.rpartition(".")[2], path)
        if spec is not None:
            return spec
    return None


def _folders(spec: ModuleSpec, part: str, path: Sequence[str]) -> list[str]:
    """Where the modules inside a package are."""
    found: Sequence[str] | None = spec.submodule_search_locations
    if found is None:
        return []
    if isinstance(found, list):
        return found
    return _folders_called(part, path)  # what it says itself depends on what was imported


def _folders_called(part: str, path: Sequence[str]) -> list[str]:
    """Of which Python puts a package together that has no file."""
    return [os.path.join(entry, part) for entry in path if os.path.isdir(os.path.join(entry, part))]
