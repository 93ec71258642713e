"""One training step: however a batch is cut, its gradients are those of plain autograd on the whole batch."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import isoscale
from isoscale.data.batches import BatchPlan
from isoscale.data.feeds.device import DeviceFeed
from isoscale.data.order import Order
from isoscale.data.rng import StepRandom
from isoscale.data.sources import TensorSource
from isoscale.engine.metrics.accumulators import Recorder, means
from isoscale.engine.optim.ema import EMA
from isoscale.engine.precision import Precision
from isoscale.engine.step.context import StepContext
from isoscale.engine.step.step import Forward, Step, loss_terms
from isoscale.errors import UserError
from isoscale.parallel.reduction import FlatReducer, TreeReducer

CPU = torch.device("cpu")
FEATURES, CLASSES = 6, 4


class Loss(isoscale.Task):
    """A small network whose loss is a function of (prediction, batch)."""

    def __init__(self, loss: Callable[[Tensor, dict[str, Tensor]], Any], model: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = model or nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
        self.loss = loss
        self.sizes: list[int] = []
        """Of the parts that it was given."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        self.sizes.append(len(batch["input"]))
        return self.loss(self.model(batch["input"]), batch)


def samples(count: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return {
        "input": torch.randn(count, FEATURES, generator=generator, dtype=dtype),
        "target": torch.randint(0, CLASSES, (count,), generator=generator),
        "atoms": torch.randint(1, 9, (count,), generator=generator),
        "forces": torch.randn(count, CLASSES, generator=generator, dtype=dtype),
    }


def make_step(task: nn.Module, reducer: Any, lr: float = 0.1, **options: Any) -> Step:
    context = StepContext("train", task, Recorder(CPU))
    context.enter()
    forward = Forward(task, context, [], Precision("64", "cpu"))
    optimizer = torch.optim.SGD([each for each in task.parameters() if each.requires_grad], lr=lr, fused=True)
    return Step(forward, [optimizer], reducer, context.recorder, StepRandom(0), **options)


def take(
    task: nn.Module,
    batch: dict[str, Tensor],
    num_micro: int = 1,
    num_shards: int = 0,
    weights: Mapping[str, float] | None = None,
    **options: Any,
) -> Step:
    """One step on all samples; no shards means flat."""
    count = len(batch["input"])
    reducer = TreeReducer(num_shards) if num_shards else FlatReducer()
    plan = BatchPlan(count, count, num_micro=num_micro, num_shards=reducer.num_shards)
    feed = DeviceFeed(TensorSource(batch), Order(count, 0, shuffle=False), plan, CPU)
    step = make_step(task, reducer, **options)
    tensors = {name: torch.tensor(weight) for name, weight in (weights or {}).items()}
    step(feed.parts(0), 0, 0, 0.1, tensors, 0)
    return step


def gradients(task: nn.Module) -> dict[str, Tensor]:
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in task.named_parameters()
    }


def by_hand(task: Loss, batch: dict[str, Tensor], loss: Callable[[Tensor, dict[str, Tensor]], Tensor]) -> Any:
    """Gradients by plain autograd on the whole batch at once."""
    values = torch.autograd.grad(
        loss(task.model(batch["input"]), batch), list(task.parameters()), allow_unused=True, materialize_grads=True
    )
    return dict(zip(dict(task.named_parameters()), values, strict=True))


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance)


