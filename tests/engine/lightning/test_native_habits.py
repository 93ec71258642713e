"""Tasks that change themselves in training, with the recipe's optimizer: eager, captured, in parts and on ranks."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import isoscale
from isoscale.engine.state.checkpoint import read
from isoscale.errors import UserError
from tests.helpers import first_of, sha, timeless
from tests.ranks import fit_on

NUM_SAMPLES, BATCH = 96, 8
PER_EPOCH = NUM_SAMPLES // BATCH
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def data(num_samples: int = NUM_SAMPLES) -> isoscale.Sources:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_samples, 6, generator=generator)
    labels = (rows[:, :3] + 0.1 * rows[:, 3:]).argmax(1)
    return isoscale.Sources(train={"input": rows, "target": labels}, val={"input": rows[:24], "target": labels[:24]})


class Thawing(isoscale.Task):
    """A backbone that is frozen for an epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 3)
        self.backbone[0].requires_grad_(False)
        self.epochs = 0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.backbone(inputs))

    def on_train_epoch_start(self) -> None:
        self.epochs += 1
        self.backbone[0].requires_grad_(self.epochs > 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self(batch["input"]), batch["target"])

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["input"])


class Plain(Thawing):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(True)

    def on_train_epoch_start(self) -> None:
        self.epochs += 1


class Resting(Plain):
    """Batch norm statistics that are left alone in every other epoch."""

    def on_train_epoch_start(self) -> None:
        self.epochs += 1
        self.backbone.train(self.epochs % 2 == 1)


class Annealed(Plain):
    """A number in the loss, one in a layer, and one in a list, that go down from epoch to epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.weights = nn.Dropout(0.5), [1.0, 1.0]

    def on_train_epoch_start(self) -> None:
        self.epochs += 1
        self.drop.p = 0.5 / self.epochs
        self.weights[1] = 1 / self.epochs

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.drop(self.backbone(inputs))) * self.weights[1]


class NewBuffer(Plain):
    """A buffer that is replaced at the start of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def on_train_epoch_start(self) -> None:
        self.epochs += 1
        self.scale = torch.full_like(self.scale, 1 / self.epochs)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) * self.scale


class NewStorage(Plain):
    """Weights that are given other memory."""

    def on_train_epoch_start(self) -> None:
        self.epochs += 1
        self.head.weight.data = self.head.weight.data.clone() * 0.5


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))


class Clip(torch.autograd.Function):
    """Gradients inside the network that are not to become large."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-0.02, 0.02)


class Clipping(Plain):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(Clip.apply(self.backbone(inputs)))


class Spectral(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head = parametrizations.spectral_norm(self.head)


class Fourier(Plain):
    """A layer of a Fourier neural operator, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.fft.irfft(torch.fft.rfft(self.backbone(inputs)) * self.spectrum, n=8))


class EpochInTheLoss(pl.LightningModule):
    """A LightningModule that leaves the optimizer to the recipe, and weighs its loss by the epoch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def configure_optimizers(self) -> None:
        return None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self.net(batch["input"]), batch["target"]) * (1 + self.current_epoch)


class ChangedDecay(EpochInTheLoss):
    def on_train_epoch_start(self) -> None:
        self.optimizers().param_groups[0]["weight_decay"] = 0.1 * self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self.net(batch["input"]), batch["target"])


CAPTURED = [Thawing, Plain, Resting, Annealed, NewBuffer, NewStorage, Hooked, Spectral, Fourier, EpochInTheLoss,
            ChangedDecay]  # fmt: skip


class Counting(Plain):
    """A number that every step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        return super().training_step(batch, batch_idx) * (1 + 0.01 * self.calls)


class Remembering(Plain):
    """A tensor that goes from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.backbone(batch["input"])
        before = 0.0 if self.hidden is None else self.hidden
        self.hidden = features.detach().mean(0)
        return functional.cross_entropy(self.head(features + before), batch["target"])


class FirstBatch(Plain):
    """Something that is done at the first batch of an epoch only."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (3.0 if batch_idx == 0 else 1.0)


class StepInTheLoss(EpochInTheLoss):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self.net(batch["input"]), batch["target"]) * (1 + 0.01 * self.global_step)


