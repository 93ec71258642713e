"""What a task shows besides numbers, as values for the template of the page."""

import base64
from collections.abc import Mapping
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib.image import imsave
from numpy.typing import NDArray

from isoscale.observe.drawing import averaged, draw
from isoscale.observe.figures import (
    Bands,
    Curves,
    Drawable,
    Figure,
    Histogram,
    JointHistograms,
    Matrix,
    Network,
    Parity,
    ParityPoints,
    Pictures,
    PrecisionRecall,
    Slices,
)
from isoscale.observe.style import png
from isoscale.observe.text import plain_number
from isoscale.study.report.charts import (
    CLASSES,
    HEIGHT,
    OTHER_CLASSES,
    WIDTH,
    histogram,
    precision_recall,
    shapes,
)

LARGEST_TABLE = 24
"""Classes, up to which a matrix is a table with all its numbers."""
MOST_CONFUSIONS = 5
LONGEST_SIDE = 160
"""Pixels of a picture; larger ones are averaged down."""
MOST_PICTURES = 48


def results(figures: Mapping[str, Figure]) -> list[dict[str, Any]]:
    """All figures in the order in which the task gives them."""
    return [
        {"name": name.replace("_", " "), "kind": type(figure).__name__.lower(), **_values(name, figure)}
        for name, figure in figures.items()
        if not isinstance(figure, Network)
    ]


def _values(name: str, figure: Drawable) -> dict[str, Any]:
    match figure:
        case Matrix():
            return _matrix(figure)
        case PrecisionRecall():
            return _precision_recall(figure)
        case Pictures():
            return _pictures(figure)
        case Histogram(counts, edges):
            total, low, high = map(plain_number, (counts.sum(), edges[0], edges[-1]))
            return _drawing(histogram(figure), f"{name}: {total} values from {low} to {high}")
        case Curves():
            words = f"{figure.up} against {figure.across}: {', '.join(figure.values)}"
        case Parity() | ParityPoints():
            words = f"predicted against true {figure.what}"
        case Bands():
            curves = next(iter(figure.panels.values()), {})
            words = f"{' and '.join(figure.panels)} against {figure.across}: {', '.join(curves)}"
        case Slices():
            words = f"{', '.join(figure.rows)}: slices of {', '.join(figure.columns)}"
        case JointHistograms():
            words = f"{figure.up} against {figure.across}: {', '.join(figure.names)}"
    drawn = draw("", figure)
    width, height = 72 * drawn.get_size_inches()
    return _drawing(shapes(drawn), words, float(width), float(height))


def _drawing(drawn: str, words: str, width: float = WIDTH, height: float = HEIGHT) -> dict[str, Any]:
    return {"shapes": drawn, "words": words, "size": f"{width:g} {height:g}"}


def _matrix(figure: Matrix) -> dict[str, Any]:
    """Counts, with the root of their share of the row, because errors are small; and the largest errors in words."""
    labels = figure.labels
    wrong = figure.counts * (1 - np.eye(len(labels), dtype=np.int64))
    largest = [divmod(int(place), len(labels)) for place in np.argsort(wrong, axis=None, kind="stable")[::-1]]
    confusions = [
        f"{labels[row]} as {labels[column]} ({wrong[row, column]:,})"
        for row, column in largest[:MOST_CONFUSIONS]
        if wrong[row, column]
    ]
    if len(labels) > LARGEST_TABLE:
        words = f"{figure.rows} against {figure.columns}, {len(labels)} classes; the darker, the more samples"
        return {"image": _address("png", png(draw("", figure))), "words": words, "confusions": confusions}
    shares = figure.counts / np.maximum(figure.counts.sum(1, keepdims=True), 1)
    rows = [(label, list(zip(figure.counts[row], np.sqrt(shares[row]), strict=True)), shares[row, row])
            for row, label in enumerate(labels)]  # fmt: skip
    return {"matrix": figure, "rows": rows, "confusions": confusions}


def _precision_recall(figure: PrecisionRecall) -> dict[str, Any]:
    """The curves of all classes, the worst ones in colour, and the average precision of each."""
    occurring = sorted(
        ((label, found) for label, found in figure.classes.items() if found.num_positives),
        key=lambda entry: entry[1].average_precision,
    )
    if not occurring:
        return {"classes": []}
    styles = [*CLASSES, *[OTHER_CLASSES] * len(occurring)]
    classes = [(label, found, style) for (label, found), style in zip(occurring, styles, strict=False)]
    mean = sum(found.average_precision for _, found in occurring) / len(occurring)
    words = f"precision against recall of {len(occurring)} classes; mean average precision {mean:.3f}"
    drawn = precision_recall([(found, style) for _, found, style in classes])
    return {"classes": classes, "most": len(CLASSES), "mean": mean, **_drawing(drawn, words)}


def _pictures(figure: Pictures) -> dict[str, Any]:
    number = min(MOST_PICTURES, len(figure.pixels))
    captions = [*figure.captions, *[""] * number][:number]
    verdicts = [*("right" if right else "wrong" for right in figure.right), *[""] * number][:number]
    addresses = [picture_address(pixels) for pixels in averaged(figure.pixels[:number], LONGEST_SIDE)]
    return {"pictures": list(zip(addresses, captions, verdicts, strict=True)), "more": len(figure.pixels) - number}


def picture_address(pixels: NDArray[np.uint8]) -> str:
    """A picture as an address that holds all of it: exact where it is small, compressed where it is large."""
    kind = "png" if max(pixels.shape[:2]) <= 64 else "jpeg"
    file = BytesIO()
    imsave(file, np.ascontiguousarray(pixels), format=kind)
    return _address(kind, file.getvalue())


def _address(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
