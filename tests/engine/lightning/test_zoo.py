"""Modules and scripts as people write them: the weights, steps and metrics of Lightning's Trainer."""

from functools import partial
from pathlib import Path

import pytest

from isoscale.errors import Stopped, UserError
from tests.engine.lightning.test_habits import stopping
from tests.engine.lightning.zoo.case import Case
from tests.engine.lightning.zoo.cases import CASES
from tests.engine.lightning.zoo.compare import compare, compared, trained_by_isoscale

STOP = 4
"""In the first epoch of most, and in the middle of what callbacks have begun."""


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.quick else [pytest.mark.full]) for case in CASES],
)
def test_a_script_reaches_the_weights_of_lightning_to_the_bit(case: Case, tmp_path: Path) -> None:
    if case.refused:
        with pytest.raises(UserError, match=case.refused):
            compared(case, tmp_path)
        return
    result = compared(case, tmp_path)
    if case.difference:
        assert result.largest > 0, "the weights are equal: the difference is gone and need not be explained"
        assert result.ours.steps == result.theirs.steps
    else:
        assert not result.differences, "; ".join(result.differences)


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if not case.refused], ids=lambda case: case.name)
def test_a_script_does_not_notice_a_stop(case: Case, tmp_path: Path) -> None:
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    straight = trained_by_isoscale(case, tmp_path / "straight")
    with pytest.raises(Stopped):
        trained_by_isoscale(case, tmp_path / "stopped", partial(stopping, step=STOP))
    assert compare(trained_by_isoscale(case, tmp_path / "stopped"), straight).differences == []
