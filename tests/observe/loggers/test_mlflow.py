"""MLflow, read back through MLflow's own client."""

import pytest

from isoscale.errors import UserError
from isoscale.observe.events import Logged
from isoscale.observe.loggers.logger import Replayed
from isoscale.observe.loggers.mlflow import MLflow
from tests.helpers import needs
from tests.observe.loggers.conftest import end, figures, start, steps, tell

MLFLOW = "pip install 'isoscale[mlflow]'"
pytestmark = [needs("mlflow", MLFLOW), needs("sqlalchemy", MLFLOW)]


def read(directory):
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{directory}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("isoscale")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def history(client, run, name):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]


@pytest.mark.slow
def test_a_run_is_written_whole_into_its_own_directory(directory):
    tell(MLflow(), start(directory), *steps(10, 40), figures(40), end())
    client, run = read(directory)
    assert run.info.status == "FINISHED" and run.info.run_name == "digits digits-1"
    assert run.data.params == {"seed": "0", "optimizer.lr": "0.1", "data.subset": "None", "data.split": "[8, 1, 1]"}
    assert run.data.tags["model"] == "MLP" and run.data.tags["directory"] == str(directory)
    assert history(client, run, "train/loss") == [(step, 1 / step) for step in (10, 20, 30, 40)]
    assert history(client, run, "val/loss") == [(step, 2 / step) for step in (10, 20, 30, 40)]
    assert run.data.metrics["best/val/loss"] == 0.05 and run.data.metrics["epoch"] == 3
    artifacts = directory / "mlflow/artifacts" / run.info.run_id / "artifacts"
    assert (artifacts / "recipe.yaml").read_text() == "seed: 0\n"
    (picture,) = artifacts.glob("images/*.png")
    assert "confusion" in picture.name and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_continued_run_goes_on_in_the_same_run_and_nothing_appears_twice(directory):
    tell(MLflow(), start(directory), *steps(10, 30))
    client, run = read(directory)
    assert run.info.status == "RUNNING"
    tell(MLflow(), start(directory, 20), *steps(20, 40), end())
    client, run = read(directory)
    assert run.info.status == "FINISHED"
    assert history(client, run, "val/loss") == [(step, 2 / step) for step in (10, 20, 30, 40)]


@pytest.mark.slow
def test_a_changed_setting_becomes_a_tag_because_parameters_never_change(directory):
    tell(MLflow(), start(directory), end("stopped", 10))
    assert read(directory)[1].info.status == "KILLED"
    tell(MLflow(), start(directory, **{"optimizer.lr": 0.12, "train.epochs": 3}), end("failed", 20))
    _, run = read(directory)
    assert run.info.status == "FAILED"
    assert run.data.params["optimizer.lr"] == "0.1" and run.data.tags["optimizer.lr"] == "0.12"
    assert run.data.params["train.epochs"] == "3" and "seed" not in run.data.tags


@pytest.mark.slow
def test_many_and_long_settings_and_strange_names_are_taken(directory):
    many = {f"task.argument{number}": number for number in range(250)}
    strange = Logged(10, 0, {"val/R² (å)": 1.0, "val/nan": float("nan")})
    tell(MLflow(), start(directory, **many, text="x" * 10000), strange, end())
    _, run = read(directory)
    assert len(run.data.params) == 4 + 250 + 1 and run.data.params["text"] == "x" * 6000
    assert run.data.metrics["val/R_ ___"] == 1.0 and run.data.metrics["val/nan"] != run.data.metrics["val/nan"]


def test_of_pictures_in_quick_succession_the_first_and_the_newest_are_drawn(directory):
    tell(MLflow(), start(directory), figures(10), figures(20), figures(30), end())
    pictures = sorted(path.name for path in directory.glob("mlflow/artifacts/*/artifacts/images/*.png"))
    assert ["step+10" in pictures[0], "step+30" in pictures[-1], len(pictures)] == [True, True, 2]


def test_values_that_are_sent_later_keep_their_time(directory):
    tell(MLflow(), start(directory), Replayed(10, 0, {"loss": 1.0}, 1234.5))
    client, run = read(directory)
    (metric,) = client.get_metric_history(run.info.run_id, "loss")
    assert metric.timestamp == 1234500


@pytest.mark.slow
def test_an_empty_database_is_made_once_and_a_home_that_cannot_be_written_costs_nothing(directory, monkeypatch):
    (directory.parent / "no-folder").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory.parent / "no-folder"))
    tell(MLflow(), start(directory), end())
    assert read(directory)[1].info.status == "FINISHED"


def test_the_way_to_look_at_it_is_said(directory):
    assert MLflow().commands(directory) == [
        ("mlflow", f"mlflow ui --backend-store-uri sqlite:///{directory}/mlflow/mlflow.db")
    ]
    assert MLflow(tracking_uri="http://host:5000").commands(directory) == []


def test_a_package_without_its_database_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sqlalchemy", None)
    with pytest.raises(UserError, match=r"needs the package sqlalchemy.*pip install 'isoscale\[mlflow\]'"):
        MLflow()
    MLflow(tracking_uri="http://host:5000")
