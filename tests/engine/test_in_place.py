"""Steps that change their batch in place: neither the stored data nor a later batch may know."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import isoscale
from isoscale.data.file_sources import Files
from isoscale.data.mixture import Mixture
from tests.helpers import QUIET

generator = torch.Generator().manual_seed(0)
X = torch.randn(64, 3, generator=generator)
Y = X.sum(1, keepdim=True)


class Rough(isoscale.Task):
    """Changes whatever it is given, in every step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = (self.model(batch["input"].clone()) - batch["target"]).square().mean()
        batch["input"].mul_(2).sub_(1)
        batch["target"] -= 1
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.model(batch["input"].clone())
        batch["input"].mul_(3)
        return found


class Rows(Dataset):
    def __init__(self, rows: dict[str, Tensor]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self._rows.items()}


class Whole:
    """A source that hands out what it holds where it is asked for all of it."""

    def __init__(self, rows: dict[str, Tensor]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(X)

    def fetch(self, indices: Tensor) -> dict[str, Tensor]:
        if torch.equal(indices, torch.arange(len(X))):
            return self._rows
        return {name: values[indices] for name, values in self._rows.items()}


def as_one(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of one that shares its memory with the data."""
    return {name: value[None] for name, value in samples[0].items()}


def made(kind: str, rows: dict[str, Tensor], folder: Path) -> Any:
    if kind == "tensors":
        return rows
    if kind == "arrays":
        return {name: values.numpy() for name, values in rows.items()}
    if kind == "dataset":
        return Rows(rows)
    if kind == "one":
        return DataLoader(Rows(rows), batch_size=1, collate_fn=as_one)
    if kind == "source":
        return Whole(rows)
    if kind == "mixture":
        return Mixture([rows])
    for name, values in rows.items():
        np.save(folder / f"{name}.npy", values.numpy())
    files = {name: str(folder / f"{name}.npy") for name in rows}
    return Files(train=files, val=files, test=files).train


class Centred:
    """A transform that changes its batch."""

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        batch["input"] -= 1
        return batch


CASES = [
    *((kind, "device") for kind in ("tensors", "arrays", "source", "files", "mixture")),
    *((kind, "host") for kind in ("tensors", "arrays", "source", "files", "mixture", "dataset", "one")),
    ("files", "disk"),
]


class TwoLoaders:
    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def train_dataloader(self) -> DataLoader:
        return self._loader

    def val_dataloader(self) -> DataLoader:
        return self._loader

    def test_dataloader(self) -> DataLoader:
        return self._loader


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [16, 64])
@pytest.mark.parametrize(("kind", "residency"), CASES)
def test_nothing_remains_of_what_a_step_does_to_its_batch(kind: str, residency: str, batch_size: int, tmp_path: Path):
    rows = {"input": X.clone(), "target": Y.clone()}
    given = made(kind, rows, tmp_path)
    data = TwoLoaders(given) if kind == "one" else isoscale.Sources(train=given, val=given, test=given)
    section = {"residency": residency, **({"batch_size": batch_size, "shuffle": False} if kind != "one" else {})}
    recipe = {"data": section, "train": {"epochs": 3, "evaluate": "1 epoch"}, "optimizer": {"name": "sgd", "lr": 1e-30}}
    run = isoscale.Trainer(recipe, run=tmp_path / "run", **QUIET).fit(Rough(), data)
    predictions = [isoscale.predict(run)["prediction"] for _ in range(2)]
    assert rows["input"].equal(X) and rows["target"].equal(Y), "the data is as it was"
    with torch.no_grad():
        by_hand = run.model()(X)
    loss = float((by_hand - Y).square().mean())
    for name in ("train/loss_epoch", "val/loss"):
        assert [value for _, value in run.history(name)] == pytest.approx([loss] * 3, rel=1e-5), name
    for found in predictions:
        torch.testing.assert_close(found, by_hand)
    if kind == "files":
        assert np.array_equal(np.load(tmp_path / "input.npy"), X.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("transforms", [["scale"], [f"{__name__}.Centred"], [f"{__name__}.Centred", "scale"]], ids=str)
@pytest.mark.parametrize(
    ("kind", "residency"), [(kind, "device") for kind in ("tensors", "source")] + [("source", "host")]
)
def test_nothing_remains_of_what_transforms_do(kind: str, residency: str, transforms: list[str], tmp_path: Path):
    rows = {"input": X.clone(), "target": Y.clone()}
    given = made(kind, rows, tmp_path)
    recipe = {"data": {"residency": residency, "batch_size": 64, "shuffle": False, "transforms": transforms}}
    keys = {"train.epochs": 2, **QUIET, "observe.tensorboard": 2}
    data = isoscale.Sources(train=given, val=given, test=given)
    run = isoscale.Trainer(recipe, run=tmp_path / "run", **keys).fit(Rough(), data)
    isoscale.predict(run)
    assert rows["input"].equal(X) and rows["target"].equal(Y)
