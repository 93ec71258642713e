"""Habits of people who change a module while it trains; nothing in here knows of isoscale."""

import copy
import random
from collections import deque
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

from tests.engine.lightning.modules import CLASSES, FEATURES, Points, points


class Net(pl.LightningModule):
    """A backbone with batch norm and a head, trained by SGD with momentum."""

    width = 8

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Linear(FEATURES, self.width, bias=False), nn.BatchNorm1d(self.width), nn.Tanh()
        )
        self.head = nn.Linear(self.width, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.backbone(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Unfreezing(Net):
    """A backbone that is frozen at first, and trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)


class UnfreezingInTheStep(Unfreezing):
    def on_train_epoch_start(self) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 5:
            self.backbone.requires_grad_(True)


class Freezing(Net):
    def on_train_epoch_start(self) -> None:
        self.head.requires_grad_(self.current_epoch != 1)


class AddingToTheOptimizer(Unfreezing):
    """The optimizer learns of the backbone when it is unfrozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((each for each in self.parameters() if each.requires_grad), lr=0.1, momentum=0.9)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.backbone.requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.backbone.parameters()), "lr": 0.02})


class EvalInInit(Net):
    """Batch norm statistics that are to stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone[1].running_mean.fill_(0.3)
        self.backbone.eval()


class EvalInFitStart(Net):
    def on_fit_start(self) -> None:
        self.backbone.eval()


class EvalInEpochStart(Net):
    def on_train_epoch_start(self) -> None:
        self.backbone.train(self.current_epoch != 1)


class FlagsInEpochStart(Net):
    """A flag, a factor and a list that hooks set and steps read."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.smooth, self.seen = 1.0, False, []

    def on_train_epoch_start(self) -> None:
        self.smooth = self.current_epoch % 2 == 1
        self.factor *= 0.7
        self.seen.append(self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        smoothing = 0.3 if self.smooth else 0.0
        loss = functional.cross_entropy(self(batch[0]), batch[1], label_smoothing=smoothing)
        return loss * self.factor * len(self.seen)


class Curriculum(Net):
    """Counters and running numbers that only Python knows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.window = 0, deque(maxlen=3)
        self.table: dict[int, float] = {}
        self.rng, self.numbers = np.random.default_rng(3), torch.Generator().manual_seed(5)
        self.array = np.zeros(4)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        self.window.append(self.calls)
        self.table[self.calls % 3] = self.table.get(self.calls % 3, 0.0) + 0.1
        self.array[self.calls % 4] += 1
        noise = float(self.rng.normal()) + float(torch.randn((), generator=self.numbers))
        weight = 1 + 0.05 * sum(self.window) / len(self.window) + sum(self.table.values()) + 0.1 * noise
        return functional.cross_entropy(self(batch[0]), batch[1]) * weight * (1 + self.array.max() / 10)


class Meter:
    """A helper as people write it."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


class WithMeter(Net):
    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.meter.update(0.1)
        return functional.cross_entropy(self(batch[0]), batch[1]) * (1 + self.meter.total)


class HiddenState(Net):
    """A recurrent state that goes on from batch to batch."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.backbone(batch[0])
        before = 0.0 if self.hidden is None else self.hidden
        self.hidden = features.detach().mean(0)
        return functional.cross_entropy(self.head(features + before), batch[1])


class GrowingBuffer(Net):
    """A buffer that becomes longer, and one that is replaced rather than written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(1))
        self.register_buffer("mean", None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.history = torch.cat([self.history, torch.full((1,), float(len(self.history)))])
        self.mean = self.history.mean()
        return loss * (1 + 0.01 * self.mean)


class Tied(Net):
    """Two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.back = nn.Linear(CLASSES, self.width)
        self.again = nn.Linear(self.width, CLASSES)
        self.again.weight = self.head.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.again(self.back(super().forward(inputs)))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Parametrised(Net):
    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(self.width, self.width)
        parametrize.register_parametrization(self.middle, "weight", Symmetric())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.middle(self.backbone(inputs)))


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = parametrizations.spectral_norm(self.head)


class OldSpectral(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.utils.spectral_norm(self.head)


class WeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = parametrizations.weight_norm(self.head)


class PrunedFromTheStart(Net):
    """Pruned in the constructor, and harder later on: the mask is replaced."""

    def __init__(self) -> None:
        super().__init__()
        prune.l1_unstructured(self.head, "weight", amount=2)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            prune.l1_unstructured(self.head, "weight", amount=3)


class OwnAverage(Net):
    """An average of the weights that takes their place in validations."""

    def __init__(self) -> None:
        super().__init__()
        self.average = {}
        self.backup: dict[str, Tensor] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():
            before = self.average.get(name, parameter.detach())
            self.average[name] = 0.8 * before + 0.2 * parameter.detach()

    def on_validation_start(self) -> None:
        for name, parameter in self.named_parameters():
            if name in self.average:
                self.backup[name] = parameter.detach().clone()
                parameter.data.copy_(self.average[name])

    def on_validation_end(self) -> None:
        for name, parameter in self.named_parameters():
            if name in self.backup:
                parameter.data.copy_(self.backup.pop(name))


class SwappedStorages(OwnAverage):
    """The same, with whole tensors put in the place of others."""

    def on_validation_start(self) -> None:
        for name, parameter in self.named_parameters():
            if name in self.average:
                self.backup[name], parameter.data = parameter.data, self.average[name].clone()

    def on_validation_end(self) -> None:
        for name, parameter in self.named_parameters():
            if name in self.backup:
                parameter.data = self.backup.pop(name)


class TorchAverage(Net):
    """torch's own averaged copy of the network, made when training begins."""

    def on_fit_start(self) -> None:
        self.averaged = swa_utils.AveragedModel(self.head)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.averaged.update_parameters(self.head)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.backbone(batch[0])
        with torch.no_grad():
            teacher = self.averaged(features)
        scores = self.head(features)
        return functional.cross_entropy(scores, batch[1]) + functional.mse_loss(scores, teacher)


class HiddenTeacher(Net):
    """A teacher in a list, so that its weights are nobody's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [copy.deepcopy(self.head)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features = self.backbone(batch[0])
        scores = self.head(features)
        with torch.no_grad():
            for mine, theirs in zip(self.teacher[0].parameters(), self.head.parameters(), strict=True):
                mine.mul_(0.9).add_(theirs, alpha=0.1)
            teacher = self.teacher[0](features.float()).to(scores.dtype)
        return functional.cross_entropy(scores, batch[1]) + functional.mse_loss(scores, teacher)


class GradientHooks(Net):
    """Hooks on gradients, one of them not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.backbone[0].weight.register_hook(lambda gradient: gradient * 0.5)
        self.head.bias.register_post_accumulate_grad_hook(_shrink)


def _shrink(parameter: Tensor) -> None:
    parameter.grad = parameter.grad * 0.1


class Checkpointed(Net):
    """Activations that are computed again in the backward pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = checkpoint(lambda values: torch.tanh(self.backbone[0](values)), inputs, use_reentrant=False)
        return self.head(hidden)


class Clamped(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values * 1.5

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.5


class OwnFunction(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(Clamped.apply(self.backbone(inputs)))


class InPlace(Net):
    """Augmentation that writes into the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch[0].mul_(1.1).add_(0.1)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        batch[0].add_(0.2)
        super().validation_step(batch, batch_idx)


class Complex(Net):
    """A layer of a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(self.width // 2 + 1, dtype=torch.cfloat))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.fft.irfft(torch.fft.rfft(self.backbone(inputs)) * self.spectrum, n=self.width)
        return self.head(hidden)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


class Sparse(Net):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, self.width, sparse=True)

    def forward(self, inputs: Tensor) -> Tensor:
        places = (inputs[:, 0].abs() * 4).long().clamp(max=9)
        return self.head(self.backbone(inputs) + self.embedding(places))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SharedByOptimizers(Net):
    """Two optimizers that both move the head."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(functional.cross_entropy(self(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01), torch.optim.SGD(self.head.parameters(), lr=0.05)


class ManualAccumulation(Net):
    """An update every third batch: a window is left over at the end of an epoch, when a validation comes."""

    every = 3

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(functional.cross_entropy(self(batch[0]), batch[1]) / self.every)
        if (batch_idx + 1) % self.every == 0:
            self.optimizers().step()
            self.optimizers().zero_grad()


class ManualClipping(ManualAccumulation):
    """Gradients that the task clips itself."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(functional.cross_entropy(self(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()


class OwnOptimizer(ManualAccumulation):
    """An optimizer that nobody is told of."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.mine.zero_grad()
        self.manual_backward(functional.cross_entropy(self(batch[0]), batch[1]))
        self.mine.step()


class ManualHooks(ManualClipping):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


REFUSED_ON_RANKS = {OwnOptimizer: "configure_optimizers does not return it", ManualHooks: "sees that of one rank only"}


class Quasi(Net):
    """LBFGS, which computes the loss as often as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, self.width), nn.Tanh())
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = functional.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            return loss

        optimizer.step(closure=closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=4)


class ExtraStateOfTorch(Net):
    """torch's own way to save more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.counter = _Counter()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self(batch[0]), batch[1]) * self.counter()


class _Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.box = SimpleNamespace(number=0)

    def forward(self) -> float:
        self.box.number += 1
        return 1 + 0.1 * self.box.number

    def get_extra_state(self) -> int:
        return self.box.number

    def set_extra_state(self, state: int) -> None:
        self.box.number = state


class OwnStateDict(Net):
    """An object that saves itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = _Scale()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self(batch[0]), batch[1]) * self.scale.next()


class _Scale:
    __slots__ = ("__dict__", "_steps")

    def __init__(self) -> None:
        self._steps = 0

    def next(self) -> float:
        self._steps += 1
        return 1 + 0.1 * self._steps

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps = state["steps"]


class ChangedSettings(Net):
    """Settings of the optimizer and of a layer that hooks change."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"weight": 1.0})

    def on_train_epoch_start(self) -> None:
        self.optimizers().param_groups[0]["weight_decay"] = 0.01 * self.current_epoch
        self.backbone[1].momentum = 0.1 + 0.2 * self.current_epoch
        self.hparams.weight = 1.0 + self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.hparams.weight


class LazyButKnown(Net):
    """A layer that learns its shape in time."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.LazyLinear(CLASSES)

    def setup(self, stage: str) -> None:
        torch.manual_seed(3)
        self.more(torch.zeros(1, self.width))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.backbone(inputs)) + self.more(self.backbone(inputs))


class Phase(Enum):
    FIRST = 1
    SECOND = 2


@dataclass(slots=True)
class Slotted:
    count: int = 0


class OddObjects(Net):
    """Namespaces, slots, enumerations, dicts by them, an attribute that is deleted, one that is wound up by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.box, self.slotted, self.phase = SimpleNamespace(n=0), Slotted(), None
        self.table, self.first, self.meters = dict.fromkeys(Phase, 0), True, [Meter()]
        self.clock = Meter()

    def on_train_epoch_start(self) -> None:
        self.clock.count = 2

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.box.n += 1
        self.slotted.count += 2
        self.phase = Phase.SECOND if self.box.n % 2 else Phase.FIRST
        self.table[self.phase] += 1
        self.meters[0].update(0.1)
        self.meters.append(0.5)
        self.clock.count = max(0, self.clock.count - 1)
        if self.box.n == 2:
            del self.first
        factor = 1 + 0.05 * self.box.n + 0.01 * self.slotted.count + 0.1 * self.phase.value + self.clock.count
        factor += 0.01 * self.table[Phase.FIRST] + self.meters[0].total + 0.01 * len(self.meters)
        return functional.cross_entropy(self(batch[0]), batch[1]) * (factor + hasattr(self, "first")) * 0.3


class Aliases(Net):
    """Tensors and deques that stand in two places, a view of a buffer, a temperature with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.window = torch.zeros(()), deque([0.0], maxlen=3)
        self.head.shared, self.head.window = self.shared, self.window
        self.register_buffer("table", torch.zeros(4))
        self.first = self.table[:1]
        self.temperature = torch.zeros((), requires_grad=True)
        self.own = torch.optim.SGD([self.temperature], lr=0.1, momentum=0.9)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.shared += 0.1
        self.window.append(float(self.shared))
        self.first += 0.1
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        self.own.zero_grad()
        (self.temperature - 0.1 * float(self.shared)).square().backward()
        self.own.step()
        factor = 1 + self.head.shared + sum(self.head.window) + self.table[0] + self.temperature.detach()
        return loss * factor * 0.2


class DrawsAnywhere(Net):
    """Random numbers of Python and numpy in steps, and of torch in hooks."""

    def on_train_epoch_start(self) -> None:
        self.factor = float(torch.rand(()))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        mixed = np.random.beta(0.5, 0.5) + random.random()
        return functional.cross_entropy(self(batch[0]), batch[1]) * (1 + mixed + self.factor)


class Reinitialised(Net):
    """A head that starts again in every epoch, in place."""

    def on_train_epoch_start(self) -> None:
        torch.manual_seed(self.current_epoch)
        self.head.reset_parameters()


HABITS = [
    Unfreezing, UnfreezingInTheStep, Freezing, AddingToTheOptimizer, EvalInInit, EvalInFitStart, EvalInEpochStart,
    FlagsInEpochStart, Curriculum, WithMeter, HiddenState, GrowingBuffer, Tied, Parametrised, Spectral, OldSpectral,
    WeightNorm, PrunedFromTheStart, OwnAverage, SwappedStorages, TorchAverage, HiddenTeacher, GradientHooks,
    Checkpointed, OwnFunction, InPlace, Complex, Sparse, SharedByOptimizers, ManualAccumulation, ManualClipping, Quasi,
    ExtraStateOfTorch, OwnStateDict, ChangedSettings, LazyButKnown, OddObjects, Aliases, DrawsAnywhere,
    Reinitialised,
]  # fmt: skip


class Growing(Net):
    """A layer that is added in training."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.more = nn.Linear(2, 2)


class PrunedInTraining(Net):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            prune.l1_unstructured(self.head, "weight", amount=3)


class Replacing(Net):
    """A new parameter under an old name, of which the optimizer knows nothing."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.head.weight = nn.Parameter(torch.zeros(CLASSES, self.width))


class ReplacedInFitStart(Net):
    """A new head for a pretrained backbone, made when the optimizer has the old one."""

    def on_fit_start(self) -> None:
        self.head = nn.Linear(self.width, CLASSES)


class ReplacedInTrainStart(Net):
    def on_train_start(self) -> None:
        self.backbone[0] = nn.Linear(FEATURES, self.width, bias=False)


class NormedInFitStart(Net):
    """A parametrisation that makes two parameters of one."""

    def on_fit_start(self) -> None:
        parametrizations.weight_norm(self.head)


class OptimisedCopy(Net):
    """An optimizer over a copy of the network, which is a part of the module too."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = copy.deepcopy(self.head)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.copied.parameters(), lr=0.1)


class RegisteringLate(Net):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.register_buffer("late", torch.zeros(2))


class Lazy(Net):
    """A layer that never learns its shape."""

    def __init__(self) -> None:
        super().__init__()
        self.late = nn.LazyLinear(3)


class Unregistered(Net):
    """A tensor that is optimised and belongs to no module."""

    def configure_optimizers(self) -> Any:
        self.loose = torch.zeros(3, requires_grad=True)
        return torch.optim.SGD([*self.parameters(), self.loose], lr=0.1)


class Detached(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx).detach()


class FrozenWhole(Net):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


REFUSED = {
    Growing: "parameters of the task changed in training \\(new: more.bias, more.weight\\)",
    PrunedInTraining: "new: head.weight_orig; gone: head.weight",
    Replacing: "head.weight was replaced by another parameter",
    ReplacedInFitStart: "no longer in the task \\(head.weight, head.bias\\).*head.weight, head.bias.*configure_model",
    ReplacedInTrainStart: "no longer in the task \\(backbone.0.weight\\)",
    NormedInFitStart: "head.parametrizations.weight.original0",
    OptimisedCopy: "none of the parameters that the optimizer has \\(copied.bias, copied.weight\\), but on backbone",
    RegisteringLate: "the buffer late was registered in training",
    Lazy: "late.weight has no shape yet .* and training_step does not use it",
    Unregistered: "optimises a tensor of shape \\(3,\\) that is no parameter",
    Detached: "nothing in the loss requires a gradient",
    FrozenWhole: "nothing in the loss requires a gradient",
}


def made(habit: type[Net], batch_size: int = 8, num_train: int = 60) -> tuple[Net, Points]:
    """A module and its data."""
    torch.manual_seed(1)
    return habit(), Points(batch_size, num_train)


__all__ = ["HABITS", "REFUSED", "made", "points"]
