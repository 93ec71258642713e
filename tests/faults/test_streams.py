"""Standard streams that are closed, full or no longer read cost no training, and no word of Python's about it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import command, first_of, sha
from tests.warm import ROOT

TRAIN = ["train", "images/digits", "train.epochs=1", "observe.tensorboard=0", "--run", "run"]
STREAMS = [
    ">&-",
    "2>&-",
    ">&- 2>&-",
    "<&- >&- 2>&-",
    ">/dev/full",
    "2>/dev/full",
    ">/dev/full 2>&1",
    "| true",
    "2>&1 | true",
]


def shell(words: list[str], streams: str, folder: Path) -> tuple[int, str]:
    """The exit code of a Python process with these streams, and what it said on those that are left."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    line = f'"$@" {streams}; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(
        ["bash", "-c", line, "bash", *words], cwd=folder, env={**os.environ, "PYTHONPATH": path}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("streams", first_of(STREAMS, ">&- 2>&-"))
def test_a_training_goes_on_whatever_becomes_of_its_words(streams: str, tmp_path: Path) -> None:
    code, said = shell(command(*TRAIN), streams, tmp_path)
    assert (code, "Exception" in said, "Traceback" in said) == (0, False, False)
    assert sha(tmp_path / "run") and "done at step 23" in (tmp_path / "run/log.txt").read_text()
    assert (tmp_path / "run/log.txt").read_text().startswith("20")  # nothing of a library's at its beginning


@pytest.mark.full
@pytest.mark.parametrize("streams", [">&- 2>&-", "2>&1 | true"])
def test_a_training_on_two_ranks_goes_on_as_well(streams: str, tmp_path: Path) -> None:
    code, _ = shell(command(*TRAIN, "--devices", "2"), streams, tmp_path)
    assert code == 0 and "done at step 23" in (tmp_path / "run/log.txt").read_text()


@pytest.mark.full
def test_a_script_without_streams_trains_and_leaves_the_files_of_its_run_alone(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, isoscale\n"
        "isoscale.train('images/digits', run='run', **{'train.epochs': 1, 'observe.tensorboard': 0})\n"
        "os.write(1, b'said by a library')\nos.write(2, b'said by a library')\n"
    )
    code, _ = shell([sys.executable, "script.py"], ">&- 2>&-", tmp_path)
    assert code == 0 and "done at step 23" in (tmp_path / "run/log.txt").read_text()
    assert b"said by a library" not in b"".join(path.read_bytes() for path in tmp_path.glob("run/*.*"))


@pytest.mark.full
def test_code_of_the_user_may_print_to_a_reader_that_has_gone(tmp_path: Path) -> None:
    (tmp_path / "talkative.py").write_text(
        "from isoscale.science.images import Classifier\n\n"
        "class Talkative(Classifier):\n"
        "    def training_step(self, *given):\n"
        "        print('x' * 100_000, flush=True)\n"
        "        return super().training_step(*given)\n"
    )
    code, _ = shell(command(*TRAIN, "task.class=talkative.Talkative"), "| head -1", tmp_path)
    assert code == 0 and "done at step 23" in (tmp_path / "run/log.txt").read_text()


CASES = [
    (["recipe", "list"], ">/dev/full", 2, "error: cannot write standard output: No space left on device\n"),
    (["recipe", "list"], ">&-", 0, ""),
    (["recipe", "list"], "| true", 0, ""),
    (["--help"], ">/dev/full", 2, "error: cannot write standard output: No space left on device\n"),
    (["recipe", "schema"], "| head -c 1", 0, "{"),
    (["runs", "show", "missing"], "2>&-", 2, ""),
    (["runs", "show", "missing"], "2>/dev/full", 2, ""),
    (["runs", "show", "missing"], ">&- 2>&-", 2, ""),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "streams", "code", "said"), first_of(CASES, CASES[0], CASES[5]), ids=lambda given: str(given)[:30]
)
def test_a_command_whose_words_are_lost_ends_with_a_code_and_no_traceback(
    words: list[str], streams: str, code: int, said: str, tmp_path: Path
) -> None:
    assert shell(command(*words), streams, tmp_path) == (code, said)
