"""Which systems batches come from: a table for the start of a run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from isoscale.data.mixture import Mixture, MixturePlan, system_probabilities
from isoscale.data.sources import Source

if TYPE_CHECKING:
    from isoscale.engine.splits import Split

MOST_SYSTEMS = 15
"""That are named one by one."""
MOST_LETTERS = 32
"""Of a name; the end of a path tells more than its beginning."""


def system_lines(train: "Split", val: "Split | None") -> list[str]:
    """The systems of training and of validation, where they have names."""
    splits = {"training": train, **({"validation": val} if val is not None else {})}
    return [line for name, split in splits.items() for line in _lines(name, split)]


def _lines(name: str, split: "Split") -> list[str]:
    systems = _systems(split.source)
    names = [str(getattr(system, "name", "")) for system in systems]
    if not all(names):
        return []
    return _table({
        f"{name} system": [_shortened(each) for each in names],
        "samples": _numbers([len(system) for system in systems]),
        "atoms": _numbers([getattr(system, "num_atoms", 0) for system in systems]),
        **(_batches(split, name == "training") if len(systems) == 1 or isinstance(split.source, Mixture) else {}),
    })  # fmt: skip


def _systems(source: Source) -> Sequence[Source]:
    """Those of a mixture, or those whose samples stand side by side in a batch."""
    found: Sequence[Source] = getattr(source, "systems" if isinstance(source, Mixture) else "sources", [source])
    return found


def _batches(split: "Split", drawn: bool) -> dict[str, list[str]]:
    """How many batches of what size each system has, and how likely each is drawn."""
    plans = split.plan.plans if isinstance(split.plan, MixturePlan) else [split.plan]
    counts = [plan.steps_per_epoch for plan in plans]
    columns = {"batch": _numbers([plan.batch_size for plan in plans]), "batches": _numbers(counts)}
    if drawn and isinstance(split.source, Mixture):
        columns["probability"] = [f"{value:.4f}" for value in system_probabilities(split.source.probabilities, counts)]
    return columns


def _numbers(values: Sequence[int]) -> list[str]:
    return [f"{value:,}" if value else "" for value in values]


def _shortened(name: str) -> str:
    """The end of a path from a folder on, where there is one to begin with."""
    if len(name) <= MOST_LETTERS:
        return name
    end = name[1 - MOST_LETTERS :]
    return f"…{end[max(0, end.find('/')) :]}"


def _table(columns: dict[str, list[str]]) -> list[str]:
    """Names to the left, numbers to the right; a column of nothing is left out."""
    found = [[title, *cells[:MOST_SYSTEMS]] for title, cells in columns.items() if any(cells)]
    widths = [max(map(len, column)) for column in found]
    more = max(map(len, columns.values())) - MOST_SYSTEMS
    rows = [_line(row, widths) for row in zip(*found, strict=True)]
    return [*rows, f"  … {more} more system{'s' * (more > 1)}"] if more > 0 else rows


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
    return "  " + "  ".join([row[0].ljust(widths[0]), *numbers])
