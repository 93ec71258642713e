"""Law 3: nothing in a step makes the host look at a value on the device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isoscale.engine.step.programs import EagerProgram
from tests.helpers import train
from tests.science.cosmology import made_boxes
from tests.science.crystals import made_alloys
from tests.science.electronic import made
from tests.science.potentials import made_systems

LOOKING = ("_local_scalar_dense", "is_nonzero", "nonzero", "unique", "masked_select", "equal.default")
"""Operations whose result the host needs before it can go on; `.item()` and `if tensor:` are the first of them."""


class NoLooking(TorchDispatchMode):
    """Refuses operations that a device would have to be waited for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        if any(word in name for word in LOOKING):
            raise AssertionError(f"{name} in a step")
        return function(*args, **(kwargs or {}))


@contextmanager
def nothing_waits() -> Iterator[None]:
    """On a CUDA device torch itself tells; elsewhere the operations do."""
    if not torch.cuda.is_available():
        with NoLooking():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Runs all eager steps but the first few, which allocate, under watch; counts them."""
    plain, seen = EagerProgram.run, [0]

    def run(self: EagerProgram, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        if start < 5:
            return plain(self, start, stop, interrupted)
        with nothing_waits():
            seen[0] += stop - start
            return plain(self, start, stop, interrupted)

    monkeypatch.setattr(EagerProgram, "run", run)
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"train__clip": 1.0, "train__ema": 0.99},
        {"train__accumulate": 2},
        {"parallel__reduce": "tree"},
        {"data__residency": "host"},
        {"optimizer__name": "sgd", "optimizer__momentum": 0.9, "optimizer__weight_decay": 0.0},
        {"train__precision": "bf16"},
    ],
    ids=lambda options: ", ".join(f"{key}={value}" for key, value in options.items()) or "plain",
)
def test_no_step_waits_for_the_device(options: dict[str, Any], watched: list[int], tmp_path: Path) -> None:
    train(tmp_path, train__epochs=2, train__program="eager", observe__every=5, **options)
    assert watched[0] > 30


def test_no_step_of_electronic_structure_waits(watched: list[int], tmp_path: Path) -> None:
    folder = made.write(tmp_path)
    train(tmp_path / "run", made.RECIPE, data__path=str(folder), train__epochs=6, train__program="eager")
    assert watched[0] > 9


def test_no_step_of_a_potential_waits(watched: list[int], tmp_path: Path) -> None:
    descriptor = {
        "class": "se_e2_a", "sel": [30, 30], "cutoff": made_systems.CUTOFF, "widths": [4, 8], "axis_width": 2,
    }  # fmt: skip
    model = {"class": "deep_potential", "types": made_systems.TYPES, "descriptor": descriptor, "fitting_widths": [6, 6]}
    system = str(made_systems.write(tmp_path / "system", [made_systems.arrays(8)]))
    recipe = {
        "task": {"class": "potential", "model": model, "labels": ["energy", "force", "virial"]},
        "data": {"class": "atomic_systems", "train": [system], "val": [system], "batch_size": 2},
        "optimizer": {"name": "adam", "lr": 1e-3},
    }
    train(tmp_path / "run", recipe, train__epochs=5, train__program="eager", observe__every=5)
    assert watched[0] >= 15


def test_no_step_of_cosmology_waits(watched: list[int], tmp_path: Path) -> None:
    train(
        tmp_path / "run",
        made_boxes.recipe(tmp_path),
        train__program="eager",
        observe__every=5,
        train__epochs=5,
        checkpoint__every="5 epochs",
    )
    assert watched[0] >= 9


def test_no_step_of_crystals_waits(watched: list[int], tmp_path: Path) -> None:
    recipe = made_alloys.small(made_alloys.made(tmp_path / "alloys.npz", count=20))
    train(tmp_path / "run", recipe, train__program="eager", observe__every=3, checkpoint__every="9 steps")
    assert watched[0] >= 3


def test_a_step_that_waits_is_noticed(watched: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from isoscale.science.images import Classifier

    plain = Classifier.training_step

    def looking(self: Classifier, batch: Any, batch_idx: int) -> Any:
        loss = plain(self, batch, batch_idx)
        assert loss.mean.item() > -1
        return loss

    monkeypatch.setattr(Classifier, "training_step", looking)
    with pytest.raises((AssertionError, RuntimeError), match=r"_local_scalar_dense|synchroniz"):
        train(tmp_path, train__epochs=2, train__program="eager", observe__every=5)
