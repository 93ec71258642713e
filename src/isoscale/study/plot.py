"""Line charts as SVG: drawn here, so that a page needs no script to show them."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.ticker import LogLocator, MaxNLocator

from isoscale.observe.text import number, plain_number
from isoscale.study.charts import spans_decades, time_unit
from isoscale.study.facts import Curve, Point
from isoscale.study.markup import Markup, element, joined

WIDTH, HEIGHT = 480, 270
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 10, 34
MARGIN = 0.04
"""Above and below the curves, as a share of the axis."""
MOST_RANGE = 1e60
"""Between the largest and the smallest value on a logarithmic axis: more is a mistake, and floats end."""
MOST_POINTS = 600
"""Of one curve: more than the chart is wide."""


@dataclass(frozen=True)
class Line:
    """A curve of a chart, as it is called and as it looks."""

    name: str
    style: str
    """A class of the style sheet."""
    curve: Curve


@dataclass(frozen=True)
class Axis:
    """From values to places: `low` lies at `begin`, `high` at `end`."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value lies."""
        low, high, value = (math.log(each) if self.log else each for each in (self.low, self.high, value))
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        """About five round values inside the axis."""
        few_decades = self.log and self.high / self.low < 50
        locator = (
            LogLocator(subs=(1, 2, 5) if few_decades else (1,)) if self.log else MaxNLocator(5, steps=[1, 2, 5, 10])
        )
        slack = 1e-9 * abs(self.high - self.low)
        ticks = [float(tick) for tick in locator.tick_values(self.low, self.high)]
        return [tick for tick in ticks if self.low - slack <= tick <= self.high + slack]


def chart(title: str, lines: Sequence[Line]) -> Markup:
    """A chart by step and by time, on a linear and, where values allow it, on a logarithmic axis, with its legend."""
    lines = [Line(line.name, line.style, thinned(line.curve)) for line in lines]
    numbers = [point.value for line in lines for point in _drawable(line.curve)]
    has_log = bool(numbers) and min(numbers) > 0 and 1 < max(numbers) / min(numbers) < MOST_RANGE
    scales = [False, True] if has_log else [False]
    starts_log = has_log and "loss" in title and spans_decades(numbers)
    drawings = [_drawing(title, lines, by_time, log) for by_time in (False, True) for log in scales]
    switch = element("label", element("input", type="checkbox", class_="log", checked=starts_log), " log")
    return element(
        "figure",
        element("figcaption", element("h3", title), switch if has_log else None),
        element("div", *(legend_entry(line.name, line.style) for line in lines if line.name != title), class_="legend"),
        *drawings,
        element("p", _last_values(lines), class_="readout"),
        _data(lines),
        class_="chart",
    )


def thinned(curve: Curve) -> Curve:
    """At most about MOST_POINTS of a curve: of each stretch the smallest and the largest value, and the last point."""
    if len(curve) <= MOST_POINTS:
        return curve
    stretch = math.ceil(2 * len(curve) / MOST_POINTS)
    kept: set[int] = {0, len(curve) - 1}
    for start in range(0, len(curve), stretch):
        places = range(start, min(start + stretch, len(curve)))
        finite = [place for place in places if math.isfinite(curve[place].value)]
        kept.update([place for place in places if place not in finite][:1])
        if finite:
            kept |= {min(finite, key=lambda i: curve[i].value), max(finite, key=lambda i: curve[i].value)}
    return [curve[place] for place in sorted(kept)]


def _drawable(curve: Curve) -> Curve:
    return [point for point in curve if math.isfinite(point.value)]


def _drawing(title: str, lines: Sequence[Line], by_time: bool, log: bool) -> Markup:
    points = [point for line in lines for point in line.curve]
    unit, scale = time_unit(max(point.seconds for point in points))
    across: Callable[[Point], float] = (lambda point: point.seconds / scale) if by_time else lambda point: point.step
    horizontal = Axis(0.0, max(map(across, points)) or 1.0, LEFT, WIDTH - RIGHT)
    vertical = _vertical([point.value for point in _drawable(points)], log)
    shapes = [
        *(_path(line, across, horizontal, vertical) for line in lines),
        *(_mark(point, horizontal.place(across(point))) for point in points if not math.isfinite(point.value)),
    ]
    return frame(
        _description(title, lines),
        horizontal,
        vertical,
        f"time of training ({unit})" if by_time else "step",
        "",
        shapes,
        data_by="time" if by_time else "step",
        data_scale="log" if log else "linear",
    )


