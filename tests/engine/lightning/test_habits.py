"""Whatever people do to a module while it trains: the weights of Lightning, of an unstopped run, of one rank."""

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.nn.parameter import is_lazy

from isoscale.engine.state.checkpoint import read
from isoscale.errors import Stopped, UserError
from tests.engine.lightning import habits
from tests.engine.lightning.test_lightning import assert_same_weights, fit, fit_lightning, lines
from tests.helpers import first_of, first_step, newest_step
from tests.ranks import fit_on

EPOCHS = 3
STOPS = (3, 11, 16)
"""In the first epoch, in the middle of the second, at the end of it."""


def stopping(module: Any, step: int) -> Any:
    """The module, told to stop in a step."""
    method, calls = module.training_step, []

    def training_step(batch: Any, batch_idx: int) -> Any:
        calls.append(batch_idx)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return method(batch, batch_idx)

    object.__setattr__(module, "training_step", training_step)
    return module


OFTEN_SEEN = [
    habits.Unfreezing, habits.UnfreezingInTheStep, habits.AddingToTheOptimizer, habits.EvalInEpochStart,
    habits.FlagsInEpochStart, habits.Curriculum, habits.HiddenState, habits.ManualAccumulation, habits.Complex,
    habits.TorchAverage,
]  # fmt: skip
NOT_LIGHTNINGS = {habits.DrawsAnywhere}
"""Random numbers come from other places here."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "habit", [each for each in habits.HABITS if each not in NOT_LIGHTNINGS], ids=lambda habit: habit.__name__
)
def test_a_habit_gives_the_weights_of_lightning(habit: Any, tmp_path: Path) -> None:
    ours, theirs = habits.made(habit)[0], habits.made(habit)[0]
    before = {name: tensor.detach().clone() for name, tensor in ours.named_parameters() if not is_lazy(tensor)}
    fit(ours, habits.Points(), tmp_path / "run", EPOCHS)
    fit_lightning(theirs, habits.Points(), EPOCHS)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in ours.named_parameters() if name in before)
    assert_same_weights(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("habit", first_of(habits.HABITS, *OFTEN_SEEN), ids=lambda habit: habit.__name__)
def test_a_habit_does_not_notice_a_stop(habit: Any, tmp_path: Path) -> None:
    straight, again = habits.made(habit)[0], None
    fit(straight, habits.Points(), tmp_path / "straight", EPOCHS)
    for step in STOPS:
        with pytest.raises(Stopped):
            fit(stopping(habits.made(habit)[0], step), habits.Points(), tmp_path / f"run{step}", EPOCHS)
        again = habits.made(habit)[0]
        run = fit(again, habits.Points(), tmp_path / f"run{step}", EPOCHS)
        assert first_step(run) == step
        assert_same_weights(straight, again)
        assert lines(tmp_path / f"run{step}") == lines(tmp_path / "straight")


@pytest.mark.parametrize("habit", [habits.EvalInEpochStart, habits.ManualAccumulation, habits.OwnAverage])
def test_evaluations_in_the_middle_of_an_epoch_leave_a_habit_alone(habit: Any, tmp_path: Path) -> None:
    ours, theirs = habits.made(habit)[0], habits.made(habit)[0]
    fit(ours, habits.Points(), tmp_path / "run", EPOCHS, **{"train.evaluate": "4 steps"})
    fit_lightning(theirs, habits.Points(), EPOCHS, val_check_interval=4)
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize("habit", habits.REFUSED, ids=lambda habit: habit.__name__)
def test_what_cannot_be_kept_is_refused_in_words(habit: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=habits.REFUSED[habit]):
        fit(*habits.made(habit), tmp_path / "run", EPOCHS)


PER_RANK = {habits.HiddenState}
"""They keep something of their own share of a batch, as under any other way to train on several ranks."""


def trained_on(world: int, habit: Any, path: Path, batch_size: int, step: int | None = None) -> dict[str, Any]:
    """The weights of a training on so many ranks, or only a training that is stopped in a step."""
    make = partial(_made, habit, batch_size, step)
    if step is not None:
        with pytest.raises(AssertionError, match="Stopped"):
            fit_on(world, path, make, train__epochs=EPOCHS, train__precision="64")
        return {}
    newest = newest_step(path)
    run = fit_on(world, path, make, train__epochs=EPOCHS, train__precision="64")
    assert first_step(run) == newest
    return read(run.checkpoint("last"))[0]["model"]


def _made(habit: Any, batch_size: int, step: int | None) -> tuple[Any, Any]:
    module, data = habits.made(habit, batch_size)
    return module if step is None else stopping(module, step), data


@pytest.mark.slow
@pytest.mark.parametrize("habit", first_of(habits.HABITS, *OFTEN_SEEN[:2]), ids=lambda habit: habit.__name__)
def test_a_habit_is_the_same_on_two_ranks_and_does_not_notice_a_stop_there(habit: Any, tmp_path: Path) -> None:
    together = trained_on(2, habit, tmp_path / "two", 4)
    if habit not in PER_RANK:
        alone = trained_on(1, habit, tmp_path / "one", 8)
        assert alone.keys() == together.keys()
        for name, tensor in alone.items():
            torch.testing.assert_close(
                together[name], tensor, rtol=1e-5, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
            )
    trained_on(2, habit, tmp_path / "stopped", 4, step=11)
    again = trained_on(2, habit, tmp_path / "stopped", 4)
    assert all(torch.equal(again[name], tensor) for name, tensor in together.items())


@pytest.mark.slow
@pytest.mark.parametrize("habit", habits.REFUSED_ON_RANKS, ids=lambda habit: habit.__name__)
def test_what_ranks_cannot_share_is_refused_there(habit: Any, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=habits.REFUSED_ON_RANKS[habit]):
        fit_on(2, tmp_path, partial(_made, habit, 4, None), train__epochs=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("habit", OFTEN_SEEN, ids=lambda habit: habit.__name__)
def test_a_habit_is_the_same_on_a_gpu(habit: Any, tmp_path: Path) -> None:
    options = {"train.device": "cuda", "train.precision": "32"}
    straight, theirs, again = (habits.made(habit)[0] for _ in range(3))
    fit(straight, habits.Points(), tmp_path / "straight", EPOCHS, **options)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_epochs=EPOCHS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(theirs, habits.Points())
    assert_same_weights(straight.cpu(), theirs.cpu(), 1e-4, 1e-5)
    options["train.program"] = "eager"  # a replay does not come by where the module is told to stop
    with pytest.raises(Stopped):
        fit(stopping(habits.made(habit)[0], 11), habits.Points(), tmp_path / "stopped", EPOCHS, **options)
    fit(again, habits.Points(), tmp_path / "stopped", EPOCHS, **options)
    assert_same_weights(straight, again.cpu())
