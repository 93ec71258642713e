"""A process that is killed in any phase of its checkpoint writer loses nothing that counts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.helpers import QUIET, cli, first_step, newest_step, sha, timeless

pytestmark = pytest.mark.slow

DRIVER = '''
"""isoscale's command line, killed in one phase of writing the checkpoint of a step; each step once."""
import os, signal, sys
from pathlib import Path
from isoscale.engine.state import checkpoint
from isoscale.engine.state.checkpoint import Checkpoints

phase, steps = sys.argv[1], sys.argv[2].split(",")
del sys.argv[1:3]
step = None

def kill():
    marker = Path(f"killed-{step}")
    if str(step) in steps and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)

def before(plain, *arguments, **options):
    kill()
    return plain(*arguments, **options)

def in_the_middle(plain, path, tensors):
    plain(path, tensors)
    os.truncate(path, path.stat().st_size // 2)
    kill()
    plain(path, tensors)

def at_best(plain, checkpoints, name, target):
    if name == "best":
        kill()
    plain(checkpoints, name, target)

def half_dropped(plain, checkpoints, path):
    (path / "state.json").unlink()
    path.rename(checkpoints.folder / f".dropped-{path.name}-{os.getpid()}")
    kill()

def after(plain, *arguments):
    found = plain(*arguments)
    kill()
    return found

def noting_the_step(plain, checkpoints, number, *arguments):
    global step
    step = number
    if phase == "after staging":
        kill()
    return plain(checkpoints, number, *arguments)

owner, name, around = {
    "after staging": (Checkpoints, "_point", lambda plain, *arguments: plain(*arguments)),
    "in the middle of a tensor file": (checkpoint, "_write_tensors", in_the_middle),
    "before the manifest": (checkpoint, "_write_manifest", before),
    "before all is synced": (checkpoint, "_sync_files", before),
    "before it has its name": (Checkpoints, "_name", before),
    "after it has its name": (Checkpoints, "_name", after),
    "between the pointers": (Checkpoints, "_point", at_best),
    "before dropping old ones": (Checkpoints, "_drop_old", before),
    "while dropping old ones": (Checkpoints, "_drop", half_dropped),
}[phase]

def wrapped(plain, around):
    return lambda *arguments, **options: around(plain, *arguments, **options)

setattr(owner, name, wrapped(getattr(owner, name), around))
Checkpoints.write = wrapped(Checkpoints.write, noting_the_step)

from isoscale.cli.main import run
run()
'''
PHASES = [
    "in the middle of a tensor file", "before the manifest", "after it has its name", "between the pointers",
    "while dropping old ones",
]  # fmt: skip
MORE_PHASES = ["after staging", "before all is synced", "before it has its name", "before dropping old ones"]
RECIPE = ["train.epochs=4", "data.subset=300", "observe.every=2", *(f"{key}={value}" for key, value in QUIET.items())]
STEPS = "15,20"
"""Five steps per epoch: the third checkpoint, which drops an old one, and the last."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = cli("train", "--run", "run", *RECIPE, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def driven(folder: Path, phase: str) -> "subprocess.CompletedProcess[str]":
    (folder / "driver.py").write_text(DRIVER)
    words = [sys.executable, "driver.py", phase, STEPS, "train", "--run", "run", *RECIPE]
    return warm.run(words, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("phase", [*PHASES, *(pytest.param(each, marks=pytest.mark.nightly) for each in MORE_PHASES)])
def test_a_writer_killed_in_any_phase_leaves_no_trace(phase: str, uninterrupted: Path, tmp_path: Path) -> None:
    for _ in STEPS.split(","):
        killed = driven(tmp_path, phase)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    newest = newest_step(tmp_path / "run")
    done = driven(tmp_path, phase)
    assert done.returncode == 0, done.stderr
    assert first_step(tmp_path / "run") == newest >= 15
    assert "damaged" not in done.stdout
    assert sha(tmp_path / "run") == sha(uninterrupted)
    assert timeless(tmp_path / "run") == timeless(uninterrupted)
    for name in ("last", "best"):
        assert os.readlink(tmp_path / "run/checkpoints" / name) == os.readlink(uninterrupted / "checkpoints" / name)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


SLOW = '''
"""isoscale's command line with a disk so slow that training is many steps ahead of it."""
import sys, time
from pathlib import Path
from isoscale.engine.state import checkpoint

plain, seconds = checkpoint._write_tensors, float(sys.argv.pop(1))

def slowly(path, tensors):
    Path("writing").touch()
    time.sleep(seconds)
    plain(path, tensors)

checkpoint._write_tensors = slowly
from isoscale.cli.main import run
run()
'''


def slow_disk(folder: Path, seconds: float) -> "subprocess.Popen[str]":
    (folder / "driver.py").write_text(SLOW)
    words = [sys.executable, "driver.py", str(seconds), "train", "--run", "run", *RECIPE]
    return warm.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
def test_a_signal_while_a_slow_disk_is_written_leaves_no_trace(
    number: int, uninterrupted: Path, tmp_path: Path
) -> None:
    process = slow_disk(tmp_path, 0.5)
    while not (tmp_path / "writing").exists() and process.poll() is None:
        pass
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (75 if number == signal.SIGTERM else -number), said
    if number == signal.SIGTERM:
        assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    newest = newest_step(tmp_path / "run")
    done = cli("train", "--run", "run", *RECIPE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert first_step(tmp_path / "run") == newest
    assert sha(tmp_path / "run") == sha(uninterrupted)
    assert timeless(tmp_path / "run") == timeless(uninterrupted)


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_a_disk_that_hangs(uninterrupted: Path, tmp_path: Path) -> None:
    process = slow_disk(tmp_path, 1000)
    while not (tmp_path / "writing").exists() and process.poll() is None:
        pass
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)  # the first one waits for the checkpoint
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130, said
    newest = newest_step(tmp_path / "run")
    done = cli("train", "--run", "run", *RECIPE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert first_step(tmp_path / "run") == newest
    assert sha(tmp_path / "run") == sha(uninterrupted)
    assert timeless(tmp_path / "run") == timeless(uninterrupted)
