"""A run that nobody named is called after its Slurm job, and a job that starts again finds it."""

import json
from pathlib import Path

import pytest

import isoscale
from tests.helpers import QUIET

SHORT = {**QUIET, "train.steps": 3, "train.threads": 1}


@pytest.fixture(autouse=True)
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to work in, inside of a job."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "4711")


def train(**overrides: object) -> str:
    """Train for a moment; the name of the run."""
    return isoscale.train("images/digits", **{**SHORT, **overrides}).path.name


def test_each_training_of_a_job_has_a_directory_of_its_own():
    assert [train(), train(), train(seed=1)] == ["digits-4711", "digits-4711-2", "digits-4711-3"]


def test_a_job_that_starts_again_goes_on_with_each_of_its_runs(monkeypatch: pytest.MonkeyPatch):
    names = [train(), train(seed=1)]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    longer = {"train.steps": 5}
    assert [train(**longer), train(seed=1, **longer), train(seed=2, **longer)] == [*names, "digits-4711-3"]
    attempts = json.loads(Path("runs", names[1], "run.json").read_text())["stretches"]
    assert [(attempt["restart"], attempt["first_step"], attempt["last_step"]) for attempt in attempts] == [
        (0, 0, 3), (1, 3, 5),
    ]  # fmt: skip


def test_the_same_training_twice_in_one_job_is_not_mixed_up_when_it_starts_again(monkeypatch: pytest.MonkeyPatch):
    names = [train(), train()]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert [train(), train()] == names


def test_another_job_begins_anew(monkeypatch: pytest.MonkeyPatch):
    train()
    monkeypatch.setenv("SLURM_JOB_ID", "4712")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train() == "digits-4712"


def test_a_run_made_in_python_goes_on_with_its_own_kind_of_task(monkeypatch: pytest.MonkeyPatch):
    import torch

    data = isoscale.Sources(train={"input": torch.randn(8, 2), "target": torch.randn(8, 1)})
    fit = isoscale.Trainer({"name": "digits"}, **{**SHORT, "data.batch_size": 4}).fit
    first = fit(isoscale.Supervised(torch.nn.Linear(2, 1), loss="mse"), data).path
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train() == "digits-4711-2", "a run of a recipe is not that of a task made in Python"
    assert fit(isoscale.Supervised(torch.nn.Linear(2, 1), loss="mse"), data).path == first
