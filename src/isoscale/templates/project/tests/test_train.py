"""Does the project learn, and does it learn the same thing twice?"""

from pathlib import Path
from typing import Any

import pytest

import isoscale

PROJECT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe finds its classes in the folder where the command is typed."""
    monkeypatch.chdir(PROJECT)


def train(path: Path) -> isoscale.Run:
    """Two epochs into a folder of the test's own."""
    changes: dict[str, Any] = {"train.epochs": 2, "observe.level": "error"}
    return isoscale.train("recipe.yaml", run=path, **changes)


def test_the_loss_falls(tmp_path: Path) -> None:
    (_, first), (_, second) = train(tmp_path / "run").history("val/loss")
    assert second < first


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first, second = (train(tmp_path / name).summary()["weights_sha256"] for name in ("first", "second"))
    assert first == second
