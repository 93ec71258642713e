"""The table of a model's layers, as long as people read it."""

from collections.abc import Sequence
from dataclasses import replace

from isoscale.observe.events import Layer

MOST_ROWS = 12
TITLES = ("layer", "type", "output", "parameters", "size")


def layer_lines(layers: Sequence[Layer], most: int = MOST_ROWS) -> list[str]:
    """A line for each layer with parameters, as deep as `most` rows allow, and one for the whole model."""
    if not layers:
        return []
    cells = [_cells(layer) for layer in visible(layers, most)]
    titles = TITLES if any(shape for _, _, shape, *_ in cells) else ("layer", "type", "", "parameters", "size")
    rows = [titles, *cells, ("total", "", "", *_amounts(layers[0]))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [_line(row, widths) for row in rows] + _frozen(layers[0])


def visible(layers: Sequence[Layer], most: int) -> list[Layer]:
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
    return replace(
        layer,
        num_parameters=layer.num_parameters - sum(other.num_parameters for other in inner),
        num_trainable=layer.num_trainable - sum(other.num_trainable for other in inner),
        num_bytes=layer.num_bytes - sum(other.num_bytes for other in inner),
    )


def _cells(layer: Layer) -> tuple[str, ...]:
    shape = "" if layer.shape is None else " × ".join(map(str, layer.shape[1:])) or "1"
    return layer.name, layer.kind, shape, *_amounts(layer)


def _amounts(layer: Layer) -> tuple[str, str]:
    return f"{layer.num_parameters:,}", _size(layer.num_bytes)


def _size(num_bytes: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} B"


def _line(row: tuple[str, ...], widths: list[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
    return ("  " + "  ".join(left + right)).rstrip()


def _frozen(model: Layer) -> list[str]:
    frozen = model.num_parameters - model.num_trainable
    return [f"  {frozen:,} of the parameters are not trained"] if frozen else []
