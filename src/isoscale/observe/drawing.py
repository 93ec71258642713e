"""Drawing figures, for every observer that shows pictures."""

import math
import textwrap

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, PowerNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from isoscale.observe.figures import (
    Curves,
    Detection,
    Drawable,
    Histogram,
    Matrix,
    Parity,
    ParityPoints,
    Pictures,
    PrecisionRecall,
)
from isoscale.observe.style import COLOURS, GRAY, NEUTRAL, PALE, RIGHT, WRONG, open_axes, plain

DOTS_PER_INCH = 100
MOST_NUMBERS = 400
"""Of a matrix, so that one of 20 classes has all of them and a larger one its largest."""
MOST_CURVES = 10
"""With a colour and a name; where there are more, those of the classes that are found worst."""
MOST_POINTS = 1000
"""Of one curve: more than a screen can show."""
MOST_NAMES = 12
"""Beside points."""
LINES = (COLOURS[-1], *COLOURS[1:3], COLOURS[0], *COLOURS[3:-1])
"""The colours of curves; the first is the one that the others should be equal to."""


def draw(name: str, shown: Drawable) -> Figure:
    """A figure drawn, under its name."""
    match shown:
        case Pictures():
            return _Grid(shown).draw(name)
        case Matrix():
            return _matrix(name, shown)
        case PrecisionRecall():
            return _precision_recall(name, shown)
        case Histogram():
            return _histogram(name, shown)
        case Curves():
            return _curves(name, shown)
        case Parity():
            return _parity(name, shown)
        case ParityPoints():
            return _parity_points(name, shown)


def _short(text: str, most: int) -> str:
    return plain(text if len(text) <= most else f"{text[: most - 1]}…")


