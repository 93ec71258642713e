"""LightningModules as users write them; nothing in here knows of isoscale."""

from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from lightning.pytorch.demos.lstm import SequenceSampler
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

FEATURES, CLASSES = 6, 3


def points(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(inputs, (inputs[:, :CLASSES] + 0.1 * inputs[:, CLASSES:]).argmax(1))


class Points(pl.LightningDataModule):
    """A data module that remembers which of its methods were called."""

    def __init__(self, batch_size: int = 8, num_train: int = 60, **options: Any) -> None:
        super().__init__()
        self.batch_size, self.num_train, self.options = batch_size, num_train, options
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {str.__str__(stage)}")
        self.train_set, self.val_set = points(self.num_train), points(30, seed=1)

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {str.__str__(stage)}")

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=self.batch_size, **self.options)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, batch_size=8)


class Classifier(pl.LightningModule):
    """The usual classifier: hyperparameters, log and log_dict, torchmetrics objects."""

    def __init__(self, width: int = 16, lr: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, CLASSES))
        self.train_acc = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.val_acc = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        self.val_all = torchmetrics.MetricCollection(
            {
                "val_f1": torchmetrics.F1Score("multiclass", num_classes=CLASSES, average="macro"),
                "val_recall": torchmetrics.Recall("multiclass", num_classes=CLASSES, average="macro"),
            }
        )

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        scores = self(inputs)
        loss = functional.cross_entropy(scores, labels)
        self.train_acc(scores, labels)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        inputs, labels = batch
        scores = self(inputs)
        self.val_acc(scores, labels)
        self.val_all.update(scores, labels)
        self.log_dict({"val_loss": functional.cross_entropy(scores, labels), "val_mean": scores.mean()})
        self.log("val_acc", self.val_acc)
        self.log_dict(self.val_all)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def _sgd(module: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9)


class DictOfStep(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = _sgd(self)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 3}}


class DictOfEpoch(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = _sgd(self)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "frequency": 2}}


