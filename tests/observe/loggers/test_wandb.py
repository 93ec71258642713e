"""Weights & Biases offline, read back from the files that `wandb sync` sends."""

import json

import pytest

from isoscale.errors import UserError
from isoscale.observe.loggers.wandb import WandB
from tests.helpers import needs
from tests.observe.loggers.conftest import end, figures, start, steps, tell, wandb_records

pytestmark = needs("wandb", "pip install 'isoscale[wandb]'")


def rows(records):
    """Every value of the history: name, step and value."""
    found = []
    for record in records:
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        step = record.history.step.num if record.HasField("history") else None
        found += [(name, step, value) for name, value in items.items() if not name.startswith("_")]
    return found


def curve(records, name):
    return [(step, value) for key, step, value in rows(records) if key == name]


@pytest.mark.slow
def test_a_run_is_written_whole_into_its_own_directory(directory):
    tell(WandB(), start(directory), *steps(10, 40), figures(40), end())
    (records,) = wandb_records(directory)
    assert curve(records, "train/loss") == [(step, 1 / step) for step in (10, 20, 30, 40)]
    assert curve(records, "val/loss") == [(step, 2 / step) for step in (10, 20, 30, 40)]
    assert curve(records, "best/val/loss") == [(40, 0.05)] and (40, 3) in curve(records, "epoch")
    config = {update.key: update.value_json for record in records for update in record.config.update}
    config |= {update.key: update.value_json for record in records for update in record.run.config.update}
    assert config["optimizer.lr"] == "0.1" and json.loads(config["about"])["model"] == "MLP"
    (folder,) = directory.glob("wandb/offline-run-*")
    assert (folder / "files/recipe.yaml").read_text() == "seed: 0\n"
    assert len(list(folder.glob("files/media/images/val/confusion*.png"))) == 1
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [0]


@pytest.mark.slow
def test_a_continued_run_has_the_same_id_and_nothing_appears_twice(directory):
    tell(WandB(), start(directory), *steps(10, 30))
    tell(WandB(), start(directory, 20), *steps(20, 40), end("failed"))
    first, second = wandb_records(directory)
    ids = {record.run.run_id for record in (*first, *second) if record.HasField("run")}
    assert len(ids) == 1
    assert curve(first, "val/loss") == [(step, 2 / step) for step in (10, 20, 30)]
    assert curve(second, "val/loss") == [(40, 0.05)]
    assert [record.exit.exit_code for record in second if record.HasField("exit")] == [1]


def test_online_without_a_login_is_refused_before_training():
    with pytest.raises(UserError, match="wandb is not logged in; type `wandb login`"):
        WandB(mode="online")


def test_the_way_to_send_it_is_said_with_spaces_in_the_name(directory):
    assert WandB().commands(directory / "a b") == [("wandb", f"wandb sync '{directory}/a b/wandb'/offline-run-*")]
