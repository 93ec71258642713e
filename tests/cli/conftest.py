"""The command line as tests use it: inside this process, because importing torch for each command takes seconds."""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from isoscale.cli.main import run
from tests.helpers import train


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def isoscale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command in an empty folder, as the installed script does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["isoscale", *words])
        with pytest.raises(SystemExit) as end:
            run()
        printed = capsys.readouterr()
        return Result(int(end.value.code or 0), printed.out, printed.err)

    return call


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs, to look at."""
    folder = tmp_path_factory.mktemp("finished") / "runs" / "digits-1"
    return train(folder, train__epochs=2).path


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies of that run, to change and to break."""

    def copy(name: str = "runs/digits-1") -> Path:
        return Path(shutil.copytree(finished, tmp_path / name, symlinks=True)).relative_to(tmp_path)

    return copy
