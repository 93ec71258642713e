"""`isoscale data check`: all data of a run beside what it was."""

import json
from pathlib import Path

import numpy as np

WORDS = ("task.class=supervised", "task.loss=mse", "~task.label_smoothing", "~checkpoint.monitor", "~data.split",
         "task.model.widths=[2, 1]", "~data.transforms", "data.class=files", "data.batch_size=10",
         "data.columns={input: x.npy, target: y.npy}", "train.steps=2", "~train.epochs")  # fmt: skip


def test_equal_is_code_0_changed_is_1(isoscale):
    np.save("x.npy", np.ones((1000, 2), np.float32))
    np.save("y.npy", np.ones((1000, 1), np.float32))
    assert isoscale("train", *WORDS, "--run", "a").code == 0
    equal = isoscale("data", "check", "a")
    assert equal.code == 0
    assert equal.out == "a: the data is what the run began with; compared: every value of 2 arrays (12 KiB)\n"
    changed = np.ones((1000, 1), np.float32)
    changed[501] = 2
    np.save("y.npy", changed)
    found = isoscale("data", "check", "a")
    assert found.code == 1 and found.out.startswith("changed: target in y.npy: its values differ; y.npy was written at")
    assert json.loads(isoscale("data", "check", "a", "--json").out)["changed"].keys() == {"target in y.npy"}


def test_a_run_that_is_not_there_is_refused(isoscale):
    Path("a").mkdir()
    refused = isoscale("data", "check", "a")
    assert refused.code == 2 and "there is no run in a" in refused.err
