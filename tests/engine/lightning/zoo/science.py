"""Modules of science and of representation learning, and those that build or change themselves in hooks."""

from functools import partial
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.lightning.modules import CLASSES, FEATURES
from tests.engine.lightning.zoo.case import Case, Net


class Heat(pl.LightningModule):
    """A physics-informed network: the heat equation, by second derivatives with respect to the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.diffusivity = nn.Parameter(torch.tensor(0.1))

    def residual(self, points: Tensor) -> Tensor:
        points = points.requires_grad_(True)
        values = self.net(points)
        first = torch.autograd.grad(values.sum(), points, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0][:, 0]
        return first[:, 1] - self.diffusivity * second

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        points, edges, values = batch
        equation, boundary = self.residual(points).square().mean(), functional.mse_loss(self.net(edges), values)
        self.log_dict({"equation": equation, "boundary": boundary}, on_epoch=True)
        return equation + 10 * boundary

    @torch.enable_grad()
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_residual", self.residual(batch[0]).square().mean().detach())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.005)


def heat() -> dict[str, Any]:
    numbers = torch.Generator().manual_seed(0)
    inside, edges = torch.rand(48, 2, generator=numbers), torch.rand(48, 2, generator=numbers)
    edges[:, 1] = 0
    data = TensorDataset(inside, edges, torch.sin(torch.pi * edges[:, :1]))
    return {"train_dataloaders": DataLoader(data, 12), "val_dataloaders": DataLoader(data, 12)}


class MultiTask(Net):
    """Two tasks whose weights are learned (homoscedastic uncertainty)."""

    def __init__(self) -> None:
        super().__init__()
        self.regression = nn.Linear(8, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.backbone(batch[0])
        losses = torch.stack(
            [functional.cross_entropy(self.head(features), batch[1]),
             functional.huber_loss(self.regression(features)[:, 0], batch[0].sum(1))]
        )  # fmt: skip
        self.log_dict({f"weight_{number}": each for number, each in enumerate(torch.exp(-self.log_vars.detach()))})
        return (torch.exp(-self.log_vars) * losses + self.log_vars).sum()


class Contrastive(pl.LightningModule):
    """NT-Xent over two views of a batch, with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 8))
        self.log_temperature = nn.Parameter(torch.tensor(-1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        views = torch.cat([batch[0] * 1.1, batch[0].roll(1, dims=1)])
        codes = functional.normalize(self.encoder(views), dim=1)
        similarity = codes @ codes.t() / self.log_temperature.exp()
        similarity = similarity.masked_fill(torch.eye(len(codes), dtype=torch.bool, device=self.device), float("-inf"))
        count = len(batch[0])
        partners = torch.arange(2 * count, device=self.device).roll(count)
        loss = functional.cross_entropy(similarity, partners)
        self.log("nt_xent", loss, batch_size=count)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


class Balanced(Net):
    """Label smoothing with class weights, which are a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 0.5]))
        self.criterion = nn.CrossEntropyLoss(weight=self.weights, label_smoothing=0.1)

    def loss(self, batch: Any) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])


class Buffered(Net):
    """Buffers that hooks update and steps read: statistics of the inputs, a queue of features."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("queue", torch.zeros(16, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.mean.mul_(0.9).add_(batch[0].mean(0), alpha=0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs - self.mean)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = self.backbone(batch[0] - self.mean)
        distance = torch.cdist(features, self.queue.clone()).mean()
        start = int(self.place)
        self.queue[start : start + len(features)] = features.detach()
        self.place[0] = (start + len(features)) % 16
        return functional.cross_entropy(self.head(features), batch[1]) + 0.01 * distance


class BuiltLate(pl.LightningModule):
    """Layers that `configure_model` builds from the settings."""

    def __init__(self, widths: tuple[int, ...] = (8, 8)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(21)
            widths = (FEATURES, *self.hparams.widths)
            layers = [nn.Sequential(nn.Linear(*pair), nn.GELU()) for pair in pairwise(widths)]
            self.net = nn.Sequential(*layers, nn.Linear(widths[-1], CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True, logger=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.NAdam(self.trainer.model.parameters(), lr=0.01)


class Configured(Net):
    """Optimizer and scheduler as partial functions, as in the lightning-hydra-template; torch.compile is off."""

    def __init__(self, net: nn.Module, optimizer: Any, scheduler: Any, compile: bool) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def setup(self, stage: str) -> None:
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        scheduler = self.hparams.scheduler(optimizer=optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "interval": "epoch", "frequency": 1},
        }


def configured() -> Configured:
    return Configured(
        nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES)),
        partial(torch.optim.Adam, lr=0.05),
        partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="min", factor=0.1, patience=1),
        compile=False,
    )


CASES = [
    Case("pinn", "physics-informed network: second derivatives, a learned coefficient", Heat, heat),
    Case("multi-task", "two tasks with learned weights", MultiTask),
    Case("contrastive", "NT-Xent with a learned temperature", Contrastive),
    Case("class-weights", "label smoothing with class weights in a buffer", Balanced),
    Case("buffers", "buffers that hooks and steps update: running mean, a queue of features", Buffered),
    Case("configure-model", "layers built in configure_model, trainer.model in configure_optimizers", BuiltLate),
    Case("partials", "optimizer and scheduler as partial functions, plateau, setup by stage", configured, epochs=5),
]  # fmt: skip
