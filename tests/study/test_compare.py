import math
from pathlib import Path

import pytest

from isoscale.errors import UserError
from isoscale.runs.lock import RunLock
from isoscale.study.compare import compare, find_runs
from isoscale.study.table import text
from tests.study.conftest import rows


@pytest.fixture(autouse=True)
def _on_a_terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


LOSS = ["checkpoint.monitor=val/loss", "checkpoint.mode=min"]


def test_runs_are_given_as_paths_names_and_folders(make):
    make("elsewhere/a")
    make("runs/b", started="2026-01-02")
    make("runs/c", started="2026-01-01")
    make("runs/sweep/d")

    def names(*places):
        return [str(run.path) for run in find_runs(places)]

    assert names("elsewhere/a", "b") == ["elsewhere/a", "runs/b"]
    assert names("runs") == ["runs/c", "runs/b"]
    assert names("sweep") == ["runs/sweep/d"]
    assert names("b", "runs", Path("runs/b")) == ["runs/b", "runs/c"]


def test_one_run_is_not_enough(make):
    make("runs/a")
    with pytest.raises(
        UserError, match=r"two or more runs are needed to compare, found runs/a; .*isoscale compare RUN RUN"
    ):
        compare(["a", "runs/a"])
    with pytest.raises(UserError, match="there is no run in nothing"):
        compare(["a", "nothing"])


def test_best_and_last_of_a_metric_and_where(make):
    make("a", rows("val/loss", [math.nan, 0.5, math.nan, 0.7]), LOSS)
    make("b", rows("val/loss", [3.0, 1.0]), LOSS)
    runs = compare(["a", "b"]).as_dict()["runs"]
    assert runs[0]["metrics"] == {"val/loss": {"best": 0.5, "best_step": 20, "last": 0.7}}
    assert runs[1]["metrics"]["val/loss"] == {"best": 1.0, "best_step": 20, "last": 1.0}
    assert runs[0]["path"] == "a" and runs[0]["seconds"] == 8.0


def test_by_default_runs_race_to_what_the_worst_managed_at_its_best(make):
    make("a", rows("val/loss", [2.0, 1.0, 0.5, 0.9]), LOSS)
    make("b", rows("val/loss", [3.0, 1.2, 0.8], seconds=5.0), LOSS)
    make("c", [], LOSS)
    comparison = compare(["a", "b", "c"]).as_dict()
    assert comparison["to"] == {"name": "val/loss", "value": 0.8, "larger_is_better": False}
    assert [run["reached"] for run in comparison["runs"]] == [
        {"step": 30, "seconds": 6.0}, {"step": 30, "seconds": 15.0}, None,
    ]  # fmt: skip


def test_a_race_upwards_is_one_for_more(make):
    make("a", rows("val/accuracy", [0.1, 0.9, 0.95]))
    make("b", rows("val/accuracy", [0.2, 0.5, 0.6]))
    assert compare(["a", "b"]).as_dict()["to"] == {"name": "val/accuracy", "value": 0.6, "larger_is_better": True}
    reached = [run["reached"] for run in compare(["a", "b"], to="val/accuracy=0.9").as_dict()["runs"]]
    assert reached == [{"step": 20, "seconds": 4.0}, None]


@pytest.mark.parametrize(
    ("name", "values", "larger"),
    [("val/f1", [0.1, 0.5], True), ("val/error", [0.5, 0.1], False), ("val/loss", [1.0, 9.0], False)],
)
def test_the_direction_is_that_of_the_training_and_a_loss_always_falls(make, name, values, larger):
    make("a", rows(name, values))
    make("b", rows(name, values))
    assert compare(["a", "b"], to=f"{name}=0.3").target.larger_is_better is larger


def test_without_an_evaluation_runs_race_by_their_training(make):
    make("a", rows("train/loss_epoch", [2.0, 1.0]))
    make("b", rows("train/loss_epoch", [2.0, 1.5]))
    comparison = compare(["a", "b"])
    assert comparison.metrics == ["train/loss_epoch"] and comparison.target.value == 1.5


