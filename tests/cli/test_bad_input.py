"""Each mistake gets one clear message, no traceback, and the exit code of what the user can fix."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import warm
from tests.helpers import cli

MISTAKES = {
    "an unknown recipe": (("images/digit",), 'did you mean "images/digits"?'),
    "a recipe that is nowhere": (("no/such.yaml",), 'there is no preset or file "no/such.yaml"'),
    "an unknown section": (("optimiser.lr=1",), 'did you mean "optimizer"?'),
    "an unknown key": (("train.epocs=1",), 'train.epocs: unknown key; did you mean "epochs"?'),
    "a word that is no override": (("images/digits", "epochs"), "write key=value to set"),
    "a value of another type": (("train.epochs=many",), "train.epochs: expected a whole number"),
    "an unknown short name": (("task.model.class=mpl",), 'did you mean "mlp"?'),
    "an unknown module": (("task.class=no_such_module.Task",), 'there is no module "no_such_module"'),
    "an unknown class": (
        ("task.class=isoscale.science.images.Clasifier",),
        'isoscale.science.images has no "Clasifier"; did you mean "Classifier"?',
    ),
    "an unknown argument": (("task.model.width=[64, 10]",), 'did you mean "widths"?'),
    "an unknown optimizer": (("optimizer.name=adamm",), 'did you mean "adam"?'),
    "an unknown argument of the optimizer": (("optimizer.momentum=1",), "AdamW takes no such argument"),
    "an unknown precision": (("train.precision=bf15",), 'did you mean "bf16"?'),
    "an unknown program": (("train.program=fast",), "train.program: expected auto, eager"),
    "an unknown loss": (("task.loss=cros_entropy",), "did you mean 'cross_entropy'?"),
    "an unknown activation": (("task.model.activation=rellu",), "unknown activation 'rellu': use relu"),
    "an unknown metric to monitor": (("checkpoint.monitor=val/acuracy",), "did you mean 'val/accuracy'?"),
    "a batch larger than the data": (("data.batch_size=5000",), "only 1438 training samples"),
    "a split of more than there is": (("data.split.train=0.9",), "but there are 1797"),
    "a schedule that never ends": (("train.epochs=null",), "set epochs or steps"),
    "a split that is not a number": (
        ("data.split.train=.nan",),
        "data.split.train: expected a finite number, found nan",
    ),
    "an infinite split": (("data.split.val=.inf",), "data.split.val: expected a finite number, found inf"),
    "a negative split": (("data.split.val=-0.1",), "split.val is -0.1; expected a fraction such as 0.8"),
    "a fraction that is not a number": (("data.subset=.nan",), "data.subset: "),
    "too few betas": (("optimizer.betas=[]",), "AdamW refuses its arguments"),
    "a rate that is not a number": (("optimizer.lr=.nan",), "optimizer.lr: "),
    "an infinite argument of the optimizer": (
        ("optimizer.weight_decay=.inf",),
        "optimizer.weight_decay: expected a finite number, found inf",
    ),
    "a transform by no number": (
        ("data.transforms=[{class: divide, by: .nan}]",),
        "data.transforms.0.by: expected a finite number, found nan",
    ),
    "a negative width": (("task.model.widths=[64, -1, 10]",), "widths is [64, -1, 10]: expected whole numbers above 0"),
    "a width of zero": (("task.model.widths=[64, 0, 10]",), "widths is [64, 0, 10]: expected whole numbers above 0"),
    "a width that no memory holds": (("task.model.widths=[64, 99999999999, 10]",), "cannot build mlp (widths=["),
    "a dropout of everything": (("task.model.dropout=1.0",), "dropout is 1.0; expected a fraction"),
    "a negative smoothing": (("task.label_smoothing=-1.0",), "label_smoothing is -1.0; expected a fraction"),
    "a division by zero": (
        ("data.transforms=[{class: divide, by: 0.0}]",),
        "cannot build divide (by=0.0): Divide needs",
    ),
    "more parts than a batch has": (("train.accumulate=99999999999999999999",), "train.accumulate: "),
    "dev with a run": (("--dev", "2", "--run", "a"), "leave one of them out"),
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_refused_with_the_way_out_and_leaves_nothing_behind(isoscale, words, message):
    refused = isoscale("train", *words, "--log-level", "error")
    assert refused.code == 2
    assert refused.err.startswith("error: ") and message in refused.err
    assert "Traceback" not in refused.err and refused.out == ""
    assert list(Path().rglob("run.json")) == []


def test_a_metric_that_does_not_exist_is_refused(isoscale):
    Path("mine.yaml").write_text(
        "task: {class: supervised, model: {class: mlp, widths: [64, 10]}, loss: cross_entropy, metrics: [acuracy]}\n"
        "data: {class: digits, transforms: [{class: divide, by: 16}, flatten]}\n"
    )
    refused = isoscale("train", "mine.yaml")
    assert refused.code == 2 and "unknown metric 'acuracy': did you mean 'accuracy'?" in refused.err


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(isoscale, monkeypatch, device):
    from isoscale.system import devices as accelerator

    monkeypatch.setattr(accelerator, "is_available", lambda kind: kind == "cpu")
    refused = isoscale("train", f"train.device={device}")
    assert refused.code == 2 and "this machine offers cpu; use train.device=auto" in refused.err
    assert not Path("runs").exists()


@pytest.mark.slow
def test_five_mistakes_are_reported_as_five(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(
        "extends: images/digits\n"
        "optimiser: {lr: 1}\n"
        "task: {loss: 3, model: {class: mpl}}\n"
        "data: {batch_size: 0}\n"
        "train: {epocs: 3}\n"
    )
    refused = cli("train", "mine.yaml", cwd=tmp_path)
    lines = refused.stderr.splitlines()
    assert refused.returncode == 2 and refused.stdout == ""
    assert lines[0] == "error: 5 problems in the recipe:"
    assert sorted(line.split(":")[1] for line in lines[1:]) == ["2", "3", "3", "4", "5"]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import surely_not_installed", "No module named 'surely_not_installed'"),
        ("1 / 0", "ZeroDivisionError"),
        ("def f(:", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_reason(isoscale, text, message):
    name = f"broken_{abs(hash(text))}"
    Path(f"{name}.py").write_text(text)
    refused = isoscale("train", f"task.class={name}.Task")
    assert refused.code == 2 and f"importing {name} failed" in refused.err and message in refused.err


@pytest.mark.parametrize(
    ("content", "message"), [(None, "there is no file data.npz"), (b"PK\3\4 and no more", "cannot read data.npz")]
)
def test_data_that_cannot_be_read_is_named(isoscale, content, message):
    if content is not None:
        Path("data.npz").write_bytes(content)
    refused = isoscale("train", "~data.split", "data.class=arrays", "data.path=data.npz")
    assert refused.code == 2 and message in refused.err


FILES = (
    "task.class=supervised", "~task.label_smoothing", "~checkpoint.monitor", "~data.split", "~data.transforms",
    "data.class=files", "data.columns={input: x.npy, target: y.npy}", "data.batch_size=10",
)  # fmt: skip
INPUT = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
TARGET, LABELS = INPUT[:, :1], (INPUT.sum(1) > 0).astype(np.int64)
FLOATS = "but the network computes with floats; convert it: data.columns={input: {path: FILE, dtype: float32}"
VALUES = {
    "whole numbers": (INPUT.astype(np.int64), TARGET, f"the input is int64, {FLOATS}"),
    "bytes": (INPUT.astype(np.uint8), TARGET, f"the input is uint8, {FLOATS}"),
    "booleans": (INPUT > 0, TARGET, f"the input is bool, {FLOATS}"),
    "complex inputs": (INPUT.astype(np.complex64), TARGET, "give real and imaginary parts as columns of their own"),
    "complex targets": (INPUT, TARGET.astype(np.complex64), "the target holds complex numbers (complex64)"),
    "text": (INPUT.astype("U9"), TARGET, "x.npy holds text or dates (<U9), expected numbers"),
    "objects": (INPUT.astype(object), TARGET, "x.npy holds Python objects (object), expected numbers"),
    "dates": (INPUT.astype("M8[s]"), TARGET, "x.npy holds text or dates"),
    "long doubles": (INPUT.astype(np.longdouble), TARGET, "which no tensor can be; set its dtype, such as float64"),
    "no rows": (INPUT[:0], TARGET[:0], "the data has no samples, and so cannot be split"),
    "one row": (INPUT[:1], TARGET[:1], "split.val is 0.1, which is less than one sample of 1"),
    "no columns": (INPUT[:, :0], TARGET, "the input has no values: a batch has the shape (10, 0)"),
    "one value": (np.float32(1), TARGET, "x.npy is one value, not an array of rows"),
    "other numbers of rows": (INPUT, TARGET[:50], "input has 100 (x.npy), target has 50 (y.npy)"),
    "a dimension too many": (INPUT[:, :, None], TARGET, "add flatten to data.transforms"),
    "targets that are not numbers": (INPUT, TARGET * np.nan, "target in 100 of 100 rows, first in y.npy, row 0"),
    "labels of more classes": (INPUT, LABELS + 7, "but the model has 2 classes, numbered from 0"),
    "negative labels": (INPUT, LABELS - 1, "run from -1 to 0, but classes are numbered from 0; correct the labels"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("inputs", "targets", "message"), VALUES.values(), ids=VALUES)
def test_values_that_no_network_learns_from_are_named_with_what_to_type(isoscale, inputs, targets, message):
    np.save("x.npy", inputs, allow_pickle=True)
    np.save("y.npy", targets, allow_pickle=True)
    loss, width = ("cross_entropy", 2) if targets.dtype == np.int64 else ("mse", 1)
    words = (f"task.loss={loss}", f"task.model.widths=[3, {width}]")
    refused = isoscale("train", *FILES, *words, "--log-level", "error")
    assert refused.code == 2, refused.err
    assert refused.err.startswith("error: ") and message in refused.err and "Traceback" not in refused.err
    assert list(Path().rglob("run.json")) == []


WELCOME = {"the other byte order": ">f4", "half precision": "f2", "double precision": "f8"}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", WELCOME.values(), ids=WELCOME)
@pytest.mark.parametrize("labels", ["u8", "u2", ">i4", "i1", "?"])
def test_floats_and_labels_of_every_width_are_welcome(isoscale, dtype, labels):
    np.save("x.npy", INPUT.astype(dtype))
    np.save("y.npy", LABELS.astype(labels))
    words = ("task.loss=cross_entropy", "task.model.widths=[3, 2]", "--dev", "1", "--log-level", "error")
    assert isoscale("train", *FILES, *words).code == 0


def test_a_file_in_the_way_of_the_run_is_named(isoscale):
    Path("taken").touch()
    refused = isoscale("train", "--run", "taken")
    assert refused.code == 2 and "taken is a file" in refused.err
    refused = isoscale("train", "--run", "taken/run")
    assert refused.code == 2 and "cannot write the run directory taken/run" in refused.err


def test_a_directory_that_holds_something_else_is_left_alone(isoscale):
    Path("thesis").mkdir()
    Path("thesis/chapter.tex").write_text("precious")
    refused = isoscale("train", "--run", "thesis")
    assert refused.code == 2 and "thesis is not empty and holds no run" in refused.err
    assert [path.name for path in Path("thesis").iterdir()] == ["chapter.tex"]
    assert isoscale("test", "thesis").code == isoscale("runs", "show", "thesis").code == 2


def test_a_changed_recipe_is_refused_with_the_difference(isoscale, copied):
    run = copied("a")
    before = (run / "recipe.yaml").read_bytes(), (run / "run.json").read_bytes()
    refused = isoscale("train", "--run", "a", "optimizer.lr=1", "train.epochs=1")
    assert refused.code == 2 and refused.out == ""
    assert "optimizer.lr: 0.00" in refused.err and "→ 1.0" in refused.err
    assert "train.epochs: 2 → 1  (a run can be made longer, not shorter)" in refused.err
    assert ((run / "recipe.yaml").read_bytes(), (run / "run.json").read_bytes()) == before


@pytest.mark.parametrize("command", [("train", "--run"), ("test",)], ids=" ".join)
@pytest.mark.parametrize(("name", "text"), [("recipe.yaml", "task: {"), ("recipe.yaml", "tusk: 1")])
def test_a_damaged_file_of_a_run_is_named(isoscale, copied, command, name, text):
    run = copied("a")
    (run / name).write_text(text)
    refused = isoscale(*command, "a")
    assert refused.code == 2 and f"a/{name}" in refused.err and "Traceback" not in refused.err


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_it(isoscale, copied, name):
    run = copied("a")
    os.truncate(run / "checkpoints/step_00000046" / name, 7)
    refused = isoscale("test", "a", "--checkpoint", "last")
    assert refused.code == 2 and name in refused.err
    assert json.loads(isoscale("runs", "show", "a", "--json").out)["step"] == 46
    again = isoscale("train", "--run", "a", "--log-level", "info")
    assert again.code == 0
    assert "warning: checkpoint step_00000046 is damaged and passed over" in again.out
    assert "continued at step 23 of 46" in again.out
    assert isoscale("test", "a").code == 0


def test_a_run_of_which_no_checkpoint_is_whole_is_not_begun_anew(isoscale, copied):
    run = copied("a")
    logged = (run / "metrics.jsonl").read_bytes()
    for file in run.glob("checkpoints/step_*/model.safetensors"):
        os.truncate(file, 7)
    refused = isoscale("train", "--run", "a")
    assert refused.code == 2 and "no checkpoint in a/checkpoints can be read" in refused.err
    assert (run / "metrics.jsonl").read_bytes() == logged


BROKEN_TASK = """
import isoscale
from torch import nn