def frame(
    description: str,
    horizontal: Axis,
    vertical: Axis,
    across: str,
    up: str,
    shapes: Sequence[Markup],
    **attributes: str,
) -> Markup:
    """A drawing with its two axes, their names, and a description for those who cannot see it."""
    bottom, middle = HEIGHT - BOTTOM, (LEFT + WIDTH - RIGHT) / 2
    name = element("text", up, transform=f"translate(11 {(TOP + bottom) / 2:g}) rotate(-90)", text_anchor="middle")
    return element(
        "svg",
        element("title", description),
        *(_horizontal_tick(horizontal.place(tick), plain_number(tick)) for tick in horizontal.ticks()),
        *(_vertical_tick(vertical.place(tick), plain_number(tick)) for tick in vertical.ticks()),
        element("text", across, x=middle, y=HEIGHT - 3, text_anchor="middle"),
        name if up else None,
        *shapes,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        **attributes,
    )


def _horizontal_tick(x: float, text: str) -> Markup:
    bottom = HEIGHT - BOTTOM
    line = element("line", x1=x, x2=x, y1=TOP, y2=bottom, class_="ruler")
    return joined([line, element("text", text, x=x, y=bottom + 15, text_anchor="middle")])


def _vertical_tick(y: float, text: str) -> Markup:
    line = element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="ruler")
    return joined([line, element("text", text, x=LEFT - 6, y=y + 4, text_anchor="end")])


def _vertical(values: Sequence[float], log: bool) -> Axis:
    """An axis with room for all values and a little more, whatever they are."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if log:
        room = (high / low) ** MARGIN
        return Axis(low / room, high * room, HEIGHT - BOTTOM, TOP, log)
    room = MARGIN * (high - low) or abs(low) * 0.1 or 0.5
    return Axis(low - room, high + room, HEIGHT - BOTTOM, TOP)


def _path(line: Line, across: Callable[[Point], float], horizontal: Axis, vertical: Axis) -> Markup:
    places = [(horizontal.place(across(point)), vertical.place(point.value)) for point in _drawable(line.curve)]
    if len(places) == 1:
        return element("circle", cx=places[0][0], cy=places[0][1], r=3.5, class_=f"dot {line.style}")
    words = "M" + "L".join(f"{x:g} {y:g}" for x, y in places)
    return element("path", d=words, class_=line.style) if places else Markup("")


def _mark(point: Point, x: float) -> Markup:
    """A value that no axis can show, such as NaN."""
    text = f"{point.value} at step {point.step}"
    return element("text", element("title", text), "×", x=x, y=TOP + 12, text_anchor="middle", class_="bad")


def legend_entry(name: str, style: str) -> Markup:
    """A short piece of a line, and what it stands for."""
    piece = element("path", d="M1 6L25 6", class_=style)
    return element("span", element("svg", piece, viewBox="0 0 26 12", aria_hidden="true"), name, class_="key")


def _last_values(lines: Sequence[Line]) -> str:
    """What stands below the chart until the pointer is on it."""
    texts = {line.name: f"{line.name} {number(line.curve[-1].value)}" for line in lines}
    return f"last: {' · '.join(texts.values())}"


def _description(title: str, lines: Sequence[Line]) -> str:
    """The chart in words, for those who cannot see it."""
    texts = []
    for line in lines:
        points = _drawable(line.curve)
        if points:
            first, last = points[0], points[-1]
            texts.append(
                f"{line.name}: {plain_number(first.value)} at step {first.step}, "
                f"{plain_number(last.value)} at step {last.step}"
            )
    return f"{title}. {'; '.join(texts)}"


def _data(lines: Sequence[Line]) -> Markup:
    """The numbers behind the lines, in their order, for the script that shows them under the pointer."""
    values = [
        {
            "name": line.name,
            "step": [point.step for point in points],
            "time": [float(f"{point.seconds:.6g}") for point in points],
            "value": [number(point.value) for point in points],
        }
        for line in lines
        if len(points := _drawable(line.curve)) > 1
    ]
    text = json.dumps(values, separators=(",", ":")).replace("<", "\\u003c")
    return element("script", Markup(text), type="application/json")
