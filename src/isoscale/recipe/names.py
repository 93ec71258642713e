"""The short names of components, and the class paths that they stand for."""

from pathlib import Path

from isoscale.science import registry

OF_ALL_SCIENCES = {
    "supervised": "isoscale.engine.task.Supervised",
    "mixture": "isoscale.data.mixture.Systems",
    "arrays": "isoscale.data.sources.Arrays",
    "files": "isoscale.data.file_sources.Files",
    "divide": "isoscale.data.transforms.Divide",
    "flatten": "isoscale.data.transforms.Flatten",
    "noise": "isoscale.data.transforms.Noise",
    "normalize": "isoscale.data.transforms.Normalize",
    "scale": "isoscale.data.transforms.Scale",
    "mlflow": "isoscale.observe.loggers.mlflow.MLflow",
    "wandb": "isoscale.observe.loggers.wandb.WandB",
    "comet": "isoscale.observe.loggers.comet.Comet",
    "neptune": "isoscale.observe.loggers.neptune.Neptune",
}
"""Beside these there are the names that each science adds."""

CONVERTERS = {
    "text": "isoscale.data.tools.convert.text",
    "npz": "isoscale.data.tools.convert.arrays",
    "hdf5": "isoscale.data.tools.convert.arrays",
}
"""What `data make` knows by a short name."""

TORCHVISION = "torchvision:"
"""Before the name of a network of torchvision: `torchvision:resnet18`."""


def short_names() -> dict[str, str]:
    """All short names, and the class paths that they stand for."""
    return registry.short_names() | OF_ALL_SCIENCES


def full_name(name: str) -> str:
    """What a short name stands for; the path of a class is its own full name."""
    if name.startswith(TORCHVISION):
        return f"torchvision.models:{name.removeprefix(TORCHVISION)}"
    return short_names().get(name.lower(), name)


def parted(path: str) -> tuple[str, str]:
    """The module of a full name, `package.module.Class` or `package.module:Outer.Inner`, and what it names inside."""
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    return module, attribute


def class_path(name: str) -> str:
    """The full path of a class, in one spelling: `mlp` and `isoscale.science.models:MLP` are the same."""
    return full_name(name).replace(":", ".")


def no_module(module: str, name: str) -> str:
    """That there is no module for a name."""
    return f'there is no module "{module}" for "{name}" (looked in {Path.cwd()} and installed packages)'
