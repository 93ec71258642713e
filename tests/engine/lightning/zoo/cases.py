"""All cases of the zoo."""

from tests.engine.lightning.zoo import (
    averages,
    callbacks,
    data,
    demos,
    finetuning,
    generative,
    metrics,
    schedules,
    science,
    sequences,
    steps,
)
from tests.engine.lightning.zoo.case import Case

CASES: list[Case] = [
    *demos.CASES, *generative.CASES, *schedules.CASES, *metrics.CASES, *averages.CASES, *sequences.CASES,
    *finetuning.CASES, *data.CASES, *steps.CASES, *callbacks.CASES, *science.CASES,
]  # fmt: skip
