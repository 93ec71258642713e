"""The first 100 losses of the digits in float64, as they were when they were written down.

The recipe is pinned here key by key, so that retuning the preset does not change them. After a change that is meant to
move the numbers, write them anew, look at the difference, and say why in the commit:

    python -m tests.engine.test_golden
"""

import json
import tempfile
from pathlib import Path

import pytest

from tests.helpers import train

GOLDEN = Path(__file__).with_name("golden_digits_float64.json")
PINNED = {
    "seed": 0,
    "task": {
        "class": "classifier",
        "model": {"class": "mlp", "widths": [64, 128, 128, 10], "activation": "relu", "dropout": 0.1},
        "loss": "cross_entropy",
    },
    "data": {
        "class": "digits",
        "split": {"train": 0.8, "val": 0.1, "test": 0.1},
        "batch_size": 64,
        "transforms": [{"class": "divide", "by": 16}, "flatten"],
    },
    "optimizer": {"name": "adamw", "lr": 2e-3, "weight_decay": 0.01},
    "schedule": {"name": "cosine", "end": 0, "warmup": 20},
    "train": {"steps": 100, "epochs": None, "precision": "64", "threads": 1, "device": "cpu", "evaluate": "never"},
    "parallel": {"reduce": "flat"},
    "checkpoint": {"every": "never"},
    "observe__every": 1,
}


def losses(path: Path) -> list[float]:
    """The loss of each of the first 100 steps."""
    return [value for _, value in train(path, "images/digits", **PINNED).history("train/loss")]


def test_the_first_100_losses_of_the_digits_in_float64_are_those_written_down(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())
    found = losses(tmp_path / "run")
    assert len(found) == len(golden) == 100
    assert found == pytest.approx(golden, rel=1e-9, abs=0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(losses(Path(folder) / "run"), indent=0) + "\n")
    print(f"wrote {GOLDEN}")
