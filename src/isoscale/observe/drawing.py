"""Drawing figures, for every observer that shows pictures."""

import math
import textwrap
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from isoscale.observe.figures import (
    Bands,
    Curves,
    Detection,
    Drawable,
    Histogram,
    JointHistograms,
    Matrix,
    Parity,
    ParityPoints,
    Pictures,
    PrecisionRecall,
    Slices,
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
HIGHEST = 3.0
"""Up to where curves are shown that should be 1; what is far beyond would hide the others."""
UNSIGNED, SIGNED, APART = "inferno", "PuOr_r", "RdBu_r"
"""The colours of images: of any values, of values about zero, and of differences."""


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
        case Bands():
            return _bands(name, shown)
        case Slices():
            return _slices(name, shown)
        case JointHistograms():
            return _joint_histograms(name, shown)


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
    is_ratio = shown.below == "ratio"
    for place, (label, values) in enumerate(shown.values.items()):
        style = {"color": LINES[place % len(LINES)], "linestyle": "--" if place else "-", "linewidth": 1.8}
        drawn = np.where(values > 0, values, np.nan) if "y" in shown.logarithmic else values
        above.plot(shown.places, drawn, label=plain(label), **style)
        if place:
            nothing = np.full_like(first, np.nan)
            apart = np.divide(values, first, nothing, where=first > 0) if is_ratio else values - first
            below.plot(shown.places, apart, **style)
            low, high = shown.bands.get(label, (np.full_like(apart, float(is_ratio)), apart))
            below.fill_between(shown.places, low, high, color=style["color"], alpha=0.15, linewidth=0)
        if label in shown.marks:
            what, where = shown.marks[label]
            for axes in (above, below):
                axes.axvline(where, color=style["color"], linestyle=style["linestyle"], linewidth=0.9, alpha=0.8)
            above.plot([], [], color=style["color"], linestyle=style["linestyle"], linewidth=0.9, label=plain(what))
    above.set(title=plain(name), ylabel=plain(shown.up))
    below.set(xlabel=plain(shown.across), ylabel=shown.below)
    below.axhline(float(is_ratio), color="0.6", linewidth=0.8)
    if is_ratio:
        _look_near_one(below)
    for axes in (above, below):
        open_axes(axes)
        axes.margins(x=0)
        if "x" in shown.logarithmic:
            _logarithmic_x(axes, shown.places)
    if "y" in shown.logarithmic and any((values > 0).any() for values in shown.values.values()):
        above.set_yscale("log")
    figure.align_ylabels()
    above.legend(frameon=False, fontsize=9)
    return figure


def _look_near_one(axes: Axes) -> None:
    """Ratios up to two, however large they are where there is next to nothing."""
    low, high = axes.get_ylim()
    half = min(1.0, max(0.05, 1 - low, high - 1))
    axes.set_ylim(1 - half, 1 + half)


def _logarithmic_x(axes: Axes, places: NDArray[np.float64]) -> None:
    """With plain numbers, and enough of them where the axis has no power of ten."""
    axes.set_xlim(places[0], places[-1])
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _bands(name: str, shown: Bands) -> Figure:
    """Panels one above the other, in each all curves with their bands."""
    figure = Figure(figsize=(7.5, 0.8 + 2.6 * len(shown.panels)), dpi=DOTS_PER_INCH, layout="constrained")
    every = figure.subplots(len(shown.panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (up, curves) in zip(every, shown.panels.items(), strict=True):
        for place, (label, band) in enumerate(curves.items()):
            colour = COLOURS[place % len(COLOURS)]
            axes.fill_between(shown.places, band.low, band.high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(shown.places, band.values, color=colour, label=_short(label, 24), linewidth=1.8)
        axes.axhline(1, color="0.6", linewidth=0.8)
        axes.set_ylabel(_short(up, 40))
        lowest = min((float(np.nanmin(band.low, initial=1.0)) for band in curves.values()), default=0.0)
        low, high = axes.get_ylim()
        axes.set_ylim(max(low, lowest - 0.1), min(high, HIGHEST))
        open_axes(axes)
        axes.margins(x=0)
        _logarithmic_x(axes, shown.places)
        if shown.words:
            axes.fill_between([], [], [], color=GRAY, alpha=0.18, linewidth=0, label=_short(shown.words, 40))
        if shown.mark is not None:
            what, where = shown.mark
            axes.axvline(where, color=GRAY, linewidth=0.9, linestyle=(0, (5, 4)), label=_short(what, 40))
    every[0].set_title(plain(name))
    every[-1].set_xlabel(plain(shown.across))
    handles, labels = every[0].get_legend_handles_labels()  # outside, because bands leave no room
    figure.legend(handles, labels, loc="outside upper center", ncols=min(5, len(labels)), frameon=False, fontsize=9)
    figure.align_ylabels()
    return figure


def _slices(name: str, shown: Slices) -> Figure:
    """Rows of images with a colour bar below each column, and one more below a row of differences."""
    num_rows, num_columns = shown.values.shape[:2]
    layout = _Table(num_rows, num_columns, shown.difference)
    for column, (words, signed) in enumerate(zip(shown.columns, shown.signed, strict=True)):
        values = shown.values[:, column]
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        if signed:
            low, high = -max(-low, high), max(-low, high)
        for row in range(num_rows):
            image = layout.draw(row, column, values[row], SIGNED if signed else UNSIGNED, low, high)
        layout.explain(num_rows - 1, column, image)
        if shown.difference:
            apart = values[1] - values[0]
            most = float(np.nanmax(np.abs(apart), initial=0))
            layout.explain(num_rows, column, layout.draw(num_rows, column, apart, APART, -most, most))
        layout.write(layout.left + column * layout.step + layout.side / 2, layout.top - 0.12, words, ha="center")
    for row, words in enumerate([*shown.rows, *(["difference"] if shown.difference else [])]):
        layout.write(layout.left - 0.12, layout.middle(row), words, rotation=90, ha="center")
    layout.write(layout.left, 0.14, " – ".join(filter(None, (name, shown.words))))
    return layout.figure


class _Table:
    """Square images in rows and columns, with colour bars below some rows; all lengths in inches, from above."""

    side, gap, bar, numbers = 1.75, 0.08, 0.09, 0.26
    left, top = 0.3, 0.55

    def __init__(self, num_rows: int, num_columns: int, difference: bool) -> None:
        """The last row has a bar; with `difference`, another row with a bar follows."""
        self.step = self.side + self.gap
        self._num_rows = num_rows
        self.width = self.left + num_columns * self.step
        below = self.gap + self.bar + self.numbers
        self.height = self.top + (num_rows + difference) * self.step + (1 + difference) * below - self.gap
        self.figure = Figure(figsize=(self.width, self.height), dpi=DOTS_PER_INCH)

    def start(self, row: int) -> float:
        """Where a row begins."""
        below = self.gap + self.bar + self.numbers if row >= self._num_rows else 0.0
        return self.top + row * self.step + below

    def middle(self, row: int) -> float:
        return self.start(row) + self.side / 2

    def draw(
        self, row: int, column: int, values: NDArray[np.float64], colours: str, low: float, high: float
    ) -> AxesImage:
        axes = self._axes(self.left + column * self.step, self.start(row), self.side)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_linewidth(0.5)
        if not high > low:
            low, high = low - 1e-3, high + 1e-3
        return axes.imshow(values, cmap=colours, vmin=low, vmax=high, interpolation="nearest", aspect="auto")

    def explain(self, row: int, column: int, image: AxesImage) -> None:
        """A colour bar below an image."""
        axes = self._axes(self.left + column * self.step, self.start(row) + self.side + self.gap, self.bar)
        bar = self.figure.colorbar(image, cax=axes, orientation="horizontal", ticks=MaxNLocator(4, prune="both"))
        axes.tick_params(labelsize=8, length=2, pad=1.5)
        bar.outline.set_linewidth(0.4)

    def write(self, x: float, y: float, words: str, **style: Any) -> None:
        self.figure.text(x / self.width, 1 - y / self.height, plain(words), va="center", fontsize=10, **style)

    def _axes(self, x: float, y: float, height: float) -> Axes:
        place = (x / self.width, 1 - (y + height) / self.height, self.side / self.width, height / self.height)
        return self.figure.add_axes(place)


def _joint_histograms(name: str, shown: JointHistograms) -> Figure:
    """Side by side on one logarithmic scale of colours, each with the mean of the first as a line."""
    count = len(shown.names)
    figure = Figure(figsize=(3.4 * count + 1, 3.9), dpi=DOTS_PER_INCH, layout="constrained")
    every = figure.subplots(1, count, sharex=True, sharey=True, squeeze=False)[0]
    some = shown.shares[shown.shares > 0]
    low, high = (float(some.min()), float(some.max())) if some.size else (1.0, 10.0)
    norm = LogNorm(low, max(high, 1.001 * low))
    extent = (*shown.x_range, *shown.y_range)
    x, y = (
        _middles(*ends, bins) for ends, bins in zip((shown.x_range, shown.y_range), shown.shares.shape[1:], strict=True)
    )
    total = shown.shares[0].sum(1)
    mean = np.divide(shown.shares[0] @ y, total, np.full_like(total, np.nan), where=total > 0)
    for axes, label, shares in zip(every, shown.names, shown.shares, strict=True):
        masked = np.ma.masked_less_equal(shares.T, 0)
        image = axes.imshow(masked, cmap="viridis", norm=norm, origin="lower", extent=extent, aspect="auto",
                            interpolation="nearest")  # fmt: skip
        axes.plot(
            x, mean, color=COLOURS[1], linewidth=1.4, linestyle="--", label=f"mean of the {_short(shown.names[0], 24)}"
        )
        axes.set(title=_short(label, 24), xlabel=plain(shown.across))
        axes.title.set_fontsize(10)
        open_axes(axes)
    every[0].set_ylabel(plain(shown.up))
    every[0].legend(frameon=False, fontsize=8)
    figure.colorbar(image, ax=list(every), label=plain(shown.what), pad=0.02)
    figure.suptitle(plain(name), fontsize=10)
    return figure


def _middles(low: float, high: float, bins: int) -> NDArray[np.float64]:
    return low + (high - low) * (np.arange(bins) + 0.5) / bins


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
