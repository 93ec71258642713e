"""What is read from the source of a class is what importing it would tell."""

from pathlib import Path

import pytest

from isoscale.recipe.components import check, resolve
from isoscale.recipe.outline import find_module
from isoscale.recipe.trust import read
from tests.recipe.test_components import THINGS, texts


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"widths": [1, 2], "dropout": 0, "betas": [0.9, 0.999], "head": None},
        {"width": [1]},
        {"widths": [1], "zzz": 1},
        {"widths": "1"},
        {"widths": [1, "a"]},
        {"widths": [True]},
        {"widths": [1], "dropout": "0.1"},
        {"widths": [1], "activation": "rellu"},
        {"widths": [1], "head": {"class": f"{THINGS}.Net"}},
        {"widths": [1], "head": {"a": [{"class": "mpl"}]}},
        {"widths": [1], "head": {"class": 3}},
    ],
)
@pytest.mark.parametrize("name", ["Net", "Science", "Samples", "Anything", "Unresolvable", "Nett", "number"])
def test_a_check_of_the_source_finds_what_importing_finds(name: str, arguments: dict[str, object]) -> None:
    spec = {"class": f"{THINGS}.{name}", **arguments}
    assert texts(check(spec, ("m",), look=read)) == texts(check(spec, ("m",), look=resolve))


@pytest.mark.parametrize("name", [f"{THINGS}:Outer.Inner", "nowhere.X", f"{THINGS}.deeper.Net", "mpl", ".Net", "mlp"])
def test_names_end_where_importing_them_ends(name: str) -> None:
    assert texts(check({"class": name, "is": 1}, (), look=read)) == texts(check({"class": name, "is": 1}, ()))


SOURCE = """
from dataclasses import dataclass, field
from functools import cache
import torch
import torch.nn as layers
from torch import nn
from .base import Base as Renamed
from . import base

1 / 0

class Own(Renamed): ...
class Other(base.Base): ...
class Layer(nn.Linear): ...
class Same(layers.Linear): ...
class Long(torch.nn.Linear): ...
class Twice(nn.Linear, Renamed): ...
class Empty: ...

@dataclass
class Plain:
    size: int
    name: str = "a"

@dataclass(frozen=True)
class Filled:
    names: list[str] = field(default_factory=list)

def load(path: str, *, rows: int | None = None): ...

@cache
def changed(path): ...

alias = Own
"""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Own", "Own takes no such argument"),
        ("Other", "Other takes no such argument"),
        ("Layer", "Layer takes no such argument"),
        ("Same", "Same takes no such argument"),
        ("Long", "Long takes no such argument"),
        ("Empty", "Empty takes no such argument"),
        ("Plain", "Plain takes no such argument"),
        ("load", "load takes no such argument"),
        ("base.Base", "Base takes no such argument"),
        ("nn.Linear", "Linear takes no such argument"),
        ("Twice", None),
        ("Filled", None),
        ("changed", None),
        ("alias", None),
        ("Missing", 'package.module has no "Missing"'),
    ],
)
def test_arguments_are_followed_through_imports_and_bases_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, problem: str | None
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("1 / 0\n")
    (tmp_path / "package" / "base.py").write_text("1 / 0\nclass Base:\n    def __init__(self, width: int = 3): ...\n")
    (tmp_path / "package" / "module.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    found = texts(check({"class": f"package.module:{name}", "zzz": 1}, (), look=read))
    assert (problem is None and not found) or (problem is not None and problem in found[0])


def test_modules_are_found_as_python_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spread" / "deep").mkdir(parents=True)
    (tmp_path / "spread" / "deep" / "here.py").write_text("")
    assert find_module("spread.deep.here").files == [tmp_path / "spread" / "deep" / "here.py"]
    assert find_module("spread.deep.gone") == ([], "spread.deep.gone", False)
    assert find_module("posix").missing is None
    assert find_module("..").missing is not None
