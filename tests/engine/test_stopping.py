"""Requests to stop and to save: files in the run directory, and the clock."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import isoscale
from isoscale.engine import stopping as stop
from isoscale.engine.stopping import StopRequest, deadline
from isoscale.errors import Stopped
from tests.helpers import first_step, newest_step, sha, timeless, train

pytestmark = pytest.mark.slow

LONG = {"train__epochs": 40, "checkpoint__every": "never", "checkpoint__keep": 100, "train__evaluate": "never"}


def meanwhile(action: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def when_it_has_logged(run: Path, action: Callable[[], Any]) -> None:
    while not (run / "metrics.jsonl").exists() or not (run / "metrics.jsonl").stat().st_size:
        time.sleep(0.01)
    action()


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stop, "_LOOK_EVERY", 0.0)


def test_a_file_stops_the_run_which_goes_on_without_a_trace(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", **LONG)
    run = tmp_path / "run"
    asking = meanwhile(lambda: when_it_has_logged(run, (run / "STOP").touch))
    with pytest.raises(Stopped, match="stopped by the file STOP at step"):
        train(run, **LONG)
    asking.join()
    assert not (run / "STOP").exists()  # or else it would stop again at once
    stopped_at = newest_step(run)
    again = train(run, **LONG)
    assert first_step(again) == stopped_at > 0
    assert sha(again) == sha(whole)
    assert timeless(again) == timeless(whole)


def test_a_file_saves_and_the_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    asking = meanwhile(lambda: when_it_has_logged(run, (run / "SAVE").touch))
    found = train(run, **LONG)
    asking.join()
    steps = sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_*"))
    assert found.status == "done" and len(steps) == 2 and steps[0] < steps[1]
    assert not (run / "SAVE").exists()


def test_a_run_stops_before_its_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Stopped, match="stopped by the deadline at "):
        train(tmp_path / "run", **LONG, train__stop_after="00:00:20")  # less than what is left for the end
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 10))
    with pytest.raises(Stopped, match="stopped by the deadline at "):
        train(tmp_path / "run", **LONG)
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert sha(train(tmp_path / "run", **LONG)) == sha(train(tmp_path / "whole", **LONG))


def test_the_earlier_of_two_limits_counts() -> None:
    now = time.time()
    assert deadline(None, {}) is None
    assert deadline(100.0, {}) == pytest.approx(now + 100, abs=5)
    assert deadline(100.0, {"SLURM_JOB_END_TIME": str(int(now) + 50)}) == int(now) + 50
    assert deadline(None, {"SLURM_JOB_END_TIME": "Unknown"}) is None


def test_a_long_save_makes_the_stop_earlier() -> None:
    request = StopRequest()
    request.watch(None, None, time.time() + 40)
    assert not request()
    request.saved(20.0)
    assert request() and "deadline" in str(request.reason)


def test_minutes_ask_for_a_save_again_and_again(tmp_path: Path) -> None:
    request = StopRequest()
    request.watch(tmp_path, 0.02, None)
    while request.saves < 3:
        assert not request()
    request.saved(0.0)
    count = request.saves
    assert not request() and request.saves == count


@pytest.mark.parametrize("wrong", ["soon", "1:2:3:4", "-5", 0])
def test_what_is_no_time_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(isoscale.UserError, match="stop_after"):
        train(tmp_path / "run", train__stop_after=wrong)
