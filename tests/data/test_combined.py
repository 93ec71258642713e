"""Several loaders as one: which batch of which pass a step takes."""

from isoscale.data.batches import BatchPlan
from isoscale.data.combined import CombinedPlan

PLANS = [BatchPlan(15, 4), BatchPlan(5, 3), BatchPlan(24, 4)]  # 4, 2 and 6 batches


def test_no_pass_over_a_loader_that_cycles_is_read_in_two_epochs() -> None:
    plan = CombinedPlan(PLANS, "max_size_cycle")
    for number, count in enumerate(plan.counts):
        epochs = [{plan.where(6 * epoch + step)[number] // count for step in range(6)} for epoch in range(3)]
        assert not epochs[0] & epochs[1]
        assert not epochs[1] & epochs[2]


def test_a_launch_ends_where_the_batches_of_one_loader_change_their_size_or_begin_anew() -> None:
    plan, step, ends = CombinedPlan(PLANS, "max_size_cycle"), 0, []
    while step < 6:
        step = plan.end_of_kind(step)
        ends.append(step)
    assert ends == [1, 2, 3, 4, 5, 6]
    whole = CombinedPlan([BatchPlan(16, 4), BatchPlan(24, 4)], "max_size")
    assert [whole.end_of_kind(0), whole.end_of_kind(4)] == [4, 6]
    assert whole.kind(0) != whole.kind(4)