class Broken(isoscale.Task):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 3)

    def training_step(self, batch, batch_idx):
        return self.net(batch["input"].float()).sum()  # 8 is not 3
"""


@pytest.mark.slow
def test_an_error_in_the_users_code_names_its_line_and_how_to_see_more(tmp_path: Path):
    (tmp_path / "my_task.py").write_text(BROKEN_TASK)
    words = ("train", "task.class=my_task.Broken", "~task.model", "~task.loss", "~task.label_smoothing")
    failed = cli(*words, cwd=tmp_path)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    lines = failed.stderr.splitlines()
    assert lines[0].startswith("error: RuntimeError: mat1 and mat2 shapes cannot be multiplied")
    assert "in training_step, " in lines[1] and "my_task.py:11: return self.net(" in lines[1]
    assert "--debug" in lines[-1]


LATE_TASK = (
    BROKEN_TASK.replace("Broken", "Late")
    .replace("nn.Linear(3, 3)", "nn.Linear(8, 1)")
    .replace("        return", "        if batch_idx == 3:\n            raise KeyError('energy')\n        return")
)


def test_an_error_later_on_is_written_down_and_costs_no_checkpoint(isoscale):
    Path("late_task.py").write_text(LATE_TASK)
    words = ("task.class=late_task.Late", "~task.model", "~task.loss", "~task.label_smoothing", "~checkpoint.monitor")
    failed = isoscale(
        "train", *words, "~data.transforms", "checkpoint.every=2 steps", "train.evaluate=never", "--run", "a"
    )
    assert failed.code == 1 and "KeyError: 'energy'" in failed.err and "late_task.py:12" in failed.err
    assert "go on from the last checkpoint: isoscale train --run a" in failed.err
    assert "Traceback" in Path("a/log.txt").read_text() and "Traceback" not in failed.out
    shown = json.loads(isoscale("runs", "show", "a", "--json").out)
    assert (shown["status"], shown["message"]) == ("failed", "KeyError: 'energy'")
    assert Path("a/checkpoints/last").resolve().name == "step_00000002"


@pytest.mark.parametrize("words", [("--debug", "train", "optimizer.lr=-1"), ("train", "optimizer.lr=-1", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(isoscale, words):
    refused = isoscale(*words)
    assert refused.code == 2
    assert refused.err.startswith("Traceback") and "RecipeError" in refused.err


def run_in_small_space(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command in a file system of its own, of one megabyte."""
    mount = f'mount -t tmpfs -o size=1m none {folder} && cd {folder} && exec "$@"'
    command = [sys.executable, "-m", "isoscale", *words]
    return warm.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", *command],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def can_mount() -> bool:
    probe = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and warm.run(probe, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_mount(), reason="needs unshare, and leave to mount a file system")
