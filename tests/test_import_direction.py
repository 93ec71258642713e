"""Imports point one way: cli → study, launch, recipe → engine → parallel, data, observe."""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "isoscale"

LEAVES = ("isoscale.errors", "isoscale.config", "isoscale.printing", "isoscale.signals", "isoscale._version")
"""Modules that every room may use, and that use no room themselves."""

BELOW = {
    "cli": ("study", "launch", "recipe", "science", "engine", "parallel", "data", "observe"),
    "study": ("launch", "recipe", "science", "engine", "parallel", "data", "observe"),
    "launch": ("recipe", "engine", "parallel", "data", "observe"),
    "recipe": ("science", "engine", "parallel", "data", "observe"),
    "engine": ("parallel", "data", "observe"),
    "parallel": (),
    "data": (),
    "observe": (),
    "science": ("engine.task", "engine.pairs", "engine.survey", "data", "observe.exhibits"),
}
"""For each room, the rooms or single modules that it may import besides itself and the leaves."""

ABOVE_THE_ENGINE = ("cli", "study", "launch")
"""The rooms that may use the modules at the top of the package, such as isoscale.api and isoscale.run."""

USES_RUNS = ("isoscale.science.potentials.use",)
"""Modules of a science that take a finished run by its path, as commands do: no training needs them."""


class Import(NamedTuple):
    importer: str
    target: str
    where: str

    def __str__(self) -> str:
        return f"{self.where}: {self.importer} imports {self.target}"


def violations(package: Path) -> list[str]:
    """Every import in `package` that points the wrong way, as "file:line: importer imports target"."""
    return [str(found) for found in imports(package) if not is_allowed(found.importer, found.target)]


def imports(package: Path) -> Iterator[Import]:
    """Every import of one module of `package` by another, lazy ones inside functions included."""
    files = {module_name(package, path): path for path in sorted(package.rglob("*.py"))}
    for module, path in files.items():
        is_package = path.name == "__init__.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for target in targets(node, module, is_package, files.keys()):
                if target.partition(".")[0] == package.name:
                    yield Import(module, target, f"{path.relative_to(package.parent)}:{getattr(node, 'lineno', 0)}")


def module_name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def targets(node: ast.AST, module: str, is_package: bool, modules: Collection[str]) -> list[str]:
    """The modules that a statement or call imports, under their full names."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=base, names=names, level=level):
            origin = absolute(base, module, is_package, level)
            full = [f"{origin}.{alias.name}" for alias in names]
            return [name if name in modules or name == "isoscale.__version__" else origin for name in full]
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if is_importer(function):
            return [name]
    return []


def absolute(base: str | None, module: str, is_package: bool, level: int) -> str:
    if level == 0:
        return base or ""
    parts = module.split(".")
    kept = parts[: len(parts) - level + is_package]
    return ".".join([*kept, base] if base else kept)


def is_importer(function: ast.expr) -> bool:
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    return name in ("import_module", "__import__")


def is_allowed(importer: str, target: str) -> bool:
    room = room_of(importer)
    if target in LEAVES or target == "isoscale.__version__":
        return True
    if importer in LEAVES:
        return False
    if room is None:
        return room_of(target) != "cli" or importer == "isoscale.__main__"
    if room_of(target) is None:
        return room in ABOVE_THE_ENGINE or importer in USES_RUNS
    return any(is_inside(target, f"isoscale.{name}") for name in (room, *BELOW[room]))


def room_of(module: str) -> str | None:
    """The room that a module lives in; None for a module at the top of the package."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in BELOW else None


def is_inside(module: str, name: str) -> bool:
    return module == name or module.startswith(f"{name}.")


def test_every_import_points_the_right_way():
    assert violations(PACKAGE) == []


def test_every_room_has_its_rule():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms <= BELOW.keys(), f"no rule in {Path(__file__).name} for {rooms - BELOW.keys()}"


def plant(folder: Path, file: str, line: str) -> Path:
    """A copy of the house's layout in which one module holds one line."""
    package = folder / "isoscale"
    rooms = [package / room / "__init__.py" for room in BELOW]
    contracts = [package / "engine" / name for name in ("task.py", "pairs.py", "trainer.py")]
    top = [package / name for name in ("__init__.py", "__main__.py", "api.py", "errors.py", "config.py")]
    for path in (*rooms, *contracts, *top, package / "cli" / "main.py", package / file):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (package / file).write_text(line, encoding="utf-8")
    return package


@pytest.mark.parametrize(
    ("file", "line", "target"),
    [
        ("engine/loop.py", "import isoscale.science", "isoscale.science"),
        ("engine/loop.py", "def late():\n    from isoscale.recipe import schema", "isoscale.recipe"),
        ("engine/loop.py", "from isoscale import recipe", "isoscale.recipe"),
        ("engine/loop.py", "from isoscale import api", "isoscale.api"),
        ("engine/loop.py", "from isoscale import train", "isoscale"),
        ("engine/loop.py", "from .. import cli", "isoscale.cli"),
        ("engine/__init__.py", "from ..launch import slurm", "isoscale.launch"),
        ("engine/loop.py", "import importlib\nimportlib.import_module('isoscale.study')", "isoscale.study"),
        ("data/reader.py", "from ..engine.task import Task", "isoscale.engine.task"),
        ("data/reader.py", "from isoscale.observe import console", "isoscale.observe"),
        ("observe/console.py", "from isoscale.parallel import votes", "isoscale.parallel"),
        ("parallel/votes.py", "from isoscale.data import order", "isoscale.data"),
        ("science/images.py", "from isoscale.engine import trainer", "isoscale.engine.trainer"),
        ("science/images.py", "from isoscale.recipe import schema", "isoscale.recipe"),
        ("recipe/schema.py", "from isoscale.launch import local", "isoscale.launch"),
        ("recipe/schema.py", "from isoscale.api import train", "isoscale.api"),
        ("study/sweep.py", "from isoscale.cli.main import run", "isoscale.cli.main"),
        ("api.py", "from isoscale.cli import main", "isoscale.cli.main"),
        ("errors.py", "from isoscale.engine import task", "isoscale.engine.task"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, file: str, line: str, target: str):
    found = violations(plant(tmp_path, file, line))
    assert len(found) == 1
    assert found[0].startswith(f"isoscale/{file}:{len(line.splitlines())}: ")
    assert found[0].endswith(f" imports {target}")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("cli/main.py", "from isoscale.api import train"),
        ("__main__.py", "from isoscale.cli.main import run"),
        ("api.py", "from isoscale.science import images"),
        ("engine/loop.py", "from isoscale import __version__"),
        ("engine/loop.py", "from .task import Task\nfrom ..data import order\nimport torch"),
        ("data/config.py", "from isoscale.config import Config\nfrom isoscale.errors import UserError"),
        ("science/images.py", "from isoscale.engine import pairs, task\nfrom isoscale.data import sources"),
        ("science/potentials/use.py", "def late():\n    from isoscale.api import train"),
    ],
)
def test_an_import_that_points_the_right_way_passes(tmp_path: Path, file: str, line: str):
    assert violations(plant(tmp_path, file, line)) == []
