"""Tables of plain text: columns side by side, the layers of a model, where the time of a training went.

Not drawn by rich, which takes 0.15 s to import: log.txt has them at the start of every run, with a terminal or without.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from isoscale.observe.events import Layer

GAP = "  "
MOST_LAYERS = 12


def aligned(rows: Sequence[Sequence[str]], num_left: int | None = None, indent: str = "") -> list[str]:
    """A line for each row: the first `num_left` columns to the left, all where it is None, and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if num_left is None or place < num_left else ">" for place in range(len(widths))]
    cells = ([f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)] for row in rows)
    return [(indent + GAP.join(row)).rstrip() for row in cells]


def side_by_side(first: Sequence[str], groups: Sequence[Sequence[str]], room: int) -> list[list[str]]:
    """Groups of columns beside the first one, in as few blocks of lines as fit into `room`; a group has one width."""
    blocks: list[list[Sequence[str]]] = []
    left = 0
    for group in groups:
        left -= len(group[0]) + len(GAP)
        if not blocks or left < 0:
            blocks.append([first])
            left = room - len(first[0]) - len(group[0]) - len(GAP)
        blocks[-1].append(group)
    return [[GAP.join(line).rstrip() for line in zip(*block, strict=True)] for block in blocks]


def layer_lines(layers: Sequence[Layer], most: int = MOST_LAYERS) -> list[str]:
    """A line for each layer with parameters, as deep as `most` rows allow, and one for the whole model."""
    if not layers:
        return []

    def cells(layer: Layer) -> tuple[str, ...]:
        shape = "" if layer.shape is None else " × ".join(map(str, layer.shape[1:])) or "1"
        return layer.name, layer.kind, shape, f"{layer.num_parameters:,}", _size(layer.num_bytes)

    model, shown = layers[0], [cells(layer) for layer in visible_layers(layers, most)]
    output = "output" if any(shape for _, _, shape, *_ in shown) else ""
    rows = [("layer", "type", output, "parameters", "size"), *shown, ("total", "", "", *cells(model)[3:])]
    frozen = model.num_parameters - model.num_trainable
    return aligned(rows, 3, GAP) + ([f"  {frozen:,} of the parameters are not trained"] if frozen else [])


def visible_layers(layers: Sequence[Layer], most: int) -> list[Layer]:
    """The deepest cut through the tree of layers that has at most `most` rows.

    A layer beside those that it is made of has only the parameters that none of these has.
    """
    weighty = [layer for layer in layers if layer.num_parameters]
    shown: list[Layer] = []
    for depth in range(1, 1 + max((layer.depth for layer in weighty), default=0)):
        above = [_alone(layer, weighty) if layer.depth < depth else layer for layer in weighty if layer.depth <= depth]
        cut = [layer for layer in above if layer.num_parameters > 0]
        if len(cut) > most and shown:
            break
        shown = cut
    return shown or [layer for layer in weighty if layer.depth == 0]


def _alone(layer: Layer, layers: Sequence[Layer]) -> Layer:
    """A layer without those that it is made of."""
    prefix = f"{layer.name}." if layer.name else ""
    inner = [other for other in layers if other.depth == layer.depth + 1 and other.name.startswith(prefix)]
    counts = ("num_parameters", "num_trainable", "num_bytes")
    return replace(layer, **{key: getattr(layer, key) - sum(getattr(other, key) for other in inner) for key in counts})


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} B"


@dataclass(frozen=True)
class Action:
    """Something that a training did, how often, and how long in total."""

    name: str
    calls: int
    seconds: float


def profile_lines(actions: Sequence[Action]) -> list[str]:
    """A line a row; the last action is the total that the shares refer to."""
    total = actions[-1].seconds or 1.0
    rows = [
        (
            action.name, _seconds(action.seconds / max(1, action.calls)), f"{action.calls:,}", _seconds(action.seconds),
            f"{100 * action.seconds / total:.1f} %",
        )
        for action in actions
    ]  # fmt: skip
    return aligned([("action", "mean", "calls", "total", "share"), *rows], 1)


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


def _seconds(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}" if seconds * factor < 1000 else f"{seconds * factor:,.0f} {unit}"
    return f"{seconds * 1e6:.3g} µs"
