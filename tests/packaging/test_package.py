"""The package as it reaches a user: version, start-up, wheel and the data inside."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from isoscale._version import __version__

ROOT = Path(__file__).parents[2]
COMMANDS = (
    "train", "test", "predict", "compare", "report", "tensorboard", "runs", "recipe", "data", "init", "doctor",
)  # fmt: skip
NEEDED = (
    "py.typed", "recipes/images/digits.yaml", "science/data/digits.npz", "science/data/DIGITS_LICENSE.txt",
    *(f"study/report/templates/{name}" for name in ("page.html", "curves.html", "results.html", "parts.html")),
    "study/report/templates/page.css", "study/report/templates/page.js",
)  # fmt: skip
HEAVY = ("torch", "numpy", "pydantic", "lightning", "torchmetrics", "tensorboard", "matplotlib", "jinja2")


def isoscale(*arguments: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`python -m isoscale` as a user starts it, on a terminal wide enough for every line."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    return subprocess.run(
        [sys.executable, *options, "-m", "isoscale", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=environment | {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"},
    )


def test_version_prints_the_version():
    assert re.search(rf"(^|\s){re.escape(__version__)}$", isoscale("--version").stdout.strip())


def test_the_package_knows_its_version():
    import isoscale

    assert isoscale.__version__ == __version__


def test_the_citation_names_the_same_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_help_names_every_command():
    shown = isoscale("--help").stdout
    missing = [name for name in COMMANDS if not re.search(rf"^\W*{name}\b", shown, re.MULTILINE)]
    assert missing == []


def test_help_imports_nothing_heavy():
    timings = isoscale("--help", options=("-X", "importtime")).stderr
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in timings.splitlines()}
    assert "isoscale" in imported
    assert imported.isdisjoint(HEAVY)


def test_the_shipped_digits_are_the_1797_of_the_test_part():
    datasets = pytest.importorskip("sklearn.datasets")
    expected = datasets.load_digits()
    with np.load(ROOT / "src/isoscale/science/data/digits.npz", allow_pickle=False) as digits:
        assert digits["images"].dtype == np.uint8
        np.testing.assert_array_equal(digits["images"], expected.images)
        np.testing.assert_array_equal(digits["labels"], expected.target)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that no old build folder helps and none is left behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(source)]
    subprocess.run([sys.executable, "-m", "pip", *build], check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_all_that_a_user_needs(wheel: Path):
    assert wheel.name == f"isoscale-{__version__}-py3-none-any.whl"
    held = set(zipfile.ZipFile(wheel).namelist())
    files = [path for path in (ROOT / "src/isoscale").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT / "src").as_posix() for path in files} - held == set()
    for name in (
        "py.typed",
        "recipes/images/digits.yaml",
        "science/data/digits.npz",
        "science/data/DIGITS_LICENSE.txt",
    ):
        assert f"isoscale/{name}" in held
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)


@pytest.mark.slow
def test_the_wheel_says_what_it_is(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(f"isoscale-{__version__}.dist-info/METADATA").decode()
        scripts = archive.read(f"isoscale-{__version__}.dist-info/entry_points.txt").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist: torch>=2.11" in metadata
    assert "isoscale = isoscale.__main__:run" in scripts