CUTS = [(1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (3, 2)]
"""(micro-batches, shards); no shards is flat."""
SIZES = [24, 23, 5, 1]
"""Even, ragged, fewer samples than shards, a single one."""
CLASS_WEIGHTS = torch.tensor([1.0, 4.0, 0.25, 2.0], dtype=torch.float64)


def class_weighted(prediction: Tensor, batch: dict[str, Tensor]) -> Any:
    return isoscale.WeightedSum(
        functional.cross_entropy(prediction, batch["target"], CLASS_WEIGHTS, reduction="sum"),
        CLASS_WEIGHTS[batch["target"]].sum(),
    )


def energies(prediction: Tensor) -> Tensor:
    return prediction.sum(1).square()


def force_errors(prediction: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return ((prediction - batch["forces"]).square().mean(1) * batch["atoms"]).sum()


def two_terms(prediction: Tensor, batch: dict[str, Tensor]) -> Any:
    return {
        "energy": energies(prediction).mean(),
        "forces": isoscale.WeightedSum(force_errors(prediction, batch), batch["atoms"].sum()),
        "size": prediction.square().mean(),
    }


def two_terms_counted_on_the_host(prediction: Tensor, batch: dict[str, Tensor]) -> Any:
    """Numbers of atoms that sometimes equal the number of samples."""
    atoms = int(batch["atoms"].sum())
    return {
        "energy": isoscale.WeightedSum(energies(prediction).sum(), len(prediction)),
        "forces": isoscale.WeightedSum(force_errors(prediction, batch), atoms),
    }


LOSSES: dict[str, tuple[Any, Any]] = {
    "mean": (
        lambda prediction, batch: functional.cross_entropy(prediction, batch["target"]),
        lambda prediction, batch: functional.cross_entropy(prediction, batch["target"]),
    ),
    "class weighted": (
        class_weighted,
        lambda prediction, batch: functional.cross_entropy(prediction, batch["target"], CLASS_WEIGHTS),
    ),
    "terms of different weights": (
        two_terms,
        lambda prediction, batch: (
            energies(prediction).mean() * 0.5
            + force_errors(prediction, batch) / batch["atoms"].sum() * 4.0
            + prediction.square().mean()
        ),
    ),
}
TERM_WEIGHTS = {"energy": 0.5, "forces": 4.0}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("num_micro", "num_shards"), CUTS)
@pytest.mark.parametrize("kind", list(LOSSES))
def test_gradients_of_a_batch_that_is_cut_are_those_of_the_whole(
    kind: str, num_micro: int, num_shards: int, size: int
) -> None:
    loss, plain = LOSSES[kind]
    task, batch = Loss(loss), samples(size)
    expected = by_hand(task, batch, plain)
    take(task, batch, num_micro, num_shards, TERM_WEIGHTS if kind.startswith("terms") else None)
    assert len(task.sizes) == min(size, num_micro * max(num_shards, 1)) and sum(task.sizes) == size
    assert max(task.sizes) - min(task.sizes) <= 1
    assert_same(gradients(task), expected)


@pytest.mark.parametrize(("num_micro", "num_shards"), CUTS)
def test_weights_that_are_equal_in_one_part_by_chance_are_not_taken_for_one(num_micro: int, num_shards: int) -> None:
    task, batch = Loss(two_terms_counted_on_the_host), samples(8)
    batch["atoms"] = torch.tensor([1, 1, 1, 1, 3, 5, 2, 7])  # as many atoms as samples in the first parts only
    expected = by_hand(
        task,
        batch,
        lambda prediction, whole: energies(prediction).mean() + force_errors(prediction, whole) / whole["atoms"].sum(),
    )
    take(task, batch, num_micro, num_shards)
    assert_same(gradients(task), expected)


@pytest.mark.parametrize(("num_micro", "num_shards"), CUTS)
@pytest.mark.parametrize("kind", list(LOSSES))
def test_the_recorded_loss_is_that_of_the_whole_batch(kind: str, num_micro: int, num_shards: int) -> None:
    loss, plain = LOSSES[kind]
    task, batch = Loss(loss), samples(23)
    expected = float(plain(task.model(batch["input"]), batch).detach())
    step = take(task, batch, num_micro, num_shards, TERM_WEIGHTS if kind.startswith("terms") else None)
    recorded = means(step.recorder.read().pairs())
    assert recorded["loss"] == pytest.approx(expected, rel=1e-6 if kind.startswith("terms") else 1e-12)
    if kind.startswith("terms"):
        assert recorded.keys() == {"loss", "energy", "forces", "size"}


@pytest.mark.parametrize(("num_micro", "num_shards"), [(1, 0), (3, 0), (1, 4)])
def test_a_single_named_term_has_a_loss_too(num_micro: int, num_shards: int) -> None:
    task = Loss(lambda prediction, batch: {"energy": prediction.square().mean()})
    step = take(task, samples(12), num_micro, num_shards, {"energy": 3.0})
    recorded = means(step.recorder.read().pairs())
    assert recorded["loss"] == pytest.approx(3 * recorded["energy"], rel=1e-6)


@pytest.mark.parametrize(("num_micro", "num_shards"), [(1, 0), (3, 0), (1, 4)])
def test_a_weight_of_a_term_that_the_loss_does_not_have_is_refused(num_micro: int, num_shards: int) -> None:
    with pytest.raises(UserError, match="names 'force', but the terms of the loss are energy, forces, size"):
        take(Loss(two_terms), samples(12), num_micro, num_shards, {"force": 2.0})


@pytest.mark.parametrize(("num_micro", "num_shards"), [(1, 0), (2, 0), (1, 8)])
@pytest.mark.parametrize("clip", [1e-3, 0.1, 1e3])
def test_clipping_is_that_of_clip_grad_norm(clip: float, num_micro: int, num_shards: int) -> None:
    loss, plain = LOSSES["mean"]
    task, batch = Loss(loss), samples(24)
    for parameter, gradient in zip(task.parameters(), by_hand(task, batch, plain).values(), strict=True):
        parameter.grad = gradient
    nn.utils.clip_grad_norm_(task.parameters(), clip)
    expected = gradients(task)
    take(task, batch, num_micro, num_shards, clip=clip)
    assert_same(gradients(task), expected)


@pytest.mark.parametrize(("num_micro", "num_shards"), [(1, 0), (2, 0), (1, 8)])
def test_the_update_is_minus_the_learning_rate_times_the_gradient(num_micro: int, num_shards: int) -> None:
    loss, plain = LOSSES["mean"]
    task, batch = Loss(loss), samples(24)
    before = {name: parameter.detach().clone() for name, parameter in task.named_parameters()}
    expected = by_hand(task, batch, plain)
    take(task, batch, num_micro, num_shards)
    rate = float(torch.tensor(0.1))
    assert_same(
        {name: parameter.detach() for name, parameter in task.named_parameters()},
        {name: before[name] - rate * gradient for name, gradient in expected.items()},
        1e-8,
    )


class Partly(Loss):
    """Has a parameter that its loss does not use, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__(LOSSES["mean"][0])
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)


@pytest.mark.parametrize(("num_micro", "num_shards"), [(1, 0), (3, 0), (1, 8)])
def test_unused_and_frozen_parameters_stay_as_they_are(num_micro: int, num_shards: int) -> None:
    task, batch = Partly(), samples(24)
    trained = Loss(LOSSES["mean"][0])
    take(task, batch, num_micro, num_shards)
    take(trained, batch, num_micro, num_shards)
    assert task.unused.tolist() == task.frozen.tolist() == [1.0] * 3
    assert task.frozen.grad is None
    assert_same(gradients(task), gradients(trained), 0.0)


class TwoDtypes(nn.Module):
    """Half of the output from float32 weights, half from float64 ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.coarse = nn.Linear(FEATURES, 2)
        self.fine = nn.Linear(FEATURES, 2).double()

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([self.coarse(input.float()).double(), self.fine(input)], 1)


def tenths(prediction: Tensor, batch: dict[str, Tensor]) -> Any:
    """A weight that has no exact form in float32."""
    weight = batch["atoms"] * 0.1
    return isoscale.WeightedSum(((prediction - batch["forces"]).square().mean(1) * weight).sum(), weight.double().sum())


@pytest.mark.parametrize(("num_micro", "num_shards"), [(1, 0), (3, 0), (1, 8)])
def test_parameters_of_several_dtypes_each_keep_their_own_accuracy(num_micro: int, num_shards: int) -> None:
    task, batch = Loss(tenths, TwoDtypes()), samples(23)
    expected = by_hand(task, batch, lambda prediction, whole: tenths(prediction, whole).mean)
    take(task, batch, num_micro, num_shards, clip=1e9)
    found = gradients(task)
    assert [tensor.dtype for tensor in found.values()] == [tensor.dtype for tensor in expected.values()]
    assert_same(found, {name: tensor for name, tensor in expected.items() if "fine" in name})
    assert_same(found, expected, 1e-5)


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)).double()


