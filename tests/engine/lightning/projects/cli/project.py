"""A module and a data module for LightningCLI."""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Regression(L.LightningModule):
    def __init__(self, width: int = 8, lr: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.Linear(width, 1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Sines(L.LightningDataModule):
    def __init__(self, rows: int = 64, batch_size: int = 16):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        x = torch.randn(self.hparams.rows, 4, generator=torch.Generator().manual_seed(3))
        self.data = TensorDataset(x, x.sin().sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=self.hparams.batch_size)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=self.hparams.batch_size)
