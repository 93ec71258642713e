"""`isoscale tensorboard` shows runs under short names, says how to get there, and leaves nothing behind."""

import getpass
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isoscale.cli.runs.tensorboard import _address, _overview
from isoscale.observe.events import EpochEnded, Logged
from isoscale.observe.tensorboard.observer import TensorBoard
from isoscale.observe.tensorboard.server import TensorBoardServer, free_port, is_free
from tests.helpers import command
from tests.parallel.processes import wait_until_gone

USER = getpass.getuser()


def write_events(run: Path) -> Path:
    """Curves, into a run that was trained without."""
    board = TensorBoard(run / "tensorboard")
    board.notify(Logged(10, 0, {"train/loss": 0.5, "lr": 0.1}))
    board.notify(EpochEnded(20, 0, {"train/loss_epoch": 0.5, "val/loss": 0.6}, seconds=1.0))
    board.close()
    return run


def test_a_run_that_is_not_there_is_refused_as_everywhere(isoscale):
    refused = isoscale("tensorboard", "nowhere")
    assert refused.code == 2 and "there is no run in nowhere" in refused.err


def test_without_any_run_it_says_how_to_start_one(isoscale):
    refused = isoscale("tensorboard")
    assert refused.code == 2 and "start one with `isoscale train`" in refused.err


def test_a_run_without_events_says_what_to_train_with(isoscale, copied):
    copied("runs/a")
    refused = isoscale("tensorboard", "a")
    assert refused.code == 2 and "nothing to show of runs/a" in refused.err
    assert "observe.tensorboard=1 for curves" in refused.err


