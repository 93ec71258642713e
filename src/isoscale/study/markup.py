"""HTML from Python values: every text is escaped unless it was made here."""

import html
from collections.abc import Iterable
from typing import Any

from isoscale.system.printing import visible

_EMPTY = ("br", "hr", "img", "input", "meta")
"""Elements that HTML writes without an end."""


class Markup(str):
    """Text that is HTML already."""


def element(tag: str, *children: str | None, **attributes: Any) -> Markup:
    """An element; `class_` and `data_by` become `class` and `data-by`, True a bare attribute, None and False none."""
    words = [tag, *(_attribute(name, value) for name, value in attributes.items() if value not in (None, False))]
    start = f"<{' '.join(words)}>"
    return Markup(start if tag in _EMPTY else f"{start}{joined(children)}</{tag}>")


def joined(children: Iterable[str | None], between: str = "") -> Markup:
    """Several pieces in a row."""
    return Markup(between.join(_escaped(child) for child in children if child is not None))


def table(heads: Iterable[str], rows: Iterable[Iterable[str | None]], class_: str | None = None) -> Markup:
    """A table with a line of heads, in a box that scrolls sideways where the page is too narrow for it."""
    head = element("tr", *(element("th", text, scope="col") for text in heads))
    body = [element("tr", *(element("td", cell) for cell in row)) for row in rows]
    return element(
        "div", element("table", element("thead", head), element("tbody", *body), class_=class_), class_="wide"
    )


def facts_list(rows: Iterable[tuple[str, str | None]]) -> Markup:
    """Names and what belongs to them, those left out for which nothing is known."""
    return element("dl", *(joined([element("dt", name), element("dd", text)]) for name, text in rows if text))


def folded(summary: str, *children: str | None) -> Markup:
    """Something long that opens on demand."""
    return element("details", element("summary", summary), *children)


def _escaped(text: str) -> str:
    return text if isinstance(text, Markup) else html.escape(visible(text))


def _attribute(name: str, value: Any) -> str:
    written = name.rstrip("_").replace("_", "-")
    return written if value is True else f'{written}="{html.escape(visible(str(value)))}"'
