"""Labels of classes and targets in every form that people store them in: the same losses and metrics, or words."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional

import isoscale
from isoscale.data.sources import Subset, TensorSource
from isoscale.engine.metrics.losses import LOSSES, METRICS, as_weighted_sum, cross_entropy, find_loss, find_metric
from isoscale.errors import UserError
from isoscale.science.images import Classifier
from isoscale.science.images.classifier import confusion_counts

SIZE, CLASSES = 8, 3
LABELS = torch.tensor([0, 1, 2, 2, 1, 0, 2, 1])
FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "int64": lambda labels: labels,
    "int32": lambda labels: labels.int(),
    "int16": lambda labels: labels.short(),
    "int8": lambda labels: labels.to(torch.int8),
    "uint8": lambda labels: labels.byte(),
    "float32": lambda labels: labels.float(),
    "float64": lambda labels: labels.double(),
    "one column": lambda labels: labels[:, None],
    "one column of int32": lambda labels: labels[:, None].int(),
    "one column of float32": lambda labels: labels[:, None].float(),
    "one-hot": lambda labels: functional.one_hot(labels, CLASSES),
    "one-hot int32": lambda labels: functional.one_hot(labels, CLASSES).int(),
    "one-hot bool": lambda labels: functional.one_hot(labels, CLASSES).bool(),
    "one-hot float": lambda labels: functional.one_hot(labels, CLASSES).float(),
}
forms = pytest.mark.parametrize("form", list(FORMS))
numbered = pytest.mark.parametrize("form", [name for name in FORMS if "one-hot" not in name])


def scores(*shape: int) -> Tensor:
    return torch.randn(*(shape or (SIZE, CLASSES)), generator=torch.Generator().manual_seed(0), requires_grad=True)


def stored(form: str) -> Tensor:
    return FORMS[form](LABELS)


@forms
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 5.0, 0.5])], ids=["plain", "weighted"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_that_of_plain_labels(form: str, weight: Tensor | None, smoothing: float) -> None:
    expected = functional.cross_entropy(scores(), LABELS, weight, label_smoothing=smoothing)
    found = cross_entropy(scores(), stored(form), weight, smoothing)
    torch.testing.assert_close(found.mean, expected)
    assert float(found.weight) == pytest.approx(SIZE if weight is None else float(weight[LABELS].sum()))
    found.mean.backward()


@numbered
def test_nll_is_that_of_plain_labels(form: str) -> None:
    logs = scores().log_softmax(1)
    torch.testing.assert_close(find_loss("nll")(logs, stored(form)).mean, functional.nll_loss(logs, LABELS))


def test_nll_refuses_a_column_for_each_class() -> None:
    with pytest.raises(UserError, match=r"nll needs the number of a class .* \(8, 3\); use their argmax\(1\)"):
        find_loss("nll")(scores(), stored("one-hot"))


@forms
def test_accuracy_is_that_of_plain_labels(form: str) -> None:
    right = (scores().argmax(1) == LABELS).sum()
    found = METRICS["accuracy"](scores(), stored(form))
    assert (int(found.sum), found.weight) == (int(right), SIZE)


@pytest.mark.parametrize("shape", [(SIZE,), (SIZE, 1)])
def test_accuracy_of_one_score_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="accuracy needs a score for each class"):
        METRICS["accuracy"](scores(*shape), torch.ones(shape))


def test_labels_of_two_classes_may_be_booleans() -> None:
    labels = LABELS > 0
    expected = functional.cross_entropy(scores(SIZE, 2), labels.long())
    torch.testing.assert_close(cross_entropy(scores(SIZE, 2), labels).mean, expected)
    torch.testing.assert_close(cross_entropy(scores(SIZE, 2), labels[:, None]).mean, expected)


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8, torch.float32])
@pytest.mark.parametrize("channel", [False, True], ids=["plain", "one channel"])
def test_labels_of_pixels_may_be_of_any_type(kind: torch.dtype, channel: bool) -> None:
    prediction = scores(2, CLASSES, 4, 5)
    labels = torch.randint(0, CLASSES, (2, 4, 5), generator=torch.Generator().manual_seed(1))
    target = (labels[:, None] if channel else labels).to(kind)
    torch.testing.assert_close(cross_entropy(prediction, target).mean, functional.cross_entropy(prediction, labels))
    right = (prediction.argmax(1) == labels).sum()
    found = METRICS["accuracy"](prediction, target)
    assert (int(found.sum), found.weight) == (int(right), labels.numel())


@pytest.mark.parametrize("num_classes", [CLASSES, 150], ids=["few", "more than 100"])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.float32])
def test_ignored_labels_have_no_class_weight(num_classes: int, kind: torch.dtype) -> None:
    prediction, labels = scores(SIZE, num_classes), LABELS.clone()
    labels[::3] = -100
    weight = torch.linspace(0.5, 3.0, num_classes)
    expected = functional.cross_entropy(prediction, labels, weight)
    torch.testing.assert_close(cross_entropy(prediction, labels.to(kind), weight).mean, expected)
    plain = functional.cross_entropy(prediction, labels)
    torch.testing.assert_close(cross_entropy(prediction, labels.to(kind)).mean, plain)


def test_a_fraction_among_labels_is_not_cut_off() -> None:
    labels = LABELS.float()
    labels[3] = 1.5
    for loss in ("cross_entropy", "nll", nn.CrossEntropyLoss()):
        assert torch.isnan(find_loss(loss)(scores(), labels).mean)
    assert torch.isnan(cross_entropy(scores(), labels, torch.ones(CLASSES)).mean)


@pytest.mark.parametrize("shape", [(SIZE, 2), (SIZE + 1,), (SIZE, 1, 1)])
def test_labels_of_another_shape_are_refused_in_words(shape: tuple[int, ...]) -> None:
    for criterion in (cross_entropy, METRICS["accuracy"], find_loss(nn.CrossEntropyLoss())):
        with pytest.raises(UserError, match=r"expected one label each, \(8,\), or a probability .* \(8, 3\)"):
            criterion(scores(), torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("name", ["mse", "mae", "huber", "smooth_l1", "bce"])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_whole_numbers_are_values_too(name: str, kind: torch.dtype) -> None:
    target = functional.one_hot(LABELS, CLASSES).to(kind)
    found, expected = LOSSES[name](scores(), target).mean, LOSSES[name](scores(), target.float()).mean
    assert torch.equal(found, expected)
    found.backward()


def test_large_whole_numbers_keep_their_digits_beside_a_prediction_of_few_bits() -> None:
    found = LOSSES["mae"](torch.zeros(1, dtype=torch.bfloat16), torch.tensor([1001]))
    assert float(found.mean) == 1001


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), functional.cross_entropy], ids=["module", "function"])
@forms
def test_torchs_own_cross_entropy_gets_the_labels_it_wants(loss: Any, form: str) -> None:
    expected = functional.cross_entropy(scores(), LABELS)
    torch.testing.assert_close(find_loss(loss)(scores(), stored(form)).mean, expected)


@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.MSELoss(), nn.HuberLoss(), functional.mse_loss])
@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_torchs_own_losses_of_values_get_floats(loss: Any, kind: torch.dtype) -> None:
    target = functional.one_hot(LABELS, CLASSES)
    found = find_loss(loss)(scores(), target.to(kind)).mean
    torch.testing.assert_close(found, loss(scores(), target.float()))
    found.backward()


def test_an_error_inside_a_loss_of_ones_own_says_what_it_was_given() -> None:
    def own(prediction: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(prediction, target)

    for find in (find_loss, find_metric):
        with pytest.raises(RuntimeError) as caught:
            find(own)(scores(), LABELS.int()[:, None])
        assert caught.value.__notes__ == ["in own, given predictions of float32 (8, 3) and targets of int32 (8, 1)"]


@numbered
def test_a_confusion_matrix_does_not_depend_on_the_type_of_the_labels(form: str) -> None:
    predicted = scores().argmax(1)
    expected = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for guess, label in zip(predicted.tolist(), LABELS.tolist(), strict=True):
        expected[label, guess] += 1
    assert torch.equal(confusion_counts(predicted, stored(form), CLASSES), expected)


def fit(task: nn.Module, target: Tensor, run: Path, as_tuple: bool = False) -> isoscale.Run:
    recipe = {
        "train": {"epochs": 2, "device": "cpu", "threads": 1},
        "data": {"batch_size": 4},
        "observe": {"every": 1, "tensorboard": 0, "level": "warning"},
    }
    inputs = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(3))
    tensors = (inputs, target) if as_tuple else {"input": inputs, "target": target}
    data = isoscale.Sources(train=TensorSource(tensors), val=TensorSource(tensors))
    return isoscale.Trainer(recipe, run=run).fit(task, data)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, CLASSES)


def metrics_of(run: isoscale.Run) -> dict[str, float]:
    return {name: value for name, value in run.metrics.items() if not name.startswith("time/")}


TASKS: dict[str, Callable[[], nn.Module]] = {
    "supervised": lambda: isoscale.Supervised(
        network(), "cross_entropy", ["accuracy", torchmetrics.F1Score("multiclass", num_classes=CLASSES)]
    ),
    "classifier": lambda: Classifier(network(), label_smoothing=0.1, class_weights=[1.0, 2.0, 0.5]),
}


@pytest.mark.slow
@pytest.mark.parametrize("task", list(TASKS))
def test_a_training_does_not_depend_on_the_form_of_its_labels(task: str, tmp_path: Path) -> None:
    expected = metrics_of(fit(TASKS[task](), LABELS, tmp_path / "plain"))
    assert {"val/loss", "val/accuracy"} <= set(expected)
    for form in ("int32", "uint8", "one column of float32", "one-hot"):
        found = metrics_of(fit(TASKS[task](), stored(form), tmp_path / form.replace(" ", "-")))
        assert found == pytest.approx(expected, rel=1e-5), form


@pytest.mark.parametrize("as_tuple", [False, True], ids=["dict", "tuple"])
@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (LABELS + 0.5, "labels of the train data are float32, and 0.5 is among them; expected whole numbers"),
        (LABELS - 1, "labels of the train data run from -1 to 1"),
        (LABELS + 1, "labels of the train data run from 1 to 3, but the model has 3 classes"),
        ((LABELS + 1)[:, None].float(), "labels of the train data run from 1 to 3, but the model has 3 classes"),
    ],
    ids=["fraction", "negative", "too high", "too high, one column"],
)
@pytest.mark.parametrize("loss", ["cross_entropy", "nll", nn.CrossEntropyLoss()], ids=["name", "nll", "module"])
def test_labels_of_no_class_are_refused(labels: Tensor, words: str, loss: Any, as_tuple: bool, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        fit(isoscale.Supervised(network(), loss), labels, tmp_path / "run", as_tuple)
    assert not (tmp_path / "run").exists()


class Hidden(nn.Module):
    """A network whose number of classes nobody can read off its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(5, CLASSES), nn.Linear(4, 5)

    def forward(self, input: Tensor) -> Tensor:
        return self.last(self.first(input))


