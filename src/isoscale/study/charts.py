"""The curves of several runs in one picture: by step and by time, a colour for each run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from isoscale.errors import UserError
from isoscale.observe.style import COLOURS, open_axes, plain, save
from isoscale.observe.text import split_stage
from isoscale.study.compare import Comparison, monitored
from isoscale.study.facts import Curve, Facts
from isoscale.study.table import setting_text

SUFFIXES = (".png", ".svg", ".pdf")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
"""For the second and third round of the colours."""
TRAIN: dict[str, Any] = {"linewidth": 0.9, "alpha": 0.8}
VALIDATION: dict[str, Any] = {"linewidth": 2.2}
WIDE_RANGE = 30
"""Between the largest and the smallest loss, from which on a linear axis hides the end of the training."""
MOST_SETTINGS = 2
"""In the legend, beside the name of a run."""
UNITS = (("h", 3600.0), ("min", 60.0), ("s", 1.0))


def check_path(path: Path) -> None:
    """Refuse a file that the picture cannot be written to, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"--out {path}: a picture is written as {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: there is no folder {path.parent}; make it, or choose another one")


def draw(comparison: Comparison, path: Path) -> bool:
    """Write the picture; False where no run has logged anything to draw."""
    runs = comparison.runs
    metrics = [metric for metric in _metrics(comparison) if any(stages(facts, metric) for facts in runs)]
    if not metrics:
        return False
    figure = Figure(figsize=(11, 3.4 * len(metrics) + 0.22 * len(runs) + 0.5), layout="constrained")
    for metric, (by_step, by_time) in zip(metrics, figure.subplots(len(metrics), 2, squeeze=False), strict=True):
        _draw_metric(by_step, by_time, metric, runs)
    _add_legend(figure, comparison)
    save(figure, path)
    return True


def stages(facts: Facts, metric: str) -> dict[str, Curve]:
    """The curves of a metric by stage, that of training by epoch where there is one."""
    found: dict[str, Curve] = {}
    for name, curve in facts.curves.items():
        stage, own = split_stage(name)
        if own == metric and (stage not in found or name.endswith("_epoch")):
            found[stage] = curve
    return found


def _metrics(comparison: Comparison) -> list[str]:
    """What was asked for, or else the loss and the monitored metric."""
    asked = comparison.asked or ["val/loss", monitored(comparison.runs) or "val/loss"]
    return list(dict.fromkeys(split_stage(name)[1] for name in asked))


def _draw_metric(by_step: Axes, by_time: Axes, metric: str, runs: Sequence[Facts]) -> None:
    unit, scale = time_unit(max((facts.last.seconds for facts in runs if facts.last), default=0.0))
    for number, facts in enumerate(runs):
        for stage, curve in stages(facts, metric).items():
            style = {**_style(number), **(TRAIN if stage == "train" else VALIDATION)}
            values = [point.value for point in curve]
            marker = "o" if len(curve) == 1 else ""
            by_step.plot([point.step for point in curve], values, marker=marker, **style)
            by_time.plot([point.seconds / scale for point in curve], values, marker=marker, **style)
    for axes, label in ((by_step, "step"), (by_time, f"time of training ({unit})")):
        axes.set(xlabel=label, ylabel=plain(metric), yscale="log" if _wants_log(metric, runs) else "linear")
        open_axes(axes)


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a time is a handy number, and its seconds."""
    return next((unit for unit in UNITS if seconds >= 2 * unit[1]), UNITS[-1])


def _style(number: int) -> dict[str, Any]:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number // len(COLOURS) % len(DASHES)],
    }


def _wants_log(metric: str, runs: Sequence[Facts]) -> bool:
    curves = [curve for facts in runs for curve in stages(facts, metric).values()]
    return "loss" in metric and spans_decades([point.value for curve in curves for point in curve])


def spans_decades(values: Sequence[float]) -> bool:
    """Whether values are all positive and so far apart that only a logarithmic axis shows them."""
    return bool(values) and min(values) > 0 and max(values) / min(values) > WIDE_RANGE


def _add_legend(figure: Figure, comparison: Comparison) -> None:
    """The runs with what sets them apart, where that is short; and which line is which."""
    handles: list[Line2D] = []
    for number, name in enumerate(_names(comparison)):
        handles.append(Line2D([], [], label=name, **{**_style(number), **VALIDATION}))
    for name, style in (("training", TRAIN), ("validation", VALIDATION)):
        handles.append(Line2D([], [], color="0.4", label=name, **style))
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(len(handles), 130 // (longest + 8)))
    figure.legend(handles=handles, loc="outside lower left", ncols=columns, frameon=False, fontsize=9)


def _names(comparison: Comparison) -> list[str]:
    settings = comparison.settings if len(comparison.settings) <= MOST_SETTINGS else {}
    names = []
    for number, facts in enumerate(comparison.runs):
        words = [f"{key.rpartition('.')[2]} {setting_text(values[number])}" for key, values in settings.items()]
        names.append(plain(", ".join([facts.label, *words])))
    return names
