"""The picture of a scaling study: speed-up over the number of ranks, beside what would be ideal."""

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from isoscale.observe.style import COLOURS, open_axes, plain, save
from isoscale.study.scale.study import Row, Study
from isoscale.study.scale.table import title


def draw(study: Study, path: Path) -> bool:
    """Write the picture; False where there is no speed-up to draw yet."""
    rows = [row for row in study.rows() if row.speedup is not None]
    if not rows:
        return False
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    _draw(axes, rows, study.ranks[0])
    axes.set_title(plain(title(study)))
    save(figure, path)
    return True


def _draw(axes: Axes, rows: list[Row], base: int) -> None:
    counts = [row.ranks for row in rows]
    ideal = [count / base for count in counts]
    speedups = [row.speedup or 0.0 for row in rows]
    axes.plot(counts, ideal, color="0.6", linestyle="--", label="ideal")
    label = "measured" if max(row.num_repeats for row in rows) == 1 else "measured, median and range"
    axes.errorbar(counts, speedups, yerr=_spread(rows), color=COLOURS[0], marker="o", capsize=3, label=label)
    lowest = min(speedup * row.seconds_per_100 / row.slowest for row, speedup in zip(rows, speedups, strict=True))
    for row, speedup in zip(rows[1:], speedups[1:], strict=True):
        axes.annotate(
            f"{row.efficiency:.0%}", (row.ranks, speedup), (-8, 6), textcoords="offset points", ha="right", fontsize=9
        )
    _scale(axes, counts, _powers_of_two(lowest, max(ideal)))
    axes.set(xlabel="ranks", ylabel=f"speed-up against {base} rank{'s' * (base > 1)} (efficiency at the points)")
    open_axes(axes)
    axes.legend(frameon=False, loc="upper left")


def _spread(rows: list[Row]) -> Any:
    """Below and above the median, where there are repeats."""
    if all(row.num_repeats == 1 for row in rows):
        return None
    values = [(row.speedup or 0.0, row.seconds_per_100) for row in rows]
    below = [speedup * (1 - median / row.slowest) for row, (speedup, median) in zip(rows, values, strict=True)]
    above = [speedup * (median / row.fastest - 1) for row, (speedup, median) in zip(rows, values, strict=True)]
    return [below, above]


def _powers_of_two(lowest: float, highest: float) -> list[float]:
    return [2.0**power for power in range(math.floor(math.log2(lowest)), math.ceil(math.log2(highest)) + 1)]


def _scale(axes: Axes, counts: list[int], ticks: list[float]) -> None:
    """Doubling the ranks is a step of the same length everywhere."""
    axes.set(xscale="log", yscale="log", ylim=(ticks[0] / 1.2, ticks[-1] * 1.2))
    for axis, places in ((axes.xaxis, [float(count) for count in counts]), (axes.yaxis, ticks)):
        axis.set_major_locator(FixedLocator(places))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
