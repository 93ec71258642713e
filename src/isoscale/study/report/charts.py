"""Line charts as SVG, drawn by matplotlib in the colours of the page's style sheet, light and dark."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

from isoscale.observe.figures import Detection, Histogram
from isoscale.observe.style import COLOURS, GRAY, NEUTRAL, PALE, same_bytes
from isoscale.observe.text import number, plain_number
from isoscale.study.charts import spans_decades, time_unit
from isoscale.study.facts import Curve

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 56, 468, 10, 236
"""Where the axes end, from the upper left corner."""
MARGIN = 0.04
"""Above and below the curves, as a share of the axis."""
MOST_RANGE = 1e60
"""Between the largest and the smallest value on a logarithmic axis: more is a mistake, and floats end."""
MOST_POINTS = 600
"""Of one curve: more than the chart is wide."""
MOST_STEPS = 200
"""Of one curve of precision against recall."""
VARIABLES = {
    **{colour: f"var(--c{place})" for place, colour in enumerate(COLOURS)},
    **{GRAY: "var(--soft)", PALE: "var(--rule)", NEUTRAL: "var(--plain)", "#ffffff": "var(--paper)"},
}
"""What colours are called in the style sheet, which has another shade of each for dark pages."""


@dataclass(frozen=True)
class Style:
    """How a line looks, in a drawing and in a legend."""

    name: str
    colour: str
    width: float = 2.0
    alpha: float = 1.0
    dashes: tuple[float, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """For matplotlib, which counts dashes in widths; unclipped, because clip paths have ids and fail if hidden."""
        line = (0, tuple(length / self.width for length in self.dashes)) if self.dashes else "-"
        return {"color": self.colour, "linewidth": self.width, "alpha": self.alpha, "linestyle": line,
                "gid": f"line:{self.name}", "clip_on": False}  # fmt: skip

    @property
    def css(self) -> str:
        """For the piece of line in a legend."""
        dashes = " ".join(f"{length:g}" for length in self.dashes) or "none"
        return (
            f"stroke:{VARIABLES[self.colour]};stroke-width:{self.width:g};opacity:{self.alpha:g};"
            f"stroke-dasharray:{dashes}"
        )


STAGES = {
    "train": ("training, each log", Style("train-window", COLOURS[0], 1.2, 0.75)),
    "train_epoch": ("training, each epoch", Style("train", COLOURS[0])),
    "val": ("validation", Style("val", COLOURS[1], 2.6)),
    "test": ("test", Style("test", COLOURS[2])),
    "": ("", Style("plain", NEUTRAL)),
}
"""What a curve is called, and how it looks; in the order of the legend."""
CLASSES = [Style(f"class-{place}", colour, 2.0, 1.0, ((), (6, 3), (2, 2))[place // 3])
           for place, colour in enumerate(COLOURS)]  # fmt: skip
"""Of the classes that are found worst; the others have the next one in common."""
OTHER_CLASSES = Style("class-other", PALE, 1.2)


@dataclass(frozen=True)
class Line:
    """A curve of a chart, as it is called and as it looks."""

    name: str
    style: Style
    curve: Curve

    @property
    def finite(self) -> Curve:
        """What an axis can show of it."""
        return [point for point in self.curve if math.isfinite(point.value)]


def chart(title: str, lines: Sequence[Line]) -> dict[str, Any]:
    """A chart by step and by time, on a linear and, where values allow it, on a logarithmic axis, for the template."""
    lines = [Line(line.name, line.style, thinned(line.curve)) for line in lines]
    shown = [line for line in lines if line.finite]
    values = [point.value for line in shown for point in line.finite]
    has_log = bool(values) and min(values) > 0 and 1 < max(values) / min(values) < MOST_RANGE
    ends = {
        "step": max(point.step for line in lines for point in line.curve) or 1,
        "time": max(point.seconds for line in lines for point in line.curve) or 1.0,
    }
    texts = [
        f"{line.name}: {plain_number(first.value)} at step {first.step}, {plain_number(last.value)} at step {last.step}"
        for line in shown
        for first, last in [(line.finite[0], line.finite[-1])]
    ]
    return {
        "title": title,
        "lines": lines,
        "has_log": has_log,
        "starts_log": has_log and "loss" in title and spans_decades(values),
        "description": f"{title}. {'; '.join(texts)}",
        "last": {line.name: number(line.curve[-1].value) for line in lines},
        "drawings": [
            {"by": by, "scale": scale, "end": end, "shapes": _drawing(lines, by, end, scale)}
            for by, end in ends.items()
            for scale in (("linear", "log") if has_log else ("linear",))
        ],
        # The numbers behind the lines, for the script that shows them under the pointer.
        "data": [
            {
                "name": line.name,
                "step": [point.step for point in line.finite],
                "time": [float(f"{point.seconds:.6g}") for point in line.finite],
                "value": [number(point.value) for point in line.finite],
            }
            for line in shown
            if len(line.finite) > 1
        ],
    }


def thinned(curve: Curve) -> Curve:
    """At most about MOST_POINTS of a curve: of each attempt the smallest and the largest value, and the last point."""
    if len(curve) <= MOST_POINTS:
        return curve
    attempt = math.ceil(2 * len(curve) / MOST_POINTS)
    kept: set[int] = {0, len(curve) - 1}
    for start in range(0, len(curve), attempt):
        places = range(start, min(start + attempt, len(curve)))
        finite = [place for place in places if math.isfinite(curve[place].value)]
        kept.update([place for place in places if place not in finite][:1])
        if finite:
            kept |= {min(finite, key=lambda i: curve[i].value), max(finite, key=lambda i: curve[i].value)}
    return [curve[place] for place in sorted(kept)]


def _drawing(lines: Sequence[Line], by: str, end: float, scale: str) -> Markup:
    unit, seconds = time_unit(end)
    per, label = (1.0, "step") if by == "step" else (seconds, f"time of training ({unit})")
    values = [point.value for line in lines for point in line.finite]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if scale == "log":
        room = (high / low) ** MARGIN
        ends = (low / room, high * room)
    else:
        room = MARGIN * (high - low) or abs(low) * 0.1 or 0.5
        ends = (low - room, high + room)
    figure, axes = _axes(label, "", (0.0, end / per), ends, scale)
    for line in lines:
        across = {point: (point.step if by == "step" else point.seconds) / per for point in line.curve}
        places, heights = [across[point] for point in line.finite], [point.value for point in line.finite]
        # One point is a line without length, of which the round ends are left.
        dot = {"linewidth": 7, "solid_capstyle": "round"} if len(places) == 1 else {}
        axes.plot(places * (1 + bool(dot)), heights * (1 + bool(dot)), **{**line.style.options, **dot})
        for point in line.curve:
            if not math.isfinite(point.value):
                axes.text(across[point], 1, "×", transform=axes.get_xaxis_transform(), ha="center", va="top",
                          gid=f"bad:{point.value} at step {point.step}")  # fmt: skip
    return shapes(figure)


def _axes(
    across: str, up: str, horizontal: tuple[float, float], vertical: tuple[float, float], scale: str = "linear"
) -> tuple[Figure, Axes]:
    """Axes on a grid, with about five round values each."""
    figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72)
    axes = figure.add_axes(
        (LEFT / WIDTH, 1 - BOTTOM / HEIGHT, (RIGHT - LEFT) / WIDTH, (BOTTOM - TOP) / HEIGHT), yscale=scale
    )
    axes.set(xlim=horizontal, ylim=vertical)
    axes.set_xlabel(across, fontsize=12, labelpad=5)
    axes.set_ylabel(up, fontsize=12)
    decades = math.log10(vertical[1] / vertical[0]) if scale == "log" else 0.0
    locator = LogLocator(subs=(1, 2, 5) if decades < 1.7 else (1,)) if decades > 0.7 else None
    for axis, places in ((axes.xaxis, None), (axes.yaxis, locator)):
        axis.set_major_locator(places or MaxNLocator(5, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: plain_number(value)))
    axes.minorticks_off()
    axes.tick_params(length=0, labelsize=12)
    axes.grid(color=PALE, linewidth=1, clip_on=False)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    return figure, axes


def precision_recall(classes: Sequence[tuple[Detection, Style]]) -> Markup:
    """Curves of precision against recall, the first above the others."""
    figure, axes = _axes("recall", "precision", (0, 1), (0, 1))
    for found, style in reversed(classes):
        places = np.unique(np.linspace(0, len(found.recall) - 1, MOST_STEPS).round().astype(int))
        recall, precision = found.recall[places], found.precision[places]
        # Steps, because between two thresholds nothing is known.
        axes.plot([0, *recall], [precision[0], *precision], drawstyle="steps-pre", **style.options)
    return shapes(figure)


def histogram(shown: Histogram) -> Markup:
    """How many values lie where."""
    edges = shown.edges
    figure, axes = _axes("value", "count", (edges[0], edges[-1]), (0, max(*shown.counts, 1e-300)))
    axes.stairs(shown.counts, edges, fill=True, color=COLOURS[0], clip_on=False)
    return shapes(figure)


_TIDY = [(re.compile(pattern), to) for pattern, to in (
    (r"\s+", " "),
    (r"font-family: [^;\"]*;? ?", ""),
    (r" transform=\"rotate\(-0 [^\"]*\"", ""),
    (r"<g id=\"line:([^\"]*)\">", r'<g class="\1">'),
    (r"<g id=\"bad:([^\"]*)\">", r'<g class="bad"><title>\1</title>'),
    (r"<g id=\"[^\"]*\"(/?)>", r"<g\1>"),
    (r"<g/>", ""),
    (r"> <", "><"),
)]  # fmt: skip
"""What matplotlib writes and a page does not need, and the names that artists were given here."""


def shapes(figure: Figure) -> Markup:
    """What is inside the SVG element of a figure: text in the font of the page, and colours of its style sheet."""
    file = StringIO()
    figure.patch.set_visible(False)
    for axes in figure.axes:
        axes.patch.set_visible(False)
    with same_bytes(), rc_context({"svg.fonttype": "none"}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index('<g id="figure_1">') : text.rindex("</svg>")]
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    for colour, variable in VARIABLES.items():
        text = text.replace(f": {colour}", f": {variable}")
    return Markup(re.sub(r' d="[^"]*"', lambda found: re.sub(r"(\.\d)\d+", r"\1", found[0]), text))
