"""Data: data modules, samplers, several loaders at once, streams, hooks around the transfer of a batch."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler, random_split

from tests.engine.lightning.modules import points
from tests.engine.lightning.zoo.case import Case, Net, loaders


class Split(pl.LightningDataModule):
    """One data set that `setup` splits by a seed, with settings of its own."""

    def __init__(self, batch_size: int = 8, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.train_set: Any = None
        self.val_set: Any = None

    def setup(self, stage: str) -> None:
        if self.trainer is not None and self.hparams.batch_size % self.trainer.world_size:
            raise RuntimeError("a batch is not divisible by the number of devices")
        if self.train_set is None:
            numbers = torch.Generator().manual_seed(42)
            self.train_set, self.val_set = random_split(points(60), [0.7, 0.3], generator=numbers)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, num_workers=self.hparams.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val_set, batch_size=self.hparams.batch_size)


class Ordered(WeightedRandomSampler):
    """A weighted sampler that is seeded by its epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator = torch.Generator().manual_seed(max(self.epoch, 0))
        return super().__iter__()


def weighted(sampler: type[WeightedRandomSampler]) -> dict[str, Any]:
    data = points(40)
    weights = 1.0 / torch.bincount(data.tensors[1])[data.tensors[1]]
    return {**loaders(), "train_dataloaders": DataLoader(data, 8, sampler=sampler(weights, len(data)))}


class FromTwo(Net):
    """Batches that are dicts of the batches of two loaders, one of them without labels."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch["labelled"]
        (others,) = batch["unlabelled"]
        supervised = self.loss((inputs, labels))
        consistency = (self(others) - self(others * 1.01)).square().mean()
        self.log_dict({"supervised": supervised, "consistency": consistency})
        return supervised + 10 * consistency


def two(mode: str | None) -> dict[str, Any]:
    unlabelled = TensorDataset(points(24, seed=5).tensors[0])
    both = {"labelled": DataLoader(points(40), 8), "unlabelled": DataLoader(unlabelled, 4)}
    return {**loaders(), "train_dataloaders": both if mode is None else CombinedLoader(both, mode)}


class FromBoth(Net):
    """Batches that are lists of the batches of two loaders, of which the shorter one gives None in the end."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = [self.loss(each) for each in batch if each is not None]
        return torch.stack(losses).mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss(batch))


def both() -> dict[str, Any]:
    training = [DataLoader(points(16), 8), DataLoader(points(20, seed=3), 4)]
    validation = [DataLoader(points(16, seed=1), 8), DataLoader(points(12, seed=4), 4)]
    return {
        "train_dataloaders": CombinedLoader(training, "max_size"),
        "val_dataloaders": CombinedLoader(validation, "sequential"),
    }


class Stream(IterableDataset):
    """Rows that only come one after the other."""

    def __init__(self, count: int = 40) -> None:
        self.data = points(count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(list(self.data))


class Transferred(Net):
    """All three hooks around the transfer of a batch."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return [each.to(device) for each in batch]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + 0.1, batch[1]]


class AugmentingData(Split):
    """A data module that augments on the device, in training only."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0].flip(1), batch[1]] if self.trainer.training else batch


CASES = [
    Case("datamodule", "LightningDataModule with random_split in setup, hparams, trainer.world_size", Net,
         lambda: {"datamodule": Split()}, quick=True),
    Case("weighted-sampler", "WeightedRandomSampler seeded by its epoch", Net, lambda: weighted(Ordered)),
    Case("shuffle", "shuffle=True", Net,
         lambda: {**loaders(), "train_dataloaders": DataLoader(points(40), 8, shuffle=True)},
         difference="the order of samples is a function of the seed here, the same on any number of ranks"),
    Case("subset", "Subset of a data set, drop_last, a last batch that is smaller in validation", Net,
         lambda: {**loaders(), "train_dataloaders": DataLoader(Subset(points(40), range(3, 38)), 8, drop_last=True)}),
    Case("dict-of-loaders", "training batches of two loaders in a dict (the longer one says when to end)", FromTwo,
         lambda: two(None)),
    Case("combined-min-size", "CombinedLoader in mode min_size", FromTwo, lambda: two("min_size")),
    Case("combined-max-size", "CombinedLoader in mode max_size for training, sequential for validation", FromBoth,
         both),
    Case("iterable", "IterableDataset", Net, lambda: {**loaders(), "train_dataloaders": DataLoader(Stream(), 8)}),
    Case("transfer-hooks", "on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer", Transferred),
    Case("datamodule-transfer", "on_after_batch_transfer of a data module, by trainer.training", Net,
         lambda: {"datamodule": AugmentingData()}),
]  # fmt: skip