@pytest.mark.parametrize(("size", "num_shards"), [(24, 2), (24, 4), (22, 8), (22, 1)])
def test_running_statistics_in_tree_are_the_mean_over_the_shards(size: int, num_shards: int) -> None:
    task, batch = Loss(LOSSES["mean"][0], normed()), samples(size)
    plan = BatchPlan(size, size, num_shards=num_shards)
    hidden = task.model[0](batch["input"]).detach()  # type: ignore[index]
    shards = [hidden[start:stop] for ranges in plan.share(size).parts for start, stop in ranges]
    take(task, batch, 1, num_shards)
    norm = task.model[1]  # type: ignore[index]
    means_of = torch.stack([shard.mean(0) for shard in shards]).mean(0)
    variances = torch.stack([shard.var(0, unbiased=True) for shard in shards]).mean(0)
    torch.testing.assert_close(norm.running_mean, 0.1 * means_of, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * variances, rtol=1e-12, atol=1e-12)
    assert int(norm.num_batches_tracked) == 1


def test_what_is_logged_in_parts_has_the_mean_of_the_whole() -> None:
    class Logging(Loss):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            self.log("atoms", isoscale.WeightedSum(batch["atoms"].sum(), len(batch["atoms"])))
            self.log("first", batch["input"][:, 0].mean())
            return super().training_step(batch, batch_idx)

    batch = samples(23)
    for num_micro, num_shards in CUTS:
        recorded = means(take(Logging(LOSSES["mean"][0]), batch, num_micro, num_shards).recorder.read().pairs())
        assert recorded["atoms"] == pytest.approx(float(batch["atoms"].double().mean()), rel=1e-12)
        assert recorded["first"] == pytest.approx(float(batch["input"][:, 0].mean()), rel=1e-12)


