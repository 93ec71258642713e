"""Image data: the digits inside the package, and files in the formats of well-known data sets."""

from importlib.resources import files

import numpy as np

from isoscale.data.sources import Sources, TensorSource, split_source

DEFAULT_SPLIT = {"train": 0.8, "val": 0.1, "test": 0.1}


class Digits(Sources):
    """1,797 handwritten digits of 8×8 pixels from 0 to 16 (UCI, CC BY 4.0), inside the package."""

    def __init__(self, split: dict[str, float | int] | None = None, split_seed: int = 0) -> None:
        """`split` says how much is for train, val and test: fractions, or numbers of images."""
        with (files("isoscale.science") / "data" / "digits.npz").open("rb") as file, np.load(file) as arrays:
            whole = TensorSource({"input": arrays["images"], "target": arrays["labels"].astype(np.int64)})
        parts = split_source(whole, split or DEFAULT_SPLIT, split_seed)
        super().__init__(parts.train, parts.val, parts.test, parts.test)
