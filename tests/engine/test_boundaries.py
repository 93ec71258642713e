"""The planner: launches end where something is due, and everything due happens exactly when it should."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from isoscale.data.batches import BatchPlan
from isoscale.engine.boundaries import Planner
from isoscale.engine.config import Cadence, Checkpoint, Train

NEVER = Cadence(1, "never")
cadences = st.one_of(
    st.just(NEVER),
    st.builds(Cadence, st.integers(1, 9), st.sampled_from(["epoch", "step"])),
    st.builds(Cadence, st.integers(1, 9), st.just("step"), st.just(True)),
)


@st.composite
def planners(draw: Any) -> Planner:
    num_samples = draw(st.integers(1, 60))
    plan = BatchPlan(
        num_samples, draw(st.integers(1, num_samples)), draw(st.booleans()), draw(st.none() | st.integers(1, 9))
    )
    return Planner(plan, draw(st.integers(1, 70)), draw(st.integers(1, 20)), draw(cadences), draw(cadences))


def launches(plan: Planner) -> list[tuple[int, int]]:
    """All launches of a training, from its start to its end."""
    found, step = [], 0
    while step < plan.num_steps:
        found.append((step, plan.next_boundary(step)))
        step = found[-1][1]
    return found


def wanted(cadence: Cadence, per_epoch: int, num_steps: int) -> set[int]:
    """The steps at which a cadence asks for something, counted by hand."""
    if cadence.unit == "never":
        return set()
    stride = int(cadence.count) * (per_epoch if cadence.unit == "epoch" else 1)
    if cadence.of_epoch:
        starts = range(0, num_steps, per_epoch)
        found = {start + within for start in starts for within in range(stride, per_epoch + 1, stride)}
        return {step for step in found if step <= num_steps}
    return set(range(stride, num_steps + 1, stride))


@given(planners())
def test_launches_advance_without_gaps_and_end_at_the_last_step(plan: Planner) -> None:
    cuts = launches(plan)
    assert cuts[0][0] == 0 and cuts[-1][1] == plan.num_steps
    assert all(start < stop for start, stop in cuts)
    assert all(one[1] == two[0] for one, two in pairwise(cuts))


@given(planners())
def test_no_launch_crosses_a_step_at_which_something_is_due(plan: Planner) -> None:
    for start, stop in launches(plan):
        assert not any(plan.due(step).anything for step in range(start + 1, stop))


@given(planners())
def test_everything_due_happens_exactly_at_its_steps(plan: Planner) -> None:
    per_epoch, end = plan.batches.steps_per_epoch, plan.num_steps
    visited = {stop: plan.due(stop) for _, stop in launches(plan)}
    epochs = set(range(per_epoch, end + 1, per_epoch))
    logs = set(range(plan.log_every, end + 1, plan.log_every)) | epochs | {end}
    evaluations = wanted(plan.evaluate, per_epoch, end) | ({end} if plan.evaluate != NEVER else set())
    assert {step for step, due in visited.items() if due.log} == logs
    assert {step for step, due in visited.items() if due.epoch_end} == epochs
    assert {step for step, due in visited.items() if due.evaluate} == evaluations
    assert {step for step, due in visited.items() if due.checkpoint} == wanted(plan.checkpoint, per_epoch, end) | {end}
    assert {step for step, due in visited.items() if due.end} == {end}


@given(planners())
def test_a_launch_has_one_batch_size_so_that_a_ragged_batch_is_a_launch_of_its_own(plan: Planner) -> None:
    for start, stop in launches(plan):
        sizes = {plan.batches.size(step) for step in range(start, stop)}
        assert len(sizes) == 1
        if sizes != {plan.batches.batch_size}:
            assert stop - start == 1


@given(planners(), st.integers(0, 69))
def test_boundaries_do_not_depend_on_where_a_run_was_continued(plan: Planner, step: int) -> None:
    if step < plan.num_steps:
        stops = [stop for _, stop in launches(plan)]
        assert plan.next_boundary(step) == min(stop for stop in stops if stop > step)


@pytest.mark.parametrize(
    ("text", "cadence"),
    [
        ("1 epoch", Cadence(1, "epoch")),
        ("2 epochs", Cadence(2, "epoch")),
        ("500 steps", Cadence(500, "step")),
        ("1step", Cadence(1, "step")),
        (" 10 minutes ", Cadence(10, "minute")),
        ("never", NEVER),
    ],
)
def test_a_cadence_is_read_as_people_write_it(text: str, cadence: Cadence) -> None:
    assert Cadence.parse(text) == cadence


@pytest.mark.parametrize("text", ["", "epoch", "0 steps", "-1 steps", "1.5 epochs", "2 weeks", "1 epoch 2 steps"])
def test_another_cadence_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(ValueError, match='"1 epoch", "500 steps", "10 minutes" or "never"'):
        Cadence.parse(text)


def test_a_bare_number_is_a_number_of_steps() -> None:
    assert Checkpoint(every=7).every == "7 steps"  # type: ignore[arg-type]


def test_an_evaluation_by_the_clock_is_refused_because_the_clock_would_steer_the_training() -> None:
    with pytest.raises(ValidationError, match="epochs or steps"):
        Train(evaluate="10 minutes")
    assert Checkpoint(every="10 minutes").every == "10 minutes"


def test_parts_of_an_epoch_are_so_many_of_its_steps() -> None:
    assert Cadence.parse("0.25 epochs").in_steps(11) == Cadence(2, "step", of_epoch=True)
    assert Cadence.parse("0.01 epochs").in_steps(11) == Cadence(1, "step", of_epoch=True)
    assert Cadence.parse("500 steps of each epoch") == Cadence(500, "step", of_epoch=True)
    for text in ("0.0 epochs", "2 epochs of each epoch"):
        with pytest.raises(ValueError, match="not a cadence"):
            Cadence.parse(text)