def test_a_port_that_was_asked_for_and_is_taken_is_refused(isoscale, copied):
    write_events(copied("runs/a"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = isoscale("tensorboard", "--port", str(port))
    assert refused.code == 2 and f"cannot listen on port {port} of 127.0.0.1" in refused.err


def test_the_next_free_port_is_found(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr("isoscale.observe.tensorboard.server.USUAL_PORT", port)
        assert not is_free("127.0.0.1", port)
        found = free_port("127.0.0.1")
    assert port < found < port + 100 and is_free("127.0.0.1", port)


def test_an_address_that_is_not_of_this_machine_cannot_be_listened_on(isoscale, copied):
    write_events(copied("runs/a"))
    refused = isoscale("tensorboard", "--host", "no.such.host.invalid")
    assert refused.code == 2 and "cannot listen on no.such.host.invalid" in refused.err


def address(monkeypatch: pytest.MonkeyPatch, host: str = "127.0.0.1", **environment: str) -> dict[str, str]:
    """What is said under each label, in an environment."""
    for name in ("SLURM_JOB_ID", "SLURM_SUBMIT_HOST", "SSH_CONNECTION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(socket, "getfqdn", lambda: "node7.example.org")
    lines = _address(TensorBoardServer(host, 6007))
    return {line[:14].strip(): line[16:] for line in lines if line[:14].strip()}


def test_at_home_there_is_only_the_address(monkeypatch: pytest.MonkeyPatch):
    assert address(monkeypatch) == {"address": "http://localhost:6007/", "end it": "Ctrl-C"}


def test_at_the_other_end_of_ssh_there_is_a_tunnel(monkeypatch: pytest.MonkeyPatch):
    said = address(monkeypatch, SSH_CONNECTION="1.2.3.4 5 6.7.8.9 22")
    assert said["runs on"] == "node7.example.org"
    assert said["tunnel"] == f"ssh -N -L 6007:localhost:6007 {USER}@node7.example.org"


def test_in_a_job_the_tunnel_goes_through_the_login_node(monkeypatch: pytest.MonkeyPatch):
    said = address(monkeypatch, SLURM_JOB_ID="42", SLURM_SUBMIT_HOST="login1", SSH_CONNECTION="1.2.3.4 5 6.7.8.9 22")
    assert said["runs on"] == "node7, in Slurm job 42"
    assert said["tunnel"] == f"ssh -N -L 6007:localhost:6007 -J {USER}@login1 {USER}@node7"


def test_in_a_job_on_the_login_node_itself_one_hop_is_enough(monkeypatch: pytest.MonkeyPatch):
    said = address(monkeypatch, SLURM_JOB_ID="42", SLURM_SUBMIT_HOST="node7")
    assert said["tunnel"] == f"ssh -N -L 6007:localhost:6007 {USER}@node7"


def test_a_page_that_other_machines_reach_is_fetched_by_the_login_node(monkeypatch: pytest.MonkeyPatch):
    said = address(monkeypatch, "0.0.0.0", SLURM_JOB_ID="42", SLURM_SUBMIT_HOST="login1")
    assert said["tunnel"] == f"ssh -N -L 6007:node7:6007 {USER}@login1"


def test_of_many_runs_some_are_named():
    assert _overview(["a", "b"], 0) == "TensorBoard shows a, b"
    names = [f"run{number}" for number in range(10)]
    assert _overview(names, 3).endswith("run7 and 2 more; of 3 more there are no events (observe.tensorboard=0)")


@contextmanager
def started(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[str], int, list[str]]]:
    """The command with its page up: process, port and what it said so far."""
    process = subprocess.Popen(
        command("tensorboard", *words), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(folder)},
        # a shell lets what it starts in the background ignore Ctrl-C, and that is inherited
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    lines: list[str] = []
    try:
        while not (lines and lines[-1].startswith("  end it")):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr and process.stderr.read()
        yield process, int(re.findall(r"http://localhost:(\d+)/", "".join(lines))[0]), lines
    finally:
        process.terminate()
        process.communicate(timeout=30)


def get(port: int, path: str) -> list[str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    return json.loads(connection.getresponse().read())


def wait_for_runs(port: int, expected: set[str]) -> None:
    """Until the page lists exactly these."""
    end = time.monotonic() + 60
    while (found := set(get(port, "/data/runs"))) != expected:
        assert time.monotonic() < end, found
        time.sleep(0.5)


def children(process: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    direct = [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    return [*direct, *(grandchild for child in direct for grandchild in children(child))]


def stages(*names: str) -> set[str]:
    return {f"{name}/{stage}" for name in names for stage in ("train", "train_epoch", "val")}


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_all_stages_are_shown_new_runs_too_and_an_end_leaves_nothing(tmp_path: Path, copied, number: int):
    write_events(tmp_path / copied("runs/a"))
    write_events(tmp_path / copied("other/a"))
    copied("runs/quiet")
    with started(tmp_path, "runs", "other/a") as (process, port, lines):
        assert lines[0].startswith("port 6006 is taken") or port == 6006
        assert any(re.match(r"TensorBoard shows a, other-a; of 1 more there are no events", line) for line in lines)
        wait_for_runs(port, stages("a", "other-a"))
        write_events(tmp_path / copied("runs/late"))
        wait_for_runs(port, stages("a", "other-a", "late"))
        below = children(process.pid)
        (folder,) = {path for child in below for path in re.findall(r"--logdir[=\0]([^\0]+)/runs", _arguments(child))}
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (0, "") and "TensorBoard has ended" in out
    assert len(below) >= 1 and not Path(folder).exists()
    wait_until_gone(below, 10)


def _arguments(process: int) -> str:
    return Path(f"/proc/{process}/cmdline").read_text()


@pytest.mark.slow
def test_it_ends_when_the_command_is_killed(tmp_path: Path, copied):
    write_events(tmp_path / copied("runs/a"))
    with started(tmp_path) as (process, _, _lines):
        below = children(process.pid)
        assert below
        process.kill()
        wait_until_gone(below, 10)


@pytest.mark.full
def test_a_browser_shows_one_chart_for_all_stages(tmp_path: Path, copied):
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs Chromium")
    write_events(tmp_path / copied("runs/a"))
    with started(tmp_path, "a") as (_, port, _lines):
        wait_for_runs(port, stages("a"))
        page = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
             "--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}",
             "--virtual-time-budget=20000", "--dump-dom", f"http://localhost:{port}/#timeseries"],
            capture_output=True, text=True, timeout=120,
        ).stdout  # fmt: skip
    assert all(name in page for name in stages("a"))
    cards = re.findall(r"<card-view.*?</card-view>", page, re.DOTALL)
    assert len(cards) == 2, "loss with all of its stages, and lr"