def test_labels_that_get_no_score_are_refused_at_the_first_batch(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run from 1 to 3, but the model has 3 classes"):
        fit(isoscale.Supervised(Hidden(), "cross_entropy"), LABELS + 1, tmp_path / "run")
    fit(isoscale.Supervised(Hidden(), "cross_entropy"), LABELS, tmp_path / "right")


def test_labels_to_be_left_out_pass() -> None:
    source = TensorSource({"input": torch.zeros(3, 4), "target": torch.tensor([0, -100, 2])})
    isoscale.Supervised(network(), "cross_entropy").check_data("train", source)
    own = TensorSource({"input": torch.zeros(3, 4), "target": torch.tensor([0, -1, 2])})
    isoscale.Supervised(network(), nn.CrossEntropyLoss(ignore_index=-1)).check_data("train", own)
    with pytest.raises(UserError, match="give those to be left out the number -100"):
        isoscale.Supervised(network(), "cross_entropy").check_data("train", own)


def test_values_and_probabilities_are_not_taken_for_labels() -> None:
    inputs, values = scores(4, 4).detach(), torch.tensor([[0.5], [7.0], [-2.0], [9.0]])
    kinds: list[tuple[Tensor, str, nn.Module, Any]] = [
        (values, "mse", nn.Linear(4, 1), functional.mse_loss),
        (scores(4, CLASSES).detach().softmax(1), "cross_entropy", network(), functional.cross_entropy),
    ]
    for target, loss, model, plain in kinds:
        batch = {"input": inputs, "target": target}
        task = isoscale.Supervised(model, loss)
        task.check_data("train", Subset(TensorSource(batch), torch.arange(3)))
        torch.testing.assert_close(as_weighted_sum(task.training_step(batch, 0), 4).mean, plain(model(inputs), target))
    with pytest.raises(UserError, match="labels of the train data"):
        source = TensorSource({"input": inputs, "target": values})
        isoscale.Supervised(network(), "cross_entropy").check_data("train", Subset(source, torch.arange(3)))


def test_class_weights_of_another_number_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"task\.class_weights has 2 weights, but the model has 3 classes"):
        fit(Classifier(network(), class_weights=[1.0, 2.0]), LABELS, tmp_path / "run")
    with pytest.raises(UserError, match="there are 2 class weights, but the model has 3 classes"):
        cross_entropy(scores(), LABELS, torch.ones(2))
