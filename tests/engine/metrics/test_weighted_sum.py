"""Losses and metrics as (sum, weight) pairs: the parts of a batch add up to the whole."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from isoscale.engine.metrics.losses import LOSSES, METRICS, as_weighted_sum, cross_entropy, find_loss, find_metric
from isoscale.engine.metrics.weighted_sum import WeightedSum
from isoscale.errors import UserError

SIZE, CLASSES = 24, 5
cuts = st.lists(st.integers(1, SIZE - 1), unique=True, max_size=6).map(lambda edges: [0, *sorted(edges), SIZE])


def rows(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of classes, and the right ones."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(SIZE, CLASSES, generator=generator, dtype=torch.float64)
    return scores, torch.randint(0, CLASSES, (SIZE,), generator=generator)


def added(criterion: Any, edges: list[int], *tensors: torch.Tensor) -> float:
    """The mean of the whole from the pairs of its parts."""
    pairs = [criterion(*(tensor[start:stop] for tensor in tensors)) for start, stop in pairwise(edges)]
    return float(sum(float(pair.sum) for pair in pairs) / sum(float(pair.weight) for pair in pairs))


@given(cuts)
def test_parts_of_a_class_weighted_loss_add_up_to_torchs_loss_of_the_whole(edges: list[int]) -> None:
    scores, labels = rows()
    weight = torch.tensor([1.0, 5.0, 0.1, 2.0, 0.7], dtype=torch.float64)
    whole = float(functional.cross_entropy(scores, labels, weight))
    assert added(lambda p, t: cross_entropy(p, t, weight), edges, scores, labels) == pytest.approx(whole, rel=1e-12)


@given(cuts)
def test_parts_of_a_masked_loss_add_up_even_where_a_part_is_all_masked(edges: list[int]) -> None:
    scores, labels = rows()
    mask = torch.arange(SIZE) % 7 == 3

    def masked(prediction: torch.Tensor, target: torch.Tensor, kept: torch.Tensor) -> WeightedSum:
        losses = functional.cross_entropy(prediction, target, reduction="none")
        return WeightedSum((losses * kept).sum(), kept.sum())

    whole = float(functional.cross_entropy(scores[mask], labels[mask]))
    assert added(masked, edges, scores, labels, mask) == pytest.approx(whole, rel=1e-12)


@given(cuts)
def test_parts_of_a_loss_per_atom_add_up_whatever_the_sizes_of_the_molecules(edges: list[int]) -> None:
    scores, _ = rows()
    atoms = torch.arange(SIZE) % 4 + 1

    def per_atom(error: torch.Tensor, count: torch.Tensor) -> WeightedSum:
        return WeightedSum((error.square().sum(1) * count).sum(), int(count.sum()))

    whole = float((scores.square().sum(1) * atoms).sum() / atoms.sum())
    assert added(per_atom, edges, scores, atoms) == pytest.approx(whole, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(LOSSES))
@given(edges=cuts)
def test_parts_of_every_named_loss_add_up_to_the_whole(name: str, edges: list[int]) -> None:
    scores, labels = rows()
    classes = name in ("cross_entropy", "nll")
    target = labels if classes else rows(1)[0].softmax(1)
    whole = LOSSES[name](scores, target)
    assert added(LOSSES[name], edges, scores, target) == pytest.approx(float(whole.mean), rel=1e-12)


@pytest.mark.parametrize("name", sorted(METRICS))
@given(edges=cuts)
def test_parts_of_every_named_metric_add_up_to_the_whole(name: str, edges: list[int]) -> None:
    scores, labels = rows()
    target = labels if name == "accuracy" else rows(1)[0]
    assert added(METRICS[name], edges, scores, target) == pytest.approx(float(METRICS[name](scores, target).mean))


def test_accuracy_is_the_share_of_right_answers() -> None:
    scores = torch.eye(4)
    assert float(METRICS["accuracy"](scores, torch.tensor([0, 1, 2, 0])).mean) == 0.75


def test_class_weights_and_label_smoothing_are_torchs() -> None:
    scores, labels = rows()
    weight = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
    smoothed = functional.cross_entropy(scores, labels, weight, label_smoothing=0.1)
    assert float(cross_entropy(scores, labels, weight, 0.1).mean) == pytest.approx(float(smoothed), rel=1e-12)
    plain = functional.cross_entropy(scores, labels, label_smoothing=0.1)
    assert float(cross_entropy(scores, labels, None, 0.1).mean) == pytest.approx(float(plain), rel=1e-12)


@given(st.floats(-1e6, 1e6), st.integers(1, 10_000))
def test_a_mean_and_its_sum_say_the_same(mean: float, count: int) -> None:
    value = torch.tensor(mean, dtype=torch.float64)
    for pair in (
        WeightedSum.of_mean(value, count),
        WeightedSum(value * count, count),
        as_weighted_sum(value, count),
        as_weighted_sum(mean, count),
    ):
        assert float(pair.sum) == pytest.approx(mean * count, rel=1e-6, abs=1e-9)
        assert float(pair.mean) == pytest.approx(mean, rel=1e-6, abs=1e-9)
        total = torch.tensor(1.0, dtype=torch.float64)
        pair.add_to(total)
        assert float(total) == pytest.approx(1 + mean * count, rel=1e-6, abs=1e-6)


def test_adding_a_loss_to_a_total_does_not_keep_its_graph() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    for pair in (
        WeightedSum.of_mean(loss, 3),
        WeightedSum(loss, torch.tensor(3.0)),
        WeightedSum.of_mean(loss, torch.tensor(3.0)),
    ):
        total = torch.zeros(())
        pair.add_to(total)
        assert not total.requires_grad


@pytest.mark.parametrize(("wrong", "right"), [("crossentropy", "cross_entropy"), ("mes", "mse"), ("hubber", "huber")])
def test_a_misspelt_loss_gets_the_nearest_name(wrong: str, right: str) -> None:
    with pytest.raises(UserError, match=f"did you mean {right!r}"):
        find_loss(wrong)


def test_an_unknown_metric_gets_the_list_of_metrics() -> None:
    with pytest.raises(UserError, match="unknown metric 'xyzzy': there are accuracy"):
        find_metric("xyzzy")


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "smooth_l1", "bce"])
def test_shapes_that_would_be_broadcast_are_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"\(24, 1\) and target \(24,\) have different shapes"):
        find_loss(name)(torch.zeros(24, 1), torch.zeros(24))


def test_a_loss_of_several_numbers_is_refused() -> None:
    with pytest.raises(UserError, match=r"one number, not a tensor of shape \(3,\)"):
        as_weighted_sum(torch.zeros(3), 3)
    with pytest.raises(UserError, match="one number"):
        find_loss(lambda prediction, target: prediction - target)(torch.zeros(3), torch.zeros(3))


def test_no_loss_at_all_is_refused_with_a_question() -> None:
    with pytest.raises(UserError, match="does the step return its loss"):
        as_weighted_sum(None, 3)
    with pytest.raises(UserError, match="not str"):
        as_weighted_sum("0.3", 3)


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), torch.tensor(2.0), torch.tensor([[2.0]]), (6.0, 3.0)])
def test_every_kind_of_number_is_a_mean_and_a_tuple_is_a_pair(value: Any) -> None:
    assert float(as_weighted_sum(value, 3).mean) == 2.0
    assert as_weighted_sum(value, 3).weight == 3
