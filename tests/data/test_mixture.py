"""Mixtures: every batch from one system, drawn by the step alone, each system without replacement."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import isoscale
from isoscale.data.batches import BatchPlan
from isoscale.data.mixture import (
    DrawnOrder,
    Mixture,
    MixturePlan,
    OneAfterTheOther,
    RandomDraws,
    Systems,
    system_batch_sizes,
    system_probabilities,
)
from isoscale.data.order import Order
from isoscale.data.sources import TensorSource
from isoscale.errors import UserError
from tests.helpers import QUIET, sha, timeless


def mixture(lengths: list[int], **options: Any) -> Mixture:
    """Systems of 2, 3, … atoms, whose samples tell their system and number."""
    systems = []
    for number, length in enumerate(lengths):
        rows = torch.arange(length)[:, None].float().expand(length, number + 2).clone()
        system = TensorSource({"input": rows, "system": torch.full((length,), number)})
        system.sample_size = number + 2  # type: ignore[attr-defined]
        systems.append(system)
    return Mixture(systems, **options)


def plan_of(lengths: list[int], sizes: list[int], seed: int = 0, weights: Any = "uniform") -> MixturePlan:
    plans = [BatchPlan(length, min(size, length)) for length, size in zip(lengths, sizes, strict=True)]
    probabilities = system_probabilities(weights, [plan.steps_per_epoch for plan in plans])
    return MixturePlan(plans, RandomDraws(seed, probabilities))


class TestProbabilities:
    def test_uniform_and_by_the_number_of_batches(self) -> None:
        assert system_probabilities("uniform", [1, 9]).tolist() == [0.5, 0.5]
        assert system_probabilities("size", [1, 9]).tolist() == system_probabilities("prob_sys_size", [1, 9]).tolist()
        assert system_probabilities("size", [1, 9]).tolist() == [0.1, 0.9]

    def test_blocks_share_out_their_weight_by_size(self) -> None:
        found = system_probabilities("prob_sys_size;0:2:0.3;2:4:0.7", [1, 2, 3, 4])
        np.testing.assert_allclose(found, [0.1, 0.2, 0.3, 0.4])
        np.testing.assert_allclose(system_probabilities("size;0:1:1;1:3:3", [5, 1, 1]), [0.25, 0.375, 0.375])

    def test_a_list_is_normalised(self) -> None:
        assert system_probabilities([1, 3], [5, 5]).tolist() == [0.25, 0.75]

    @pytest.mark.parametrize(
        ("wanted", "words"),
        [
            ("sizes", "is not uniform, size"),
            ("uniform;0:1:1", "is not uniform, size"),
            ("size;0:1", "is not start:stop:weight"),
            ("size;0:1:0;1:2:0", "not all 0"),
            ("size;0:1:-1;1:2:2", "must not be negative"),
            ("size;5:7:1", "holds none of the 2 systems"),
            ([1.0], "expected 2 numbers"),
            ([1.0, -1.0], "not negative"),
            ([0.0, 0.0], "not all 0"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, wanted: Any, words: str) -> None:
        with pytest.raises(UserError, match=words):
            system_probabilities(wanted, [1, 2])


class TestBatchSizes:
    def test_one_for_all_one_for_each_and_auto(self) -> None:
        systems = mixture([50, 50, 5])
        assert system_batch_sizes(systems, 7) == [7, 7, 5], "never more than a system has"
        assert system_batch_sizes(systems, [3, 4, 5]) == [3, 4, 5]
        assert system_batch_sizes(systems, "auto") == [16, 11, 5]  # 32 atoms at least, with 2, 3 and 4 atoms a sample
        assert system_batch_sizes(systems, "auto:6") == [3, 2, 2]
        assert system_batch_sizes(systems, "auto:6x2") == [6, 4, 4]

    def test_a_list_of_another_length_is_refused(self) -> None:
        with pytest.raises(UserError, match="lists 2 batches, but there are 3 systems"):
            system_batch_sizes(mixture([5, 5, 5]), [1, 2])


class TestPlan:
    @given(st.integers(0, 20_000), st.integers(0, 5))
    def test_counts_are_those_of_the_steps_before(self, step: int, seed: int) -> None:
        weights = np.array([0.2, 0.5, 0.3])
        draws, fresh = RandomDraws(seed, weights), RandomDraws(seed, weights)
        systems = [draws.system(number) for number in range(max(0, step - 50), step)]
        before = fresh.counts(max(0, step - 50)) + np.bincount(systems, minlength=3)
        assert draws.counts(step).tolist() == before.tolist()
        assert draws.counts(step).sum() == step

    def test_threads_that_count_at_the_same_time_find_the_same(self) -> None:
        probabilities, last = system_probabilities("uniform", [3, 5, 4]), 400_000
        wanted = RandomDraws(1, probabilities).counts(last).tolist()
        for _ in range(5):
            draws = RandomDraws(1, probabilities)
            with ThreadPoolExecutor(2) as pool:
                found = list(pool.map(lambda step: draws.counts(step).tolist(), (last, last)))  # noqa: B023
            assert found == [wanted, wanted]

    def test_systems_come_as_often_as_they_should(self) -> None:
        share = RandomDraws(0, np.array([0.2, 0.5, 0.3])).counts(20_000) / 20_000
        np.testing.assert_allclose(share, [0.2, 0.5, 0.3], atol=0.02)

    def test_draws_differ_from_seed_to_seed(self) -> None:
        first, second = (RandomDraws(seed, np.array([0.5, 0.5])) for seed in (0, 1))
        assert [first.system(step) for step in range(50)] != [second.system(step) for step in range(50)]

    @settings(max_examples=30)
    @given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4))
    def test_samples_are_counted(self, shapes: list[tuple[int, int]]) -> None:
        plan = plan_of([length for length, _ in shapes], [size for _, size in shapes])
        sizes = [plan.size(step) for step in range(60)]
        assert [plan.samples_before(step) for step in range(60)] == [sum(sizes[:step]) for step in range(60)]

    @settings(max_examples=30)
    @given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=4), st.integers(0, 100))
    def test_a_kind_ends_where_the_next_begins(self, shapes: list[tuple[int, int]], step: int) -> None:
        plan = plan_of([length for length, _ in shapes], [size for _, size in shapes])
        end = plan.end_of_kind(step)
        assert {plan.kind(number) for number in range(step, end)} == {plan.kind(step)}
        assert end % plan.steps_per_epoch == 0 or plan.kind(end) != plan.kind(step)

    def test_an_evaluation_takes_every_batch_of_every_system_once(self) -> None:
        plans = [BatchPlan(10, 4), BatchPlan(3, 4 - 1), BatchPlan(7, 2)]
        plan = MixturePlan(plans, OneAfterTheOther([each.steps_per_epoch for each in plans]))
        found = [plan.where(step) for step in range(plan.steps_per_epoch)]
        assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]
        assert sum(plan.size(step) for step in range(plan.steps_per_epoch)) == 20


class Sizes(isoscale.Supervised):
    """Takes samples of any size, and remembers what it saw."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(1, 1))
        self.seen: list[tuple[int, list[int]]] = []
        self.checked: list[tuple[int, list[int]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((int(batch["system"][0]), batch["input"][:, 0].int().tolist()))
        return self.model(batch["input"].mean(1, keepdim=True) / 20).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.checked.append((int(batch["system"][0]), batch["input"][:, 0].int().tolist()))
        return self.model(batch["input"].mean(1, keepdim=True) / 20).square().mean()


class TestTraining:
    LENGTHS = [13, 8, 20]

    def fit(self, path: Path, steps: int, **keys: Any) -> tuple[isoscale.Run, Sizes]:
        task = Sizes()
        sources = isoscale.Sources(train=mixture(self.LENGTHS), val=mixture(self.LENGTHS))
        recipe = {"data": {"batch_size": [4, 8, 3]}, "checkpoint": {"every": "7 steps"}, "train": {"steps": steps}}
        given = {**QUIET, "train.epochs": None, "observe.every": 3, **keys}
        return isoscale.Trainer(recipe, run=path, **given).fit(task, sources), task

    def test_every_batch_is_of_one_system_and_none_comes_twice_in_a_pass(self, tmp_path: Path) -> None:
        _, task = self.fit(tmp_path / "run", 60)
        assert {system for system, _ in task.seen} == {0, 1, 2}
        for number, length in enumerate(self.LENGTHS):
            rows = [row for system, rows in task.seen if system == number for row in rows]
            passes = [rows[start : start + length] for start in range(0, len(rows), length)]
            assert all(len(set(each)) == len(each) for each in passes)
            assert sorted(passes[0]) == list(range(length))

    def test_an_evaluation_counts_every_sample_once(self, tmp_path: Path) -> None:
        _, task = self.fit(tmp_path / "run", 1)
        last = task.checked[-len(task.checked) // 2 :] if len(task.checked) > 20 else task.checked[1:]
        for number, length in enumerate(self.LENGTHS):
            assert sorted(row for system, rows in last if system == number for row in rows) == list(range(length))

    @pytest.mark.slow
    def test_a_stop_is_invisible(self, tmp_path: Path) -> None:
        whole, straight = self.fit(tmp_path / "whole", 48)
        self.fit(tmp_path / "parts", 24)
        parts, task = self.fit(tmp_path / "parts", 48)
        assert sha(whole) == sha(parts) and timeless(whole) == timeless(parts)
        assert task.seen == straight.seen

    @pytest.mark.slow
    @pytest.mark.parametrize("keys", [{"data.residency": "host"}, {"train.accumulate": 2}, {"parallel.reduce": "tree"}])
    def test_it_works_in_every_combination(self, keys: dict[str, Any], tmp_path: Path) -> None:
        plain, seen = self.fit(tmp_path / "plain", 20)
        other, again = self.fit(tmp_path / "other", 20, **keys)
        losses = [dict(run.history("train/loss")) for run in (plain, other)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)
        whole, parts = ([(system, row) for system, rows in task.seen for row in rows] for task in (seen, again))
        assert whole == parts
        if "data.residency" in keys:
            assert sha(plain) == sha(other) and seen.seen == again.seen
            assert [run.record["decided"]["residency"] for run in (plain, other)] == ["device", "host"]
        else:
            assert len(again.seen) > 1.5 * len(seen.seen), "batches are cut"

    @pytest.mark.parametrize(
        "keys",
        [
            {"data.subset": 5},
            {"data.samples_per_epoch": 10},
            {"data.shuffle": {"samples_per_block": 2}},
            {"train.overfit_batches": 1},
        ],
    )
    def test_what_is_said_about_one_source_is_refused(self, keys: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(UserError, match="is for one source, not for a mixture"):
            self.fit(tmp_path / "run", 3, **keys)

    def test_several_batch_sizes_are_for_mixtures(self, tmp_path: Path) -> None:
        recipe = {"data": {"batch_size": [1, 2]}}
        with pytest.raises(UserError, match="is for a mixture of systems; give one number"):
            isoscale.Trainer(recipe, run=tmp_path / "run").fit(Sizes(), {"input": torch.ones(9, 1)})

    def test_batches_of_each_system_are_those_of_training(self, tmp_path: Path) -> None:
        task = Sizes()
        sources = isoscale.Sources(train=mixture(self.LENGTHS), val=mixture([5]))
        keys = {**QUIET, "data.batch_size": [4, 8, 3], "train.epochs": None, "train.steps": 3}
        isoscale.Trainer({}, run=tmp_path / "run", **keys).fit(task, sources)
        assert sorted(row for _, rows in task.checked[-1:] for row in rows) == list(range(5))

    def test_a_recipe_can_name_systems(self, tmp_path: Path) -> None:
        for number in (1, 2):
            np.savez(tmp_path / f"{number}.npz", input=np.ones((12, 4)), target=np.ones((12, number)))
        arrays = [{"class": "arrays", "path": str(tmp_path / f"{n}.npz")} for n in (1, 2)]
        data = {"class": "mixture", "train": arrays, "val": arrays, "probabilities": "size", "batch_size": "auto:3"}
        recipe = {"task": {"model": {"class": "mlp", "widths": [4, 1]}}, "data": data, "train": {"steps": 3}}
        with pytest.raises(UserError, match="different shapes"):
            isoscale.train(recipe, run=tmp_path / "run", **QUIET)

    def test_data_with_roles_gives_the_part_that_it_stands_under(self) -> None:
        parts = isoscale.Sources(train=torch.ones(3, 1), val=torch.ones(2, 1))
        found = Systems([parts], [parts])
        assert len(found.train) == 3 and len(found.val) == 2 and found.test is None  # type: ignore[arg-type]


class TestSystemsOfOneShape:
    @given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 9000))
    def test_samples_come_as_they_do_one_system_at_a_time(self, passes: list[int], size: int, step: int) -> None:
        lengths = [size * count for count in passes]
        plan = plan_of(lengths, [size] * len(lengths), weights="size")
        orders = [Order(length, 3, purpose=f"order of system {number}") for number, length in enumerate(lengths)]
        starts = [0, *np.cumsum(lengths)[:-1].tolist()]
        drawn = DrawnOrder(plan._draws, orders, starts, size)  # type: ignore[arg-type]
        expected = []
        for number in range(step, step + 7):
            system, before = plan.where(number)
            expected.append(orders[system].indices(plan.plans[system].place(before), size) + starts[system])
        assert drawn.indices(step * size, 7 * size).tolist() == torch.cat(expected).tolist()

    def test_a_launch_of_several_steps_is_the_training_of_single_ones(self, tmp_path: Path) -> None:
        """With a source for all samples, and without: the same steps on the same samples."""
        rows = {"input": torch.randn(24, 3), "target": torch.randint(0, 2, (24,))}
        parts = [{key: value[start:stop] for key, value in rows.items()} for start, stop in ((0, 8), (8, 24))]
        found = []
        for name, joined in (("apart", None), ("joined", TensorSource(rows))):
            torch.manual_seed(0)
            task = isoscale.Supervised(nn.Linear(3, 2), "cross_entropy")
            data = isoscale.Sources(train=Mixture(parts, "size", joined))
            keys = {**QUIET, "data.batch_size": 4, "train.epochs": 3}
            run = isoscale.Trainer({}, run=tmp_path / name, **keys).fit(task, data)
            found.append((sha(run), timeless(run)))
        assert found[0] == found[1]
