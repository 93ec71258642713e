"""Numbers and durations as people read them."""

import math
from dataclasses import replace

import pytest

from isoscale.observe.events import EpochEnded, Started
from isoscale.observe.text import clock, duration, epoch_line, number, plain_number, table

STARTED = Started("images/digits", "runs/a", [], step=0, num_steps=690, steps_per_epoch=23)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.213449, "0.2134"),
        (0.941, "0.9410"),
        (0.0, "0.000"),
        (-12.3456, "-12.35"),
        (0.99999, "1.000"),
        (9999.4, "9999"),
        (9999.6, "10000"),
        (123456.7, "123457"),
        (0.00012, "0.0001200"),
        (1.2e-5, "1.200e-05"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_metrics_have_four_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_other_numbers_have_no_trailing_zeros() -> None:
    assert [plain_number(value) for value in (0.001, 12340.4, 3.0)] == ["0.001", "12,340", "3"]


def test_durations_grow_from_seconds_to_days() -> None:
    assert [duration(0.42), duration(59.96), duration(125)] == ["0.4 s", "1:00", "2:05"]
    assert [clock(12), clock(3725), clock(2 * 86400 + 3 * 3600)] == ["0:12", "1:02:05", "2 d 03:00"]


def test_an_epoch_is_one_line_with_a_place_for_every_value() -> None:
    values = {
        "val/loss": 0.1822,
        "lr": 0.001,
        "train/accuracy_epoch": 0.941,
        "train/loss_epoch": 0.2134,
        "val/accuracy": 0.951,
        "time/gather": 0.5,
    }
    assert epoch_line(EpochEnded(69, 2, values, seconds=0.4, best=True), STARTED) == (
        "epoch  3/30  step  69  train loss 0.2134  accuracy 0.9410  | val loss 0.1822  accuracy 0.9510 "
        " | lr 0.001   *  0.4 s"
    )


def test_an_epoch_shows_as_many_metrics_of_a_stage_as_fit() -> None:
    values = {"train/loss_epoch": 1.0, "val/accuracy": 0.9, "val/loss": 0.1, "val/f1": 0.8, "val/recall": 0.7}
    event = EpochEnded(69, 2, values, seconds=0.4)
    wide, narrow, very_narrow = (epoch_line(event, STARTED, width) for width in (None, 87, 60))
    assert "val loss 0.1000  accuracy 0.9000  f1 0.8000" in wide and "recall" not in wide
    assert "val loss 0.1000  accuracy 0.9000" in narrow and "f1" not in narrow and "\n" not in narrow
    assert "\n" in very_narrow and "f1 0.8000" in very_narrow


def test_only_the_best_epoch_has_a_star() -> None:
    assert "*" not in epoch_line(EpochEnded(69, 2, {"val/loss": 0.1}, seconds=0.4), STARTED)


def test_one_stage_alone_shows_a_metric_less_where_it_is_too_wide_and_its_loss_in_any_case() -> None:
    values = {"val/energy_rmse": 0.3, "val/force_rmse": 0.8, "val/virial_rmse": 0.5, "val/loss": 100.0}
    wide, narrow = (epoch_line(EpochEnded(69, 2, values, seconds=0.4), STARTED, width) for width in (None, 75))
    assert "val loss 100.0   energy_rmse 0.3000  force_rmse 0.8000  " in wide and "virial" not in wide
    assert "val loss 100.0   energy_rmse 0.3000  " in narrow and len(narrow) <= 75 and "\n" not in narrow


def test_the_metric_that_says_which_is_the_best_is_never_left_out() -> None:
    values = {"val/energy_rmse": 0.3, "val/force_rmse": 0.8, "val/virial_rmse": 0.5, "val/loss": 100.0}
    event = EpochEnded(69, 2, values, seconds=0.4, best=True)
    for monitor in ("val/force_rmse", "val/virial_rmse"):
        started = replace(STARTED, settings={"checkpoint.monitor": monitor})
        wide, narrow = (epoch_line(event, started, width) for width in (None, 75))
        assert monitor.removeprefix("val/") in wide and "val loss 100.0   energy_rmse" in wide
        assert f"val loss 100.0   {monitor.removeprefix('val/')} " in narrow and len(narrow) <= 75


def test_an_epoch_line_that_is_too_wide_is_broken_between_groups() -> None:
    values = {"train/loss_epoch": 0.2, "train/accuracy_epoch": 0.9, "val/loss": 0.1, "lr": 0.001}
    lines = epoch_line(EpochEnded(69, 2, values, seconds=0.4), STARTED, width=80).split("\n")
    assert len(lines) == 2 and max(map(len, lines)) <= 80
    assert lines[0].index("train") == lines[1].index("val") and "lr" in lines[1]


def test_lines_that_are_broken_have_a_metric_less_where_they_are_too_wide_still() -> None:
    names = ("loss", "energy_rmse", "force_rmse")
    values = {f"train/{name}_epoch": 0.002459 for name in names} | {f"val/{name}": 0.001248 for name in names}
    started = replace(STARTED, settings={"checkpoint.monitor": "val/force_rmse"})
    lines = epoch_line(EpochEnded(69, 2, values, seconds=0.4, best=True), started, width=80).split("\n")
    assert len(lines) == 2 and max(map(len, lines)) <= 80
    assert all("force_rmse" in line for line in lines)


def test_a_table_keeps_texts_of_several_lines_in_their_column() -> None:
    assert table([("a", "one\ntwo")]) == ["  a             one", "                two"]


def test_of_names_that_a_module_gives_itself_those_of_a_validation_are_shown() -> None:
    values = {"train_acc": 0.1, "train_f1": 0.2, "gap": 0.3, "val_loss": 0.4, "val_acc": 0.5}
    line = epoch_line(EpochEnded(69, 2, values, seconds=0.4), STARTED)
    assert all(name in line for name in ("val_loss 0.4", "val_acc 0.5", "gap 0.3")) and "train_acc" not in line
