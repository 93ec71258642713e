"""Sequences: packed ones, a hidden state that is kept, truncated backpropagation, ragged batches."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.engine.lightning.zoo.case import Case


class Ragged(Dataset):
    """Sequences of 3 to 9 rows, and a label."""

    def __init__(self, count: int = 24) -> None:
        numbers = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 10, (count,), generator=numbers)
        self.rows = [torch.randn(int(length), 4, generator=numbers) for length in lengths]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index], int(self.rows[index].sum() > 0)


def padded(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    rows, labels = zip(*samples, strict=True)
    return {
        "rows": pad_sequence(rows, batch_first=True),
        "lengths": torch.tensor([len(each) for each in rows]),
        "labels": torch.tensor(labels),
    }


def listed(samples: list[tuple[Tensor, int]]) -> tuple[list[Tensor], Tensor]:
    """A batch whose samples keep their shapes."""
    return [rows for rows, _ in samples], torch.tensor([label for _, label in samples])


class Packed(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        packed = pack_padded_sequence(batch["rows"], batch["lengths"].cpu(), batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        loss = functional.cross_entropy(self.head(hidden[-1]), batch["labels"])
        self.log("train_loss", loss, batch_size=len(batch["labels"]))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Lists(Packed):
    """A sequence after the other, as graphs and point clouds are often computed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        rows, labels = batch
        scores = torch.stack([self.head(self.lstm(each[None])[0].mean(1)[0]) for each in rows])
        loss = functional.cross_entropy(scores, labels)
        self.log("train_loss", loss, batch_size=len(labels))
        return loss


class KeptState(pl.LightningModule):
    """A GRU whose state goes on from batch to batch, and starts anew with an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(3, 6, batch_first=True), nn.Linear(6, 3)
        self.hidden: Tensor | None = None

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs, hidden = self.gru(batch[0][:, :-1], self.hidden)
        self.hidden = hidden.detach()
        return functional.mse_loss(self.head(outputs), batch[0][:, 1:])

    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), lr=0.01)


class Truncated(KeptState):
    """Truncated backpropagation by hand: several updates for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer, hidden, loss = self.optimizers(), None, torch.zeros(())
        for piece in batch[0].split(4, dim=1):
            outputs, hidden = self.gru(piece[:, :-1], hidden)
            loss = functional.mse_loss(self.head(outputs), piece[:, 1:])
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            hidden = hidden.detach()
        self.log("train_loss", loss, prog_bar=True)


def waves() -> dict[str, Any]:
    times = torch.linspace(0, 6, 12)[None, :, None] + torch.arange(16)[:, None, None]
    return {"train_dataloaders": DataLoader(TensorDataset(torch.sin(times * torch.tensor([1.0, 2.0, 3.0]))), 4)}


CASES = [
    Case("packed-lstm", "LSTM on packed sequences, a collate function that pads", Packed,
         lambda: {"train_dataloaders": DataLoader(Ragged(), 6, collate_fn=padded)}),
    Case("ragged", "batches that are lists of tensors of several shapes", Lists,
         lambda: {"train_dataloaders": DataLoader(Ragged(), 6, collate_fn=listed)}),
    Case("gru-state", "GRU with a hidden state that is kept between batches", KeptState, waves),
    Case("truncated-backprop", "truncated backpropagation by hand, several updates for each batch", Truncated, waves),
]  # fmt: skip
