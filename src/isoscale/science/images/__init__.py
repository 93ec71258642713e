"""Image classification."""

from isoscale.science.images.classifier import Classifier
from isoscale.science.images.sources import Digits

__all__ = ["Classifier", "Digits"]
