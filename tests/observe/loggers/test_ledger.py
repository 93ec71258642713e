from pathlib import Path

import pytest

from isoscale.observe.loggers.logger import Ledger


def test_what_was_sent_is_known_to_the_next_start(tmp_path: Path):
    first = Ledger(tmp_path, "mlflow http://host")
    assert first.run_id is None
    first.opened("abc")
    first.sent(50, ["train/loss"])
    second = Ledger(tmp_path, "mlflow http://host")
    assert second.run_id == "abc"
    assert second.unsent(50, ["train/loss", "val/loss"]) == ["val/loss"]
    assert second.unsent(51, ["train/loss"]) == ["train/loss"]


def test_every_destination_has_its_own_entry(tmp_path: Path):
    one, other = Ledger(tmp_path, "one"), Ledger(tmp_path, "other")
    one.opened("1")
    other.opened("2")
    one.sent(10, ["loss"])
    assert (Ledger(tmp_path, "one").run_id, Ledger(tmp_path, "other").run_id) == ("1", "2")
    assert Ledger(tmp_path, "other").unsent(10, ["loss"]) == ["loss"]


def test_a_value_of_step_zero_is_sent(tmp_path: Path):
    assert Ledger(tmp_path, "one").unsent(0, ["loss"]) == ["loss"]


def test_a_damaged_file_says_what_to_do(tmp_path: Path):
    (tmp_path / "loggers.json").write_text("{")
    with pytest.raises(ValueError, match=r"loggers\.json is damaged: .*; remove it"):
        Ledger(tmp_path, "one")
