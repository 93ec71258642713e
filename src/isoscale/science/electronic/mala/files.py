"""The parameter file of a run that another program has saved: alone, in a folder or in an archive."""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from isoscale.errors import UserError
from isoscale.science.importing import PeerFile

SUFFIX = ".params.json"
WEIGHTS = ".network.pth"

Name = TypeVar("Name", str, Path)


def read_parameters(path: Path) -> PeerFile:
    """Read a JSON file of parameters, or the one in a folder or a .zip of a saved run."""
    if path.is_dir():
        return read_parameters(_only(sorted(path.glob(f"*{SUFFIX}")), path))
    if path.suffix == ".pkl":
        raise UserError(
            f"{path} is a pickle, and to read it could run code hidden in it: load it where you trust it, and save it "
            "again with parameters.save_as_json"
        )
    weights = path.with_name(path.name.removesuffix(SUFFIX) + WEIGHTS)
    try:
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                name = _only([name for name in archive.namelist() if name.endswith(SUFFIX)], path)
                return _parsed(f"{name} in {path}", archive.read(name))
        return _parsed(str(path), path.read_bytes())._replace(weights=weights if weights.is_file() else None)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None


def _only(found: Sequence[Name], where: Path) -> Name:
    if len(found) == 1:
        return found[0]
    several = f"{len(found)} of them, {', '.join(map(str, found[:4]))}: name one" if found else "none"
    raise UserError(f"expected one file NAME{SUFFIX} in {where}, but found {several}")


def _parsed(source: str, content: bytes) -> PeerFile:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{source} is not JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(values, dict):
        raise UserError(f"{source} holds no parameters by name, but a {type(values).__name__}")
    return PeerFile(source, values)
