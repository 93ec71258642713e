import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from isoscale.recipe.presets import preset_names
from tests.helpers import cli, commands

COMMANDS = [(), ("runs",), ("recipe",), ("data",), *commands()]
COMPLETE = "import sys; sys.argv = ['isoscale']; from isoscale.cli.main import run; run()"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(isoscale, words):
    shown = isoscale(*words, "--help")
    assert shown.code == 0
    assert f"Usage: isoscale {' '.join(words)}".strip() in shown.out
    assert isoscale(*words, "-h").out == shown.out


@pytest.mark.parametrize("words", [(), ("runs",), ("recipe",), ("data",)], ids=" ".join)
def test_a_group_without_a_command_shows_its_help(isoscale, words):
    shown = isoscale(*words)
    assert shown.code == 2 and "Commands" in shown.out + shown.err


@pytest.mark.parametrize(
    "words", [("trian",), ("train", "--rum", "a"), ("test", "--role", "x"), ("train", "--dev", "0")]
)
def test_a_word_that_is_not_known_is_refused(isoscale, words):
    refused = isoscale(*words)
    assert refused.code == 2 and "Error" in refused.err and refused.out == ""


def completed(*words: str, cwd: Path) -> list[str]:
    """What bash offers for the last word."""
    environment = {
        **os.environ, "_ISOSCALE_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["isoscale", *words]),
        "COMP_CWORD": str(len(words)),
    }  # fmt: skip
    done = subprocess.run([sys.executable, "-c", COMPLETE], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.slow
def test_the_shell_completes_commands_recipes_keys_and_runs(tmp_path: Path):
    (tmp_path / "runs/digits-7").mkdir(parents=True)
    (tmp_path / "runs/digits-7/recipe.yaml").touch()
    assert completed("tr", cwd=tmp_path) == ["train"]
    assert completed("train", "images/dig", cwd=tmp_path) == ["images/digits"]
    assert completed("train", "optimizer.l", cwd=tmp_path) == ["optimizer.lr="]
    assert completed("train", "images/digits", "~data.s", cwd=tmp_path) == [
        "~data.samples_per_epoch", "~data.shuffle", "~data.subset"
    ]  # fmt: skip
    images = {name for name in preset_names() if name.startswith("im")}
    assert set(completed("recipe", "show", "im", cwd=tmp_path)) == images
    assert completed("test", "di", cwd=tmp_path) == ["digits-7"]
    assert completed("predict", "--checkpoint", "b", cwd=tmp_path) == ["best"]


def test_the_completion_of_a_shell_can_be_shown(isoscale, monkeypatch):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # no shell may have started the tests
    assert "_ISOSCALE_COMPLETE=complete_bash" in isoscale("--show-completion", "bash").out


def test_output_into_a_closed_pipe_ends_without_a_traceback(tmp_path: Path):
    reader, writer = os.pipe()
    os.close(reader)
    shown = subprocess.run(
        [sys.executable, "-m", "isoscale", "recipe", "schema"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert "Traceback" not in shown.stderr


def test_the_module_can_be_run(tmp_path: Path):
    assert re.fullmatch(r"isoscale \d+\.\d+\S*\n", cli("--version", cwd=tmp_path).stdout)
