"""lcurve.out: the peer's layout, read by the tools that people plot it with, and the same after a stop."""

import math
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from isoscale.observe.config import Observe
from isoscale.observe.events import EpochEnded, Event, Logged, Note
from isoscale.observe.learning_curve import LearningCurve
from isoscale.observe.metric_log import MetricLog, read_metrics

COLUMNS = {"rmse": "loss", "rmse_e": "energy_rmse", "rmse_f": "force_rmse"}
HEAD = """\
# step       rmse_val    rmse_trn    rmse_e_val  rmse_e_trn    rmse_f_val  rmse_f_trn   lr      
# If there is no available reference data, rmse_*_{val,trn} will print nan
"""


def logged(step: int, loss: float = 4.0) -> Logged:
    values = {"train/loss": loss, "train/energy_rmse": 0.5, "train/force_rmse": 0.25, "lr": 1e-3}
    return Logged(step, 0, {**values, "time/seconds": 1.0})


def evaluated(step: int, loss: float = 9.0) -> EpochEnded:
    return EpochEnded(step, 0, {"val/loss": loss, "val/energy_rmse": 0.125, "val/force_rmse": 0.75}, seconds=1.0)


def epoch_end(step: int) -> EpochEnded:
    return EpochEnded(step, 0, {"train/loss_epoch": 4.0}, seconds=1.0)


def curve(path: Path, *events: Event, every: int = 20, validated: bool = True) -> str:
    writer = LearningCurve(path / "lcurve.out", every, COLUMNS, validated)
    for event in events:
        writer.notify(event)
    writer.close()
    return (path / "lcurve.out").read_text()


def test_the_table_is_laid_out_as_deepmd_kit_writes_it(tmp_path: Path) -> None:
    written = curve(tmp_path, logged(1), evaluated(1), Note("aside"), logged(20, loss=0.0625), evaluated(20, loss=1e4))
    assert written == HEAD + (
        "      1      3.00e+00    2.00e+00      1.25e-01    5.00e-01      7.50e-01    2.50e-01    1.0e-03\n"
        "     20      1.00e+02    2.50e-01      1.25e-01    5.00e-01      7.50e-01    2.50e-01    1.0e-03\n"
    )


def test_a_curve_that_deepmd_kit_has_written_is_written_again_to_the_byte(shared: Path, tmp_path: Path) -> None:
    reference = shared / "data/potentials/ref_lcurve_deepmd3.2.0_pt_first240steps.out"
    names = ("loss", "energy_rmse", "force_rmse")
    events: list[Event] = []
    for step, root_val, root_train, *errors, rate in np.loadtxt(reference):
        val = dict(zip([f"val/{name}" for name in names], [root_val**2, *errors[::2]], strict=True))
        train = dict(zip([f"train/{name}" for name in names], [root_train**2, *errors[1::2]], strict=True))
        events += [Logged(int(step), 0, {**train, "lr": rate}), EpochEnded(int(step), 0, val, seconds=1.0)]
    assert curve(tmp_path, *events) == reference.read_text()


def test_an_error_that_is_not_in_the_first_row_has_a_column(tmp_path: Path) -> None:
    """As where the first batch comes from a system without virials."""
    writer = LearningCurve(tmp_path / "lcurve.out", 20, {**COLUMNS, "rmse_v": "virial_rmse"}, validated=True)
    writer.notify(logged(1))
    writer.notify(Logged(20, 0, {"train/loss": 1.0, "train/virial_rmse": 0.5, "val/virial_rmse": 0.25}))
    writer.close()
    table = np.genfromtxt(tmp_path / "lcurve.out", names=True)
    np.testing.assert_array_equal(table["rmse_v_trn"], [np.nan, 0.5])
    np.testing.assert_array_equal(table["rmse_v_val"], [np.nan, 0.25])


def test_numpy_reads_the_columns_by_name(tmp_path: Path) -> None:
    curve(tmp_path, logged(1), evaluated(1), logged(20), evaluated(20))
    table = np.genfromtxt(tmp_path / "lcurve.out", names=True)
    assert table.dtype.names == (
        "step", "rmse_val", "rmse_trn", "rmse_e_val", "rmse_e_trn", "rmse_f_val", "rmse_f_trn", "lr",
    )  # fmt: skip
    assert table["step"].tolist() == [1, 20] and table["rmse_f_val"].tolist() == [0.75, 0.75]
    assert np.loadtxt(tmp_path / "lcurve.out").shape == (2, 8)


def test_the_end_of_an_epoch_is_no_row_of_its_own(tmp_path: Path) -> None:
    written = curve(tmp_path, logged(20), evaluated(20), logged(33), epoch_end(33), logged(40), evaluated(40))
    assert [int(line.split()[0]) for line in written.splitlines()[2:]] == [20, 40]


