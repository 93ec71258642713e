"""Train a scientific model the same way on one core or a thousand GPUs."""

from typing import TYPE_CHECKING, Any

from isoscale._version import __version__

if TYPE_CHECKING:
    from isoscale.api import Trainer, exhibits, predict, test, train
    from isoscale.data.shuffle import shuffle_files
    from isoscale.data.sources import Sources
    from isoscale.engine.pairs import Pair
    from isoscale.engine.task import Supervised, Task
    from isoscale.errors import UserError
    from isoscale.exporting import export
    from isoscale.run import Run

__all__ = [
    "Pair",
    "Run",
    "Sources",
    "Supervised",
    "Task",
    "Trainer",
    "UserError",
    "__version__",
    "exhibits",
    "export",
    "predict",
    "shuffle_files",
    "test",
    "train",
]

_HOMES = {
    "Pair": "isoscale.engine.pairs",
    "Run": "isoscale.run",
    "Sources": "isoscale.data.sources",
    "Supervised": "isoscale.engine.task",
    "Task": "isoscale.engine.task",
    "Trainer": "isoscale.api",
    "UserError": "isoscale.errors",
    "exhibits": "isoscale.api",
    "export": "isoscale.exporting",
    "predict": "isoscale.api",
    "shuffle_files": "isoscale.data.shuffle",
    "test": "isoscale.api",
    "train": "isoscale.api",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `isoscale --help` must not wait for torch."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'isoscale' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
