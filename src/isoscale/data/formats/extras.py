"""Libraries that come with an extra of this package."""

import importlib
from typing import Any

from isoscale.errors import UserError


def library(name: str, path: object) -> Any:
    """The library that reads `path`, or what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"reading {path} needs {name}: pip install 'isoscale[{name}]' ({error})") from None