class _Grid:
    """Pictures side by side, painted dot by dot so that each of their pixels is a sharp square."""

    side = 96
    """Dots that a small picture is enlarged to, as nearly as whole factors allow."""
    longest = 256
    frame, gap, line, title = 3, 8, 13, 26

    def __init__(self, shown: Pictures) -> None:
        self.shown = shown
        pixels = averaged(shown.pixels, self.longest)
        factor = max(1, self.side // max(1, *pixels.shape[1:3]))
        self.pixels = pixels.repeat(factor, 1).repeat(factor, 2)
        self.num_pictures, self.height, self.width = self.pixels.shape[:3]
        self.num_columns = max(1, math.ceil(math.sqrt(1.6 * self.num_pictures)))
        self.num_rows = math.ceil(self.num_pictures / self.num_columns)
        self.cell_width = max(self.width + 2 * self.frame, self.side) + self.gap
        self.captions = [self._wrapped(caption) for caption in shown.captions]
        lines = max((caption.count("\n") + 1 for caption in self.captions), default=0)
        self.cell_height = self.height + 2 * self.frame + self.line * lines + self.gap

    def draw(self, name: str) -> Figure:
        """All pictures with their frames and captions."""
        width = self.num_columns * self.cell_width + self.gap
        height = self.num_rows * self.cell_height + self.title + self.gap
        figure = Figure(figsize=(width / DOTS_PER_INCH, height / DOTS_PER_INCH), dpi=DOTS_PER_INCH)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.text(self.gap, self.title / 2, plain(name), va="center", fontsize=10)
        axes.imshow(self._canvas(width, height), interpolation="none", extent=(0, width, height, 0), aspect="auto")
        for index, caption in enumerate(self.captions[: self.num_pictures]):
            left, top = self._corner(index)
            below = top + self.height + 2 * self.frame + 2
            axes.text(left, below, caption, va="top", fontsize=7.5, color=self._colour(index), linespacing=1.1)
        return figure

    def _canvas(self, width: int, height: int) -> NDArray[np.uint8]:
        canvas = np.full((height, width, 3), 255, np.uint8)
        for index, pixels in enumerate(self.pixels):
            left, top = self._corner(index)
            framed = canvas[top : top + self.height + 2 * self.frame, left : left + self.width + 2 * self.frame]
            framed[:] = _bytes(self._colour(index))
            framed[self.frame : -self.frame, self.frame : -self.frame] = pixels
        return canvas

    def _corner(self, index: int) -> tuple[int, int]:
        row, column = divmod(index, self.num_columns)
        return self.gap + column * self.cell_width, self.title + row * self.cell_height

    def _colour(self, index: int) -> str:
        right = self.shown.right
        return (RIGHT if right[index] else WRONG) if index < len(right) else NEUTRAL

    def _wrapped(self, caption: str) -> str:
        return plain("\n".join(textwrap.wrap(caption, self.cell_width // 6, max_lines=2, placeholder="…")))


def averaged(pixels: NDArray[np.uint8], longest: int) -> NDArray[np.uint8]:
    """Pictures averaged down by a whole factor until no side is longer; gray ones keep their single channel."""
    pixels = pixels.reshape(*pixels.shape[:3], -1 if pixels.size else 3)
    number, height, width, channels = pixels.shape
    factor = math.ceil(max(height, width) / longest)
    if factor <= 1:
        return pixels
    rows, columns = max(1, height // factor), max(1, width // factor)
    blocks = pixels[:, : rows * factor, : columns * factor].reshape(number, rows, -1, columns, factor, channels)
    return blocks.mean((2, 4)).round().astype(np.uint8)


def _bytes(colour: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour.removeprefix("#")))


def _matrix(name: str, shown: Matrix) -> Figure:
    """The share of each row as colour, strong for small shares too, because errors are what people look for."""
    number = max(1, len(shown.labels))
    cell = float(np.clip(14 / number, 0.02, max(0.45, 2 / number)))  # inches
    side = cell * number + 1.2 + 0.06 * min(20, max(map(len, shown.labels), default=0))
    figure = Figure(figsize=(side + 1, side), dpi=DOTS_PER_INCH, layout="compressed")
    axes = figure.add_subplot()
    shares = shown.counts / np.maximum(shown.counts.sum(1, keepdims=True), 1)
    image = axes.imshow(shares, cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
    bar = figure.colorbar(image, ax=axes, label=f"share of the {shown.rows}", shrink=min(0.9, 4 / side), aspect=25)
    bar.set_ticks([0, 0.01, 0.1, 0.5, 1], labels=["0", "1 %", "10 %", "50 %", "100 %"])
    axes.set(title=plain(name), xlabel=shown.columns, ylabel=shown.rows)
    font = min(9.0, 72 * cell * 0.75)
    _name_classes(axes, shown.labels, font)
    if font >= 4:
        _write_counts(axes, shown.counts, shares, 72 * cell)
    return figure


def _name_classes(axes: Axes, labels: list[str], font: float) -> None:
    """Every class, or every second, third … where the names would overlap."""
    places = range(0, len(labels), max(1, math.ceil(5 / font)))
    names = [_short(labels[place], 20) for place in places]
    upright = all(len(label) <= 2 for label in labels)
    axes.set_xticks(places, names, rotation=0 if upright else 90, fontsize=max(font, 5))
    axes.set_yticks(places, names, fontsize=max(font, 5))


def _write_counts(axes: Axes, counts: NDArray[np.int64], shares: NDArray[np.float64], cell: float) -> None:
    """As large as a cell of that many points allows."""
    smallest = np.sort(counts, axis=None)[-MOST_NUMBERS - 1] if counts.size > MOST_NUMBERS else 0
    for row, column in np.argwhere(counts > smallest):
        text = str(counts[row, column])
        colour = "white" if shares[row, column] > 0.3 else "black"
        font = min(9.0, 0.75 * cell, 1.4 * cell / len(text))
        axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=font)


def _precision_recall(name: str, shown: PrecisionRecall) -> Figure:
    """One curve a class, the worst first; beyond ten, the better ones stay gray and nameless."""
    classes = {label: found for label, found in shown.classes.items() if found.num_positives}
    labels = sorted(classes, key=lambda label: classes[label].average_precision)
    figure = Figure(figsize=(7.5, 5), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    for label in labels[MOST_CURVES:]:
        axes.plot(*_curve(classes[label]), drawstyle="steps-pre", color=PALE, linewidth=0.8)
    for place, label in enumerate(labels[:MOST_CURVES]):
        text = f"{classes[label].average_precision:.3f}  {_short(label, 24)}"
        axes.plot(*_curve(classes[label]), drawstyle="steps-pre", color=colormaps["tab10"](place), label=text)
    axes.set(title=plain(name), xlabel="recall", ylabel="precision", xlim=(-0.02, 1.02), ylim=(-0.02, 1.02))
    open_axes(axes)
    if labels:
        title = "average precision" + (f", worst {MOST_CURVES}" if len(labels) > MOST_CURVES else "")
        figure.legend(loc="outside right upper", title=title, fontsize=8, title_fontsize=8, frameon=False)
    return figure


def _curve(found: Detection) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Recall and precision where recall grows: the steps whose area is the average precision."""
    rising = np.flatnonzero(np.diff(found.true_positives, prepend=0))
    places = rising[np.unique(np.linspace(0, len(rising) - 1, MOST_POINTS).round().astype(int))]
    recall, precision = found.recall[places], found.precision[places]
    return np.concatenate([[0.0], recall]), np.concatenate([precision[:1], precision])


def _histogram(name: str, shown: Histogram) -> Figure:
    figure = Figure(figsize=(6, 3.5), dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    axes.stairs(shown.counts, shown.edges, fill=True, color=COLOURS[0])
    open_axes(axes)
    axes.set(title=plain(name), xlabel="value", ylabel="count")
    return figure


def _curves(name: str, shown: Curves) -> Figure:
    """The curves, and below them how far each is from the first."""
    figure = Figure(figsize=(7.5, 5.4), dpi=DOTS_PER_INCH, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    first = next(iter(shown.values.values()))
    for place, (label, values) in enumerate(shown.values.items()):
        style = {"color": LINES[place % len(LINES)], "linestyle": "--" if place else "-", "linewidth": 1.8}
        above.plot(shown.places, values, label=plain(label), **style)
        if place:
            below.plot(shown.places, values - first, **style)
            below.fill_between(shown.places, values - first, color=style["color"], alpha=0.15, linewidth=0)
        if label in shown.marks:
            what, where = shown.marks[label]
            for axes in (above, below):
                axes.axvline(where, color=style["color"], linestyle=style["linestyle"], linewidth=0.9, alpha=0.8)
            above.plot([], [], color=style["color"], linestyle=style["linestyle"], linewidth=0.9, label=plain(what))
    above.set(title=plain(name), ylabel=plain(shown.up))
    below.set(xlabel=plain(shown.across), ylabel="difference")
    below.axhline(0, color="0.6", linewidth=0.8)
    for axes in (above, below):
        open_axes(axes)
        axes.margins(x=0)
    figure.align_ylabels()
    above.legend(frameon=False, fontsize=9)
    return figure


def _parity(name: str, shown: Parity) -> Figure:
    """Counts as colour on a logarithmic scale, on which single outliers are seen too."""
    figure = Figure(figsize=(6.2, 5.2), dpi=DOTS_PER_INCH, layout="compressed")
    axes = figure.add_subplot()
    ends = (shown.low, shown.high)
    counts = np.ma.masked_less(shown.counts.T, 0.5)
    norm = LogNorm(1, max(2.0, float(shown.counts.max(initial=0))))
    image = axes.imshow(counts, cmap="viridis", norm=norm, origin="lower", extent=ends * 2, interpolation="nearest")
    figure.colorbar(image, ax=axes, label="number of values", shrink=0.85, pad=0.03)
    _diagonal(axes, ends)
    axes.set(title=plain(name), xlabel=plain(f"true {shown.what}"), ylabel=plain(f"predicted {shown.what}"))
    _write_beside(axes, plain("\n".join(shown.words)), shown.counts)
    return figure


def _write_beside(axes: Axes, words: str, counts: NDArray[np.float64]) -> None:
    """Words above the diagonal, or below it where that is emptier: a constant error puts all points on one side."""
    half, edge = -(-len(counts) // 2), -(-len(counts) // 5)
    is_free = counts[:half, -edge:].sum() <= counts[-half:, :edge].sum()
    x, y, horizontal, vertical = (0.03, 0.97, "left", "top") if is_free else (0.97, 0.03, "right", "bottom")
    axes.text(x, y, words, transform=axes.transAxes, ha=horizontal, va=vertical, fontsize=9)


def _diagonal(axes: Axes, ends: tuple[float, float]) -> None:
    axes.plot(ends, ends, color=GRAY, linewidth=0.9, linestyle=(0, (5, 4)))
    axes.set(xlim=ends, ylim=ends, aspect="equal")
    open_axes(axes)


def _parity_points(name: str, shown: ParityPoints) -> Figure:
    """Each point with its name, as long as they are few."""
    figure = Figure(figsize=(6.2, 5.2), dpi=DOTS_PER_INCH, layout="compressed")
    axes = figure.add_subplot()
    both = np.concatenate([shown.true, shown.predicted])
    margin = 0.12 * max(float(np.ptp(both)), 1e-3 * float(np.abs(both).max()), 1e-12)
    _diagonal(axes, (float(both.min()) - margin, float(both.max()) + margin))
    axes.scatter(shown.true, shown.predicted, color=LINES[1], s=42, zorder=3, edgecolor="white", linewidth=0.8)
    if len(shown.names) <= MOST_NAMES:
        _name_points(axes, shown)
    axes.set(title=plain(name), xlabel=plain(f"true {shown.what}"), ylabel=plain(f"predicted {shown.what}"))
    axes.ticklabel_format(useOffset=False)
    return figure


def _name_points(axes: Axes, shown: ParityPoints) -> None:
    """To the side that has more room."""
    middle = sum(axes.get_xlim()) / 2
    for label, true, predicted in zip(shown.names, shown.true, shown.predicted, strict=True):
        side, align = (7, "left") if true < middle else (-7, "right")
        axes.annotate(
            _short(label, 24), (true, predicted), (side, 0), textcoords="offset points", fontsize=8, ha=align,
            va="center",
        )  # fmt: skip
