"""`--log main|collect|workers` and `--log-file`: what every rank says, and where one finds it."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import cli
from tests.parallel.processes import Ended
from tests.ranks import Command, command_on

NETWORK = """
import logging, os, warnings
from torch import nn

class Net(nn.Module):
    def __init__(self, fails_at: int = -1, flood: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 10)
        self.fails_at, self.flood, self.count = fails_at, flood, 0
        self.rank = int(os.environ.get("SLURM_PROCID") or os.environ.get("RANK") or 0)
        logging.basicConfig(level=logging.INFO)
        logging.info(f"logged by {self.rank}")

    def forward(self, images):
        self.count += 1
        print(f"pass {self.count} of {self.rank}")
        if self.count == 3:
            warnings.warn(f"warned by {self.rank}")
            for number in range(self.flood):
                print("flood", number)
        if self.rank == 1 and self.count == self.fails_at:
            print("the last words", end="")
            raise RuntimeError("boom")
        return self.linear(images.float().flatten(1))
"""
RECIPE = """
extends: images/digits
task: {class: supervised, model: {class: net.Net}, loss: cross_entropy}
train: {epochs: 1, threads: 1, program: eager}
checkpoint: {monitor: val/loss, mode: min}
"""
TRAIN = ("train", "recipe.yaml", "observe.tensorboard=0", "--run", "run")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NETWORK)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def done(ends: list[Ended]) -> str:
    """What rank 0 wrote, after all ranks are done; nobody else writes anything."""
    assert [end.code for end in ends] == [0] * len(ends), [end.err for end in ends]
    assert not any(end.out + end.err for end in ends[1:])
    return ends[0].out


def of_rank(rank: int, text: str) -> list[str]:
    """The lines of a rank, without the name of it and the time."""
    found = re.findall(rf"^(?:\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d  )?rank {rank}: (.*)$", text, re.MULTILINE)
    return [str(line) for line in found]


def passes(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("pass ")]


@pytest.mark.slow
def test_collect_shows_every_line_of_every_rank_in_its_order(folder: Path):
    ends = command_on(2, folder, *TRAIN, "--log", "collect")
    out = done(ends)
    assert ends[0].err == ""
    for text in (out, (folder / "run/log.txt").read_text()):
        for rank in (0, 1):
            lines = of_rank(rank, text)
            count = len(passes(lines))
            assert count > 20 and passes(lines) == [f"pass {number} of {rank}" for number in range(1, count + 1)]
            assert f"INFO:root:logged by {rank}" in lines
            assert any(f"UserWarning: warned by {rank}" in line for line in lines)
            assert any(re.fullmatch(r"on \S+, process \d+: cpu \(1 thread\)", line) for line in lines)
            assert any(line.startswith("peak memory ") for line in lines)
        assert not re.search(r"^(?!\d{4}-|rank \d: |$)", text, re.MULTILINE), "a line that names no rank"
    assert text.index("rank 1: peak memory") < text.index("rank 0: done at step 23"), "the last words before the end"
    assert "rank 1: step 23  epoch 1  time/" in text and "rank 1: step 23" not in out, "such lines are for the log"


@pytest.mark.slow
def test_collect_in_json_is_one_object_a_line_with_the_rank(folder: Path):
    out = done(command_on(2, folder, *TRAIN, "--log", "collect", "--log-format", "json"))
    rows = [json.loads(line) for line in out.splitlines()]
    assert {row["rank"] for row in rows} == {0, 1}
    assert {"event": "said", "rank": 1, "text": "pass 3 of 1", "level": "info", "source": "print"}.items() <= next(
        row for row in rows if row.get("text") == "pass 3 of 1"
    ).items()


@pytest.mark.slow
def test_the_last_lines_of_a_rank_that_fails_come_before_the_error(folder: Path):
    ends = command_on(2, folder, *TRAIN, "--log", "collect", "task.model.fails_at=9")
    assert [end.code for end in ends] == [1, 1]
    assert passes(of_rank(1, ends[0].out))[-1] == "pass 9 of 1"
    assert of_rank(1, ends[0].out)[-1] == "the last words"
    assert "RuntimeError: boom" in ends[0].err and "the last words" not in ends[0].err
    assert "the last words" not in ends[1].out + ends[1].err
    log = (folder / "run/log.txt").read_text()
    assert log.index("rank 1: the last words") < log.index("RuntimeError: boom")


@pytest.mark.slow
def test_a_flood_is_cut_and_counted_and_the_training_goes_on(folder: Path):
    out = done(command_on(2, folder, *TRAIN, "--log", "collect", "task.model.flood=200000"))
    for rank in (0, 1):
        lines = of_rank(rank, out)
        shown = [line for line in lines if line.startswith("flood ")]
        counts = re.findall(r"warning: ([\d,]+) lines? (?:was|were) dropped here", "\n".join(lines))
        num_passes = int(passes(lines)[-1].split()[1])  # some of these may be among the dropped
        missing = 200_000 - len(shown) + num_passes - len(passes(lines))
        assert counts and sum(int(count.replace(",", "")) for count in counts) >= missing > 0
        assert shown[-1] == "flood 199999"


@pytest.mark.slow
def test_workers_gives_every_rank_a_file_and_going_on_appends(folder: Path):
    words = (*TRAIN, "--log", "workers", "--log-file", "logs/here/training.log")
    out = done(command_on(2, folder, *words))
    assert "pass 3 of 0" in out and "of 1\n" not in out and not re.search("^rank", out, re.MULTILINE)
    written = {name: (folder / name).read_text() for name in ("run/log-rank1.txt", "logs/here/training-rank1.log")}
    for text in written.values():
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in text.splitlines())
        assert "  pass 3 of 1\n" in text and "UserWarning: warned by 1" in text and "  peak memory " in text
        assert "of 0" not in text
    same = (folder / "run/log.txt").read_text(), (folder / "logs/here/training.log").read_text()
    assert same[0] == same[1] and "done at step 23" in same[0]
    done(command_on(2, folder, "train", "--run", "run", "train.epochs=2"))
    for name, text in written.items():
        again = (folder / name).read_text()
        assert again.startswith(text) and "epoch 2  step 46" in again[len(text) :]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["main", "collect", "workers"])
def test_one_rank_alone_has_nothing_to_tell_apart(folder: Path, mode: str):
    out = done(command_on(1, folder, *TRAIN, "--log", mode))
    assert "\npass 3 of 0\n" in out and "rank 0" not in out
    assert not list((folder / "run").glob("log-*"))
    assert ("pass 3 of 0" in (folder / "run/log.txt").read_text()) == (mode == "collect")


@pytest.mark.slow
def test_what_local_ranks_say_is_shown_once_also_where_one_is_killed(folder: Path):
    shown = cli(*TRAIN, "--log", "collect", "--devices", "2", "task.model.fails_at=9", cwd=folder, timeout=90)
    assert shown.returncode == 1
    assert (shown.stdout + shown.stderr).count("the last words") == 1
    assert (shown.stdout + shown.stderr).count("logged by 1") == 1


@pytest.mark.slow
def test_what_a_rank_said_before_it_was_killed_is_there(folder: Path):
    with_time = ("train.epochs=100000", "--log", "collect")
    running = Command(2, folder, (*TRAIN, *with_time))
    log, until = folder / "run/log.txt", time.monotonic() + 60
    while not (log.exists() and "rank 1: pass 5 of 1" in log.read_text()):
        assert time.monotonic() < until and running.running
        time.sleep(0.05)
    running.tell(signal.SIGKILL, 1)
    ends = running.ended()
    assert ends[0].code == 1 and "rank 1 on" in ends[0].err and "is gone" in ends[0].err
    numbers = [int(line.split()[1]) for line in passes(of_rank(1, log.read_text()))]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_development_run_writes_the_log_file(isoscale, tmp_path: Path):
    ended = isoscale("train", "images/digits", "--dev", "1", "--log-file", "a/b.log")
    assert ended.code == 0, ended.err
    assert "done at step 1" in (tmp_path / "a/b.log").read_text()
    assert not (tmp_path / "runs").exists()


def test_a_log_file_that_cannot_be_written_is_told_before_the_training(isoscale, tmp_path: Path):
    (tmp_path / "file").write_text("")
    for path, reason in [("file/b.log", "what should be a folder is a file"), (".", "Is a directory")]:
        ended = isoscale("train", "images/digits", "--run", "a", "--log-file", path)
        assert ended.code == 2 and ended.out == ""
        assert reason in ended.err and "name another file: --log-file PATH" in ended.err
        assert not (tmp_path / "a/recipe.yaml").exists()


def test_the_log_of_the_run_as_the_log_file_is_written_once(isoscale, tmp_path: Path):
    quick = ("train", "images/digits", "train.steps=2", "--run", "a", "observe.tensorboard=0")
    assert isoscale(*quick, "--log-file", "a/log.txt").code == 0
    assert (tmp_path / "a/log.txt").read_text().count("done at step 2") == 1


def test_the_name_of_a_log_file_may_look_like_anything(isoscale, tmp_path: Path):
    assert isoscale("train", "images/digits", "--dev", "1", "--log-file", "1.0").code == 0
    assert (tmp_path / "1.0").exists()