NOT_CAPTURED = {
    Counting: "changes self.calls", Remembering: "changes self.hidden", FirstBatch: "uses batch_idx",
    StepInTheLoss: "reads self.global_step",
}  # fmt: skip


def recipe(**changes: Any) -> dict[str, Any]:
    found = {
        "data.batch_size": BATCH, "data.shuffle": False, "train.epochs": 4, "train.device": "cpu", "train.threads": 1,
        "optimizer.name": "sgd", "optimizer.lr": 0.2, "optimizer.momentum": 0.9, "observe.every": 2,
        "observe.tensorboard": 0, "observe.level": "warning",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }  # fmt: skip
    return {key: value for key, value in found.items() if key != "optimizer.momentum" or value is not None}


def fit(path: Path, task: Any, num_samples: int = NUM_SAMPLES, **changes: Any) -> isoscale.Run:
    return isoscale.Trainer(run=path, **recipe(**changes)).fit(task, data(num_samples))


def weights(run: isoscale.Run) -> dict[str, Tensor]:
    return read(run.checkpoint("last"))[0]["model"]


def by_hand(clip: float) -> nn.Module:
    """What anybody would write for Thawing."""
    task = Thawing()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.2, momentum=0.9)
    batches = data().train.tensors
    for _ in range(4):
        task.on_train_epoch_start()
        for number in range(PER_EPOCH):
            rows = slice(number * BATCH, (number + 1) * BATCH)
            optimizer.zero_grad()
            task.training_step({key: value[rows] for key, value in batches.items()}, number).backward()
            nn.utils.clip_grad_norm_(task.parameters(), clip)
            optimizer.step()
    return task


