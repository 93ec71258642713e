"""Imports point one way, and never in a circle: errors ← system ← data, parallel ← observe ← engine ← … ← cli."""

import ast
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "isoscale"

PUBLIC = ("__init__", "__main__", "_version", "api", "config", "errors")
"""The only modules that lie at the top of the package."""
LEAVES = ("isoscale.errors", "isoscale.config", "isoscale._version")
"""Those that every room may use, and that use no room themselves."""

BELOW = {
    "system": (),
    "data": ("system",),
    "parallel": ("system",),
    "observe": ("system", "data", "parallel"),
    "engine": ("system", "data", "parallel", "observe"),
    "science": ("system", "data", "observe.figures", "observe.tables", "engine.task", "engine.metrics.weighted_sum",
                "engine.dataset_metrics"),
    "recipe": ("system", "data", "parallel", "observe", "engine", "science"),
    "runs": ("system", "data", "parallel", "observe", "engine", "science", "recipe"),
    "launch": ("system", "data", "parallel", "observe", "engine", "science", "recipe", "runs"),
    "study": ("system", "data", "parallel", "observe", "engine", "science", "recipe", "runs", "launch"),
    "cli": ("system", "data", "parallel", "observe", "engine", "science", "recipe", "runs", "launch", "study"),
}  # fmt: skip
"""For each room, the rooms or single modules that it may import besides itself and the leaves."""

USES_RUNS = ("isoscale.science.atoms.use",)
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
        return room == "cli"
    allowed = (room, *BELOW[room], *(["runs"] if importer in USES_RUNS else []))
    return any(is_inside(target, f"isoscale.{name}") for name in allowed)


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


def test_nothing_but_the_public_names_lies_at_the_top():
    assert sorted(path.stem for path in PACKAGE.glob("*.py")) == sorted(PUBLIC)


def circles(package: Path) -> list[list[str]]:
    """Groups of modules that import each other, types and late imports included (Tarjan's algorithm)."""
    below: dict[str, set[str]] = {}
    for found in imports(package):
        below.setdefault(found.importer, set()).add(found.target)
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    groups = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for target in sorted(below.get(module, ())):
            if target not in number:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in path:
                lowest[module] = min(lowest[module], number[target])
        if lowest[module] == number[module]:
            group = path[path.index(module) :]
            del path[path.index(module) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for module in sorted(below):
        if module not in number:
            visit(module)
    return groups


def test_no_imports_go_in_a_circle():
    assert circles(PACKAGE) == []


def test_a_planted_circle_is_found(tmp_path: Path):
    package = plant(tmp_path, "engine/one.py", "from isoscale.engine import two")
    (package / "engine/two.py").write_text("def late():\n    from isoscale.engine.one import something")
    assert circles(package) == [["isoscale.engine.one", "isoscale.engine.two"]]


def plant(folder: Path, file: str, line: str) -> Path:
    """A copy of the house's layout in which one module holds one line."""
    package = folder / "isoscale"
    rooms = [package / room / "__init__.py" for room in BELOW]
    contracts = [package / "engine" / name for name in ("task.py", "metrics/weighted_sum.py", "trainer.py")]
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
        ("observe/console.py", "from isoscale.engine import task", "isoscale.engine.task"),
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
        (
            "science/images.py",
            "from isoscale.engine.metrics import weighted_sum\nfrom isoscale.engine import task",
        ),
        ("science/atoms/use.py", "def late():\n    from isoscale.runs import run"),
    ],
)
def test_an_import_that_points_the_right_way_passes(tmp_path: Path, file: str, line: str):
    assert violations(plant(tmp_path, file, line)) == []
