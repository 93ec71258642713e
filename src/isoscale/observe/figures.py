"""What a task can show besides numbers: pictures, matrices, curves. Plain arrays, drawn by the observers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Pictures:
    """A grid of small pictures."""

    pixels: NDArray[np.uint8]
    """(pictures, height, width, 3)."""
    captions: list[str] = field(default_factory=list)
    """One short text a picture, such as `cat 93 %`; may be empty."""
    right: list[bool] = field(default_factory=list)
    """Whether each picture's prediction is right, which decides the colour of its frame; may be empty."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """Counts of samples by row and column, such as a confusion matrix."""

    counts: NDArray[np.int64]
    """(rows, columns)."""
    labels: list[str]
    """Of the rows, and in the same order of the columns."""
    rows: str = "true class"
    columns: str = "predicted class"


@dataclass(frozen=True, eq=False)
class Detection:
    """How well a score tells the samples of one class from the rest, at every threshold."""

    thresholds: NDArray[np.float64]
    """The distinct scores, falling: a sample counts as found where its score is at least the threshold."""
    true_positives: NDArray[np.int64]
    false_positives: NDArray[np.int64]
    num_positives: int
    num_negatives: int

    @property
    def precision(self) -> NDArray[np.float64]:
        """Share of the found samples that belong to the class, at each threshold."""
        found = self.true_positives + self.false_positives
        return self.true_positives / np.maximum(found, 1)

    @property
    def recall(self) -> NDArray[np.float64]:
        """Share of the class that is found, at each threshold; 1 everywhere for a class that never occurs."""
        if self.num_positives == 0:
            return np.ones(len(self.thresholds))
        return self.true_positives / self.num_positives

    @property
    def average_precision(self) -> float:
        """The area under the curve as a sum of steps; 0 for a class that never occurs."""
        if self.num_positives == 0:
            return 0.0
        steps = np.diff(self.recall, prepend=0.0)
        return float(np.sum(steps * self.precision))


@dataclass(frozen=True, eq=False)
class PrecisionRecall:
    """Precision against recall, one curve a class."""

    classes: Mapping[str, Detection]


@dataclass(frozen=True, eq=False)
class Histogram:
    """How values are distributed: `counts[i]` of them lie between `edges[i]` and `edges[i + 1]`."""

    counts: NDArray[np.float64]
    edges: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Curves:
    """Functions of one variable, the first of which the others should be equal to."""

    places: NDArray[np.float64]
    values: Mapping[str, NDArray[np.float64]]
    """By name: one value at each place."""
    across: str
    """What is drawn to the right, with its unit."""
    up: str
    marks: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """A place that is marked on a curve, by the name of the curve: what it is, and where."""
    logarithmic: Literal["", "x", "y", "xy"] = ""
    """The axes that are logarithmic."""
    below: Literal["difference", "ratio"] = "difference"
    """How curves are compared with the first one."""
    bands: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]] = field(default_factory=dict)
    """From where to where that difference or ratio lies in single samples, by the name of the curve."""


class Band(NamedTuple):
    """A curve, and from where to where single samples lie about it."""

    values: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Bands:
    """Functions of one variable, on a logarithmic scale, that should be equal to 1 everywhere."""

    places: NDArray[np.float64]
    panels: Mapping[str, Mapping[str, Band]]
    """One above the other: what is drawn upwards, and the curves by name."""
    across: str
    words: str = ""
    """What the bands are."""
    mark: tuple[str, float] | None = None
    """A place that is marked: what it is, and where."""


@dataclass(frozen=True, eq=False)
class Slices:
    """A table of images, with the same colours in a column."""

    values: NDArray[np.float64]
    """(rows, columns, height, width)."""
    rows: list[str]
    columns: list[str]
    """What is shown, with its unit."""
    signed: list[bool]
    """Whether a column has values about zero."""
    words: str = ""
    """What else is to be said, such as how large they are."""
    difference: bool = False
    """Whether a last row shows how far the second is from the first."""


@dataclass(frozen=True, eq=False)
class JointHistograms:
    """How pairs of values are distributed, in several histograms with the same colours."""

    shares: NDArray[np.float64]
    """(histograms, bins of x, bins of y)."""
    names: list[str]
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    across: str
    up: str
    what: str
    """What is counted."""


@dataclass(frozen=True, eq=False)
class Parity:
    """How many values were predicted how."""

    counts: NDArray[np.float64]
    """(true, predicted): in as many equal bins from `low` to `high` each."""
    low: float
    high: float
    what: str
    """What is predicted, with its unit."""
    words: Sequence[str] = ()
    """What else is to be said, such as the mean error."""


@dataclass(frozen=True, eq=False)
class ParityPoints:
    """Some values, each with a name, and what was predicted for them."""

    names: list[str]
    true: NDArray[np.float64]
    predicted: NDArray[np.float64]
    what: str
    """What is predicted, with its unit."""


@dataclass(frozen=True, eq=False)
class Network:
    """A network on the CPU with an input that it takes, from which its graph can be drawn."""

    module: Any
    example: Any


Drawable = (
    Pictures | Matrix | PrecisionRecall | Histogram | Curves | Parity | ParityPoints | Bands | Slices | JointHistograms
)
Figure = Drawable | Network