def test_an_evaluation_is_a_row_wherever_it_is(tmp_path: Path) -> None:
    written = curve(tmp_path, logged(20), evaluated(20), logged(33), evaluated(33))
    assert [int(line.split()[0]) for line in written.splitlines()[2:]] == [20, 33]


def test_what_was_measured_before_the_first_step_is_no_row(tmp_path: Path) -> None:
    assert curve(tmp_path, Logged(0, 0, {"val/loss": 1.0})) == ""


def test_a_row_without_evaluation_says_nan(tmp_path: Path) -> None:
    written = curve(tmp_path, logged(20), logged(40), evaluated(40))
    assert written.splitlines()[2].split()[1:3] == ["nan", "2.00e+00"]
    assert math.isnan(np.genfromtxt(tmp_path / "lcurve.out", names=True)["rmse_val"][0])


def test_without_validation_data_there_is_one_column_for_each_error_and_no_row_twice(tmp_path: Path) -> None:
    written = curve(tmp_path, logged(1), logged(20), epoch_end(20), logged(40), validated=False)
    assert written.splitlines()[0].split() == ["#", "step", "rmse_trn", "rmse_e_trn", "rmse_f_trn", "lr"]
    assert [line.split()[0] for line in written.splitlines()[2:]] == ["1", "20", "40"]


def test_a_row_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    writer = LearningCurve(tmp_path / "lcurve.out", 20, COLUMNS, validated=True)
    writer.notify(logged(20))
    writer.notify(evaluated(20))
    assert (tmp_path / "lcurve.out").read_text().splitlines()[-1].startswith("     20 ")
    writer.close()


def test_a_run_that_goes_on_shows_at_once_what_it_has_logged_before(tmp_path: Path) -> None:
    events = [*logged(20).values.items(), *evaluated(20).values.items()]
    history = [{"step": 20, "name": name, "value": value} for name, value in events]
    writer = LearningCurve(tmp_path / "lcurve.out", 20, COLUMNS, True, history)
    assert (tmp_path / "lcurve.out").read_text().splitlines()[-1].startswith("     20 ")
    writer.close()


def test_a_task_without_columns_of_its_own_gets_one_for_each_metric(tmp_path: Path) -> None:
    writer = LearningCurve(tmp_path / "curve.txt", 1, {}, validated=True)
    writer.notify(Logged(1, 0, {"train/topfive_accuracy": 0.5, "train/loss": 4.0, "lr": 1e-3}))
    writer.notify(EpochEnded(1, 0, {"train/loss_epoch": 4.0, "val/loss": 9.0}, seconds=1.0))
    writer.close()
    head, row = (tmp_path / "curve.txt").read_text().splitlines()
    assert head.split()[2:] == ["loss_val", "loss_trn", "topfive_accuracy_val", "topfive_accuracy_trn", "lr"]
    assert row.split() == ["1", "9.00e+00", "4.00e+00", "nan", "5.00e-01", "1.0e-03"]
    assert head.rindex("topfive_accuracy_trn") + len("topfive_accuracy_trn") == row.index("5.00e-01") + len("5.00e-01")


@pytest.mark.parametrize("kept", range(7))
def test_a_run_that_stops_anywhere_ends_with_the_same_bytes(tmp_path: Path, kept: int) -> None:
    """Also between the log of a step and its evaluation; what comes after the checkpoint is written again."""
    events = [logged(1), evaluated(1), logged(20, 3.0), evaluated(20), logged(33), logged(40, 2.0), evaluated(40)]
    expected = curve(tmp_path, *events)
    log = MetricLog(tmp_path / "metrics.jsonl")
    for event in events[:kept]:
        log.notify(event)
    log.close()
    first = LearningCurve(tmp_path / "lcurve.out", 20, COLUMNS, validated=True)
    for event in events[: kept + 1]:
        first.notify(event)
    first.close()
    again = LearningCurve(tmp_path / "lcurve.out", 20, COLUMNS, True, read_metrics(tmp_path / "metrics.jsonl"))
    for event in events[kept:]:
        again.notify(event)
    again.close()
    assert (tmp_path / "lcurve.out").read_text() == expected


@pytest.mark.parametrize("name", ["metrics.jsonl", "../lcurve.out", "/tmp/lcurve.out", "", ".", ".."])
def test_a_name_that_would_not_be_a_file_of_its_own_in_the_run_is_refused(name: str) -> None:
    with pytest.raises(ValidationError, match=r"lcurve\.out"):
        Observe(curve=name)
    assert Observe(curve="lcurve.out").curve == "lcurve.out"