def test_a_full_disk_is_named_and_the_checkpoints_are_called_intact(tmp_path: Path):
    failed = run_in_small_space(tmp_path, "train", "task.model.widths=[64, 300, 300, 10]", "checkpoint.every=1 steps")
    assert failed.returncode == 2, failed.stderr
    assert "No space left on device" in failed.stderr and "Traceback" not in failed.stderr


SCIENCE = {
    "energies without a spacing": (("electronic/be2", "task.energies.spacing=-1.0"), "expected at least 2 of them"),
    "no loss": (("electronic/be2", "task.loss=3"), "expected a name, a class path, or a mapping with class"),
    "a cutoff beyond all atoms": (
        ("potentials/water", "task.model.descriptor.cutoff=1e300"),
        "expected a distance in Å, such as 6.0",
    ),
    "a negative width of a potential": (
        ("potentials/water", "task.model.fitting_widths=[240, -1]"),
        "fitting_widths is [240, -1]: expected whole numbers above 0",
    ),
    "channels below one": (("images/mnist", "task.model.widths=[784, 0, 10]"), "expected whole numbers above 0"),
}


@pytest.mark.parametrize(("words", "message"), SCIENCE.values(), ids=SCIENCE)
def test_a_value_that_a_science_cannot_use_is_refused_before_its_data_is_read(isoscale, words, message):
    refused = isoscale("train", *words, "--log-level", "error")
    assert refused.code == 2 and message in refused.err and "Traceback" not in refused.err


def test_a_table_with_ragged_rows_is_refused_with_its_line(isoscale):
    Path("a.csv").write_text("1,2,3\n4,5,6\n7,8\n")
    words = ("task.loss=mse", "task.model.widths=[3, 3]", "data.columns={input: a.csv, target: a.csv}")
    refused = isoscale("train", *FILES, *words)
    assert refused.code == 2 and "a.csv, line 3: 2 columns found, 3 expected" in refused.err
