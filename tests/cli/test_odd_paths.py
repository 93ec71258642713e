"""Names that nobody expects: a run, a recipe or a log under them works like any other, or is refused in words."""

import json
import os
from pathlib import Path

import pytest

from isoscale.errors import exit_code
from isoscale.runs.run import Run
from tests.helpers import cli, first_of, train

NO_TEXT = os.fsdecode(b"\xff\xfe")
NAMES = [NO_TEXT, "~x", "~", "-x", "two\nlines", "x.", "x ", "n" * 255, "[x]", "*", "$HOME", "a'b\"c", "a=b"]
USES = [["test"], ["runs", "show"], ["report", "--no-figures"], ["status"], ["logs"], ["reproduce"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(NAMES, NO_TEXT, "~x"))
def test_a_run_of_any_name_is_trained_continued_and_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    train(tmp_path / name, train__epochs=1, observe__tensorboard=1)
    train(tmp_path / name, recipe=None, train__epochs=2)
    assert Run.find(name).summary()["step"] == 46
    for words in USES:
        done = cli(*words, "--", name, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr)
    done = cli("export", "--out", "weights.safetensors", "--", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(cli("runs", "list", ".", "--json", cwd=tmp_path).stdout)[0]["status"] == "done"
    assert len(cli("runs", "list", ".", cwd=tmp_path).stdout.splitlines()) == 2


@pytest.mark.slow
def test_a_folder_a_recipe_and_a_log_may_have_names_that_are_no_text(tmp_path: Path) -> None:
    (folder := tmp_path / NO_TEXT).mkdir()
    (folder / f"{NO_TEXT}.yaml").write_text("extends: images/digits\ntrain: {epochs: 1}\n")
    done = cli("train", f"{NO_TEXT}.yaml", "--log-file", f"{NO_TEXT}.txt", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert r"in runs/\xff\xfe-" in done.stdout and (folder / f"{NO_TEXT}.txt").is_file()
    done = cli("test", cwd=folder)
    assert done.returncode == 0, done.stderr


COMMANDS = [
    ["train", "images/digits", "--run"],
    ["runs", "show"],
    ["recipe", "check"],
    ["runs", "list"],
    ["data", "info"],
]


@pytest.mark.parametrize("words", first_of(COMMANDS, ["runs", "show"]), ids=" ".join)
def test_a_name_that_is_too_long_is_refused_in_words(words: list[str], tmp_path: Path) -> None:
    said = cli(*words, "n" * 256 + ".yaml", cwd=tmp_path)
    assert said.returncode in (0, 2) and "--debug" not in said.stderr and "Traceback" not in said.stderr
    assert said.returncode == 0 or "too long" in said.stderr or "there is no" in said.stderr


def test_only_a_name_that_is_too_long_can_be_mended_by_a_shorter_one(tmp_path: Path) -> None:
    with pytest.raises(OSError) as error:
        (tmp_path / ("n" * 256)).touch()
    assert exit_code(error.value) == 2 and exit_code(OSError(5, "Input/output error")) == 1


@pytest.mark.parametrize("number", [1025, 100_000])
def test_more_threads_than_any_processor_has_are_refused(number: int, tmp_path: Path) -> None:
    said = cli("train", "images/digits", f"train.threads={number}", cwd=tmp_path)
    assert (said.returncode, said.stderr) == (
        2, f"error: command line: train.threads: expected a number of at most 1024 or auto, found {number}\n"
    )  # fmt: skip
