"""Style of figures: colours, axes and file formats that all of them share; without pyplot and its global state."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from isoscale.system.files import failures_in_words, written_aside
from isoscale.system.printing import visible

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart by people with any kind of colour vision, after Okabe and Ito."""
RIGHT, WRONG, NEUTRAL = "#1a7f4b", "#c9302c", "#8a8f98"
GRAY, PALE = "#595959", "#d9d9d9"
DATES = {"svg": "Date", "pdf": "CreationDate"}
"""What a file format says about when it was written, by which equal figures would differ."""


def plain(text: str) -> str:
    """Text in which dollar signs are dollar signs and not the marks of a formula, and all else can be drawn."""
    return visible(text).replace("$", r"\$")


def open_axes(axes: Axes) -> None:
    """Without the lines to the right and above, which hold nothing, on a pale grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6, which="both")
    axes.set_axisbelow(True)


@contextmanager
def same_bytes() -> Iterator[None]:
    """Equal figures become equal files in here, whatever characters their texts have."""
    with rc_context({"svg.hashsalt": "isoscale"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # a name in a rare script
        yield


def png(figure: Figure, scale: int = 1) -> bytes:
    """The figure as a PNG file, with so many times the dots that a screen needs."""
    file = BytesIO()
    with same_bytes():
        figure.savefig(file, format="png", dpi=scale * figure.dpi)
    return file.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write the figure in the format that the name of the file says."""
    kind = path.suffix[1:].lower()
    with same_bytes(), failures_in_words(path), written_aside(path) as file:
        figure.savefig(file, format=kind, dpi=150, metadata={DATES[kind]: None} if kind in DATES else None)
