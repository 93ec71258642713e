"""The table of where the time of a training went."""

from collections.abc import Sequence
from dataclasses import dataclass

TITLES = ("action", "mean", "calls", "total", "share")


@dataclass(frozen=True)
class Action:
    """Something that a training did, how often, and how long in total."""

    name: str
    calls: int
    seconds: float


def profile_lines(actions: Sequence[Action]) -> list[str]:
    """A line a row; the last action is the total that the shares refer to."""
    total = actions[-1].seconds or 1.0
    rows = [TITLES, *((*_cells(action), f"{100 * action.seconds / total:.1f} %") for action in actions)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
            for row in rows]  # fmt: skip


def rank_lines(waits: Sequence[float], travelled: float, exposed: float) -> list[str]:
    """What there is to say about several ranks: who waited for whom, and how much communication was hidden."""
    lines = []
    if len(waits) > 1:
        slowest = min(range(len(waits)), key=waits.__getitem__)
        lines.append(f"ranks waited for the slowest {_seconds(min(waits))} to {_seconds(max(waits))} in all; the least "
                     f"of all rank {slowest}, for which the others wait")  # fmt: skip
    if travelled:
        hidden = 100 * max(0.0, travelled - exposed) / travelled
        lines.append(f"gradients travelled {_seconds(travelled)}, {hidden:.0f} % of it hidden behind the backward pass")
    return lines


def _cells(action: Action) -> tuple[str, str, str, str]:
    return action.name, _seconds(action.seconds / max(1, action.calls)), f"{action.calls:,}", _seconds(action.seconds)


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:,.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"
