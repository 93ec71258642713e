"""`isoscale train --devices N`: ranks on this machine, started, told and ended together."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import warm
from tests.cli.train.test_stopping import on_a_terminal
from tests.helpers import cli, command
from tests.parallel.processes import wait_until_gone

pytestmark = pytest.mark.slow

TINY = ("train", "train.epochs=1", "observe.tensorboard=0", "--run", "a")
LONG = ("train", "train.epochs=5000", "observe.tensorboard=0", "--run", "a", "--devices", "2")


def launched(folder: Path, script: str, num_ranks: int = 2, **more: str) -> subprocess.Popen[str]:
    """Ranks that run a few lines instead of a training."""
    (folder / "script.py").write_text(script)
    (folder / "launch.py").write_text(
        "import sys\nfrom isoscale.launch import local\n"
        "local.command_of = lambda words: [sys.executable, 'script.py']\n"
        "local.TO_END, local.TO_OBEY = 2, 1\n"
        f"sys.exit(local.launch({num_ranks}, sys.argv))\n"
    )
    return warm.Popen(
        [sys.executable, "launch.py"], cwd=folder, env={**os.environ, **more}, text=True, bufsize=1,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def test_the_launcher_is_light(tmp_path: Path):
    words = "import sys, isoscale.launch.local; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", words], capture_output=True, text=True).stdout == "[]\n"


def test_ranks_get_their_numbers_and_a_share_of_the_cores(tmp_path: Path):
    script = (
        "import json, os\n"
        "names = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR', 'OMP_NUM_THREADS')\n"
        "open('rank' + os.environ['RANK'], 'w').write(json.dumps([os.environ[name] for name in names]))\n"
    )
    cores = len(os.sched_getaffinity(0))
    assert launched(tmp_path, script, OMP_NUM_THREADS="").wait(timeout=60) == 0
    for rank in ("0", "1"):
        found = json.loads((tmp_path / f"rank{rank}").read_text())
        assert found == [rank, "2", rank, "2", "127.0.0.1", str(max(1, cores // 2))]
    assert launched(tmp_path, script, OMP_NUM_THREADS="3").wait(timeout=60) == 0
    assert json.loads((tmp_path / "rank1").read_text())[-1] == "3"


@pytest.mark.parametrize(
    ("codes", "together"), [((0, 0), 0), ((75, 75), 75), ((0, 75), 75), ((2, 0), 2), ((0, 1), 1), ((75, 2), 2)]
)
def test_the_exit_code_is_that_of_all(tmp_path: Path, codes: tuple[int, int], together: int):
    process = launched(tmp_path, f"import os, sys\nsys.exit({codes}[int(os.environ['RANK'])])\n")
    assert process.wait(timeout=60) == together


def test_what_a_rank_said_last_is_shown_when_nobody_else_could(tmp_path: Path):
    process = launched(tmp_path, (
        "import os, sys, time\nfrom isoscale.launch import local\n"
        "if os.environ['RANK'] == '0':\n    time.sleep(1000)\n"
        "print('\\n'.join(f'line {number}' for number in range(100)))\n"
        "import a_module_that_is_missing\n"
    ))  # fmt: skip
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert err.startswith("the last lines of rank 1:\nline 7") and "a_module_that_is_missing" in err
    assert len(err.splitlines()) == 31


def test_what_other_ranks_say_is_not_shown_when_rank_0_told(tmp_path: Path):
    process = launched(tmp_path, (
        "import os, sys, time\ntime.sleep(1 - int(os.environ['RANK']))\n"
        "print('error of', os.environ['RANK'], file=sys.stderr)\nsys.exit(2)\n"
    ))  # fmt: skip
    assert process.communicate(timeout=60)[1] == "error of 0\n" and process.returncode == 2


COUNTS = """
import os, signal, sys, time
got = []
signal.signal(signal.SIGINT, lambda number, _: got.append(number))
signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
open("ready" + os.environ["RANK"], "w").close()
while signal.SIGTERM not in got:
    time.sleep(0.01)
time.sleep(0.5)
open("got" + os.environ["RANK"], "w").write(" ".join(str(int(number)) for number in got))
sys.exit(75)
"""


def wait_for(*paths: Path) -> None:
    end = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_every_rank_gets_every_signal_of_a_terminal_once(tmp_path: Path):
    process = launched(tmp_path, COUNTS)
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM):
        os.killpg(process.pid, number)
        time.sleep(0.3)
    assert process.wait(timeout=60) == 75
    for rank in (0, 1):
        assert (tmp_path / f"got{rank}").read_text() == f"{int(signal.SIGUSR1)} {int(signal.SIGINT)} 15"


def test_a_second_ctrl_c_ends_also_those_who_do_not_listen(tmp_path: Path):
    script = (
        "import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "open('ready' + os.environ['RANK'], 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    )
    process = launched(tmp_path, script)
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) != 0
    wait_until_gone([int((tmp_path / f"ready{rank}").read_text()) for rank in (0, 1)])


def test_ctrl_c_before_ranks_listen_is_no_failure_of_theirs(tmp_path: Path):
    script = (
        "import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        "open('ready' + os.environ['RANK'], 'w').close()\ntime.sleep(1000)\n"
    )
    process = launched(tmp_path, script)
    wait_for(tmp_path / "ready0", tmp_path / "ready1")
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and not err


def test_devices_are_refused_where_there_are_ranks_already(tmp_path: Path):
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
    refused = cli("train", "--devices", "2", cwd=tmp_path, **ranks)
    assert refused.returncode == 2
    assert "this process is already rank 0 of 2, started by the variables RANK and WORLD_SIZE" in refused.stderr


@pytest.mark.slow
def test_a_training_on_two_ranks(tmp_path: Path):
    done = cli(*TINY, "--devices", "2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("done at step 23") == 1
    assert json.loads((tmp_path / "a/run.json").read_text())["status"] == "done"


@pytest.mark.slow
def test_a_smoke_run_on_two_ranks(tmp_path: Path):
    done = cli("train", "--dev", "2", "--devices", "2", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_one_mistake_in_a_recipe_is_one_message(tmp_path: Path):
    done = cli("train", "optimizer.lrr=1", "--devices", "2", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("lrr") == cli(
        "train", "optimizer.lrr=1", cwd=tmp_path
    ).stderr.count("lrr")


@pytest.mark.slow
def test_a_request_to_stop_reaches_all_and_saves(tmp_path: Path):
    process = warm.Popen(
        command(*LONG), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("epoch"):
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert err.count("finishing the launch and saving") == 1
    assert re.search(r"^stopped at step \d+, in a$", out, re.MULTILINE)


@pytest.mark.slow
def test_rank_0_has_the_terminal_and_ctrl_c_stops_all(tmp_path: Path):
    def stop(process: int, text: str) -> bool:
        if text.count("samples/s") < 3:
            return False
        os.kill(process, signal.SIGINT)
        return True

    text = on_a_terminal(tmp_path, 80, LONG, stop)
    assert "\x1b[" in text and text.count("finishing the launch and saving") == 1
    assert re.search(r"stopped at step \d+, in a", text)


def test_a_rank_that_is_stopped_before_it_meets_the_others_leaves_none_of_them_waiting(tmp_path: Path):
    script = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.exit(75)\n"
        "time.sleep(600)\n"
    )
    assert launched(tmp_path, script, 3).wait(timeout=60) == 75
