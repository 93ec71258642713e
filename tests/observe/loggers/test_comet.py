"""Comet offline, read back from the archives that `comet upload` sends."""

import json
import zipfile

import pytest

from isoscale.errors import UserError
from isoscale.observe.loggers.comet import Comet
from tests.helpers import needs
from tests.observe.loggers.conftest import comet_messages, end, figures, start, steps, tell

pytestmark = needs("comet_ml", "pip install 'isoscale[comet]'")


def curve(messages, name):
    metrics = [message["payload"]["metric"] for message in messages if message["type"] == "metric_msg"]
    return [(metric["step"], metric["metricValue"]) for metric in metrics if metric["metricName"] == name]


@pytest.mark.slow
def test_a_run_is_written_whole_into_its_own_directory(directory):
    tell(Comet(), start(directory), *steps(10, 40), figures(40), end())
    (archive,) = directory.glob("comet/*.zip")
    messages = comet_messages(archive)
    assert curve(messages, "train/loss") == [(step, 1 / step) for step in (10, 20, 30, 40)]
    assert curve(messages, "best/val/loss") == [(40, 0.05)]
    parameters = [message["payload"].get("param", {}) for message in messages if message["type"] == "parameter_msg"]
    assert {"optimizer.lr": 0.1, "seed": 0}.items() <= {
        parameter.get("paramName"): parameter.get("paramValue") for parameter in parameters
    }.items()
    others = {
        message["payload"]["key"]: message["payload"]["value"] for message in messages if message["type"] == "log_other"
    }
    assert others["status"] == "done" and others["model"] == "MLP"
    with zipfile.ZipFile(archive) as opened:
        contents = [opened.read(name) for name in opened.namelist()]
    assert b"seed: 0\n" in contents and any(content.startswith(b"\x89PNG") for content in contents)


@pytest.mark.slow
def test_a_continued_run_has_the_same_key_and_nothing_appears_twice(directory):
    tell(Comet(), start(directory), *steps(10, 30))
    tell(Comet(), start(directory, 20), *steps(20, 40), end())
    key = next(iter(json.loads((directory / "loggers.json").read_text()).values()))["id"]
    archives = sorted(directory.glob("comet/*.zip"), key=lambda path: path.stat().st_mtime_ns)
    assert len(archives) == 2 and all(path.name.startswith(key) for path in archives)
    assert curve(comet_messages(archives[0]), "val/loss") == [(step, 2 / step) for step in (10, 20, 30)]
    assert curve(comet_messages(archives[1]), "val/loss") == [(40, 0.05)]


def test_online_without_a_login_is_refused_before_training():
    with pytest.raises(UserError, match="comet is not logged in; type `comet login`"):
        Comet(mode="online")