def test_runs_race_by_what_they_have_in_common(make):
    make("a", rows("train/loss_epoch", [2.0, 1.0]) + rows("val/accuracy", [0.1, 0.2]))
    make("b", rows("train/loss_epoch", [2.0, 1.5]))
    comparison = compare(["a", "b"])
    assert comparison.target.name == "train/loss_epoch"
    assert comparison.metrics == ["val/accuracy", "train/loss_epoch"]


@pytest.mark.parametrize("to", ["val/loss", "val/loss=low", "=1", "val/loss=nan"])
def test_a_race_to_nowhere_is_refused(make, to):
    make("a"), make("b")
    with pytest.raises(UserError, match=r"expected a metric and a number, such as --to val/loss=0.1"):
        compare(["a", "b"], to=to)


def test_a_metric_that_no_run_has_is_refused_with_the_nearest(make):
    make("a"), make("b")
    with pytest.raises(UserError, match=r"no run has a metric val/los; did you mean val/loss\?"):
        compare(["a", "b"], to="val/los=1")
    with pytest.raises(UserError, match=r"no run has a metric qqq; logged are val/loss, time/seconds"):
        compare(["a", "b"], metrics=["qqq"])


def test_only_settings_that_differ_are_shown(make):
    make("a"), make("b", None, ["optimizer.lr=0.1", "task.model.widths=[64,10]"])
    comparison = compare(["a", "b"])
    assert comparison.settings == {
        "task.model.widths": [[64, 256, 256, 10], [64, 10]], "optimizer.lr": [0.002, 0.1],
    }  # fmt: skip
    make("c", None, ["~schedule.warmup", "optimizer.momentum=0.5"])
    assert compare(["a", "c"]).as_dict()["settings"]["optimizer.momentum"] == ["(not set)", 0.5]


def test_what_else_differs_is_shown(make):
    make("a", code={"commit": "a" * 40, "diff": ""}, packages={"torch": "2.13.0"})
    make(
        "b", code={"commit": "a" * 40, "diff": "+1"}, packages={"torch": "2.11.0"}, data={"train": "other", "val": "bb"}
    )
    others = compare(["a", "b"]).others
    assert others["torch"] == ["2.13.0", "2.11.0"] and others["train data"] == ["aa", "other"]
    assert others["uncommitted"][0] == "none" and len(others["uncommitted"][1]) == 8
    assert set(others) == {"torch", "train data", "uncommitted"}


METRICS = ["val/loss", "val/error", "train/loss_epoch"]


def test_the_table_shows_a_line_for_each_run_and_fits_on_a_terminal(make):
    names = [f"images-digits-2026030{number // 10}-1200{number % 10:02d}" for number in range(20)]
    for name in names:
        make(f"runs/{name}", [row for metric in METRICS for row in rows(metric, [2.0, 0.5])])
    shown = text(compare(["runs"], metrics=METRICS)).splitlines()
    assert max(map(len, shown)) <= 80
    for name in names:
        assert sum(line.startswith(f"{name}  ") for line in shown) == 4  # progress, two blocks of metrics, the race
    assert shown[0].split() == ["run", "status", "step", "time", "device"]
    assert "no settings differ" in shown


def test_the_table_says_what_is_wrong_with_a_run(make):
    make("good", rows("val/loss", [2.0, 0.5]) + rows("val/f1", [0.1, 0.2]), LOSS)
    make("bad", [], LOSS, status="failed", message="a loss or gradient became NaN\nand more", step=23)
    make("new", [], LOSS, status="running")
    make("gone", [], LOSS, status="running")
    with RunLock(Path("new"), str):
        shown = text(compare(["good", "bad", "new", "gone"], to="val/loss=0.1"))
    assert "\nbad failed: a loss or gradient became NaN\nnew has logged nothing yet\ngone killed: it ended" in shown
    assert "\ngood  done        40  8.0 s  cpu\nbad   failed   23/40  " in shown
    assert "\ngood  0.5000       20  0.5000\nbad        –        –       –\n" in shown
    assert "\nuntil val/loss is 0.1000 or less\nrun   step         time\ngood  not reached     –\n" in shown
    assert "also logged, shown by --metric NAME: val/f1" in shown
