"""Fine-tuning: frozen backbones, unfreezing by callbacks, distillation, checkpoints of a module with settings."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional

from tests.engine.lightning.modules import CLASSES, FEATURES
from tests.engine.lightning.zoo.case import Case, Net


class FrozenBackbone(Net):
    """The backbone of the documentation's transfer learning: frozen, in eval mode, under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU())
        for parameter in self.backbone.parameters():
            parameter.requires_grad = False

    def forward(self, inputs: Tensor) -> Tensor:
        self.backbone.eval()
        with torch.no_grad():
            features = self.backbone(inputs).flatten(1)
        return self.head(features)


class ToFinetune(Net):
    """What BackboneFinetuning expects: an optimizer that has the head alone at first."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(filter(lambda each: each.requires_grad, self.parameters()), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [2], 0.5)]


class Milestones(BaseFinetuning):
    """A callback of one's own, in the manner of Lightning's example."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.002, train_bn=False)


class Unfreeze(pl.Callback):
    """A callback that knows nothing of Lightning's: the flag, and a smaller learning rate."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 2:
            pl_module.backbone.requires_grad_(True)
            trainer.optimizers[0].param_groups[0]["lr"] *= 0.1


class Distilled(Net):
    """A student with a frozen teacher."""

    def __init__(self, temperature: float = 2.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.teacher = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, CLASSES))
        self.teacher.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.teacher.eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores, temperature = self(batch[0]), self.hparams.temperature
        with torch.no_grad():
            target = functional.softmax(self.teacher(batch[0]) / temperature, dim=1)
        soft = functional.kl_div(functional.log_softmax(scores / temperature, dim=1), target, reduction="batchmean")
        loss = 0.5 * functional.cross_entropy(scores, batch[1]) + 0.5 * temperature**2 * soft
        self.log_dict({"train_loss": loss, "train_soft": soft}, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, nesterov=True)


class Saved(Net):
    """Settings that a checkpoint holds, and something that the module saves itself."""

    def __init__(self, width: int = 8, lr: float = 0.02, **others: Any) -> None:
        super().__init__(width)
        self.save_hyperparameters()
        self.num_batches = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_batches += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_batches"] = self.num_batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_batches = checkpoint["num_batches"]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


def loaded(module: Any, callbacks: list[Any]) -> Any:
    """The best checkpoint, as a module."""
    module = Saved.load_from_checkpoint(callbacks[0].best_model_path, map_location="cpu")
    return module.num_batches, dict(module.hparams), module.state_dict()


CASES = [
    Case("frozen-backbone", "frozen backbone in eval mode under no_grad", FrozenBackbone),
    Case("backbone-finetuning", "BackboneFinetuning", ToFinetune, epochs=4,
         trainer=lambda folder: {"callbacks": [BackboneFinetuning(1, lambda epoch: 1.5, verbose=False)]}),
    Case("base-finetuning", "a subclass of BaseFinetuning that adds a parameter group", ToFinetune,
         trainer=lambda folder: {"callbacks": [Milestones()]}),
    Case("unfreezing", "a user's callback that unfreezes and lowers the learning rate", Net, epochs=4,
         trainer=lambda folder: {"callbacks": [Unfreeze()]}),
    Case("distillation", "knowledge distillation with a frozen teacher", Distilled),
    Case("hyperparameters", "save_hyperparameters, on_save_checkpoint, ModelCheckpoint, load_from_checkpoint",
         lambda: Saved(width=6, lr=0.05, note="mine"), facts=loaded,
         trainer=lambda folder: {"callbacks": [ModelCheckpoint(folder, monitor="val_loss")]}),
]  # fmt: skip
