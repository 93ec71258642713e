"""Loggers in a training: told everything, never in its way, and refused before it begins."""

import json
import socket
import subprocess
import sys

import pytest

import isoscale
from isoscale.errors import UserError
from isoscale.observe.events import Ended, Event, Logged
from tests.helpers import cli, first_of, train

HERE = "tests.observe.loggers.test_training"


class Diary:
    """A logger of one's own: writes the kinds of events into a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def notify(self, event: Event) -> None:
        with open(self.path, "a") as file:
            file.write(f"{type(event).__name__}\n")
        if isinstance(event, Ended):
            with open(self.path, "a") as file:
                file.write(f"{event.status}\n")

    def close(self) -> None:
        with open(self.path, "a") as file:
            file.write("closed\n")

    def commands(self, directory):
        return [("diary", f"cat {self.path}")]


class Broken(Diary):
    def notify(self, event: Event) -> None:
        if isinstance(event, Logged):
            raise RuntimeError("the pen is empty")


class Deaf:
    def __init__(self) -> None:
        pass


def test_a_logger_of_ones_own_is_told_everything(tmp_path, capsys):
    diary = tmp_path / "diary"
    spec = {"class": f"{HERE}.Diary", "path": str(diary)}
    train(tmp_path / "run", train__epochs=2, observe__loggers=[spec], observe__level="info")
    lines = diary.read_text().splitlines()
    assert lines[0] == "Started" and lines[-3:] == ["Ended", "done", "closed"]
    assert "Logged" in lines and lines.count("EpochEnded") == 2
    assert f"cat {diary}" in capsys.readouterr().out


def test_a_failed_training_is_told_as_failed(tmp_path, monkeypatch):
    diary = tmp_path / "diary"
    spec = {"class": f"{HERE}.Diary", "path": str(diary)}
    from isoscale.engine.trainer import Trainer

    def fail(self):
        self.started = True
        raise RuntimeError("a cosmic ray")

    monkeypatch.setattr(Trainer, "fit", fail)
    with pytest.raises(RuntimeError, match="cosmic"):
        train(tmp_path / "run", train__epochs=1, observe__loggers=[spec])
    assert diary.read_text().splitlines()[-3:] == ["Ended", "failed", "closed"]


def test_a_logger_that_fails_is_said_once_and_changes_nothing(tmp_path, capsys):
    spec = {"class": f"{HERE}.Broken", "path": str(tmp_path / "x")}
    run = train(tmp_path / "run", train__epochs=2, observe__loggers=[spec], observe__level="info")
    printed = capsys.readouterr()
    assert run.status == "done"
    assert (printed.out + printed.err).count("the pen is empty") == 1
    assert f"isoscale runs send {tmp_path / 'run'} {HERE}.Broken path={tmp_path / 'x'}" in printed.out + printed.err
    assert "the pen is empty" in (tmp_path / "run/log.txt").read_text()


def test_nothing_is_logged_elsewhere_when_nothing_is_saved(tmp_path):
    spec = {"class": f"{HERE}.Diary", "path": str(tmp_path / "diary")}
    isoscale.api.develop("images/digits", {"observe.loggers": [spec], "observe.level": "error"}, 1)
    assert not (tmp_path / "diary").exists()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mlflw", r'observe\.loggers\.0: there is no component "mlflw".*did you mean "mlflow"'),
        ({"class": "mlflow", "experimnt": "x"}, r'observe\.loggers\.0\.experimnt: .*did you mean "experiment"'),
        ({"class": "wandb", "mode": "ofline"}, r"observe\.loggers\.0\.mode: "),
        (f"{HERE}.Deaf", r"observe\.loggers\.0: .*Deaf is not a logger: it has no method notify"),
        (3, r"observe\.loggers\.0: expected a component"),
    ],
)
def test_a_wrong_logger_is_refused_by_recipe_check_and_by_training(tmp_path, spec, words):
    from isoscale.recipe.check import check_recipe
    from isoscale.recipe.load import load_recipe

    with pytest.raises(UserError, match=words):
        check_recipe(load_recipe("images/digits", {"observe.loggers": [spec]}))
    with pytest.raises(UserError, match=words):
        train(tmp_path / "run", observe__loggers=[spec])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("logger", "package"), [("mlflow", "mlflow"), ("wandb", "wandb"), ("comet", "comet_ml"), ("neptune", "neptune")]
)
def test_a_missing_package_names_the_extra_and_leaves_nothing_behind(tmp_path, monkeypatch, logger, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=rf"pip install 'isoscale\[{logger}\]'"):
        train(tmp_path / "run", observe__loggers=[logger])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_no_package_of_a_logger_is_imported_without_need(tmp_path):
    code = (
        "import sys, isoscale.runs.session, isoscale.cli.main, isoscale.recipe.check\n"
        "import isoscale.observe.loggers.mlflow, isoscale.observe.loggers.wandb\n"
        "import isoscale.observe.loggers.comet, isoscale.observe.loggers.neptune\n"
        "found = {'mlflow', 'wandb', 'comet_ml', 'neptune', 'sqlalchemy'} & set(sys.modules)\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_killed_and_continued_run_is_one_mlflow_run_without_a_value_twice(tmp_path):
    mlflow = pytest.importorskip("mlflow", reason="needs MLflow: pip install 'isoscale[mlflow]'")
    pytest.importorskip("sqlalchemy", reason="needs MLflow's database: pip install 'isoscale[mlflow]'")
    run = tmp_path / "run"
    options = {"observe__loggers": ["mlflow"], "observe__every": 5}
    train(run, train__epochs=2, **options)
    (run / "checkpoints/last").unlink()  # as if it had been killed after the first epoch's checkpoint
    newest = max((run / "checkpoints").glob("step_*"))
    for path in sorted(newest.rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    newest.rmdir()
    train(run, "images/digits", train__epochs=3, **options)
    client = mlflow.MlflowClient(f"sqlite:///{run}/mlflow/mlflow.db")
    (found,) = client.search_runs([client.get_experiment_by_name("isoscale").experiment_id])
    steps = [metric.step for metric in client.get_metric_history(found.info.run_id, "train/loss")]
    assert found.info.status == "FINISHED" and steps == sorted(set(steps)) and steps[-1] == 69
    assert [metric.step for metric in client.get_metric_history(found.info.run_id, "val/loss")] == [23, 46, 69]


@pytest.fixture
def silent_server():
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.slow
@pytest.mark.parametrize("answer", first_of(["refuses", "is silent"], "refuses"))
def test_a_server_that_does_not_answer_costs_no_training(tmp_path, silent_server, answer):
    pytest.importorskip("mlflow", reason="needs MLflow: pip install 'isoscale[mlflow]'")
    uri = "http://127.0.0.1:9" if answer == "refuses" else silent_server
    loggers = json.dumps([{"class": "mlflow", "tracking_uri": uri}])
    words = ("train", "train.epochs=1", f"observe.loggers={loggers}", "--run", "run")
    done = cli(*words, cwd=tmp_path, MLFLOW_HTTP_REQUEST_TIMEOUT="2")
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert printed.count("MLflow failed and is switched off") == 1 and "Traceback" not in printed
    assert f"isoscale runs send run mlflow tracking_uri={uri}" in printed
    assert isoscale.Run(tmp_path / "run").status == "done"


@pytest.mark.nightly
def test_wandb_online_without_a_network_costs_no_training(tmp_path, silent_server):
    pytest.importorskip("wandb", reason="needs wandb: pip install 'isoscale[wandb]'")
    loggers = json.dumps([{"class": "wandb", "mode": "online"}])
    done = cli(
        "train", "train.epochs=1", f"observe.loggers={loggers}", "--run", "run", cwd=tmp_path,
        WANDB_API_KEY="0" * 40, WANDB_BASE_URL=silent_server,
    )  # fmt: skip
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert printed.count("WandB failed and is switched off") == 1 and "Traceback" not in printed
    assert "isoscale runs send run wandb mode=online" in printed
