"""Numbers, durations and events in words, the same for the console and the text log."""

import math
from collections.abc import Iterable, Sequence

from isoscale.observe.events import Ended, EpochEnded, Event, Logged, LoggedByTask, Note, Said, Started
from isoscale.observe.tables import layer_lines

MOST_METRICS = 3
"""Of each stage, in the line of an epoch; metrics.jsonl has them all."""
VALUE_WIDTH = 7
LABEL_WIDTH = 12


def number(value: float) -> str:
    """Four significant digits, written out unless that needs many zeros: 0.9410, 12.34, 123456, 1.200e-05."""
    if 9999.5 <= abs(value) < 1e9:
        return f"{value:.0f}"
    return f"{value:#.4g}".removesuffix(".")


def plain_number(value: float) -> str:
    """Like `number`, without trailing zeros and with thousands apart: 0.001, 12,340."""
    if 999.5 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """A time that passed: 0.4 s, 12.0 s, 2:05, 1:02:05."""
    return f"{seconds:.1f} s" if seconds < 59.95 else clock(seconds)


def clock(seconds: float) -> str:
    """Minutes and seconds, with hours and days when there are any: 0:12, 1:02:05, 2 d 03:00."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02d}:{minute:02d}"
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def num_epochs(started: Started) -> int:
    """Epochs in total, counting one that is cut short."""
    return math.ceil(started.num_steps / max(1, started.steps_per_epoch))


def heading(event: Started | Ended, directory: str = "") -> str:
    """The one line that says what begins or is over."""
    if isinstance(event, Started):
        return event.name + (f", continued at step {event.step} of {event.num_steps}" if event.step else "")
    return f"{event.status} at step {event.step}" + (f", in {directory}" if directory else "")


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Label and text in two columns; a text of several lines stays in its column."""
    width = label_width(rows)
    return [f"  {label:<{width}}  {text}".rstrip() for label, text in _one_line_rows(rows)]


def label_width(rows: Iterable[tuple[str, str]]) -> int:
    """The width of the first column, the same for all short labels."""
    return max([LABEL_WIDTH, *(len(label) for label, _ in rows)])


def start_lines(event: Started) -> list[str]:
    """The start-up summary."""
    return [heading(event), *table(start_rows(event)), *start_tables(event)]


def start_tables(event: Started) -> list[str]:
    """What is data and what is the model made of, each after an empty line."""
    return [line for found in (event.systems, layer_lines(event.layers)) if found for line in ("", *found)]


def start_rows(event: Started) -> list[tuple[str, str]]:
    """Where the run is, and what is said about it."""
    return [("run", event.directory or "nothing is saved"), *event.rows]


def end_lines(event: Ended, directory: str) -> list[str]:
    """The end summary and what to type next."""
    commands = ["", "next:", *table(event.commands)] if event.commands else []
    return [heading(event, directory), *table(event.rows), *commands]


def note_line(event: Note) -> str:
    """The note, after its level unless that is `info`."""
    return event.text if event.level == "info" else f"{event.level}: {event.text}"


def rank_prefix(event: Event, rank: int | None) -> str:
    """Before each line of an event of `rank`, or of the one that said it; nothing where it need not be told apart."""
    if rank is None:
        return ""
    return f"rank {event.rank if isinstance(event, Said) else rank}: "


def prefixed(lines: Iterable[str], prefix: str) -> list[str]:
    """Lines behind a prefix; empty ones stay empty."""
    return [prefix + line if line else "" for line in lines]


def logged_line(event: Logged | LoggedByTask) -> str:
    """Every value under its full name."""
    values = "  ".join(f"{name} {plain_number(value)}" for name, value in event.values.items())
    return f"step {event.step}  epoch {event.epoch + 1}  {values}"


def epoch_line(event: EpochEnded, started: Started | None, width: int | None = None) -> str:
    """One line for an epoch: where, train, val, everything else, a star when it is the best, how long.

    Where that does not fit into `width`, each stage has a metric less, and keeps its loss and the one that says which
    is the best; where that does not fit either, it goes on in further lines, broken between train, val and the rest.
    """
    place = _place(event, started) + "  "
    end = f" {'*' if event.best else ' '}  {duration(event.seconds)}"
    room = math.inf if width is None else width - len(place) - len(end)
    monitored = split_stage(str(started.settings.get("checkpoint.monitor", "")))[1] if started else ""
    cuts = [_packed(_groups(event.values, most, monitored), room) for most in (MOST_METRICS, MOST_METRICS - 1)]
    fitting = [lines for lines in cuts if max(map(len, lines), default=0) <= room]
    lines = next((lines for lines in fitting if len(lines) <= 1), (fitting or cuts)[0])
    return place + ("\n" + " " * len(place)).join(lines) + end


def _packed(groups: list[str], room: float) -> list[str]:
    """As few lines as hold the groups, none wider than `room` unless a group alone is."""
    lines: list[str] = []
    for group in groups:
        if lines and len(lines[-1]) + len(group) + 3 <= room:
            lines[-1] += f" | {group}"
        else:
            lines.append(group)
    return lines


def _place(event: EpochEnded, started: Started | None) -> str:
    if started is None:
        return f"epoch {event.epoch + 1}  step {event.step}"
    total = num_epochs(started)
    return f"epoch {event.epoch + 1:>{len(str(total))}}/{total}  step {event.step:>{len(str(started.num_steps))}}"


def _groups(values: dict[str, float], most: int, monitored: str) -> list[str]:
    """The values by stage: train first, then val, test and those that belong to no stage."""
    stages: dict[str, dict[str, float]] = {"train": {}, "val": {}, "test": {}, "": {}}
    for name, value in values.items():
        stage, metric = split_stage(name)
        if not name.startswith("time/"):
            stages[stage][metric] = value
    return [_group(stage, metrics, most, monitored) for stage, metrics in stages.items() if metrics]


def _group(stage: str, metrics: dict[str, float], most: int, monitored: str) -> str:
    # of names that a module gives itself, those of a validation come first: val_acc, accuracy, train_acc
    by_stage = {name: 0 if name.startswith("val") else 1 + name.startswith("train") for name in metrics}
    kept = sorted(metrics, key=lambda name: (name != "loss", name != monitored, not stage and by_stage[name]))[:most]
    loss_first = sorted(metrics, key=lambda name: name != "loss")
    write = number if stage else plain_number
    words = " ".join(f"{name} {write(metrics[name]):<{VALUE_WIDTH}}" for name in loss_first if name in kept)
    return f"{stage} {words}".lstrip()


def split_stage(name: str) -> tuple[str, str]:
    """Stage and metric of a logged name; the mean over an epoch is the same metric: train/loss_epoch is loss."""
    stage, _, metric = name.partition("/")
    if stage == "train":
        return stage, metric.removesuffix("_epoch")
    return (stage, metric) if stage in ("val", "test") else ("", name)


def _one_line_rows(rows: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [
        (label if first else "", line)
        for label, text in rows
        for first, line in zip([True] + [False] * text.count("\n"), text.split("\n"), strict=True)
    ]
