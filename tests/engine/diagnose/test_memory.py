"""Out of memory, in words."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isoscale
from isoscale.engine.diagnose.memory import explained, size
from isoscale.errors import UserError
from isoscale.system import devices as accelerator


class Greedy(isoscale.Supervised):
    """Asks for a petabyte in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            torch.empty(1 << 50, dtype=torch.uint8)
        return super().training_step(batch, batch_idx)


def test_a_step_that_asks_for_too_much_says_how_much_and_what_to_change(tmp_path: Path) -> None:
    recipe = {
        "data": {"batch_size": 16},
        "train": {"epochs": 1, "device": "cpu", "threads": 1},
        "observe": {"level": "error", "tensorboard": 0},
    }
    data = {"input": torch.randn(64, 3), "target": torch.randn(64, 1)}
    with pytest.raises(UserError) as caught:
        isoscale.Trainer(recipe, run=tmp_path / "run").fit(Greedy(nn.Linear(3, 1), "mse"), data)
    message = str(caught.value)
    assert "out of memory on cpu" in message
    assert "1048576.0 GiB was asked for" in message
    assert "in use by this run" in message
    for setting in ("train.accumulate=2", "data.residency=host", "train.precision=bf16", "data.batch_size=16"):
        assert setting in message
    assert isoscale.Run(tmp_path / "run").status == "failed"


def test_the_amount_in_a_message_of_a_gpu_is_taken_over() -> None:
    with pytest.raises(UserError, match=r"2\.50 GiB was asked for"), explained(accelerator.find("cpu"), 8):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of …")


def test_other_errors_pass_untouched() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), explained(accelerator.find("cpu"), 8):
        torch.zeros(2, 3) @ torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (2048, "2 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 42, "4096.0 GiB"),
    ],
)
def test_bytes_in_words(num_bytes: int, words: str) -> None:
    assert size(num_bytes) == words
