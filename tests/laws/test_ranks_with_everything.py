"""What people train with, on two ranks as on one: mixtures, datasets with workers, metrics, terms, loaders."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import isoscale
from isoscale.data.mixture import Mixture
from isoscale.engine.metrics.weighted_sum import WeightedSum
from isoscale.engine.state.checkpoint import read_weights
from tests.helpers import sha, timeless
from tests.laws.test_any_number_of_ranks import assert_close
from tests.ranks import fit_on

pytestmark = pytest.mark.slow

SGD = {"optimizer__name": "sgd", "optimizer__lr": 0.05, "train__epochs": 2, "observe__every": 2}
TREE = {"parallel__reduce": "tree"}


def rows(count: int, width: int = 5, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, width, generator=generator)
    return {"input": inputs, "target": inputs.sum(1, keepdim=True).tanh()}


def both(make: Any, tmp_path: Path, **options: Any) -> list[isoscale.Run]:
    return [fit_on(world, tmp_path / f"{world}-{options.get('parallel__reduce')}", make, **options)
            for world in (1, 2)]  # fmt: skip


def last(run: isoscale.Run) -> dict[str, Tensor]:
    return read_weights(run.checkpoint("last"))


def assert_same_values(one: isoscale.Run, other: isoscale.Run, rel: float = 1e-5) -> None:
    first, second = timeless(one), timeless(other)
    assert [(row["step"], row["name"]) for row in first] == [(row["step"], row["name"]) for row in second]
    assert [row["value"] for row in first] == pytest.approx([row["value"] for row in second], rel=rel)


def mixture() -> tuple[Any, Any]:
    network = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.Linear(8, 1))
    network(torch.zeros(1, 5))
    systems = Mixture([rows(61, seed=1), rows(40, seed=2), rows(90, seed=3)], "size")
    return isoscale.Supervised(network, loss="mse"), isoscale.Sources(train=systems, val=Mixture([rows(21, seed=4)]))


def test_a_mixture_of_systems(tmp_path: Path) -> None:
    runs = both(mixture, tmp_path, **SGD, **TREE, data__batch_size=17)
    assert sha(runs[0]) == sha(runs[1])
    assert timeless(runs[0]) == timeless(runs[1])


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augments in __getitem__, with numpy's generator."""

    def __len__(self) -> int:
        return 93

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = torch.full((5,), index / 93) + torch.from_numpy(np.random.normal(0, 0.1, 5)).float()
        return inputs, inputs.sum(0, keepdim=True)


def dataset() -> tuple[Any, Any]:
    return isoscale.Supervised(nn.Linear(5, 1), loss="mse"), isoscale.Sources(train=Noisy(), val=Noisy())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_that_draws_random_numbers(workers: int, tmp_path: Path) -> None:
    runs = both(dataset, tmp_path, **SGD, **TREE, data__batch_size=20, data__workers=workers)
    assert sha(runs[0]) == sha(runs[1])
    assert timeless(runs[0]) == timeless(runs[1])


class Terms(isoscale.Task):
    """Two terms with weights of their own, a third weighted by class, and metrics of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 3)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.train_accuracy = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, WeightedSum]:
        """The terms of a loss."""
        logits = self.net(batch["input"])
        mask = (batch["input"][:, 0] > 0).float()
        chosen = (logits.square().sum(1) * mask).sum()
        atoms = batch["input"].abs().sum(1).detach()
        self.log("masked", WeightedSum(chosen.detach(), mask.sum()))
        self.train_accuracy.update(logits, self.classes(batch))
        self.log("accuracy", self.train_accuracy)
        entropy = nn.functional.cross_entropy(logits, self.classes(batch), reduction="sum")
        return {
            "entropy": WeightedSum(entropy, len(logits)), "small": WeightedSum(chosen, mask.sum()),
            "scaled": WeightedSum((logits.mean(1).square() * atoms).sum(), atoms.sum()),
        }  # fmt: skip

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """A loss and a metric."""
        logits = self.net(batch["input"])
        self.accuracy.update(logits, self.classes(batch))
        self.log("accuracy", self.accuracy)
        return nn.functional.cross_entropy(logits, self.classes(batch))

    def classes(self, batch: dict[str, Tensor]) -> Tensor:
        """Made up of the inputs."""
        return batch["input"][:, :3].argmax(1)


def terms() -> tuple[Any, Any]:
    return Terms(), isoscale.Sources(train=rows(90), val=rows(31, seed=5))


@pytest.mark.parametrize("reduce", ["tree", "flat", "overlap"])
def test_terms_with_weights_of_their_own_and_torchmetrics(reduce: str, tmp_path: Path) -> None:
    weights = {"small": 0.5, "scaled": {"start": 1.0, "end": 0.1}}
    runs = both(terms, tmp_path, **SGD, parallel__reduce=reduce, data__batch_size=30, train__loss_weights=weights)
    assert_same_values(*runs)
    assert_close(last(runs[1]), last(runs[0]), reduce)
    if reduce == "tree":
        assert sha(runs[0]) == sha(runs[1])
        assert timeless(runs[0]) == timeless(runs[1])


class Loaders:
    """A data module whose loaders say the batch of one rank."""

    prepared = 0

    def __init__(self, batch_size: int, distributed: bool = False) -> None:
        self.batch_size = batch_size
        self.distributed = distributed

    def train_dataloader(self) -> DataLoader[Any]:
        """In order, shared out by torch's own sampler or not."""
        data = TensorDataset(*rows(80).values())
        sampler = DistributedSampler(data, 2, 0, shuffle=False) if self.distributed else None
        return DataLoader(data, batch_size=self.batch_size, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Any]:
        """Some more."""
        return DataLoader(TensorDataset(*rows(20, seed=6).values()), batch_size=self.batch_size)


