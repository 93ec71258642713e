"""The short names of components, and the class paths that they stand for."""

from pathlib import Path

SHORT_NAMES = {
    "supervised": "isoscale.engine.task.Supervised",
    "classifier": "isoscale.science.images.Classifier",
    "mlp": "isoscale.science.models.MLP",
    "cnn": "isoscale.science.images.CNN",
    "resnet": "isoscale.science.images.ResNet",
    "fastnet": "isoscale.science.images.FastNet",
    "digits": "isoscale.science.images.Digits",
    "mnist": "isoscale.science.images.MNIST",
    "fashion-mnist": "isoscale.science.images.FashionMNIST",
    "cifar10": "isoscale.science.images.CIFAR10",
    "ldos": "isoscale.science.electronic.Ldos",
    "snapshots": "isoscale.science.electronic.Snapshots",
    "potential": "isoscale.science.potentials.Potential",
    "deep_potential": "isoscale.science.potentials.DeepPotential",
    "se_e2_a": "isoscale.science.potentials.SeE2A",
    "atomic_systems": "isoscale.science.potentials.AtomicSystems",
    "mixture": "isoscale.data.mixture.Systems",
    "arrays": "isoscale.data.sources.Arrays",
    "files": "isoscale.data.file_sources.Files",
    "divide": "isoscale.data.transforms.Divide",
    "flatten": "isoscale.data.transforms.Flatten",
    "noise": "isoscale.data.transforms.Noise",
    "normalize": "isoscale.data.transforms.Normalize",
    "scale": "isoscale.data.scaling.Scale",
    "mlflow": "isoscale.observe.loggers.mlflow.MLflow",
    "wandb": "isoscale.observe.loggers.wandb.WandB",
    "comet": "isoscale.observe.loggers.comet.Comet",
    "neptune": "isoscale.observe.loggers.neptune.Neptune",
    "flip": "isoscale.science.images.Flip",
    "crop": "isoscale.science.images.Crop",
    "cutout": "isoscale.science.images.Cutout",
    "rotate": "isoscale.science.images.Rotate",
}

CONVERTERS = {
    "text": "isoscale.data.tools.converters.text",
    "npz": "isoscale.data.tools.converters.arrays",
    "hdf5": "isoscale.data.tools.converters.arrays",
}
"""What `data make` knows by a short name."""

TORCHVISION = "torchvision:"
"""Before the name of a network of torchvision: `torchvision:resnet18`."""


def full_name(name: str) -> str:
    """What a short name stands for; the path of a class is its own full name."""
    if name.startswith(TORCHVISION):
        return f"torchvision.models:{name.removeprefix(TORCHVISION)}"
    return SHORT_NAMES.get(name.lower(), name)


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
