"""The first steps of a run again: equal to the bit, or it is said what is not, and why."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from isoscale.errors import UserError
from isoscale.runs.run import Run
from isoscale.study import reproduce as module
from isoscale.study.reproduce import reproduce, text
from tests.helpers import train

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("reproduce") / "digits", train__epochs=2, observe__every=10)


@pytest.fixture
def run(finished: Run, tmp_path: Path) -> Run:
    return Run(shutil.copytree(finished.path, tmp_path / "digits", symlinks=True))


def edit(run: Run, **values: object) -> None:
    run.directory.update(**values)


def test_every_logged_value_is_equal_to_the_bit(run: Run) -> None:
    found = reproduce(run)
    assert found.equal and found.tolerance == 0 and found.num_steps == 20 and not found.others
    assert [line.step for line in found.lines] == [10, 10, 10, 20, 20, 20]
    assert "reproduced: all 6 logged values up to step 20 are equal to the last bit" in text(found)


def test_as_many_steps_as_are_asked_for_with_epochs_and_evaluations(run: Run) -> None:
    found = reproduce(run, 45)
    names = {(line.step, line.name) for line in found.lines}
    assert found.equal and found.num_steps == 40 and (23, "val/loss") in names and (23, "train/loss_epoch") in names
    whole = reproduce(run, 1000)
    assert whole.equal and whole.num_steps == 46


def test_a_learning_curve_begins_with_the_first_step_again(tmp_path: Path) -> None:
    found = reproduce(train(tmp_path / "run", train__epochs=1, observe__every=10, observe__curve="lcurve.out"))
    assert found.equal and {line.step for line in found.lines} == {1, 10}
    later = train(tmp_path / "later", train__epochs=1, observe__every=10)
    later = train(later.path, train__epochs=2, observe__every=10, observe__curve="lcurve.out")
    assert reproduce(later).equal


def test_nothing_of_the_run_is_touched(run: Run) -> None:
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    threads, generator = torch.get_num_threads(), torch.get_rng_state()
    reproduce(run)
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), generator)


def test_a_recipe_that_was_changed_behind_the_runs_back_is_found_out(run: Run) -> None:
    path = run.directory.recipe
    path.write_text(path.read_text().replace("lr: 0.002", "lr: 0.0021"))
    found = reproduce(run)
    wrong = [(line.step, line.name) for line in found.lines if not line.equal]
    assert not found.equal and (10, "lr") in wrong and (20, "train/loss") in wrong
    assert "not reproduced: " in found.verdict and "NO" in text(found)


def test_a_value_that_is_missing_on_either_side_is_not_equal(run: Run) -> None:
    path = run.directory.metrics
    path.write_text("".join(line for line in path.open() if json.loads(line)["name"] != "train/accuracy"))
    found = reproduce(run)
    assert not found.equal and {line.recorded for line in found.lines if line.name == "train/accuracy"} == {None}


def test_other_hardware_or_versions_get_a_tolerance_that_is_said(run: Run) -> None:
    edit(run, hardware={**run.record["hardware"], "processor": "Another"}, packages={"torch": "1.0", "numpy": "1.0"})
    found = reproduce(run)
    assert found.equal and found.tolerance in (module.ROUNDING, module.COARSE_ROUNDING)
    assert any(line.startswith("processor was Another, is ") for line in found.others)
    assert "torch was 1.0" in text(found) and f"to within {found.tolerance:g}" in found.verdict


def test_the_tolerance_is_relative_and_nan_equals_nan() -> None:
    assert module._equal(1000.0, 1000.9, 1e-3) and not module._equal(1000.0, 1002.0, 1e-3)
    assert module._equal(math.nan, math.nan, 0) and not module._equal(math.nan, 1.0, 1e-3)
    assert module._equal(0.0, 0.0, 0) and not module._equal(math.inf, 1.0, 1e-3)


def test_changes_of_the_users_code_are_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(run, code={"folder": "/x", "commit": "a" * 40, "diff": ""})
    monkeypatch.setattr(module, "code", lambda: {"folder": "/x", "commit": "b" * 40, "diff": "+1"})
    found = reproduce(run)
    assert found.equal
    assert f"the code was at commit {'a' * 12}, it is at {'b' * 12}" in text(found) and "not committed" in text(found)


THREADS = """
import torch
from isoscale.science.images import Classifier

class Threads(Classifier):
    def training_step(self, batch, batch_idx):
        self.log("threads", torch.tensor(float(torch.get_num_threads())))
        return super().training_step(batch, batch_idx)
"""


def test_the_recorded_number_of_threads_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "threaded.py").write_text(THREADS)
    options = {"task__class": "threaded.Threads", "train__steps": 4, "observe__every": 2}
    here = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", str(here + 1))
    run = train(tmp_path / "run", **options)
    monkeypatch.setenv("OMP_NUM_THREADS", str(here))
    found = reproduce(run)
    assert found.equal and {line.recorded for line in found.lines if line.name == "train/threads"} == {here + 1.0}


def test_a_run_that_was_made_longer_is_reproduced_as_it_was_first_meant(tmp_path: Path) -> None:
    run = train(tmp_path / "run", train__epochs=1, observe__every=10, schedule__warmup=0)
    train(tmp_path / "run", recipe=None, train__epochs=2, observe__every=5)
    found = reproduce(run)
    assert found.equal and found.num_steps == 20
    with pytest.raises(UserError, match=r"continued at step 23 .* --steps 23 or less"):
        reproduce(run, 46)


def test_what_cannot_be_reproduced_is_refused(run: Run) -> None:
    with pytest.raises(UserError, match=r"nothing was logged up to step 3, .*: --steps 10"):
        reproduce(run, 3)
    edit(run, given="Net")
    with pytest.raises(UserError, match="Net, was given in Python"):
        reproduce(run)
    edit(run, given=None)
    run.directory.metrics.write_text("")
    with pytest.raises(UserError, match="has logged nothing"):
        reproduce(run)


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run on a file of its own."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    np.savez("data.npz", input=generator.normal(size=(64, 4)).astype("float32"), target=np.ones((64, 1), "float32"))
    recipe = {
        "task": {"class": "supervised", "model": {"class": "torch.nn.Linear", "in_features": 4, "out_features": 1}},
        "data": {"class": "arrays", "path": "data.npz", "batch_size": 8},
        "train": {"epochs": 2},
        "observe": {"every": 4, "level": "error", "tensorboard": 0},
    }
    return train(tmp_path / "run", recipe)


def test_data_that_has_changed_or_is_gone_is_refused_and_where_it_was(
    arrays: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reproduce(arrays).equal
    np.savez("data.npz", input=np.zeros((64, 4), "float32"), target=np.ones((64, 1), "float32"))
    with pytest.raises(UserError, match=r"the data \(train, val\) is not the data that this run was trained on"):
        reproduce(arrays)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=r"data\.npz") as caught:
        reproduce(arrays)
    assert str(tmp_path) in caught.value.__notes__[-1]


def test_a_missing_package_is_named(run: Run) -> None:
    path = run.directory.recipe
    path.write_text(path.read_text().replace("class: classifier", "class: missing.Net"))
    assert "missing.Net" in path.read_text()
    with pytest.raises(UserError, match='no module "missing"'):
        reproduce(run)
