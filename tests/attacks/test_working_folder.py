"""Files of the working folder that have the names of libraries are not imported in their place."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isoscale.observe.tensorboard.server import TensorBoardServer, free_port
from tests.helpers import cli, command
from tests.warm import ROOT

NAMES = ("tensorboard", "numpy", "torch", "torchmetrics", "matplotlib", "yaml", "json", "sqlite3", "copy", "pickle")
MARK = "import os, sys; open(os.environ['MARK'], 'a').write(__name__ + ' ')\nraise SystemExit('the wrong one')\n"
SMALL = ["train.epochs=1", "observe.tensorboard=2", "observe.level=error"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files that leave a mark when they are imported, and a module of the user's own."""
    monkeypatch.setenv("MARK", str(tmp_path / "mark"))
    (own := tmp_path / "folder").mkdir()
    for name in NAMES:
        (own / f"{name}.py").write_text(MARK)
    (own / "own_model.py").write_text("from isoscale.science.models import MLP as Net\n")
    (own / "recipe.yaml").write_text(
        "extends: images/digits\ntask:\n  model: {class: own_model.Net, widths: [64, 10]}\n"
    )
    return own


def marks(folder: Path) -> str:
    path = folder.parent / "mark"
    return path.read_text() if path.exists() else ""


def cold(words: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_training_imports_the_users_own_model_and_nothing_else_from_the_folder(folder: Path, devices: int) -> None:
    done = cold(command("train", "recipe.yaml", *SMALL, "--run", "run", "--devices", str(devices)), folder)
    assert (done.returncode, marks(folder)) == (0, ""), done.stderr


@pytest.mark.slow
def test_the_server_of_tensorboard_is_the_installed_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with TensorBoardServer("127.0.0.1", free_port("127.0.0.1")) as server:
        server.wait_until_ready()
    assert marks(folder) == ""


@pytest.mark.full
def test_a_worker_that_is_spawned_imports_nothing_from_the_folder(folder: Path) -> None:
    (folder.parent / "script.py").write_text(
        "import os, torch\n"
        "from isoscale.data.feeds.workers import _spawning, _without_working_folder, _forget_safe_path\n"
        "import multiprocessing\n"
        "with _spawning():\n"
        "    worker = multiprocessing.get_context('spawn').Process(target=_forget_safe_path)\n"
        "    worker.start()\n"
        "worker.join()\n"
        "print(worker.exitcode, 'PYTHONSAFEPATH' in os.environ)\n"
    )
    done = cold([sys.executable, str(folder.parent / "script.py")], folder)
    assert (done.stdout, marks(folder)) == ("0 False\n", ""), done.stderr


def test_a_file_that_an_installed_package_hides_is_named(folder: Path) -> None:
    (folder / "rich.py").write_text("class Net:\n    pass\n")
    said = cli("train", "images/digits", "task.model.class=rich.Net", cwd=folder)
    assert "is found before rich.py of this folder: give that another name" in said.stderr
