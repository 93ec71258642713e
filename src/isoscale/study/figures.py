"""What a task shows besides numbers, as parts of a page."""

import base64
import math
from collections.abc import Mapping
from io import BytesIO

import numpy as np
from matplotlib.image import imsave
from numpy.typing import NDArray

from isoscale.observe import drawing as figures
from isoscale.observe.figures import (
    Curves,
    Detection,
    Drawable,
    Figure,
    Histogram,
    Matrix,
    Network,
    Parity,
    ParityPoints,
    Pictures,
    PrecisionRecall,
)
from isoscale.observe.text import plain_number
from isoscale.study.markup import Markup, element, folded, joined, table
from isoscale.study.plot import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, frame, legend_entry

LARGEST_TABLE = 24
"""Classes, up to which a matrix is a table with all its numbers."""
MOST_CONFUSIONS = 5
MOST_CURVES = 7
"""With a colour of their own; those of the classes that are found worst."""
MOST_POINTS = 200
"""Of one curve of precision against recall."""
LONGEST_SIDE = 160
"""Pixels of a picture; larger ones are averaged down."""
MOST_PICTURES = 48


def shown(figures: Mapping[str, Figure]) -> Markup:
    """All figures in the order in which the task gives them."""
    return joined(_figure(name, figure) for name, figure in figures.items() if not isinstance(figure, Network))


def _figure(name: str, figure: Drawable) -> Markup:
    match figure:
        case Matrix():
            body = _matrix(figure)
        case PrecisionRecall():
            body = _precision_recall(figure)
        case Pictures():
            body = _pictures(figure)
        case Histogram():
            body = _histogram(name, figure)
        case Curves() | Parity() | ParityPoints():
            body = _drawn(_words_for(figure), figure)
    return element(
        "figure",
        element("figcaption", element("h3", name.replace("_", " "))),
        body,
        class_=type(figure).__name__.lower(),
    )


def _matrix(figure: Matrix) -> Markup:
    if len(figure.labels) > LARGEST_TABLE:
        words = f"{figure.rows} against {figure.columns}, {len(figure.labels)} classes; the darker, the more samples"
        return joined([_drawn(words, figure), _confusions(figure)])
    return joined([_matrix_table(figure), _confusions(figure)])


def _drawn(words: str, figure: Drawable) -> Markup:
    return element("img", src=_address("png", figures.png(figures.draw("", figure))), alt=words)


def _words_for(figure: Curves | Parity | ParityPoints) -> str:
    if isinstance(figure, Curves):
        return f"{figure.up} against {figure.across}: {', '.join(figure.values)}"
    return f"predicted against true {figure.what}"


def _matrix_table(figure: Matrix) -> Markup:
    shares = figure.counts / np.maximum(figure.counts.sum(1, keepdims=True), 1)
    corner = element("th", f"{figure.columns} →", element("br"), f"{figure.rows} ↓", class_="corner")
    head = element(
        "tr", corner, *(element("th", label, scope="col") for label in figure.labels), element("th", "right")
    )
    rows = [_matrix_row(figure, shares, row) for row in range(len(figure.labels))]
    return element("div", element("table", element("thead", head), element("tbody", *rows)), class_="wide")


def _matrix_row(figure: Matrix, shares: NDArray[np.float64], row: int) -> Markup:
    """Counts on the colour of their share of the row; shares of errors are small, hence the root."""
    cells = []
    for column, count in enumerate(figure.counts[row]):
        kind = "right" if row == column else "wrong"
        strength = round(100 * math.sqrt(shares[row, column]))
        text = element("td", f"{count:,}" if count else "·", class_=kind, style=f"--strength:{strength}%")
        cells.append(text)
    right = element("td", _percent(shares[row, row]), class_="share")
    return element("tr", element("th", figure.labels[row], scope="row"), *cells, right)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _confusions(figure: Matrix) -> Markup:
    """The largest errors in words."""
    wrong = figure.counts * (1 - np.eye(len(figure.labels), dtype=np.int64))
    largest = np.argsort(wrong, axis=None, kind="stable")[::-1][:MOST_CONFUSIONS]
    pairs = [divmod(int(place), len(figure.labels)) for place in largest]
    texts = [
        f"{figure.labels[row]} as {figure.labels[column]} ({wrong[row, column]:,})"
        for row, column in pairs
        if wrong[row, column]
    ]
    return element("p", f"Most often confused: {', '.join(texts)}." if texts else "Nothing is off the diagonal.")