class TupleOfLists(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = _sgd(self)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


class Plateau(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.5)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


class OneCycle(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        total = self.trainer.estimated_stepping_batches
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Sequential(Classifier):
    """Schedulers inside a scheduler, and a momentum that moves with the learning rate; no length of the run in it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        schedulers = torch.optim.lr_scheduler
        parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=5), schedulers.ExponentialLR(optimizer, 0.95)]
        both = schedulers.SequentialLR(optimizer, parts, milestones=[5])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": both, "interval": "step"}}


class LongCycle(Classifier):
    """A cycle that is longer than any run of it, and moves beta1 of Adam as well."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class OwnSchedulerStep(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = _sgd(self)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        assert metric is None
        if self.current_epoch % 2 == 1:
            scheduler.step()


class BatchAlone(Classifier):
    """A step method that takes the batch and no index."""

    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(batch, 0)

    def validation_step(self, batch: Any) -> None:  # type: ignore[override]
        super().validation_step(batch, 0)


class LateLayers(Classifier):
    """Layers that exist only after `setup`, and a hook that needs the data module."""

    def setup(self, stage: str) -> None:
        torch.manual_seed(5)
        self.head = nn.Linear(CLASSES, CLASSES)
        assert self.trainer.datamodule.batch_size

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.net(inputs))


class Counting(Classifier):
    """Writes down what it sees of the run, and lets it weigh in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append(("step", self.current_epoch, self.global_step, batch_idx, self.trainer.training))
        loss = super().training_step(batch, batch_idx) * (1 + 0.1 * self.current_epoch + 0.01 * self.global_step)
        self.outputs.append(loss.detach())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.outputs.append(batch[0].sum())

    def on_train_epoch_start(self) -> None:
        self.outputs.clear()
        self.seen.append(("start", self.current_epoch, self.global_step))

    def on_train_epoch_end(self) -> None:
        self.seen.append(("end", self.current_epoch, self.global_step, float(self.trainer.callback_metrics["val_acc"])))
        self.outputs.clear()

    def on_validation_epoch_start(self) -> None:
        self.outputs.clear()

    def on_validation_epoch_end(self) -> None:
        self.log("val_collected", torch.stack(self.outputs).sum())
        if not self.trainer.sanity_checking:
            self.seen.append(("validated", self.current_epoch, self.global_step, len(self.outputs)))
        self.outputs.clear()


HOOKS = (
    "on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward",
    "on_before_optimizer_step", "on_train_batch_end", "on_validation_start", "on_validation_batch_start",
    "on_validation_batch_end", "on_validation_end",
)  # fmt: skip


class Hooked(Classifier):
    """Overrides every hook around batches and updates, each of which changes the result a little."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.scale = 1.0

    def _told(self, name: str, *values: Any) -> None:
        if not self.trainer.sanity_checking:
            self.calls.append((name, *values))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._told("training_step", batch_idx)
        return {"loss": super().training_step(batch, batch_idx) * self.scale, "rows": len(batch[0])}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 1.5, batch[1]]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scale, self.batch_idx = 1.0 + float(batch[0].mean()), batch_idx
        self._told("on_train_batch_start", batch_idx)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradient = self.net[0].bias.grad
        # Lightning lets go of the gradients when it validates, before each epoch's first batch
        self._told("on_before_zero_grad", gradient is None and self.batch_idx > 0)

    def on_before_backward(self, loss: Tensor) -> None:
        self._told("on_before_backward", round(float(loss.detach()), 4))

    def on_after_backward(self) -> None:
        self.net[0].bias.grad *= 0.5
        self._told("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad += 0.01 * parameter.detach()
        self._told("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._told("on_train_batch_end", round(float(outputs["loss"]), 4), outputs["rows"], batch_idx, self.global_step)

    def on_validation_start(self) -> None:
        self._told("on_validation_start")

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._told("on_validation_batch_start", batch_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._told("on_validation_batch_end", outputs, len(batch[0]), batch_idx)

    def on_validation_end(self) -> None:
        self._told("on_validation_end")


class WarmUp(Classifier):
    """The documented warm-up in `optimizer_step`, and clipping of its own."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.2 * min(1.0, (self.trainer.global_step + 1) / 10)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")


class Adversarial(pl.LightningModule):
    """Two networks, two optimizers, manual optimisation with everything that goes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Linear(2, FEATURES)
        self.critic = nn.Sequential(nn.Linear(FEATURES, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real = batch[0]
        seeds = real[:, :2]
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        loss = -self.critic(self.generator(seeds)).mean()
        self.log("train_generator", loss, prog_bar=True)
        first.zero_grad()
        self.manual_backward(loss)
        assert all(parameter.grad is None for parameter in self.critic.parameters()) or self.global_step > 1
        self.clip_gradients(first, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        first.step()
        self.untoggle_optimizer(first)
        with self.toggled_optimizer(second):
            loss = self.critic(self.generator(seeds).detach()).mean() - self.critic(real).mean()
            self.log("train_critic", loss)
            second.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(second, gradient_clip_val=0.05, gradient_clip_algorithm="value")
            second.step()
        self.seen.append(self.global_step)
        if batch_idx % 2:
            self.lr_schedulers()[0].step()

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers()[1].step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        second = torch.optim.SGD(self.critic.parameters(), lr=0.05)
        schedulers = torch.optim.lr_scheduler
        return [first, second], [schedulers.ExponentialLR(first, 0.9), schedulers.StepLR(second, 1, 0.5)]


class OwnLoaders(Classifier):
    """A module that brings its data along."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(points(40), batch_size=8)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(points(20, seed=1), batch_size=8)


class Tokens(Dataset):
    """A text of random words, in blocks, with the next word as the target."""

    def __init__(self, blocks: int, vocabulary: int, size: int = 5) -> None:
        self.words = torch.randint(vocabulary, (blocks * size + 1,), generator=torch.Generator().manual_seed(0))
        self.blocks, self.size = blocks, size

    def __len__(self) -> int:
        return self.blocks

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.size
        return self.words[start : start + self.size], self.words[start + 1 : start + self.size + 1]


class TokenLoaders(pl.LightningDataModule):
    """Blocks of text: batches of neighbours, or the continuation batches that a recurrent network needs."""

    def __init__(self, blocks: int, vocabulary: int, continued: bool) -> None:
        super().__init__()
        self.data, self.continued = Tokens(blocks, vocabulary), continued

    def train_dataloader(self) -> DataLoader:
        if self.continued:
            return DataLoader(self.data, batch_sampler=SequenceSampler(self.data, batch_size=4))
        return DataLoader(self.data, batch_size=4)


def without_dropout(module: nn.Module) -> nn.Module:
    """Random masks are drawn in different ways, so that they would be compared rather than the training."""
    for child in module.modules():
        if isinstance(child, nn.Dropout):
            child.p = 0.0
        elif isinstance(getattr(child, "dropout", None), float):
            child.dropout = 0.0
    return module
