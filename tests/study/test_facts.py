import pytest

from isoscale.study.facts import Point, read, read_all
from tests.study.conftest import LOSSES, rows


def test_a_value_knows_its_step_epoch_and_time_of_training(make):
    facts = read(make("a"))
    assert facts.curves["val/loss"][1] == Point(step=20, epoch=2, seconds=4.0, value=1.0)


def test_without_a_training_clock_time_is_that_of_the_wall_since_the_first_value(make):
    curve = read(make("a", rows("val/loss", LOSSES, clock=False))).curves["val/loss"]
    assert [point.seconds for point in curve] == [0, 3, 6, 9]


def test_a_value_without_a_clock_of_its_own_has_the_last_one(make):
    logged = [*rows("val/loss", [2.0]), *rows("val/f1", [0.1, 0.2], clock=False)]
    assert [point.seconds for point in read(make("a", logged)).curves["val/f1"]] == [2.0, 2.0]


def test_a_running_run_is_as_far_as_it_has_logged(make):
    facts = read(make("a", status="running", step=10, seconds=1.0))
    assert (facts.step, facts.seconds, facts.num_steps) == (40, 8.0, 40)
    started = read(make("b", [], status="running", step=None, seconds=None))
    assert (started.step, started.seconds, started.samples_per_second, started.monitor) == (None, None, None, None)


def test_the_rate_is_the_mean_over_the_time_after_the_first_window(make):
    logged = rows("time/samples_per_second", [1.0, 100.0, 300.0])
    assert read(make("a", logged)).samples_per_second == pytest.approx(2 / (1 / 100 + 1 / 300))
    assert read(make("b", logged[:2])).samples_per_second == 1.0


def test_parameters_are_those_of_the_whole_model(make):
    layers = [{"name": "", "num_parameters": 12}, {"name": "head", "num_parameters": 5}]
    assert read(make("a", layers=layers)).num_parameters == 12
    assert read(make("b")).num_parameters is None


def test_runs_of_one_name_are_told_apart_by_their_paths(make):
    assert [facts.label for facts in read_all([make("x/a"), make("x/b")])] == ["a", "b"]
    assert [facts.label for facts in read_all([make("y/a"), make("z/a")])] == ["y/a", "z/a"]


def test_a_damaged_run_does_not_hide_the_others(make):
    bad = make("bad")
    (bad.path / "metrics.jsonl").write_text("{\n{\n")
    facts = read_all([bad, make("good")])
    assert [each.status for each in facts] == ["damaged", "done"]
    assert "metrics.jsonl, line 1" in facts[0].message
