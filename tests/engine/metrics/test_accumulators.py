"""Accumulators on the device: sums and weights by name, read in windows."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from isoscale.engine.metrics.accumulators import MAX_NAMES, Recorder, means
from isoscale.engine.metrics.weighted_sum import WeightedSum
from isoscale.errors import UserError

CPU = torch.device("cpu")
numbers = st.floats(-1e3, 1e3)
entries = st.lists(
    st.tuples(st.sampled_from(["loss", "accuracy", "energy"]), numbers, st.integers(1, 64), st.booleans()), max_size=30
)
Entries = list[tuple[str, float, int, bool]]


def add(recorder: Recorder, found: Entries) -> None:
    for name, mean, weight, on_device in found:
        value = torch.tensor(mean, dtype=torch.float64)
        recorder.add(name, WeightedSum.of_mean(value, torch.tensor(float(weight)) if on_device else weight))


def expected(found: Entries) -> dict[str, float]:
    names = dict.fromkeys(name for name, *_ in found)
    return {
        name: sum(mean * weight for key, mean, weight, _ in found if key == name)
        / sum(weight for key, _, weight, _ in found if key == name)
        for name in names
    }


@given(entries)
def test_means_are_weighted_whether_weights_are_numbers_or_tensors(found: Entries) -> None:
    recorder = Recorder(CPU)
    add(recorder, found)
    assert means(recorder.read().pairs()) == pytest.approx(expected(found), rel=1e-9, abs=1e-9)
    assert recorder.names == list(expected(found))


@given(entries, entries)
def test_a_window_is_the_difference_of_two_readings(first: Entries, second: Entries) -> None:
    recorder = Recorder(CPU)
    add(recorder, first)
    before = recorder.read().pairs()
    add(recorder, second)
    assert means(recorder.read().pairs(), before) == pytest.approx(expected(second), rel=1e-6, abs=1e-6)


@given(entries, entries)
def test_a_reading_is_not_changed_by_what_comes_after_it(first: Entries, second: Entries) -> None:
    recorder = Recorder(CPU)
    add(recorder, first)
    reading = recorder.read()
    add(recorder, second)
    recorder.reset()
    assert means(reading.pairs()) == pytest.approx(expected(first), rel=1e-9, abs=1e-9)


@given(entries, entries)
def test_after_a_reset_the_next_epoch_counts_for_itself(first: Entries, second: Entries) -> None:
    recorder = Recorder(CPU)
    add(recorder, first)
    recorder.reset()
    assert means(recorder.read().pairs()) == {}
    add(recorder, second)
    assert means(recorder.read().pairs()) == pytest.approx(expected(second), rel=1e-9, abs=1e-9)


@given(entries, entries)
def test_a_state_that_was_saved_and_loaded_goes_on_to_the_same_bits(first: Entries, second: Entries) -> None:
    straight, cut, again = Recorder(CPU), Recorder(CPU), Recorder(CPU)
    add(straight, first)
    add(cut, first)
    tensors, values = cut.state()
    add(again, [("other", 1.0, 1, False)])
    again.load({name: tensor.clone() for name, tensor in tensors.items()}, json.loads(json.dumps(values)))
    add(straight, second)
    add(again, second)
    assert again.read().pairs() == straight.read().pairs()


@given(entries)
def test_what_shards_collect_is_what_would_have_been_added_at_once(found: Entries) -> None:
    recorder, shards = Recorder(CPU), Recorder(CPU)
    add(recorder, found)
    one = shards.begin_shard()
    add(shards, found[::2])
    two = shards.begin_shard()
    add(shards, found[1::2])
    shards.end_shards(one + two)
    assert means(shards.read().pairs()) == pytest.approx(means(recorder.read().pairs()), rel=1e-9, abs=1e-9)


def test_small_values_are_not_lost_among_many() -> None:
    recorder = Recorder(CPU)
    recorder.add("loss", WeightedSum.of_mean(torch.tensor(1e8), 1))
    for _ in range(100):
        recorder.add("loss", WeightedSum.of_mean(torch.tensor(0.1), 1))
    total, _ = recorder.read().pairs()["loss"]
    assert total == pytest.approx(1e8 + 100 * float(torch.tensor(0.1)), abs=1e-6)


def test_the_flag_travels_with_a_reading_and_is_not_a_metric() -> None:
    recorder = Recorder(CPU)
    recorder.add("loss", WeightedSum.of_mean(torch.tensor(1.0), 1))
    assert not recorder.read(torch.zeros(())).flag
    reading = recorder.read(torch.ones(()))
    assert reading.flag
    assert means(reading.pairs()) == {"loss": 1.0}


def test_neither_sums_nor_weights_keep_a_graph() -> None:
    grown = torch.ones((), requires_grad=True)
    recorder = Recorder(CPU)
    recorder.add("loss", WeightedSum(grown * 2, grown * 3))
    shard = recorder.begin_shard()
    recorder.add("loss", WeightedSum(grown * 2, grown * 3))
    recorder.end_shards(shard)
    assert not recorder.buffer.requires_grad
    assert recorder.read().pairs() == {"loss": (4.0, 6.0)}


def test_more_names_than_there_is_room_for_are_refused_with_the_name() -> None:
    recorder = Recorder(CPU)
    for number in range(MAX_NAMES - 1):
        recorder.add(f"metric_{number}", WeightedSum.of_mean(torch.tensor(float(number)), 1))
    with pytest.raises(UserError, match="'one_more' is one too many"):
        recorder.add("one_more", WeightedSum.of_mean(torch.tensor(1.0), 1))
    found = means(recorder.read(torch.ones(())).pairs())
    assert found == {f"metric_{number}": float(number) for number in range(MAX_NAMES - 1)}


def test_roots_are_taken_of_the_mean_over_all_and_survive_a_restart() -> None:
    recorder = Recorder(torch.device("cpu"))
    recorder.roots.add("rmse")
    for total, weight in ((9.0, 1.0), (1.0, 1.0), (2.0, 2.0)):
        recorder.add("rmse", WeightedSum(torch.tensor(total), weight))
        recorder.add("mse", WeightedSum(torch.tensor(total), weight))
    again = Recorder(torch.device("cpu"))
    again.load(*recorder.state())
    for each in (recorder, again):
        assert each.shown(means(each.read().pairs())) == {"rmse": 3.0**0.5, "mse": 3.0}
    assert again.shown({"rmse": -1e-30})["rmse"] == 0.0


@given(entries, entries)
def test_ranks_that_met_names_in_another_order_add_up_the_same_ones(ours: Entries, theirs: Entries) -> None:
    ranks = [(Recorder(CPU), found) for found in (ours, theirs)]
    shards = []
    for recorder, found in ranks:
        shards.append(recorder.begin_shard())
        add(recorder, found)
    every = [recorder.recorded for recorder, _ in ranks]
    for (recorder, _), shard in zip(ranks, shards, strict=True):
        recorder.agree(every, [shard])
    for recorder, _ in ranks:
        recorder.end_shards(shards[0] + shards[1])
        assert means(recorder.read().pairs()) == pytest.approx(expected(ours + theirs), rel=1e-9, abs=1e-6)


def test_a_rank_without_samples_shows_roots_as_others_do() -> None:
    other, recorder = Recorder(CPU), Recorder(CPU)
    other.roots.add("rmse")
    add(other, [("rmse", 4.0, 2, False)])
    recorder.agree([other.recorded])
    assert recorder.names == ["rmse"] and recorder.shown({"rmse": 4.0}) == {"rmse": 2.0}
