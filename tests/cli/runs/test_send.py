"""`isoscale runs send`: a finished run reaches a logger later, and again without a value twice."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from isoscale.observe.metric_log import read_metrics
from tests import warm

HERE = "tests.cli.runs.test_send"


class Teller:
    """A logger that prints what it is told."""

    def __init__(self, word: str = "told") -> None:
        self.word = word

    def notify(self, event) -> None:
        print(self.word, type(event).__name__, getattr(event, "status", getattr(event, "step", "")))

    def close(self) -> None:
        print("closed")


class Refusing(Teller):
    def notify(self, event) -> None:
        raise ConnectionError("nobody there")


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pytest.importorskip("sqlalchemy", reason="needs MLflow's database: pip install 'isoscale[mlflow]'")
    return pytest.importorskip("mlflow", reason="needs MLflow: pip install 'isoscale[mlflow]'")


def edit(run: Path, **values) -> None:
    record = run / "run.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), **values}))


def test_a_logger_is_told_all_that_a_run_has_logged(isoscale, copied):
    result = isoscale("runs", "send", str(copied()), f"{HERE}.Teller", "word=heard")
    lines = result.out.splitlines()
    assert result.code == 0 and lines[0] == "heard Started 0"
    assert lines[-4:-1] == ["heard Replayed 46", "heard Ended done", "closed"]
    assert lines[-1] == f"runs/digits-1: {len(lines) - 2} entries sent to {HERE}.Teller"


def test_a_run_that_goes_on_has_no_end(isoscale, copied):
    run = copied()
    edit(run, status="running")
    assert "Ended" not in isoscale("runs", "send", str(run), f"{HERE}.Teller").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-run", "mlflow"], "there is no run in no-such-run"),
        (["runs/digits-1", "mlflw"], 'did you mean "mlflow"?'),
        (["runs/digits-1", "mlflow", "uri=x"], "mlflow.uri: MLflow takes no such argument"),
        (["runs/digits-1", "mlflow", "x"], 'cannot read "x": write key=value'),
        (["runs/digits-1", "mlp", "widths=[1]"], "mlp is not a logger"),
        (["runs/digits-1", f"{HERE}.Refusing"], "nobody there\nwhat has arrived is remembered"),
    ],
)
def test_what_cannot_be_sent_is_said_without_a_traceback(isoscale, copied, words, message):
    copied()
    result = isoscale("runs", "send", *words)
    assert result.code == 2 and message in result.err and "Traceback" not in result.err


@pytest.mark.slow
def test_a_run_reaches_mlflow_once_however_often_it_is_sent(isoscale, copied, mlflow, tmp_path):
    run, uri = copied(), f"sqlite:///{tmp_path}/server.db"
    edit(run, status="running")
    words = ["runs", "send", str(run), "mlflow", f"tracking_uri={uri}", "experiment=later"]
    assert isoscale(*words).code == 0
    edit(run, status="done")
    assert isoscale(*words).code == 0
    client = mlflow.MlflowClient(uri)
    check_sent(client, run)


def check_sent(client, run: Path) -> None:
    (found,) = client.search_runs([client.get_experiment_by_name("later").experiment_id])
    assert found.info.status == "FINISHED" and found.data.params["train.epochs"] == "2"
    logged = [row for row in read_metrics(run / "metrics.jsonl") if row["name"] == "train/loss"]
    history = client.get_metric_history(found.info.run_id, "train/loss")
    expected = [(row["step"], row["value"], int(1000 * row["time"])) for row in logged]
    assert [(metric.step, metric.value, metric.timestamp) for metric in history] == expected
    assert any(name.startswith("best/") for name in found.data.metrics)


@pytest.fixture
def server(mlflow, tmp_path):
    """A real MLflow server."""
    if importlib.util.find_spec("flask") is None:
        pytest.skip("needs the server, which only the full package has: pip install mlflow")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "art")]
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with (tmp_path / "server.log").open("w") as log:
        process = warm.Popen([*command, *store], stdout=log, stderr=log, cwd=tmp_path, start_new_session=True)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", process, tmp_path / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


def wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + 90
    while time.monotonic() < end and process.poll() is None:
        try:
            urllib.request.urlopen(address, timeout=2)
            return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(f"no server at {address}:\n{log.read_text()}")


@pytest.mark.slow
def test_a_run_reaches_a_real_server(isoscale, copied, mlflow, server):
    run = copied()
    words = ["runs", "send", str(run), "mlflow", f"tracking_uri={server}", "experiment=later"]
    for _ in range(2):
        result = isoscale(*words)
        assert result.code == 0, result.err
    client = mlflow.MlflowClient(server)
    check_sent(client, run)
    (found,) = client.search_runs([client.get_experiment_by_name("later").experiment_id])
    assert [file.path for file in client.list_artifacts(found.info.run_id)] == ["recipe.yaml"]
