"""Habits of people under capture, by recorded graphs: captured or refused with a line, and the bits of eager steps."""

from pathlib import Path
from typing import Any

import pytest

import isoscale
from tests.engine.lightning import habits
from tests.engine.lightning.test_lightning import fit
from tests.engine.step.recorded_graphs import recorded_graphs
from tests.helpers import first_of

__all__ = ["recorded_graphs"]

REASONS = {
    habits.FlagsInEpochStart: "changes self.factor too often", habits.Curriculum: "needs a value of the device",
    habits.WithMeter: "changes self.meter", habits.HiddenState: "changes self.hidden",
    habits.HiddenTeacher: "changes self.teacher", habits.GrowingBuffer: "replaces the tensor model/history",
    habits.ManualAccumulation: "updates its weights itself", habits.Sparse: "gradients are sparse",
    habits.ChangedSettings: "changes self._hparams too often",
    habits.DrawsAnywhere: "draws random numbers on the host",
}  # fmt: skip
"""Why some run eagerly."""
CAPTURED = [
    habits.UnfreezingInTheStep, habits.TorchAverage, habits.Unfreezing, habits.Freezing, habits.AddingToTheOptimizer,
    habits.EvalInInit, habits.EvalInFitStart, habits.EvalInEpochStart, habits.Tied, habits.Parametrised,
    habits.Spectral, habits.OldSpectral, habits.WeightNorm, habits.PrunedFromTheStart, habits.OwnAverage,
    habits.SwappedStorages, habits.GradientHooks, habits.OwnFunction, habits.InPlace, habits.LazyButKnown,
]  # fmt: skip


def trained(habit: Any, path: Path, program: str) -> isoscale.Run:
    return fit(habits.made(habit)[0], habits.Points(), path, 4, **{"train.program": program})


@pytest.mark.slow
@pytest.mark.usefixtures("recorded_graphs")
@pytest.mark.parametrize("habit", first_of([*CAPTURED, *REASONS], *CAPTURED[:2], habits.GrowingBuffer))
def test_a_habit_is_captured_or_refused_with_a_line(habit: Any, tmp_path: Path) -> None:
    eager, auto = (trained(habit, tmp_path / program, program) for program in ("eager", "auto"))
    decided = auto.record["decided"]
    assert decided["program"] == ("eager" if habit in REASONS else "graphed"), decided["why"]
    assert REASONS.get(habit, "") in decided["why"]
    assert auto.summary()["weights_sha256"] == eager.summary()["weights_sha256"]
    names = [name for name in eager.metrics if not name.startswith("time/")]
    assert [auto.history(name) for name in names] == [eager.history(name) for name in names]
