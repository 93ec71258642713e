"""Precision, recall, F1, confusion and precision-recall curves are scikit-learn's, on odd inputs too."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as theirs

from isoscale.science.images.classifier import confusion_counts, detection, macro_scores

TOLERANCE = 1e-6


@st.composite
def labels(draw: st.DrawFn) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Classes, targets and predictions, in which some classes may never occur."""
    num_classes = draw(st.integers(2, 6))
    count = draw(st.integers(1, 40))
    used = draw(st.integers(1, num_classes))
    label = st.integers(0, used - 1)
    target = draw(st.lists(label, min_size=count, max_size=count))
    predicted = draw(st.lists(st.integers(0, num_classes - 1), min_size=count, max_size=count))
    return num_classes, torch.tensor(target), torch.tensor(predicted)


@given(labels())
def test_macro_scores_are_scikit_learns(case: tuple[int, torch.Tensor, torch.Tensor]) -> None:
    num_classes, target, predicted = case
    counts = confusion_counts(predicted, target, num_classes)
    np.testing.assert_array_equal(counts, theirs.confusion_matrix(target, predicted, labels=range(num_classes)))
    precision, recall, f1, _ = theirs.precision_recall_fscore_support(
        target, predicted, average="macro", zero_division=0
    )
    found = macro_scores(counts)
    assert found["precision"] == pytest.approx(precision, abs=TOLERANCE)
    assert found["recall"] == pytest.approx(recall, abs=TOLERANCE)
    assert found["f1"] == pytest.approx(f1, abs=TOLERANCE)


def test_counts_of_batches_add_up_to_the_counts_of_all() -> None:
    target, predicted = torch.randint(0, 5, (2, 100))
    parts = [confusion_counts(p, t, 5) for p, t in zip(predicted.split(7), target.split(7), strict=True)]
    assert torch.equal(sum(parts[1:], parts[0]), confusion_counts(predicted, target, 5))


def test_no_samples_give_no_score_and_no_error() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    assert macro_scores(confusion_counts(empty, empty, 3)) == {"precision": 0.0, "recall": 0.0, "f1": 0.0}


@st.composite
def ranking(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with many ties, and which samples are positive: perhaps none, perhaps all."""
    count = draw(st.integers(1, 60))
    steps = draw(st.integers(1, 12))
    scores = draw(st.lists(st.integers(0, steps), min_size=count, max_size=count))
    positive = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    return torch.tensor(scores, dtype=torch.float32) / steps, torch.tensor(positive)


@given(ranking())
@pytest.mark.filterwarnings("ignore:No positive class found")
def test_precision_recall_curves_are_scikit_learns(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    score, positive = case
    precision, recall, thresholds = theirs.precision_recall_curve(positive.numpy(), score.numpy())
    found = detection(score, positive)
    # theirs rises in the threshold and ends with an added point (1, 0)
    np.testing.assert_allclose(found.thresholds[::-1], thresholds, atol=TOLERANCE)
    np.testing.assert_allclose(found.precision[::-1], precision[:-1], atol=TOLERANCE)
    np.testing.assert_allclose(found.recall[::-1], recall[:-1], atol=TOLERANCE)
    assert (found.num_positives, found.num_negatives) == (int(positive.sum()), int((~positive).sum()))


@given(ranking())
@pytest.mark.filterwarnings("ignore:No positive class found")
def test_average_precision_is_scikit_learns(case: tuple[torch.Tensor, torch.Tensor]) -> None:
    score, positive = case
    expected = theirs.average_precision_score(positive.numpy(), score.numpy())
    assert detection(score, positive).average_precision == pytest.approx(expected, abs=TOLERANCE)


def test_curves_of_real_probabilities_are_scikit_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    probability = torch.softmax(torch.randn(5000, 10, generator=generator), 1)
    target = torch.randint(0, 9, (5000,), generator=generator)  # class 9 never occurs
    for index in range(9):
        precision, recall, _ = theirs.precision_recall_curve(target.numpy() == index, probability[:, index].numpy())
        found = detection(probability[:, index], target == index)
        np.testing.assert_allclose(found.precision[::-1], precision[:-1], atol=TOLERANCE)
        np.testing.assert_allclose(found.recall[::-1], recall[:-1], atol=TOLERANCE)
    missing = detection(probability[:, 9], target == 9)
    assert missing.average_precision == 0 and (missing.precision == 0).all() and (missing.recall == 1).all()
