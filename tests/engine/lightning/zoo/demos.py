"""Modules that come with Lightning, trained by their own loaders where they need no download."""

from typing import Any

import torch
from lightning.pytorch.demos import boring_classes as boring
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.engine.lightning.modules import TokenLoaders, without_dropout
from tests.engine.lightning.zoo.case import Case, Net


def boring_data() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"datamodule": boring.BoringDataModule()}


class Boring(boring.BoringModel):
    """Its own random loaders, drawn from one seed."""

    def train_dataloader(self) -> DataLoader:
        torch.manual_seed(7)
        return super().train_dataloader()

    def val_dataloader(self) -> DataLoader:
        torch.manual_seed(8)
        return super().val_dataloader()


class Transformer(LightningTransformer):
    def prepare_data(self) -> None:
        """Nothing to download."""


class Recurrent(LightningLSTM):
    def prepare_data(self) -> None:
        """Nothing to download."""


def digits() -> dict[str, Any]:
    """Images of the size of MNIST, of noise with a bright row where the label is."""
    generator = torch.Generator().manual_seed(0)
    images = 0.3 * torch.randn(32, 1, 28, 28, generator=generator)
    labels = torch.randint(10, (32,), generator=generator)
    images[torch.arange(32), 0, 2 * labels] += 2
    return {"train_dataloaders": DataLoader(TensorDataset(images, labels), batch_size=8)}


class MnistNet(Net):
    """The network of the MNIST examples, without its dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = without_dropout(boring.Net())

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def loss(self, batch: Any) -> Tensor:
        return functional.nll_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adadelta(self.net.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)]


class WithDropout(Net):
    """The usual classifier with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.append(nn.Dropout(0.2))


CASES = [
    Case("boring", "BoringModel with its own random loaders", Boring, dict, epochs=2, quick=True),
    Case("boring-manual", "ManualOptimBoringModel with BoringDataModule", boring.ManualOptimBoringModel, boring_data,
         epochs=2),
    Case("demo-model", "DemoModel with BoringDataModule", boring.DemoModel, boring_data, epochs=2),
    Case("transformer", "LightningTransformer (word model), no dropout",
         lambda: without_dropout(Transformer(vocab_size=20)),
         lambda: {"datamodule": TokenLoaders(12, 20, continued=False)}, epochs=2),
    Case("lstm", "LightningLSTM with its SequenceSampler (hidden state kept), no dropout",
         lambda: without_dropout(Recurrent(vocab_size=20)),
         lambda: {"datamodule": TokenLoaders(12, 20, continued=True)}, epochs=2),
    Case("mnist-net", "the MNIST example's network and schedule on images of noise", MnistNet, digits, epochs=2),
    Case("dropout", "a classifier with nn.Dropout", WithDropout,
         difference="dropout masks are keyed by seed, step and sample here, so that ranks and restarts agree"),
]  # fmt: skip
