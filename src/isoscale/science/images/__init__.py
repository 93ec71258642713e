"""Image classification."""

from typing import TYPE_CHECKING

from isoscale.science.domain import Domain

if TYPE_CHECKING:
    from isoscale.science.images.augment import Crop, Cutout, Flip, Rotate
    from isoscale.science.images.classifier import Classifier
    from isoscale.science.images.networks import CNN, FastNet
    from isoscale.science.images.resnet import ResNet
    from isoscale.science.images.sources import CIFAR10, MNIST, Digits, FashionMNIST

__all__ = [
    "CIFAR10",
    "CNN",
    "MNIST",
    "Classifier",
    "Crop",
    "Cutout",
    "Digits",
    "FashionMNIST",
    "FastNet",
    "Flip",
    "ResNet",
    "Rotate",
]

DOMAIN = Domain(
    package=__name__,
    description="image classification",
    homes={
        "Classifier": "classifier", "CNN": "networks", "FastNet": "networks", "ResNet": "resnet",
        "Digits": "sources", "MNIST": "sources", "FashionMNIST": "sources", "CIFAR10": "sources",
        "Crop": "augment", "Cutout": "augment", "Flip": "augment", "Rotate": "augment",
    },
    short_names={
        "classifier": "Classifier", "cnn": "CNN", "resnet": "ResNet", "fastnet": "FastNet",
        "digits": "Digits", "mnist": "MNIST", "fashion-mnist": "FashionMNIST", "cifar10": "CIFAR10",
        "flip": "Flip", "crop": "Crop", "cutout": "Cutout", "rotate": "Rotate",
    },
    public=("Classifier",),
    presets="isoscale/recipes/images",
    downloads="isoscale.science.images.downloads.CATALOG",
)  # fmt: skip

__getattr__, __dir__ = DOMAIN.find, DOMAIN.names
