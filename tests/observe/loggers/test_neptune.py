"""Neptune offline, read back from the files that `neptune sync` sends."""

import json

from isoscale.observe.events import Logged
from isoscale.observe.loggers.neptune import Neptune
from tests.helpers import needs
from tests.observe.loggers.conftest import end, figures, start, steps, tell

pytestmark = needs("neptune", "pip install 'isoscale[neptune]'")


def operations(directory):
    files = sorted(directory.glob(".neptune/offline/*/data-1.log"), key=lambda path: path.stat().st_mtime_ns)
    return [[json.loads(line)["obj"] for line in path.read_text().splitlines()] for path in files]


def curve(found, name):
    logs = [entry for entry in found if entry["type"] == "LogFloats" and "/".join(entry["path"]) == name]
    return [(value["step"], value["value"]) for entry in logs for value in entry["values"]]


def test_a_run_is_written_whole_into_its_own_directory(directory):
    tell(Neptune(), start(directory), *steps(10, 40), Logged(41, 4, {"val/nan": float("nan")}), figures(40), end())
    (found,) = operations(directory)
    assert curve(found, "train/loss") == [(step, 1 / step) for step in (10, 20, 30, 40)]
    assert curve(found, "best/val/loss") == [(40, 0.05)]
    values = {"/".join(entry["path"]): entry.get("value") for entry in found}
    assert values["settings/optimizer.lr"] == 0.1 and values["status"] == "done" and values["about/model"] == "MLP"
    assert "LogImages" in {entry["type"] for entry in found} and "recipe" in values


def test_nothing_of_a_continued_run_is_written_twice(directory):
    tell(Neptune(), start(directory), *steps(10, 30))
    tell(Neptune(), start(directory, 20), *steps(20, 40), end())
    first, second = operations(directory)
    assert curve(first, "val/loss") == [(step, 2 / step) for step in (10, 20, 30)]
    assert curve(second, "val/loss") == [(40, 0.05)]
