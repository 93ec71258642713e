"""Image classification."""

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
