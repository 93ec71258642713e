"""metrics.jsonl: what is written can be read, and a continued run repeats nothing."""

import json
import math
from pathlib import Path

import pytest

from isoscale.errors import UserError
from isoscale.observe.events import EpochEnded, Logged, Note
from isoscale.observe.metric_log import MetricLog, history, last_values, read_metrics
from tests.disks import mounted


def logged(step: int, loss: float) -> Logged:
    return Logged(step, 0, {"train/loss": loss, "lr": 0.001})


def test_each_value_is_a_line_with_keys_in_a_fixed_order(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.notify(logged(50, 0.51))
    log.notify(Note("not a value"))
    log.notify(EpochEnded(60, 0, {"val/loss": 0.4}, seconds=1.0))
    log.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows] == [["step", "epoch", "name", "value", "time"]] * 3
    assert [(row["step"], row["name"], row["value"]) for row in rows] == [
        (50, "train/loss", 0.51),
        (50, "lr", 0.001),
        (60, "val/loss", 0.4),
    ]


def test_values_that_are_not_finite_are_valid_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    log.notify(Logged(1, 0, {"a": math.nan, "b": math.inf, "c": -math.inf}))
    log.close()
    first = json.loads(path.read_text().splitlines()[0], parse_constant=pytest.fail)
    assert first["value"] is None and first["text"] == "nan"
    values = last_values(path)
    assert math.isnan(values["a"]) and values["b"] == math.inf and values["c"] == -math.inf


def test_a_value_can_be_read_while_the_log_is_open(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "metrics.jsonl")
    log.notify(logged(50, 0.5))
    assert history(tmp_path / "metrics.jsonl", "train/loss") == [(50, 0.5)]
    log.close()


def test_position_is_the_length_of_the_file(tmp_path: Path) -> None:
    log = MetricLog(tmp_path / "metrics.jsonl")
    assert log.position() == 0
    log.notify(logged(50, 0.5))
    assert log.position() == (tmp_path / "metrics.jsonl").stat().st_size > 0
    log.close()


def test_a_continued_run_drops_what_was_logged_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    log.notify(logged(50, 0.5))
    position = log.position()
    log.notify(logged(100, 0.4))
    log.close()
    again = MetricLog(path, start_bytes=position)
    assert again.position() == position
    again.notify(logged(100, 0.3))
    again.close()
    assert history(path, "train/loss") == [(50, 0.5), (100, 0.3)]


@pytest.mark.parametrize("content", [None, b'{"step": 1}\n'])
def test_a_file_shorter_than_the_checkpoint_says_is_refused_in_words(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "metrics.jsonl"
    if content:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"metrics\.jsonl has \d+ bytes, but the checkpoint .* 1000"):
        MetricLog(path, start_bytes=1000)
    assert path.exists() == bool(content)


@pytest.mark.parametrize("cut", [1, 10, 40])
def test_a_torn_last_line_is_left_out_and_does_not_spoil_the_next(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricLog(path)
    log.notify(Logged(50, 0, {"train/loss": 0.5}))
    log.notify(Logged(100, 0, {"train/loss": 0.4}))
    log.close()
    content = path.read_bytes()
    path.write_bytes(content[: -cut - 1])
    assert history(path, "train/loss") == [(50, 0.5)]
    log = MetricLog(path)
    log.notify(Logged(150, 0, {"train/loss": 0.3}))
    log.close()
    assert history(path, "train/loss") == [(50, 0.5), (150, 0.3)]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = '{"step": 1, "epoch": 0, "name": "a", "value": 1.0, "time": 0.0}\n'
    path.write_text(good + "nonsense\n" + good)
    with pytest.raises(UserError, match="line 2"):
        read_metrics(path)


def test_a_run_that_logged_nothing_has_no_values(tmp_path: Path) -> None:
    assert last_values(tmp_path / "metrics.jsonl") == {}


def test_a_full_disk_is_an_error_that_names_the_file_and_the_reason(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk") as disk:
        log = MetricLog(disk.path / "metrics.jsonl", start_bytes=0)
        disk.leave(0)
        said = rf"cannot write .*metrics\.jsonl: No space left on device: the disk at {disk.path} is full"
        with pytest.raises(UserError, match=said):
            log.notify(logged(50, 0.5))


def test_a_directory_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file or directory"):
        MetricLog(tmp_path / "nowhere" / "metrics.jsonl")
