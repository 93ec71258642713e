"""Networks of torchvision, whose errors are put into words: it need not be there, fit torch or reach the network."""

import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any

from isoscale.errors import UserError

PACKAGE = "torchvision"
INSTALL = "pip install 'isoscale[vision]'"
OWN = "isoscale's own networks, such as resnet, need none of it"


def is_part(module_name: str) -> bool:
    """Whether a module belongs to torchvision."""
    return module_name.partition(".")[0] == PACKAGE


def has_networks(module_name: str) -> bool:
    """Whether a module is where torchvision keeps its networks."""
    return module_name.startswith(f"{PACKAGE}.models")


def why_not(error: Exception) -> str:
    """Why torchvision cannot be imported, and what to do."""
    if isinstance(error, ModuleNotFoundError):
        if error.name == PACKAGE:
            return f"torchvision is not installed: {INSTALL}; {OWN}"
        return f"importing torchvision failed: {error}; {INSTALL} brings what it needs"
    versions = " and ".join(f"{name} {_version(name)}" for name in (PACKAGE, "torch"))
    return (
        f"torchvision does not work here: {type(error).__name__}: {error}. {versions} were not built for each other: "
        f"install both together, from the same place; {OWN}"
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown)"


def explained(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """The function that makes a network, with errors that say what to change in the recipe."""

    @functools.wraps(make)
    def made(**arguments: Any) -> Any:
        try:
            return make(**arguments)
        except OSError as error:
            raise UserError(
                f"cannot fetch the weights {arguments.get('weights')} of {name}: {error}\n"
                "Where there is no way to the internet, bring a file of weights (`isoscale data get` lists some) and "
                "start from that: task.model.weights=null task.init_from=FILE"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            words = f"there is nothing called {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"torchvision cannot make {name} with {_written(arguments)}: {words}") from error

    return made


def _written(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in arguments.items()) or "no arguments"
