"""Sciences say what they add in one DOMAIN object each: nothing else in the package names one of them."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

import isoscale
from isoscale.cli.data import data
from isoscale.cli.recipe import recipe
from isoscale.recipe.components import resolve
from isoscale.recipe.load import load_recipe
from isoscale.recipe.presets import preset_names
from isoscale.science import registry
from isoscale.science.domain import load
from tests.test_import_direction import PACKAGE, imports

CONTRACTS = tuple(f"isoscale.science.{name}" for name in ("registry", "domain", "importing"))
"""The modules of `science` that the rest of the package may use."""
PEERS = ("DeePMD", "MALA", "NERSC")


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module that do something, with their lines: all but docstrings and examples in them."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    explanations = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explanations:
            yield node.lineno, node.value


def outside() -> Iterator[Path]:
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        if inside.parts[0] != "science" and str(inside) != "system/moved.py":
            yield path


def test_nothing_outside_imports_a_science():
    found = [
        str(each)
        for each in imports(PACKAGE)
        if each.target.startswith("isoscale.science")
        and not each.importer.startswith("isoscale.science")
        and each.target not in CONTRACTS
    ]
    assert found == []


def test_nothing_outside_names_a_science():
    domains = registry.domains()
    words = {f"{domain.name}/" for domain in domains} | {f"isoscale.science.{domain.name}" for domain in domains}
    names = {name for domain in domains for name in domain.homes} | {*PEERS}
    either = (rf"({'|'.join(map(re.escape, sorted(each)))})" for each in (words, names))
    named = re.compile(r"(?<!\w)({}|{}\b)".format(*either))
    found = [f"{path}:{line}: {text}" for path in outside() for line, text in texts(path) if named.search(text)]
    assert found == []


@pytest.mark.parametrize("domain", registry.domains(), ids=lambda domain: domain.name)
def test_all_that_a_science_names_is_there(domain):
    package = import_module(domain.package)
    assert sorted(getattr(package, "__all__", domain.homes)) == sorted(domain.homes)
    assert all(getattr(package, name) is domain.find(name) for name in domain.homes)
    assert set(domain.short_names.values()) <= set(domain.homes) >= set(domain.public)
    paths = [*domain.generators.values(), *(path for path in (domain.downloads, domain.calculator) if path)]
    for importer in domain.importers:
        paths += [path for path in (importer.translate, importer.aliases, importer.opens) if path]
    for describer in domain.describers:
        paths += [describer.recognises, describer.of_paths, describer.of_recipe, describer.lines]
    assert all(load(path) is not None for path in paths)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        package.Nothing  # noqa: B018


def test_looking_at_all_sciences_imports_neither_torch_nor_numpy():
    look = "registry.short_names(), registry.public_names(), registry.generators(), list(registry.importers())"
    code = (
        f"import sys; from isoscale.science import registry; {look}; print({{'torch', 'numpy'}} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


PAINT = '''
"""How things look."""

from isoscale.science.domain import Describer, Domain, Importer

DOMAIN = Domain(
    package=__name__,
    description="how things look",
    homes={"Painter": "painting"},
    short_names={"painter": "Painter"},
    public=("Painter",),
    presets="paint/presets",
    downloads="paint.painting.DOWNLOADS",
    generators={"paint/drops": "paint.painting.make_drops"},
    importers=(
        Importer(
            title="a palette",
            files="a palette (.json)",
            recognises=lambda values: "palette" in values,
            translate="paint.painting.translate",
            sections=("palette",),
        ),
    ),
    describers=(
        Describer(
            options="of colours, shade=dark",
            recognises="paint.painting.is_colour",
            of_paths="paint.painting.of_paths",
            of_recipe="paint.painting.of_recipe",
            lines="paint.painting.lines",
        ),
    ),
)
__getattr__, __dir__ = DOMAIN.find, DOMAIN.names
'''
PAINTING = """
import json
from pathlib import Path

from torch import nn

from isoscale.data.tools.published import Entry
from isoscale.science.importing import Imported, Said, Tables, Translation, WHOLE

DOWNLOADS = {"reds": Entry("reds", "all reds", "reds", {}, (), "look at them")}
TABLES = Tables({"palette.steps": 3}, {}, (WHOLE,), {}, same={"train.steps": "palette.steps"})


class Painter(nn.Module):
    def __init__(self, width: int = 1) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)


def make_drops(folder: Path, report, count: int = 2) -> list[str]:
    folder.mkdir()
    (folder / "drops.txt").write_text("o" * count)
    return [f"{count} drops"]


def translate(file, problems):
    imported = Imported(f"{file.source}, a palette")
    said = Said(TABLES, {f"palette.{key}": value for key, value in file.values["palette"].items()})
    Translation(said, imported).put_by_tables(TABLES)
    return imported


def is_colour(name: str) -> bool:
    return name.endswith(".colour")


def of_paths(paths, options):
    return {"colours": {path: Path(path).read_text() for path in paths}, **options}


def of_recipe(data, values):
    return None


def lines(facts):
    return [f"{path} is {facts['shade']} {colour}" for path, colour in facts["colours"].items()]
"""


@pytest.fixture
def paint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A science that nobody has heard of: a package, and one more line in the registry."""
    folder = tmp_path / "paint"
    (folder / "presets").mkdir(parents=True)
    (folder / "__init__.py").write_text(PAINT)
    (folder / "painting.py").write_text(PAINTING)
    (folder / "presets" / "wall.yaml").write_text("# A wall.\ntask: {model: painter}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(registry, "SCIENCES", (*registry.SCIENCES, "paint"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "paint"]:
        del sys.modules[name]


def ran(app, *words: str) -> str:
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_new_science_is_one_more_line(paint: Path):
    painter = import_module("paint.painting").Painter
    assert resolve("painter") is resolve("paint.Painter") is isoscale.Painter is painter
    assert issubclass(painter, nn.Module) and "Painter" in dir(isoscale)
    assert "paint/wall" in preset_names() and load_recipe("paint/wall").values["task"]["model"] == "painter"
    assert "paint/wall" in ran(recipe.app, "list")
    assert "all reds" in ran(data.app, "get")


def test_a_new_science_makes_and_describes_its_own_data(paint: Path):
    assert "5 drops" in ran(data.app, "make", "paint/drops", "count=5", "--out", "made")
    assert Path("made/drops.txt").read_text() == "ooooo"
    Path("a.colour").write_text("red")
    assert ran(data.app, "info", "a.colour", "shade=dark") == "a.colour is dark red\n"


def test_a_new_science_imports_its_peers_files_and_trains_from_them(paint: Path):
    Path("mine.json").write_text('{"palette": {"steps": 5}}')
    ran(recipe.app, "import", "mine.json", "--out", "recipe.yaml")
    assert "# From mine.json, a palette." in Path("recipe.yaml").read_text()
    assert "steps: 5  # palette.steps" in Path("recipe.yaml").read_text()
    assert load_recipe("recipe.yaml").recipe.train.steps == load_recipe("mine.json").recipe.train.steps == 5
    assert load_recipe("mine.json", ["palette.steps=7", "train.epochs=2"]).recipe.train.steps == 7