def test_a_layer_that_is_unfrozen_is_trained_and_clipped_as_by_hand(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    found, expected = weights(fit(tmp_path, Thawing(), train__clip=0.2)), by_hand(0.2).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Thawing, Hooked, Clipping, Fourier, Annealed], ids=lambda cls: cls.__name__)
def test_parts_of_a_batch_add_up_to_the_whole(cls: Any, tmp_path: Path) -> None:
    class WithoutNorm(cls):  # its statistics would be those of parts
        def __init__(self) -> None:
            super().__init__()
            self.backbone[1] = nn.Identity()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.training:
                sizes.append(len(batch["input"]))
            return super().training_step(batch, batch_idx)

    sizes: list[int] = []
    options = {"train__precision": "64", "train__clip": 0.3}
    whole = weights(fit(tmp_path / "whole", WithoutNorm(), **options))
    parts = weights(fit(tmp_path / "parts", WithoutNorm(), train__accumulate=2, **options))
    assert sizes == [BATCH] * 4 * PER_EPOCH + [BATCH // 2] * 8 * PER_EPOCH
    for name, tensor in whole.items():
        torch.testing.assert_close(parts[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize(
    "cls",
    first_of([Thawing, Resting, Annealed, NewBuffer, Hooked, Fourier], Thawing, NewBuffer),
    ids=lambda cls: cls.__name__,
)
def test_a_tree_has_the_same_bits_on_one_and_two_ranks_and_over_a_restart(
    cls: Any, device: str, tmp_path: Path
) -> None:
    changes = {"parallel__reduce": "tree", "parallel__shards": 2, "train__clip": 0.3, "train__device": device}
    options = {key.replace(".", "__"): value for key, value in recipe(**changes).items()}
    one, two = (fit_on(world, tmp_path / f"{world}", partial(_made, cls), **options) for world in (1, 2))
    assert sha(one) == sha(two)
    fit_on(2, tmp_path / "again", partial(_made, cls), **{**options, "train__epochs": None, "train__steps": 15})
    longer = {**options, "train__epochs": None, "train__steps": 4 * PER_EPOCH}
    assert sha(fit_on(1, tmp_path / "again", partial(_made, cls), **longer)) == sha(one)


@pytest.mark.slow
def test_buckets_follow_parameters_that_are_unfrozen(tmp_path: Path) -> None:
    options = {key.replace(".", "__"): value for key, value in recipe(train__precision="64").items()}
    one = weights(fit_on(1, tmp_path / "1", partial(_made, Thawing), **options))
    two = weights(fit_on(2, tmp_path / "2", partial(_made, Thawing), **options, parallel__reduce="overlap"))
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-9, atol=1e-11, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.slow
def test_buckets_refuse_hooks_on_gradients(tmp_path: Path) -> None:
    options = {key.replace(".", "__"): value for key, value in recipe().items()}
    with pytest.raises(AssertionError, match=r"head.weight has a hook .* use parallel.reduce=flat"):
        fit_on(2, tmp_path / "2", partial(_made, Hooked), **options, parallel__reduce="overlap")


def _made(cls: Any) -> tuple[Any, Any]:
    return cls(), data()


ON_CUDA = {
    "num_samples": 960, "train__device": "cuda", "train__precision": "32", "observe__every": 30, "train__epochs": 4,
}  # fmt: skip
"""120 steps in an epoch: enough for a capture to be worth it."""


@needs_cuda
@pytest.mark.parametrize("steps", [10, 1])
@pytest.mark.parametrize("cls", CAPTURED, ids=lambda cls: cls.__name__)
def test_what_changes_between_launches_is_captured_anew(cls: Any, steps: int, tmp_path: Path) -> None:
    options = {**ON_CUDA, "train__steps_per_launch": steps}
    if cls is Fourier:  # torch can capture its update only by Adam
        options |= {"optimizer__name": "adam", "optimizer__momentum": None, "optimizer__lr": 0.01}
    eager = fit(tmp_path / "eager", cls(), train__program="eager", **options)
    graphed = fit(tmp_path / "graphed", cls(), **options)
    assert graphed.record["decided"]["program"] == "graphed"
    assert sha(eager) == sha(graphed)
    assert timeless(eager) == timeless(graphed)
    fit(tmp_path / "stopped", cls(), **{**options, "train__epochs": None, "train__steps": 220})
    again = fit(tmp_path / "stopped", cls(), **{**options, "train__epochs": None, "train__steps": 480})
    assert sha(again) == sha(eager)


@needs_cuda
@pytest.mark.parametrize("cls", NOT_CAPTURED, ids=lambda cls: cls.__name__)
def test_what_changes_from_step_to_step_is_not_captured_and_the_line_says_what(cls: Any, tmp_path: Path) -> None:
    eager = fit(tmp_path / "eager", cls(), train__program="eager", **ON_CUDA)
    auto = fit(tmp_path / "auto", cls(), **ON_CUDA)
    assert sha(eager) == sha(auto) and auto.record["decided"]["program"] == "eager"
    assert NOT_CAPTURED[cls] in (tmp_path / "auto" / "log.txt").read_text()


def test_what_a_module_cannot_save_is_named_once(tmp_path: Path) -> None:
    class Keeping(Plain):
        def on_train_epoch_start(self) -> None:
            super().on_train_epoch_start()
            self.file = open(__file__)  # noqa: SIM115

    fit(tmp_path, Keeping(), checkpoint__every="1 epoch")
    log = (tmp_path / "log.txt").read_text()
    assert log.count("cannot be saved: self.file (TextIOWrapper)") == 1


def test_nothing_is_said_of_a_module_that_keeps_plain_things(tmp_path: Path) -> None:
    fit(tmp_path, Annealed())
    assert "cannot be saved" not in (tmp_path / "log.txt").read_text()


def test_modules_in_eval_mode_are_named_when_training_begins(tmp_path: Path) -> None:
    task = Plain()
    task.backbone.eval()
    before = task.backbone[1].running_mean.clone()
    fit(tmp_path, task)
    assert torch.equal(task.backbone[1].running_mean, before)
    assert "in eval mode when training begins, and left so: backbone " in (tmp_path / "log.txt").read_text()


def test_what_was_trained_is_used_with_the_attributes_that_it_had(tmp_path: Path) -> None:
    run = fit(tmp_path, Annealed(), checkpoint__monitor="train/loss_epoch")
    again = isoscale.Run(tmp_path, Annealed(), data())
    assert again.task().weights == [1.0, 0.25]
    one, two = isoscale.predict(run, split="val"), isoscale.predict(again, split="val")
    assert torch.equal(one["prediction"], two["prediction"])


def test_using_what_was_trained_leaves_the_modes_of_the_task(tmp_path: Path) -> None:
    task = Plain()
    run = fit(tmp_path, task)
    run.model()
    isoscale.predict(run, split="val")
    assert all(module.training for module in task.modules())


def test_a_task_that_trains_on_in_the_same_process_is_not_confused_by_what_came_before(tmp_path: Path) -> None:
    straight = fit(tmp_path / "straight", Annealed(), train__epochs=None, train__steps=30)
    task = Annealed()
    for steps in (7, 15, 30):
        run = fit(tmp_path / "run", task, train__epochs=None, train__steps=steps)
    assert sha(run) == sha(straight)


def test_sparse_gradients_cannot_be_clipped_and_that_is_said(tmp_path: Path) -> None:
    class Sparse(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3, sparse=True)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) + self.table((inputs[:, 0] > 0).long())

    with pytest.raises(UserError, match=r"train.clip needs dense gradients"):
        fit(tmp_path, Sparse(), train__clip=1.0)


class Alone(nn.Module):
    """All that a task needs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self.net(batch["input"]), batch["target"])


class Calling(Alone):
    def forward(self, batch: Any) -> Tensor:
        return self.net(batch["input"])


class Validating(Calling):
    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx)


@pytest.mark.parametrize("cls", [Alone, Calling])
def test_a_task_needs_a_training_step_and_nothing_else(cls: Any, tmp_path: Path) -> None:
    run = fit(tmp_path, cls(), observe__tensorboard=2)
    assert run.status == "done" and "val/loss" not in run.metrics
    assert "has no validation_step: the validation data is not used" in (tmp_path / "log.txt").read_text()
    with pytest.raises(UserError, match=r"has no validation_step\(self, batch, batch_idx\): write one"):
        isoscale.test(run, split="val")
    if cls is Calling:
        assert isoscale.predict(run, split="val")["prediction"].shape == (24, 3)
        return
    with pytest.raises(UserError, match=r"neither predict_step\(self, batch, batch_idx\) nor forward"):
        isoscale.predict(run, split="val")


def test_a_test_is_a_validation_where_there_is_no_test_step(tmp_path: Path) -> None:
    run = fit(tmp_path, Validating())
    found = isoscale.test(run, data=isoscale.Sources(test=data().val), checkpoint="last")
    assert found["test/loss"] == pytest.approx(run.metrics["val/loss"])


def test_parts_that_train_other_parameters_are_refused(tmp_path: Path) -> None:
    class Alternating(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.other, self.calls = nn.Linear(8, 3), 0

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.calls += 1
            self.head.requires_grad_(self.calls % 2 == 0)
            self.other.requires_grad_(self.calls % 2 == 1)
            return functional.cross_entropy(
                self(batch["input"]) + self.other(self.backbone(batch["input"])), batch["target"]
            )

    with pytest.raises(UserError, match="changes requires_grad while a batch is computed in parts"):
        fit(tmp_path, Alternating(), train__accumulate=2)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_bad_first_step_of_an_unfrozen_layer_leaves_nothing_behind(optimizer: str, tmp_path: Path) -> None:
    class Bad(Thawing):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.epochs == 2 and batch_idx == 0 else loss

    changes = {"optimizer__name": optimizer, "optimizer__lr": 0.01, "train__nan": "skip"}
    run = fit(tmp_path, Bad(), **changes, **({} if optimizer == "sgd" else {"optimizer__momentum": None}))
    assert all(bool(tensor.isfinite().all()) for tensor in weights(run).values())
    assert sum(value for _, value in run.history("train/not_finite")) == 1


def test_hooks_on_the_recipes_optimizer_are_called(tmp_path: Path) -> None:
    class Listening(EpochInTheLoss):
        def on_fit_start(self) -> None:
            self.updates: list[int] = []
            self.optimizers().register_step_post_hook(lambda *_: self.updates.append(self.global_step))

    task = Listening()
    fit(tmp_path, task)
    assert len(task.updates) == 4 * PER_EPOCH


def test_an_error_in_an_evaluation_leaves_modes_as_they_were(tmp_path: Path) -> None:
    class Failing(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("out of luck")

    task = Failing()
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(tmp_path, task)
    assert all(module.training for module in task.modules())
