"""The list of features in docs/features.md is complete, and every row leads to a page that speaks of it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import isoscale
from isoscale.data.formats.opening import SUFFIXES
from isoscale.parallel.environments.find import LAUNCHERS
from isoscale.recipe.names import CONVERTERS, short_names
from isoscale.recipe.presets import SUFFIXES as RECIPE_SUFFIXES
from isoscale.recipe.presets import preset_names
from isoscale.recipe.schema import Recipe
from isoscale.runs.export import WRITERS
from isoscale.science.registry import domains, downloads, public_names
from tests.helpers import commands

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "features.md").read_text(encoding="utf-8")
GENERATED = {"reference.md", "components.md", "commands.md", "python.md"}


class Row(NamedTuple):
    section: str
    cells: list[str]

    @property
    def names(self) -> list[str]:
        """What the row is about: the code in its first cell, or all of that."""
        return re.findall(r"`([^`]+)`", self.cells[0]) or [self.cells[0]]

    @property
    def links(self) -> list[str]:
        return re.findall(r"\]\(([^)]+)\)", " ".join(self.cells[1:]))


def rows() -> Iterator[Row]:
    for section in TEXT.split("\n## ")[1:]:
        for line in re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:]:
            yield Row(section.partition("\n")[0], [cell.strip() for cell in line.strip("|").split(" | ")])


ROWS = list(rows())


def listed(*sections: str) -> list[str]:
    return sorted(name for row in ROWS if row.section in sections for name in row.names)


def keys(schema: dict[str, Any], fields: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key of a recipe, also of the sections that others may hold."""
    for name, field in fields.items():
        inner = set(re.findall(r"'#/\$defs/(\w+)'", str(field)))
        if "$ref" not in field and "oneOf" not in field:
            yield prefix + name
        for each in inner:
            yield from keys(schema, schema["$defs"][each]["properties"], f"{prefix}{name}.")


def test_every_command_is_listed():
    assert listed("Commands") == sorted(" ".join(words) for words in commands())


def test_every_key_of_a_recipe_is_listed():
    schema = Recipe.model_json_schema()
    assert listed("Recipe keys") == sorted({*keys(schema, schema["properties"])})


def test_every_name_of_python_is_listed():
    assert listed("Python") == sorted({*isoscale.__all__, *public_names()} - {"__version__"})


def test_every_component_and_logger_is_listed():
    files = {"log.txt", "metrics.jsonl", "TensorBoard", "a class of your own"}
    assert sorted({*listed("Components by name", "Loggers")} - files) == sorted(short_names())


def test_every_file_format_is_listed():
    assert listed("File formats") == sorted([*SUFFIXES, *WRITERS, *RECIPE_SUFFIXES, *CONVERTERS])


def test_every_launcher_is_listed():
    assert listed("Launchers") == sorted({launcher.name for launcher in LAUNCHERS if hasattr(launcher, "name")})


def test_every_science_preset_and_download_is_listed():
    folder = Path(isoscale.__file__).parent / "science"
    assert sorted(domain.name for domain in domains()) == sorted(
        path.parent.name for path in folder.glob("*/__init__.py") if "DOMAIN" in path.read_text(encoding="utf-8")
    )
    assert listed("Sciences") == sorted(domain.name for domain in domains())
    end = TEXT[TEXT.index("\n## Sciences") :]
    assert set(re.findall(r"`(\w+/[\w-]+)`", end)) == set(preset_names())
    assert {name for name in re.findall(r"`([\w-]+)`", end) if name in downloads()} == set(downloads())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_a_row_leads_to_pages_that_speak_of_it(row: Row):
    pages = {link.partition("#")[0]: (DOCS / link.partition("#")[0]).read_text(encoding="utf-8") for link in row.links}
    assert pages, "a row without a page"
    for link in row.links:
        page, _, anchor = link.partition("#")
        assert not anchor or anchor in anchors(pages[page]), f"{page} has no heading for #{anchor}"
    for name in row.names:
        assert any(speaks_of(name, text) for text in pages.values()), f"none of {', '.join(pages)} speaks of {name}"
    written = [text for page, text in pages.items() if page not in GENERATED]
    assert not written or any(speaks_of(name, text) for name in row.names for text in written), "another page is meant"


def speaks_of(name: str, text: str) -> bool:
    """Whether a page names something: as it is, a key also by its last word, and a phrase by all of its words."""
    last = re.escape(name.rpartition(".")[2])
    as_key = re.search(rf"(?<![\w.]){last}[:=]|`{last}`|--{last.replace('_', '-')}\b", text)
    words = re.findall(r"[\w-]+", name) if " " in name else []
    return name in text or bool(as_key) or (bool(words) and all(word in text for word in words))


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as the toc extension of Markdown makes them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in headings}