def _precision_recall(figure: PrecisionRecall) -> Markup:
    """The curves of all classes, the worst ones in colour, beside the average precision of each."""
    occurring = [(label, found) for label, found in figure.classes.items() if found.num_positives]
    if not occurring:
        return element("p", "No class occurs.")
    occurring.sort(key=lambda entry: entry[1].average_precision)
    styled = [
        (label, found, f"class-{place}" if place < MOST_CURVES else "class-other")
        for place, (label, found) in enumerate(occurring)
    ]
    mean = sum(found.average_precision for _, found in occurring) / len(occurring)
    across, up = Axis(0, 1, LEFT, WIDTH - RIGHT), Axis(0, 1, HEIGHT - BOTTOM, TOP)
    paths = [_detection_path(found, across, up, style) for _, found, style in reversed(styled)]
    words = f"precision against recall of {len(occurring)} classes; mean average precision {mean:.3f}"
    drawing = frame(words, across, up, "recall", "precision", paths)
    return element(
        "div", drawing, _average_precisions(mean, [_detection_row(*entry) for entry in styled]), class_="beside"
    )


def _average_precisions(mean: float, rows: list[list[str]]) -> Markup:
    heads = ("class", "average precision", "samples")
    rest = rows[MOST_CURVES:]
    return element(
        "div",
        element("p", "mean average precision ", element("b", f"{mean:.4f}")),
        table(heads, rows[:MOST_CURVES], "numbers"),
        folded(f"{len(rest)} more", table(heads, rest, "numbers")) if rest else None,
    )


def _detection_path(detection: Detection, across: Axis, up: Axis, style: str) -> Markup:
    """Steps, because between two thresholds nothing is known."""
    places = np.unique(np.linspace(0, len(detection.recall) - 1, MOST_POINTS).round().astype(int))
    recall, precision = detection.recall[places], detection.precision[places]
    words = [f"M{across.place(0):g} {up.place(float(precision[0])):g}"]
    for right, high in zip(recall, precision, strict=True):
        words.append(f"V{up.place(float(high)):g}H{across.place(float(right)):g}")
    return element("path", d="".join(words), class_=style)


def _detection_row(label: str, found: Detection, style: str) -> list[str]:
    return [legend_entry(label, style), f"{found.average_precision:.4f}", f"{found.num_positives:,}"]


def _pictures(figure: Pictures) -> Markup:
    number = min(MOST_PICTURES, len(figure.pixels))
    more = f"{len(figure.pixels) - number} more are not shown." if len(figure.pixels) > number else None
    grid = element("div", *(_picture(figure, index) for index in range(number)), class_="grid")
    return joined([grid, element("p", more) if more else None])


def _picture(figure: Pictures, index: int) -> Markup:
    caption = figure.captions[index] if index < len(figure.captions) else ""
    verdict = {True: "right", False: "wrong"}[figure.right[index]] if index < len(figure.right) else ""
    sign = {"right": "✓ ", "wrong": "✗ ", "": ""}[verdict]
    alt = ": ".join(word for word in (verdict, caption) if word) or f"picture {index + 1}"
    image = element("img", src=picture_address(figure.pixels[index]), alt=alt)
    return element("div", image, element("span", sign + caption), class_=f"picture {verdict}".strip())


def picture_address(pixels: NDArray[np.uint8]) -> str:
    """A picture as an address that holds all of it: exact where it is small, compressed where it is large."""
    height, width = pixels.shape[:2]
    factor = math.ceil(max(height, width) / LONGEST_SIDE)
    if factor > 1:
        rows, columns = max(1, height // factor), max(1, width // factor)
        blocks = pixels[: rows * factor, : columns * factor].reshape(rows, -1, columns, factor, pixels.shape[-1])
        pixels = blocks.mean((1, 3)).round().astype(np.uint8)
    kind = "png" if max(pixels.shape[:2]) <= 64 else "jpeg"
    file = BytesIO()
    imsave(file, np.ascontiguousarray(pixels), format=kind)
    return _address(kind, file.getvalue())


def _address(kind: str, data: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def _histogram(name: str, figure: Histogram) -> Markup:
    counts, edges = figure.counts.tolist(), figure.edges.tolist()
    across, up = Axis(edges[0], edges[-1], LEFT, WIDTH - RIGHT), Axis(0, max(*counts, 1e-300), HEIGHT - BOTTOM, TOP)
    words = "".join(
        f"M{across.place(low):g} {up.place(0):g}V{up.place(count):g}H{across.place(high):g}V{up.place(0):g}Z"
        for count, low, high in zip(counts, edges, edges[1:], strict=False)
    )
    text = f"{name}: {plain_number(sum(counts))} values from {plain_number(edges[0])} to {plain_number(edges[-1])}"
    return frame(text, across, up, "value", "count", [element("path", d=words, class_="bars")])
