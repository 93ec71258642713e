"""A page as a browser shows it: what the document holds after its scripts ran, and what it complained about."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-quic", "--enable-logging=stderr", "--dump-dom",
)  # fmt: skip
CLOSED = {"br", "hr", "img", "input", "meta", "link"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str | None]
    inside: "tuple[Element, ...]"
    """The elements around it, from the outside in."""
    text: str = ""

    @property
    def classes(self) -> list[str]:
        return (self.attributes.get("class") or "").split()


class Document(HTMLParser):
    """All elements of a page in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs), tuple(self._open))
        self.elements.append(element)
        if tag not in CLOSED:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1].tag == tag, f"</{tag}> closes {self._open[-1:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.text += data

    def all(self, tag: str, class_: str | None = None) -> list[Element]:
        return [each for each in self.elements if each.tag == tag and (class_ is None or class_ in each.classes)]


@dataclass
class Shown:
    document: Document
    complaints: list[str]
    """What the browser wrote to its console."""


def show(path: Path, fragment: str = "") -> Shown:
    """Open a page and wait until it has loaded."""
    assert CHROMIUM
    profile = path.parent / ".browser"
    done = subprocess.run(
        [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", f"{path.resolve().as_uri()}{fragment}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return Shown(Document(done.stdout), re.findall(r"CONSOLE.*", done.stderr))
