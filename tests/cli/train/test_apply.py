import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file


def test_test_prints_the_metrics_and_whose_they_are(isoscale, copied):
    run = copied()
    lines = isoscale("test", str(run)).out.splitlines()
    assert lines[0] == f"{run}, best checkpoint, step 46"
    names = [line.split()[0].removeprefix("test/") for line in lines[1:]]
    assert names == ["accuracy", "loss", "f1", "precision", "recall"]


def test_a_run_is_named_by_directory_by_name_or_not_at_all(isoscale, copied):
    run = copied()
    by_path = isoscale("test", str(run), "--json").out
    assert isoscale("test", run.name, "--json").out == by_path
    assert isoscale("test", "--json").out == by_path
    assert json.loads(by_path).keys() > {"test/accuracy", "test/loss"}


def test_the_newest_run_is_the_one_that_was_started_last(isoscale, copied):
    for name, started in (("runs/a", "2026-03-01T10:00:00"), ("runs/b", "2026-01-01T10:00:00")):
        record = copied(name) / "run.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "started": started}))
    assert isoscale("test").out.startswith("runs/a,")


def test_the_metrics_are_those_of_the_checkpoint_and_the_data_that_were_asked_for(isoscale, copied):
    run = str(copied())
    record = json.loads(isoscale("runs", "show", run, "--json").out)
    validated = json.loads(isoscale("test", run, "--checkpoint", "last", "--role", "val", "--json").out)
    assert validated["val/accuracy"] == record["metrics"]["val/accuracy"]
    assert validated["val/loss"] == pytest.approx(record["metrics"]["val/loss"], rel=1e-6)
    assert isoscale("test", run, "--checkpoint", "23").out.startswith(f"{run}, step 23\n")


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(isoscale, copied):
    refused = isoscale("test", str(copied()), "--checkpoint", "7")
    assert refused.code == 2
    assert "there is no checkpoint '7'" in refused.err and "step_00000023" in refused.err


def test_predictions_have_a_row_for_each_sample(isoscale, copied):
    run = copied()
    written = isoscale("predict", str(run))
    assert written.code == 0 and "class: (180,) int64" in written.out
    with np.load(run / "predictions.npz") as arrays:
        assert arrays["probability"].shape == (180, 10)
        assert (arrays["probability"].argmax(1) == arrays["class"]).all()


def test_predictions_are_the_same_in_both_formats(isoscale, copied):
    run = str(copied())
    assert isoscale("predict", run, "--out", "a.npz", "--role", "val").code == 0
    assert isoscale("predict", run, "--out", "a.safetensors", "--role", "val").code == 0
    arrays, tensors = np.load("a.npz"), load_file("a.safetensors")
    assert sorted(arrays.files) == sorted(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(arrays[name], tensor)


@pytest.mark.parametrize(
    ("out", "message"), [("a.csv", "written as .npz or .safetensors"), ("no/a.npz", "there is no folder no")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(isoscale, copied, out, message):
    refused = isoscale("predict", str(copied()), "--out", out)
    assert refused.code == 2 and message in refused.err and refused.out == ""


def test_without_any_run_the_message_says_how_to_make_one(isoscale):
    refused = isoscale("test")
    assert (refused.code, refused.out) == (2, "")
    assert "isoscale train" in refused.err and not Path("runs").exists()


BREAKS = """
from isoscale.science.images import Classifier

class Breaks(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 6:
            raise RuntimeError("the seventh step is cursed")
        return super().training_step(batch, batch_idx)
"""


@pytest.fixture
def failed(isoscale):
    """A run that fails at its seventh step, after a checkpoint at step 5."""
    Path("breaks.py").write_text(BREAKS)
    result = isoscale(
        "train", "images/digits", "--run", "runs/failed", "task.class=breaks.Breaks", "checkpoint.every=5 steps",
        "train.steps=20", "train.program=eager", "observe.tensorboard=0", "observe.level=error",
    )  # fmt: skip
    assert result.code == 1
    return "runs/failed"


def test_the_numbers_of_a_failed_run_come_with_a_word_about_it(isoscale, failed):
    words = (
        "the run runs/failed failed after step 5 of 20 (RuntimeError: the seventh step is cursed); "
        "these weights are those of its last checkpoint, step 5\n"
    )
    plain, as_json = isoscale("test", failed), isoscale("test", failed, "--json")
    assert plain.code == as_json.code == 0
    assert words in plain.err and words in as_json.err
    assert "test/accuracy" in json.loads(as_json.out)
    assert words in isoscale("predict", failed).err
    assert words in isoscale("export", failed, "--out", "weights.safetensors").err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"status": "stopped", "step": 30, "message": "a signal"}, "was stopped after step 30 of 46 (a signal); these"),
        ({"status": "running", "message": ""}, "was killed after step 46 of 46 (it ended without a word; go on"),
    ],
)
def test_a_run_that_did_not_end_says_so(isoscale, copied, changes, words):
    run = copied()
    record = run / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **changes}))
    err = isoscale("test", str(run), "--checkpoint", "23", "--json").err
    assert words in err and err.count("\n") == 1
    assert err.endswith("those of its step 23\n")


def test_a_run_that_is_done_says_nothing_on_the_side(isoscale, copied):
    run = str(copied())
    assert isoscale("test", run).err == isoscale("predict", run).err == ""
