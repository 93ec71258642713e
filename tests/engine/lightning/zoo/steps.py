"""Steps: accumulation, clipping, backward passes and gradients of one's own, steps that are skipped."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.lightning.modules import CLASSES, FEATURES
from tests.engine.lightning.zoo.case import Case, Net, loaders


class ManualAccumulation(Net):
    """Manual accumulation, with the last batches of an epoch stepped too, by `trainer.is_last_batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)]


class OwnBackward(Net):
    """A backward pass of one's own."""

    def backward(self, loss: Tensor, *arguments: Any, **options: Any) -> None:
        (loss * 0.5).backward(*arguments, **options)
        self.head.bias.grad.mul_(2)


class Skipping(Net):
    """Batches that are not worth a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx % 3 == 1 else super().training_step(batch, batch_idx)


class SkippingByHook(Net):
    """An epoch that ends early: `on_train_batch_start` returns -1."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.current_epoch == 1 and batch_idx == 2 else None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Stopping(Net):
    """A module that has had enough."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step == 7:
            self.trainer.should_stop = True


class NoisyGradients(Net):
    """Noise on the gradients, drawn from a generator of its own, in `on_after_backward`; norms in another hook."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = torch.Generator().manual_seed(3)

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad += 0.01 * torch.randn(parameter.shape, generator=self.numbers)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [each.grad.norm() for each in self.parameters()]
        self.log("grad_norm", torch.stack(norms).norm())


class HookedParameters(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
        self.backbone[0].register_full_backward_hook(lambda module, given, got: None)


class OwnClipping(Net):
    """Clipping that depends on the epoch."""

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        if self.current_epoch > 0:
            self.clip_gradients(
                optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
            )


class Zeroed(Net):
    """Gradients that are set to zero rather than to None."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class Lazy(Net):
    """Layers that learn their shapes from the first batch, and are then the same ones again."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.Tanh())
        self.head = nn.LazyLinear(CLASSES)

    def setup(self, stage: str) -> None:
        torch.manual_seed(11)
        self(torch.zeros(2, FEATURES))


class LateLazy(Lazy):
    """The same, without a first batch of its own; the weights are set when they exist."""

    def setup(self, stage: str) -> None: ...

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 0:
            numbers = torch.Generator().manual_seed(9)
            with torch.no_grad():
                self.backbone.eval()
                self(batch[0])
                self.backbone.train()
                for parameter in self.parameters():
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=numbers))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoLosses(Net):
    """The loss in a dict, beside what later hooks need."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        scores = self(batch[0])
        return {"loss": functional.cross_entropy(scores, batch[1]), "scores": scores.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.head.bias -= 0.01 * outputs["scores"].mean(0)


CASES = [
    Case("manual-accumulation", "accumulation by hand, with trainer.is_last_batch and a scheduler", ManualAccumulation),
    Case("accumulate", "accumulate_grad_batches=2", Net, lambda: loaders(48),
         lambda folder: {"accumulate_grad_batches": 2}, of_step={
             "train_loss": "the loss of a step is that of the whole update, Lightning's of the last of its batches"}),
    Case("clip-norm", "gradient_clip_val, by norm", Net, trainer=lambda folder: {"gradient_clip_val": 0.05}),
    Case("clip-value", "gradient_clip_val, by value", Net,
         trainer=lambda folder: {"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"},
         refused="define configure_gradient_clipping in the module"),
    Case("own-clipping", "configure_gradient_clipping by the epoch", OwnClipping,
         trainer=lambda folder: {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"}),
    Case("backward", "backward overridden", OwnBackward),
    Case("zero-grad", "optimizer_zero_grad overridden", Zeroed),
    Case("skipped-steps", "training_step returns None for some batches", Skipping),
    Case("skipped-epoch", "on_train_batch_start returns -1: the rest of an epoch is skipped", SkippingByHook,
         skipped=3),
    Case("should-stop", "trainer.should_stop set by the module in the middle of an epoch", Stopping),
    Case("gradient-noise", "noise on gradients in on_after_backward, norms in on_before_optimizer_step",
         NoisyGradients),
    Case("parameter-hooks", "register_hook of a parameter, register_full_backward_hook", HookedParameters),
    Case("lazy", "lazy modules with a dry run in setup", Lazy),
    Case("lazy-late", "lazy modules that the first batch makes", LateLazy),
    Case("dict-of-loss", "training_step returns a dict, on_train_batch_end uses the rest of it", TwoLosses),
    Case("double", "precision 64-true", Net, trainer=lambda folder: {"precision": "64-true"}),
    Case("limits", "max_steps, limit_train_batches, limit_val_batches, val_check_interval", Net,
         trainer=lambda folder: {"max_steps": 10, "limit_train_batches": 4, "limit_val_batches": 2,
                                 "val_check_interval": 2}),
]  # fmt: skip
