"""Train a scientific model the same way on one core or a thousand GPUs."""

from typing import TYPE_CHECKING, Any

from isoscale._version import __version__
from isoscale.system import moved

moved.install()

if TYPE_CHECKING:
    from isoscale.api import Trainer, train
    from isoscale.data.sources import Sources
    from isoscale.data.tools.shuffle import shuffle_files
    from isoscale.engine.metrics.weighted_sum import WeightedSum
    from isoscale.engine.task import Supervised, Task
    from isoscale.errors import UserError
    from isoscale.runs.export import export
    from isoscale.runs.inference import figures, predict, test
    from isoscale.runs.run import Run

__all__ = [
    "Run",
    "Sources",
    "Supervised",
    "Task",
    "Trainer",
    "UserError",
    "WeightedSum",
    "__version__",
    "export",
    "figures",
    "predict",
    "shuffle_files",
    "test",
    "train",
]

_HOMES = {
    "Run": "isoscale.runs.run",
    "Sources": "isoscale.data.sources",
    "Supervised": "isoscale.engine.task",
    "Task": "isoscale.engine.task",
    "Trainer": "isoscale.api",
    "UserError": "isoscale.errors",
    "WeightedSum": "isoscale.engine.metrics.weighted_sum",
    "export": "isoscale.runs.export",
    "figures": "isoscale.runs.inference",
    "predict": "isoscale.runs.inference",
    "shuffle_files": "isoscale.data.tools.shuffle",
    "test": "isoscale.runs.inference",
    "train": "isoscale.api",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `isoscale --help` must not wait for torch."""
    from importlib import import_module

    name = moved.renamed(name, {"Pair": "WeightedSum", "exhibits": "figures"}, "isoscale.")
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if not name.startswith("_"):
        from isoscale.science.registry import public_names

        if name in public_names():
            return public_names()[name](name)
    raise AttributeError(f"module 'isoscale' has no attribute {name!r}")


def __dir__() -> list[str]:
    from isoscale.science.registry import public_names

    return sorted({*globals(), *__all__, *public_names()})
