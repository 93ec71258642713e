"""One script, as it is sent around: a model, its loaders, callbacks, a Trainer."""

import argparse
import json

import lightning as L
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def make_data(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 1, 8, 8, generator=generator)
    return TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())


class LitConvNet(L.LightningModule):
    def __init__(self, channels=4, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(), nn.Flatten(), nn.Linear(channels * 36, 2)
        )
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=2)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.val_acc, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.cross_entropy(self(x), y))

    def predict_step(self, batch, batch_idx):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    L.seed_everything(42)
    model = LitConvNet(lr=args.lr)
    train_loader = DataLoader(make_data(96, 0), batch_size=args.batch_size)
    val_loader = DataLoader(make_data(40, 1), batch_size=args.batch_size)
    test_loader = DataLoader(make_data(40, 2), batch_size=args.batch_size)

    checkpoint = ModelCheckpoint(dirpath="checkpoints", filename="best", monitor="val_loss", mode="min")
    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=1,
        gradient_clip_val=1.0,
        logger=TensorBoardLogger("logs", name="convnet"),
        callbacks=[checkpoint, EarlyStopping("val_loss", patience=3), LearningRateMonitor("step")],
        log_every_n_steps=1,
        enable_progress_bar=False,
    )
    trainer.fit(model, train_loader, val_loader)
    results = trainer.test(model, test_loader)

    best = LitConvNet.load_from_checkpoint(checkpoint.best_model_path)
    with torch.no_grad():
        best.eval()
        accuracy = (best(make_data(40, 2).tensors[0]).argmax(1) == make_data(40, 2).tensors[1]).float().mean()
    torch.save(model.state_dict(), "weights.pt")
    with open("results.json", "w") as file:
        json.dump({**results[0], "best": float(checkpoint.best_model_score), "accuracy": float(accuracy)}, file)


if __name__ == "__main__":
    main()
