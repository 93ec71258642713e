import json
import re
from pathlib import Path

import pytest

from tests.helpers import cli

QUICK = ("train.epochs=1", "train.limit_train_batches=2", "observe.tensorboard=0")
MY_TASK = """
import isoscale
from torch import nn

class MyNet(nn.Module):
    def __init__(self, hidden: int = 8):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, images):
        return self.layers(images / 16)

class MyTask(isoscale.Task):
    def __init__(self, hidden: int = 8):
        super().__init__()
        self.net = MyNet(hidden)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch["input"]), batch["target"])
"""


@pytest.mark.slow
def test_without_a_recipe_the_embedded_one_is_trained_and_the_end_says_what_to_do_next(tmp_path: Path):
    done = cli("train", *QUICK, "train.epochs=3", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("digits-")
    path = f"runs/{run.name}"
    for line in (
        r"digits",
        rf"  run +{path}",
        r"  model +MLP, [\d,]+ parameters",
        r"  batch +64 samples, 2 steps per epoch",
        r"  length +6 steps, 3 epochs",
        r"epoch 3/3  step 6  train loss .* \| val loss .* accuracy .* \*?  [\d.]+ s",
        rf"done at step 6, in {path}",
        r"  best +val/accuracy [\d.]+ at epoch \d, step \d",
        r"  rate +[\d,]+ samples/s",
        r"  time +[\d.]+ s of training",
        r"  peak memory +\S+ \S+",
        rf"  test it +isoscale test {path}",
        rf"  train longer +isoscale train --run {path} train.epochs=6",
    ):
        assert re.search(f"^{line}$", done.stdout, re.MULTILINE), line


def test_overrides_may_come_without_a_recipe_before_them(isoscale):
    assert isoscale("train", "train.steps=2", "train.epochs=1", "--run", "a").code == 0
    assert json.loads(isoscale("runs", "show", "a", "--json").out)["step"] == 2


def test_a_run_is_continued_by_its_directory_and_says_so(isoscale):
    assert isoscale("train", *QUICK, "--run", "a").code == 0
    longer = isoscale("train", "--run", "a", "train.epochs=2")
    assert longer.code == 0
    assert "continues the run in a" in longer.out
    assert "train.epochs: 1 → 2" in longer.out
    assert "digits, continued at step 2 of 4" in longer.out


def test_a_run_that_is_complete_says_so(isoscale, copied):
    again = isoscale("train", "--run", str(copied("a")), "--log-level", "info")
    assert again.code == 0
    assert "this run is complete: all its 46 steps are done" in again.out


def test_the_command_to_train_longer_names_the_limit_that_ended_it(isoscale):
    done = isoscale("train", "images/digits", "train.steps=3", "--run", "my run")
    assert "isoscale train --run 'my run' train.steps=6" in done.out


def test_dev_tries_everything_and_saves_nothing(isoscale):
    tried = isoscale("train", "--dev", "2")
    assert tried.code == 0
    assert re.search(r"^  run +nothing is saved$", tried.out, re.MULTILINE)
    assert re.search(r"^  length +2 steps, 1 epoch$", tried.out, re.MULTILINE)
    assert re.search(r"^  test +test/accuracy .* test/loss ", tried.out, re.MULTILINE)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("words", [QUICK, ("--dev", "1")])
def test_with_json_every_line_of_output_is_json(isoscale, words):
    done = isoscale("train", *words, "--log-format", "json")
    events = [json.loads(line)["event"] for line in done.out.splitlines()]
    assert events[0] == "started" and events[-1] == "ended" and "logged" in events and "epoch_ended" in events


def test_the_level_makes_it_quiet(isoscale):
    done = isoscale("train", *QUICK, "--run", "a", "--log-level", "warning")
    assert done.out == "done at step 2, in a\n"


@pytest.mark.slow
def test_a_class_in_a_file_of_the_current_folder_is_found(tmp_path: Path):
    (tmp_path / "my_module.py").write_text(MY_TASK)
    (tmp_path / "mine.yaml").write_text(
        "task: {class: my_module.MyTask, hidden: 16}\ndata: {class: digits, batch_size: 64}\ntrain: {steps: 3}\n"
    )
    done = cli("train", "mine.yaml", "--run", "a", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "MyTask, 1,210 parameters" in done.stdout
    tested = cli("test", "a", "--json", cwd=tmp_path)
    assert json.loads(tested.stdout).keys() == {"test/loss"}
