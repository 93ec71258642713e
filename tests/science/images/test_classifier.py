"""The classifier: metrics in evaluations, what it shows, what it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as theirs
from torch import nn

import isoscale
from isoscale.data.sources import Subset, TensorSource
from isoscale.errors import UserError
from isoscale.observe.figures import Matrix, Pictures, PrecisionRecall
from isoscale.runs.inference import figures
from isoscale.science.images import Classifier
from isoscale.science.images.classifier import VARIANTS, as_pixels
from tests.helpers import train


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    return train(tmp_path_factory.mktemp("classifier") / "run", train__epochs=3)


def truth(run: isoscale.Run, split: str) -> torch.Tensor:
    source = getattr(run.data(), split)
    return source.fetch(torch.arange(len(source)))["target"]


@pytest.mark.parametrize("split", ["val", "test"])
def test_scores_of_a_run_are_scikit_learns(run: isoscale.Run, split: str) -> None:
    found = isoscale.test(run, split=split)
    target, predicted = truth(run, split), isoscale.predict(run, split=split)["class"]
    expected = theirs.precision_recall_fscore_support(target, predicted, average="macro", zero_division=0)
    for name, value in zip(("precision", "recall", "f1"), expected, strict=False):
        assert found[f"{split}/{name}"] == pytest.approx(value, abs=1e-6)
    assert found[f"{split}/accuracy"] == pytest.approx(theirs.accuracy_score(target, predicted), abs=1e-6)


def test_scores_do_not_depend_on_the_batches_of_the_evaluation(run: isoscale.Run, tmp_path: Path) -> None:
    names = ("val/precision", "val/recall", "val/f1", "val/accuracy")
    other = train(tmp_path / "run", train__epochs=3, data__eval_batch_size=7)
    assert [other.metrics[name] for name in names] == [run.metrics[name] for name in names]


def test_training_logs_no_tally(run: isoscale.Run) -> None:
    assert "train/accuracy_epoch" in run.metrics
    assert not [name for name in run.metrics if name.startswith("train/") and "f1" in name]


def test_it_shows_confusion_curves_and_predictions(run: isoscale.Run) -> None:
    shown = figures(run, split="test")
    target, outputs = truth(run, "test"), isoscale.predict(run, split="test")
    matrix, curves, pictures = (shown[name] for name in ("confusion", "precision_recall", "predictions"))
    assert isinstance(matrix, Matrix) and isinstance(curves, PrecisionRecall) and isinstance(pictures, Pictures)
    np.testing.assert_array_equal(matrix.counts, theirs.confusion_matrix(target, outputs["class"]))
    assert matrix.labels == [str(digit) for digit in range(10)] == list(curves.classes)
    for index, found in enumerate(curves.classes.values()):
        expected = theirs.average_precision_score(target == index, outputs["probability"][:, index])
        assert found.average_precision == pytest.approx(expected, abs=1e-6)
    assert pictures.pixels.shape == (32, 8, 8, 3) and pictures.pixels.dtype == np.uint8
    for index, (caption, right) in enumerate(zip(pictures.captions, pictures.right, strict=True)):
        guess = int(outputs["class"][index])
        assert caption.startswith(f"{guess} {100 * outputs['probability'][index, guess]:.0f} %")
        assert right == (guess == target[index]) == (" is " not in caption)


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        (torch.tensor([[[[0, 255]]]], dtype=torch.uint8), [0, 255]),
        (torch.tensor([[[0.0, 2.0]]]), [0, 255]),
        (torch.tensor([[[[-1.0, 1.0]], [[9.0, 9.0]]]]), [0, 51]),
        (torch.tensor([[[[3, 3]]]]), [0, 0]),
    ],
)
def test_any_image_becomes_pixels(images: torch.Tensor, expected: list[int]) -> None:
    found = as_pixels(images)
    assert found is not None and found.shape == (1, 1, 2, 3)
    assert found[0, 0, :, 0].tolist() == expected


def test_what_is_no_image_is_not_shown() -> None:
    assert as_pixels(torch.randn(4, 64)) is None


@pytest.mark.parametrize(("labels", "range_"), [([0, 1, 10], "0 to 10"), ([-1, 3], "-1 to 3")])
def test_labels_out_of_range_are_refused_before_training(tmp_path: Path, labels: list[int], range_: str) -> None:
    images = torch.zeros(len(labels) * 10, 64)
    data = isoscale.Sources(train=TensorSource({"input": images, "target": torch.tensor(labels * 10)}))
    task = Classifier(nn.Linear(64, 10))
    with pytest.raises(UserError, match=f"labels of the train data run from {range_}, but the model has 10 classes"):
        isoscale.Trainer({"data": {"batch_size": 5}}, run=tmp_path / "run").fit(task, data)
    assert not (tmp_path / "run").exists()


def test_labels_of_a_part_of_the_data_are_looked_at() -> None:
    whole = TensorSource({"input": torch.zeros(4, 2), "target": torch.tensor([0, 1, 5, 1])})
    task = Classifier(nn.Linear(2, 2))
    task.check_data("val", Subset(whole, torch.tensor([0, 1, 3])))
    with pytest.raises(UserError, match="val data run from 1 to 5"):
        task.check_data("val", Subset(whole, torch.tensor([1, 2])))


def test_class_weights_weigh_the_loss_and_its_mean() -> None:
    scores, target = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 0])
    weights = [1.0, 5.0, 0.5]
    pair = Classifier(nn.Identity(), class_weights=weights).training_step({"input": scores, "target": target}, 0)
    expected = nn.functional.cross_entropy(scores, target, torch.tensor(weights))
    torch.testing.assert_close(pair.mean, expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_images_have_the_weight_one(name: str) -> None:
    images = torch.randn(2, 3, 6, 6)
    variants = VARIANTS[name](images)
    assert sum(weight for _, weight in variants) == 1
    assert all(variant.shape == images.shape for variant, _ in variants)
    assert len({variant.numpy().tobytes() for variant, _ in variants}) == {"none": 1, "mirror": 2}.get(name, 6)


def test_scores_are_averaged_over_variants() -> None:
    images = torch.randn(2, 3, 6, 6)
    task = Classifier(nn.Flatten(), average_over="mirror")
    torch.testing.assert_close(task.scores(images), (images + images.flip(3)).flatten(1) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["images/mnist", "images/fashion-mnist", "images/cifar10-resnet18"])
def test_every_preset_trains_on_the_real_files(
    name: str, tmp_path: Path, real_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = name.removeprefix("images/").removesuffix("-resnet18")
    monkeypatch.setenv("ISOSCALE_DATA", str(real_data(dataset).parent))
    few = {"train__steps": 3, "data__batch_size": 16, "data__eval_batch_size": 16, "train__limit_val_batches": 2}
    found = train(tmp_path / "run", name, **few, train__precision="32", observe__every=1)
    assert found.status == "done" and len(found.history("train/loss")) == 3


def test_labels_of_test_data_are_looked_at_as_well(run: isoscale.Run) -> None:
    wrong = {"input": torch.zeros(4, 8, 8), "target": torch.tensor([0, 1, 2, 10])}
    with pytest.raises(UserError, match="labels of the test data run from 0 to 10"):
        isoscale.test(run, data=wrong)
