"""The image definitions and conda files: in step with what is tested here, and clean to their linters."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE, DEFINITION = ROOT / "containers/Dockerfile", ROOT / "containers/isoscale.def"
CONDA = sorted((ROOT / "conda").glob("*.yml"))
PINNED = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def checked(program: str, *words: str, text: str | None = None) -> None:
    """Run a linter, which has nothing to say."""
    found = shutil.which(program, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"needs {program}: pip install --constraint constraints.txt --editable '.[dev]'")
    done = subprocess.run([found, *words], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def section(name: str) -> str:
    """A part of the Apptainer definition."""
    found = re.search(rf"^%{name}\n(.*?)(?=^%|\Z)", DEFINITION.read_text(), re.MULTILINE | re.DOTALL)
    assert found, name
    return found[1]


def test_the_dockerfile_is_clean():
    checked("hadolint", str(DOCKERFILE))


@pytest.mark.parametrize("name", ["post", "environment", "runscript", "test"])
def test_what_the_apptainer_definition_runs_is_clean(name: str):
    checked("shellcheck", "--shell=sh", "--severity=style", "-", text=section(name))


def test_the_scripts_are_clean():
    checked("shellcheck", str(ROOT / ".ci/run"))


@pytest.mark.parametrize("path", CONDA, ids=lambda path: path.stem)
def test_the_conda_files_are_clean(path: Path):
    rules = "{extends: default, rules: {document-start: disable, line-length: {max: 120}}}"
    checked("yamllint", "--strict", "--config-data", rules, str(path))


def test_images_have_the_torch_that_is_tested():
    torch = PINNED["torch"]
    assert f"ARG TORCH={torch}\n" in DOCKERFILE.read_text()
    assert f" torch=={torch} " in section("post")


def test_images_hold_what_the_package_is_made_of():
    needed = {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "src", "constraints.txt"}
    assert {line.split()[0] for line in section("files").splitlines() if line.strip()} == needed
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == needed


@pytest.mark.parametrize("path", CONDA, ids=lambda path: path.stem)
def test_conda_files_pin_everything(path: Path):
    content = yaml.safe_load(path.read_text())
    *packages, pip = content["dependencies"]
    assert all(re.fullmatch(r"[\w-]+=[\d.]+", package) for package in packages), packages
    assert "python=3.12" in packages
    constraint, torch, package = pip["pip"]
    assert constraint.split() == ["--constraint", "../constraints.txt"] and package.split() == ["--editable", ".."]
    build = {"cuda": "", "cpu": "+cpu", "xpu": "+xpu"}[path.stem]
    assert torch == f"torch=={PINNED['torch']}{build}"
