"""Summaries: the systems that batches come from, the devices that ranks may see, and what to type next."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isoscale.data.batches import BatchPlan
from isoscale.data.mixture import Mixture, MixturePlan, RandomDraws, system_probabilities
from isoscale.data.sources import TensorSource
from isoscale.parallel.rank_info import Facts
from isoscale.runs.summary import batch_words, system_lines, visible_rows
from tests.helpers import train


class System(TensorSource):
    def __init__(self, name: str, num_samples: int, num_atoms: int = 0) -> None:
        super().__init__({"coord": torch.zeros(num_samples)})
        self.name, self.sample_size, self.sample_unit = name, num_atoms, "atoms"


def split(*systems: TensorSource, batch_size: int = 4, probabilities: Any = "uniform") -> Any:
    mixture = Mixture(systems, probabilities)
    plans = [BatchPlan(len(system), batch_size) for system in systems]
    draws = RandomDraws(0, system_probabilities(probabilities, [plan.steps_per_epoch for plan in plans]))
    return SimpleNamespace(source=mixture, plan=MixturePlan(plans, draws))


def alone(system: TensorSource, batch_size: int = 4) -> Any:
    return SimpleNamespace(source=system, plan=BatchPlan(len(system), batch_size))


def test_systems_stand_in_a_table_with_how_often_each_is_drawn() -> None:
    train = split(System("water/data_0", 80, 192), System("ice", 1600, 96), probabilities=[1, 3])
    assert system_lines(train, alone(System("water/data_3", 80, 192))) == [
        "  training system  samples  atoms  batch  batches  probability",
        "  water/data_0          80    192      4       20       0.2500",
        "  ice                1,600     96      4      400       0.7500",
        "  validation system  samples  atoms  batch  batches",
        "  water/data_3            80    192      4       20",
    ]


def test_systems_that_share_batches_have_none_of_their_own() -> None:
    mixed = TensorSource(torch.zeros(24))
    mixed.sources = [System("water", 16, 192), System("ice", 8, 96)]  # type: ignore[attr-defined]
    assert system_lines(alone(mixed), None) == [
        "  training system  samples  atoms",
        "  water                 16    192",
        "  ice                    8     96",
    ]


def test_sources_without_names_have_no_table() -> None:
    plain = TensorSource(torch.zeros(8))
    assert system_lines(split(plain, plain), alone(plain)) == []


def test_samples_that_are_not_of_atoms_have_no_such_column() -> None:
    head, *_ = system_lines(split(System("one", 8), System("two", 8)), None)
    assert head.split() == ["training", "system", "samples", "batch", "batches", "probability"]


def test_of_many_systems_the_first_are_named_and_the_others_counted() -> None:
    lines = system_lines(split(*(System(f"system.{number}", 8, 3) for number in range(40))), None)
    assert len(lines) == 17 and lines[15].startswith("  system.14 ") and lines[16] == "  … 25 more systems"


def test_a_long_path_leaves_the_table_as_wide_as_a_small_terminal_and_shows_its_end() -> None:
    head, row = system_lines(split(System(f"/scratch/{'deep/' * 20}water/data_0", 8, 3)), None)
    assert row.split()[0].startswith("…/deep/") and row.split()[0].endswith("/water/data_0")
    assert len(head) == len(row) <= 80


def test_what_ranks_may_see_is_said_where_it_is_set() -> None:
    hidden = [Facts(rank, "n1", 1, visible="CUDA_VISIBLE_DEVICES=4,5") for rank in range(2)]
    assert visible_rows(hidden) == [("visible", "CUDA_VISIBLE_DEVICES=4,5")]
    assert visible_rows([Facts(0, "n1", 1), Facts(1, "n1", 2)]) == []
    assert visible_rows([hidden[0], Facts(1, "n1", 2)]) == [("visible", "not the same on all ranks, see run.json")]


def test_ranks_that_have_nothing_of_a_batch_are_said_to_wait() -> None:
    assert batch_words(1, 1) == "1 sample"
    assert batch_words(4, 4) == "4 samples"
    assert batch_words(1, 4) == "1 sample (for 1 of 4 ranks; others wait)"


@pytest.mark.parametrize(
    ("split", "words"), [({"train": 0.8, "val": 0.1, "test": 0.1}, ""), ({"train": 0.8, "val": 0.2}, " --split val")]
)
def test_the_command_that_tests_a_run_is_for_data_that_it_has(
    split: dict[str, float], words: str, tmp_path: Path
) -> None:
    run = train(tmp_path / "run", train__steps=1, data__split=split, observe__level="info")
    (line,) = [line for line in (run.path / "log.txt").read_text().splitlines() if "isoscale test" in line]
    assert line.endswith(f"isoscale test {run.path}{words}")
