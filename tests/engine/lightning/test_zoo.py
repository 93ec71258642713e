"""Modules and scripts as people write them: the weights, steps and metrics of Lightning's Trainer."""

from pathlib import Path

import pytest

from tests.engine.lightning.zoo.case import Case
from tests.engine.lightning.zoo.cases import CASES
from tests.engine.lightning.zoo.compare import compared


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[] if case.quick else [pytest.mark.full]) for case in CASES],
)
def test_a_script_reaches_the_weights_of_lightning_to_the_bit(case: Case, tmp_path: Path) -> None:
    result = compared(case, tmp_path)
    if case.difference:
        assert result.largest > 0, "the weights are equal: the difference is gone and need not be explained"
        assert result.ours.steps == result.theirs.steps
    else:
        assert not result.differences, "; ".join(result.differences)