@pytest.mark.parametrize(("num_micro", "num_shards"), [(1, 0), (2, 0), (1, 4)])
def test_a_gradient_that_is_not_finite_latches_and_no_later_step_touches_the_weights(
    num_micro: int, num_shards: int
) -> None:
    count = 12
    bad = samples(count)
    bad["input"][5] = float("nan")
    rows = {name: torch.cat([value, samples(count)[name]]) for name, value in bad.items()}
    reducer = TreeReducer(num_shards) if num_shards else FlatReducer()
    plan = BatchPlan(2 * count, count, num_micro=num_micro, num_shards=reducer.num_shards)
    feed = DeviceFeed(TensorSource(rows), Order(2 * count, 0, shuffle=False), plan, CPU)
    task = Loss(LOSSES["mean"][0])
    step = make_step(task, reducer, average=EMA(task, 0.5))
    before = [parameter.detach().clone() for parameter in task.parameters()]
    for number in range(2):
        step(feed.parts(number), number, number, 0.1, {}, number)
    assert float(step.nan_guard.latch) == 1
    assert all(torch.equal(*pair) for pair in zip(before, task.parameters(), strict=True))
    assert step.average is not None
    assert all(torch.equal(*pair) for pair in zip(before, step.average.state()[0].values(), strict=True))


def test_a_dict_with_a_loss_is_that_loss_and_without_one_its_terms() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert list(loss_terms({"loss": one, "prediction": torch.zeros(5)}, 5)) == ["loss"]
    assert list(loss_terms({"energy": one, "forces": two}, 5)) == ["energy", "forces"]
    with pytest.raises(UserError, match="does the step return its loss"):
        loss_terms(None, 5)
