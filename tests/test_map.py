"""The map of tests is complete, and leads to tests that `make test` runs."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from isoscale.science.registry import domains
from tests.helpers import commands

ROOT = Path(__file__).parents[1]
TABLES = [
    [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", section, re.MULTILINE)[2:]]
    for section in (ROOT / "tests/MAP.md").read_text(encoding="utf-8").split("\n## ")[1:]
]
LAWS, COMMANDS, FAULTS = TABLES
TESTS = sorted({cell.strip("`") for table in TABLES for row in table for cell in row if cell.startswith("`")})
ELSEWHERE = {"full", "nightly", "cluster"}
"""Markers of what `make test` leaves out."""


@cache
def functions(path: str) -> dict[str, set[str]]:
    """The tests of a file, with the markers that hold for all of their cases."""
    module = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    of_file = {
        name
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for name in re.findall(r"pytest\.mark\.(\w+)", ast.unparse(node.value))
    }
    return {
        node.name: of_file | {mark for each in node.decorator_list for mark in _markers(ast.unparse(each))}
        for node in module.body
        if isinstance(node, ast.FunctionDef)
    }


def _markers(decorator: str) -> set[str]:
    found = re.match(r"pytest\.mark\.(\w+)", decorator)
    return {found[1]} if found else set()


def test_every_law_is_shown_for_every_science() -> None:
    laws = re.findall(r"^\d\. \*\*(.+?)\.\*\*", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    sciences = [domain.name for domain in domains()]
    assert len(laws) == 4 and "images" in sciences
    expected = {(law.lower(), science) for law in laws for science in sciences}
    assert {(law, science) for law, science, _ in LAWS} == expected


def test_every_command_is_shown_at_work_and_refusing() -> None:
    assert {row[0] for row in COMMANDS} == {*(" ".join(words) for words in commands()), "train --devices"}


def test_every_signal_and_every_kind_of_fault_is_there() -> None:
    shown = {fault for fault, *_ in FAULTS}
    assert {"SIGINT", "SIGTERM", "SIGUSR1", "SIGKILL", "a full disk", "a value that is not finite"} <= shown
    for fault in ("SIGTERM", "SIGKILL", "a full disk", "a value that is not finite", "an error in the user's code"):
        assert {ranks for each, _, ranks, _ in FAULTS if each == fault} == {"one", "several"}, fault


@pytest.mark.parametrize("test", TESTS)
def test_the_map_leads_to_a_test_that_is_run(test: str) -> None:
    path, _, name = test.partition("::")
    assert name in functions(path), f"{path} has no {name}"
    assert not functions(path)[name] & ELSEWHERE, f"{test} is not run by `make test`"