class Plain(isoscale.Task):
    """A task on tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A mean."""
        return (self.net(batch[0]) - batch[1]).square().mean()

    validation_step = training_step


def loaders_of_20() -> tuple[Any, Any]:
    return Plain(), Loaders(20)


def loaders_of_10() -> tuple[Any, Any]:
    return Plain(), Loaders(10)


def distributed_loaders_of_10() -> tuple[Any, Any]:
    return Plain(), Loaders(10, distributed=True)


@pytest.mark.parametrize("make", [loaders_of_10, distributed_loaders_of_10])
def test_the_batch_of_a_loader_is_that_of_a_rank(make: Any, tmp_path: Path) -> None:
    alone = fit_on(1, tmp_path / "1", loaders_of_20, **SGD)
    together = fit_on(2, tmp_path / "2", make, **SGD)
    assert_same_values(alone, together)
    assert_close(last(together), last(alone), "loaders")


def test_a_run_that_began_on_two_ranks_keeps_its_batch_on_one(tmp_path: Path) -> None:
    whole = fit_on(2, tmp_path / "whole", loaders_of_10, **SGD, **TREE)
    fit_on(2, tmp_path / "parts", loaders_of_10, **{**SGD, "train__epochs": 1}, **TREE)
    parts = fit_on(1, tmp_path / "parts", loaders_of_10, **SGD, **TREE)
    assert sha(parts) == sha(whole)
    assert timeless(parts) == timeless(whole)


class Manual(Plain):
    """A task that updates its weights itself."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        """Its own."""
        self.own = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
        return self.own

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        """An update."""
        loss = Plain.training_step(self, batch, batch_idx)
        self.own.zero_grad()
        loss.backward()
        self.own.step()
        return loss.detach()

    validation_step = Plain.training_step


def manual_20() -> tuple[Any, Any]:
    return Manual(), Loaders(20)


def manual_10() -> tuple[Any, Any]:
    return Manual(), Loaders(10)


def test_a_task_that_updates_its_weights_itself(tmp_path: Path) -> None:
    options = {key: value for key, value in SGD.items() if not key.startswith("optimizer")}
    alone = fit_on(1, tmp_path / "1", manual_20, **options)
    together = fit_on(2, tmp_path / "2", manual_10, **options)
    assert_same_values(alone, together)
    assert_close(last(together), last(alone), "manual")


class Shown(isoscale.Supervised):
    """Writes down what it is given to show."""

    def __init__(self, file: str) -> None:
        super().__init__(nn.Linear(5, 1), loss="mse")
        self.file = file

    def show_results(self, source: Any, outputs: dict[str, Tensor]) -> dict[str, Any]:
        """Nothing for people."""
        torch.save(outputs["prediction"], self.file + os.environ.get("RANK", ""))
        return {}


def shown(file: str) -> tuple[Any, Any]:
    return Shown(file), isoscale.Sources(train=rows(80), val=rows(33, seed=7))


def test_what_is_shown_of_an_evaluation_is_of_all_ranks(tmp_path: Path) -> None:
    options = {**SGD, **TREE, "data__batch_size": 16, "observe__tensorboard": 2}
    for world in (1, 2):
        fit_on(world, tmp_path / str(world), partial(shown, str(tmp_path / f"shown{world}-")), **options)
    alone, together = (torch.load(tmp_path / name) for name in ("shown1-", "shown2-0"))
    assert alone.shape == (33, 1)
    assert torch.equal(alone, together)
