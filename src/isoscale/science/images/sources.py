"""Image data: the digits inside the package, and files in the formats of well-known data sets."""

from importlib.resources import files
from typing import Literal

import numpy as np

from isoscale.data.sources import Sources, TensorSource, split_source
from isoscale.data.tools.published import locate
from isoscale.errors import UserError
from isoscale.science.images import downloads as catalog
from isoscale.science.images.formats import Labelled, read_cifar, read_idx_pair

DEFAULT_SPLIT = {"train": 0.8, "val": 0.1, "test": 0.1}
DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip

Validation = int | Literal["test"]
"""How many images of the training files are for validation; `test` validates on the test files."""


class Digits(Sources):
    """1,797 handwritten digits of 8×8 pixels from 0 to 16 (UCI, CC BY 4.0), inside the package."""

    classes = DIGITS

    def __init__(self, split: dict[str, float | int] | None = None, split_seed: int = 0) -> None:
        """`split` says how much is for train, val and test: fractions, or numbers of images."""
        with (files("isoscale.science") / "data" / "digits.npz").open("rb") as file, np.load(file) as arrays:
            tensors = {"input": arrays["images"], "target": arrays["labels"].astype(np.int64)}
        parts = split_source(TensorSource(tensors, self.classes), split or DEFAULT_SPLIT, split_seed)
        super().__init__(parts.train, parts.val, parts.test, parts.test)


class _OfficialSplit(Sources):
    """Images that come as training files and test files; validation images are taken out of the training files."""

    classes: tuple[str, ...]

    def __init__(self, path: str | None = None, val: Validation = 5000, split_seed: int = 0) -> None:
        """Read the files in `path`, by default in the data folder.

        `val` images, drawn with `split_seed`, are for validation and not trained on. 0 is for none; `test` trains on
        all of the training files and validates on the test files, as benchmarks of speed do.
        """
        train, test = (
            TensorSource({"input": found.images, "target": found.labels}, self.classes) for found in self._read(path)
        )
        if val == "test":
            super().__init__(train, test, test, test)
            return
        if not isinstance(val, int) or not 0 <= val < len(train):
            raise UserError(
                f"data.val is {val!r}; expected a number of images from 0 to {len(train) - 1}, or test to validate "
                "on the test files"
            )
        parts = split_source(train, {"train": len(train) - val, "val": val}, split_seed)
        super().__init__(parts.train, parts.val, test, test)

    def _read(self, path: str | None) -> tuple[Labelled, Labelled]:
        """The images of the training files and of the test files."""
        raise NotImplementedError


class MNIST(_OfficialSplit):
    """70,000 handwritten digits, (1, 28, 28) bytes each, from idx files: `isoscale data get mnist`."""

    classes = DIGITS
    entry = catalog.MNIST

    def _read(self, path: str | None) -> tuple[Labelled, Labelled]:
        train_images, train_labels, test_images, test_labels = locate(self.entry, path).values()
        shape, num_classes = (28, 28), len(self.classes)
        train = read_idx_pair(train_images, train_labels, shape, num_classes)
        return train, read_idx_pair(test_images, test_labels, shape, num_classes)


class FashionMNIST(MNIST):
    """70,000 pictures of clothes, (1, 28, 28) bytes each, from idx files: `isoscale data get fashion-mnist`."""

    classes = CLOTHES
    entry = catalog.FASHION_MNIST


class CIFAR10(_OfficialSplit):
    """60,000 colour pictures, (3, 32, 32) bytes each, of the binary or Python version: `isoscale data get cifar10`."""

    classes = CIFAR10_CLASSES

    def _read(self, path: str | None) -> tuple[Labelled, Labelled]:
        *train, test = locate(catalog.CIFAR10, path).values()
        return read_cifar(train, len(self.classes)), read_cifar([test], len(self.classes))
