"""Several loaders, streams and hooks of a transfer beside real Lightning: the same batches, weights and names."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

import isoscale
from isoscale.engine.state.checkpoint import read
from isoscale.errors import UserError
from tests.engine.lightning.modules import CLASSES, FEATURES, points
from tests.engine.lightning.test_lightning import (
    Restarted,
    assert_same_weights,
    both,
    fit,
    pair,
)
from tests.ranks import fit_on


class Loaders(pl.LightningDataModule):
    """The loaders that functions make."""

    def __init__(self, make: Any, make_val: Any = None) -> None:
        super().__init__()
        self.make, self.make_val = make, make_val

    def train_dataloader(self) -> Any:
        return self.make()

    def val_dataloader(self) -> Any:
        return self.make_val() if self.make_val else []


def shape(batch: Any) -> Any:
    """The structure of batches side by side, and how many samples each has."""
    if batch is None or isinstance(batch[0] if not isinstance(batch, dict) else None, Tensor):
        return None if batch is None else len(batch[0])
    if isinstance(batch, dict):
        return {key: shape(value) for key, value in batch.items()}
    return type(batch)(shape(value) for value in batch)


class Net(pl.LightningModule):
    """A layer that takes batches of any structure, and remembers what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(FEATURES, CLASSES)
        self.calls: list[Any] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self.layer(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls.append(("train", batch_idx, shape(batch)))
        tensors = [leaf for leaf in tree_leaves(batch) if leaf is not None]
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return sum(self.loss(pair) * (1 + place) for place, pair in enumerate(pairs))

    def note(self, name: str, *words: Any) -> None:
        if self._trainer is not None and not self._trainer.sanity_checking:
            self.calls.append((name, *words))

    def on_validation_start(self) -> None:
        self.note("start")

    def on_validation_epoch_start(self) -> None:
        self.note("epoch start")

    def on_validation_epoch_end(self) -> None:
        self.note("epoch end")
        self.log("val_of_all", torch.tensor(2.0))


class OfLoaders(Net):
    """Evaluates several loaders."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("step", batch_idx, dataloader_idx, len(batch[0]))
        self.log("val_loss", self.loss(batch))
        self.log(f"val_of_{dataloader_idx}", self.loss(batch), add_dataloader_idx=False)

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("batch start", batch_idx, dataloader_idx)

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note("batch end", batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.layer(batch[0]) + dataloader_idx


class Three(pl.LightningDataModule):
    """Loaders of several sizes for each split, in some structure."""

    def __init__(self, structure: Any = list, batch_size: int = 6) -> None:
        super().__init__()
        self.structure, self.batch_size = structure, batch_size

    def loaders(self) -> Any:
        return self.structure(
            [
                DataLoader(points(15, seed=1), batch_size=4),
                DataLoader(Plain(5), batch_size=3),
                DataLoader(points(9, seed=3), batch_size=9),
            ]
        )

    def train_dataloader(self) -> Any:
        return DataLoader(points(24), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = loaders


class Plain(Dataset):
    """A dataset that is read sample by sample."""

    def __init__(self, count: int) -> None:
        self.points = points(count, seed=2)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Any:
        return self.points[index]


def named(loaders: list[Any]) -> dict[str, Any]:
    return {name: loader for name, loader in zip("abc", loaders, strict=False)}


def in_sequence(loaders: list[Any]) -> CombinedLoader:
    return CombinedLoader(named(loaders), "sequential")


def first_alone(loaders: list[Any]) -> list[Any]:
    return loaders[:1]


@pytest.mark.parametrize("structure", [list, tuple, named, in_sequence, first_alone])
def test_several_validation_loaders_are_what_they_are_under_lightning(structure: Any, tmp_path: Path) -> None:
    ours, theirs, run, trainer = both(OfLoaders, tmp_path, partial(Three, structure), epochs=2)
    assert_same_weights(ours, theirs)
    assert ours.calls == theirs.calls
    names = {name for name in trainer.callback_metrics if name.startswith("val")}
    assert names == {name for name in run.metrics if name.startswith("val")}
    assert structure is first_alone or "val_loss/dataloader_idx_2" in names
    for name in names:
        assert run.metrics[name] == pytest.approx(float(trainer.callback_metrics[name]), rel=1e-6), name


def test_tests_and_predictions_of_several_loaders_equal_lightnings(tmp_path: Path) -> None:
    _, theirs, run, trainer = both(OfLoaders, tmp_path, Three, epochs=1)
    expected = trainer.test(theirs, Three(), verbose=False)
    found = isoscale.test(run, "last", data=Three())
    for number, metrics in enumerate(expected):
        name = f"test_loss/dataloader_idx_{number}"
        assert found[name] == pytest.approx(metrics[name], rel=1e-6)
    rows = trainer.predict(theirs, Three())
    predicted = isoscale.predict(run, "last", data=Three(), split="predict")
    assert list(predicted) == [f"prediction/dataloader_idx_{number}" for number in range(3)]
    for mine, other in zip(predicted.values(), rows, strict=True):
        torch.testing.assert_close(mine, torch.cat(other))
    written = isoscale.predict(run, "last", data=Three().predict_dataloader(), split="predict")
    assert written.keys() == predicted.keys()


def test_every_loader_is_limited_by_itself(tmp_path: Path) -> None:
    ours, theirs, *_ = both(
        OfLoaders, tmp_path, Three, epochs=1, limit_val_batches=2, overrides={"train.limit_val_batches": 2}
    )
    assert ours.calls == theirs.calls
    assert [call[2] for call in ours.calls if call[0] == "step"] == [0, 0, 1, 1, 2]


class WithoutIndex(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Takes no number of a loader."""


def test_a_step_that_cannot_tell_loaders_apart_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="give validation_step of WithoutIndex a dataloader_idx"):
        fit(WithoutIndex(), Three(), tmp_path / "run")


@pytest.mark.slow
def test_several_validation_loaders_are_counted_once_on_two_ranks(tmp_path: Path) -> None:
    alone = fit_on(1, tmp_path / "one", partial(_made, OfLoaders, partial(Three, batch_size=6)), train__epochs=2)
    together = fit_on(2, tmp_path / "two", partial(_made, OfLoaders, partial(Three, batch_size=3)), train__epochs=2)
    names = [name for name in alone.metrics if name.startswith("val")]
    assert "val_loss/dataloader_idx_1" in names
    for name in names:
        assert together.metrics[name] == pytest.approx(alone.metrics[name], rel=1e-5), name


def _made(module: Any, data: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    return module(), data()


def side_by_side(mode: str | None = None, structure: Any = list, batch_size: int = 4, **options: Any) -> Any:
    """Loaders of 4, 2 and 6 batches for training, with smaller last ones."""

    def make() -> Any:
        loaders = structure(
            [
                DataLoader(points(15), batch_size=batch_size, **options),
                DataLoader(Plain(5), batch_size=3, **options),
                DataLoader(points(6 * batch_size, seed=4), batch_size=batch_size, **options),
            ]
        )
        return loaders if mode is None else CombinedLoader(loaders, mode)

    return Loaders(make)


COMBINED = [
    (None, list), (None, tuple), (None, named), (None, first_alone), ("max_size_cycle", named), ("min_size", list),
    ("max_size", tuple), ("min_size", lambda loaders: {"x": loaders[:2], "y": loaders[2]}),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "structure"), COMBINED)
def test_several_training_loaders_reach_lightnings_weights(mode: Any, structure: Any, tmp_path: Path) -> None:
    ours, theirs, *_ = both(Net, tmp_path, partial(side_by_side, mode, structure), epochs=3)
    assert ours.calls == theirs.calls
    assert_same_weights(ours, theirs)


def test_a_limit_cuts_the_epochs_of_several_loaders_as_lightning_does(tmp_path: Path) -> None:
    ours, theirs, *_ = both(
        Net, tmp_path, side_by_side, epochs=3, limit_train_batches=3, overrides={"train.limit_train_batches": 3}
    )
    assert_same_weights(ours, theirs)


def test_training_loaders_may_come_one_after_the_other(tmp_path: Path) -> None:
    module = Net()
    fit(module, side_by_side("sequential"), tmp_path / "run", 2)
    epoch = [("train", place, size) for place, size in enumerate([4, 4, 4, 3, 3, 2, 4, 4, 4, 4, 4, 4])]
    assert [call for call in module.calls if call[0] == "train"] == epoch * 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size", "max_size", "sequential"])
def test_several_training_loaders_that_shuffle_do_not_notice_a_stop(mode: str, tmp_path: Path) -> None:
    restarted = Restarted(Net, partial(side_by_side, mode, shuffle=True), tmp_path)
    restarted.assert_equal()


class Seen(Net):
    """Remembers the first number of every sample."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls.append([each[0][:, 0].tolist() for each in batch])
        return super().training_step(batch, batch_idx)


def test_loaders_that_shuffle_have_orders_of_their_own_for_every_pass(tmp_path: Path) -> None:
    module = Seen()

    def twice() -> Any:
        return [DataLoader(points(12), batch_size=4, shuffle=True) for _ in range(2)]

    fit(module, Loaders(twice), tmp_path / "run", 2)
    batches = [call for call in module.calls if isinstance(call, list)]
    one, other = ([row for batch in batches for row in batch[number]] for number in range(2))
    assert one != other
    assert sorted(one[:12]) == sorted(one[12:]) == sorted(other[:12])
    assert one[:12] != one[12:]


@pytest.mark.slow
def test_several_training_loaders_agree_on_two_ranks_and_do_not_notice_a_stop(tmp_path: Path) -> None:
    def weights(world: int, name: str, **keys: Any) -> dict[str, Tensor]:
        data = partial(_even, 8 // world)
        run = fit_on(
            world, tmp_path / name, partial(_made, Net, data), train__epochs=None, train__precision="64", **keys
        )
        return read(run.checkpoint("last"))[0]["model"]

    alone, together = weights(1, "one", train__steps=8), weights(2, "two", train__steps=8)
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-10, atol=1e-12)
    weights(2, "stopped", train__steps=5)
    again = weights(2, "stopped", train__steps=8)
    assert all(torch.equal(again[name], tensor) for name, tensor in together.items())
    in_tree = [weights(world, f"tree{world}", train__steps=8, parallel__reduce="tree") for world in (1, 2)]
    assert all(torch.equal(in_tree[0][name], tensor) for name, tensor in in_tree[1].items())


def _even(batch_size: int) -> Any:
    def make() -> Any:
        return {
            "a": DataLoader(points(32), batch_size=batch_size, shuffle=True),
            "b": DataLoader(Plain(16), batch_size=batch_size, shuffle=True),
        }

    return Loaders(make)


def test_batches_that_cannot_be_cut_alike_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="every batch of every loader must be a multiple of 2"):
        fit(Net(), side_by_side(), tmp_path / "run", **{"train.accumulate": 2})
    with pytest.raises(UserError, match=r"data.subset is for one loader"):
        fit(Net(), side_by_side(), tmp_path / "run", **{"data.subset": 5})


class Stream(IterableDataset):
    """Samples one after the other; with worker processes, each has every second one."""

    def __init__(self, count: int = 22) -> None:
        self.points = points(count)

    def __iter__(self) -> Any:
        worker = get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter([self.points[index] for index in range(number, len(self.points), count)])


class Sized(Stream):
    def __len__(self) -> int:
        return len(self.points)


class Drawing(Stream):
    """A stream that draws its order and its samples at random."""

    def __iter__(self) -> Any:
        for index in torch.randperm(len(self.points)).tolist():
            yield self.points[index][0] + torch.randn(FEATURES), self.points[index][1]


class Ready:
    """No DataLoader: ready batches, of different sizes."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter([points(count, seed=count)[:] for count in (4, 7, 2)])


class ReadyBatches(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return points(3 + index, seed=index)[:]


class Uneven(Sampler):
    def __init__(self) -> None: ...

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Any:
        return iter([[0, 1, 2], [3, 4], [5, 6, 7, 9]])


STREAMS = {
    "without length": lambda: DataLoader(Stream(), batch_size=4),
    "with length": lambda: DataLoader(Sized(), batch_size=4),
    "drop last": lambda: DataLoader(Sized(), batch_size=4, drop_last=True),
    "no DataLoader": Ready,
    "ready batches": lambda: DataLoader(ReadyBatches(), batch_size=None),
    "uneven batches": lambda: DataLoader(points(10), batch_sampler=Uneven()),
    "beside a dataset": lambda: [DataLoader(Sized(), batch_size=4), DataLoader(points(9), batch_size=3)],
    "workers": lambda: DataLoader(Stream(), batch_size=4, num_workers=2),
}


class Evaluated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note("step", batch_idx, len(batch[0]))
        self.log("val_loss", self.loss(batch))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "workers")) for name in STREAMS]
)
def test_a_stream_reaches_lightnings_weights_and_metrics(name: str, tmp_path: Path) -> None:
    val = STREAMS[name] if name not in ("beside a dataset", "workers") else None
    ours, theirs, run, trainer = both(Evaluated, tmp_path, lambda: Loaders(STREAMS[name], val))
    assert ours.calls == theirs.calls
    assert_same_weights(ours, theirs)
    if val is not None:
        assert run.metrics["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-6)
    said = (run.directory.path / "log.txt").read_text()
    assert "can only be read from its start" in said


@pytest.mark.parametrize("keys", [{"train.limit_train_batches": 4}, {"data.samples_per_epoch": 15}])
def test_a_stream_without_length_has_the_epochs_that_the_recipe_gives_it(keys: Any, tmp_path: Path) -> None:
    ours, theirs, run, _ = both(
        Net, tmp_path, lambda: Loaders(STREAMS["without length"]), limit_train_batches=4, overrides=keys
    )
    assert_same_weights(ours, theirs)
    assert "read once to count" not in (run.directory.path / "log.txt").read_text()


def test_a_stream_that_ends_before_the_steps_do_is_read_again_and_says_so(tmp_path: Path) -> None:
    ours, theirs = pair(Net)
    run = fit(ours, Loaders(STREAMS["without length"]), tmp_path / "run", None, **{"train.steps": 9})
    again = fit(theirs, Loaders(STREAMS["with length"]), tmp_path / "sized", None, **{"train.steps": 9})
    assert_same_weights(ours, theirs)
    assert "train.limit_train_batches=6 lets the epoch end there" in (run.directory.path / "log.txt").read_text()
    assert again.metrics


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Stream, Sized, Drawing])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_to_the_same_bits_and_metrics(dataset: Any, workers: int, tmp_path: Path) -> None:
    data = partial(Loaders, lambda: DataLoader(dataset(), batch_size=4, num_workers=workers))
    Restarted(Net, data, tmp_path, **{"train.limit_train_batches": 6}).assert_equal()
    assert "5 batches pass by" in (tmp_path / "stopped" / "log.txt").read_text()


def test_an_iterable_dataset_by_itself_is_cut_into_the_batches_of_the_recipe(tmp_path: Path) -> None:
    ours, theirs = pair(Net)
    fit(ours, Stream(), tmp_path / "run", **{"data.batch_size": 4})
    fit(theirs, Loaders(STREAMS["without length"]), tmp_path / "loader")
    assert_same_weights(ours, theirs)


@pytest.mark.slow
def test_ranks_share_out_the_batches_of_a_stream(tmp_path: Path) -> None:
    data = partial(Loaders, partial(DataLoader, Drawing(), batch_size=8), partial(DataLoader, Sized(), batch_size=5))
    keys = {"train__epochs": 2, "train__precision": "64"}
    runs = [fit_on(world, tmp_path / str(world), partial(_made, Evaluated, data), **keys) for world in (1, 2)]
    alone, together = (read(run.checkpoint("last"))[0]["model"] for run in runs)
    for name, tensor in alone.items():
        torch.testing.assert_close(together[name], tensor, rtol=1e-10, atol=1e-12)
    assert runs[0].metrics["val_loss"] == pytest.approx(runs[1].metrics["val_loss"], rel=1e-10)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: iter([1]), "an iterator that can be read once only"),
        (lambda: DataLoader(Stream(0), batch_size=4), "gives no batches"),
        (lambda: [1], "gives a int"),
    ],
)
def test_what_cannot_be_read_again_is_refused_in_words(loader: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        fit(Net(), Loaders(loader), tmp_path / "run")


class Transferring(Evaluated):
    """All hooks of a transfer, which change the batch."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("before", dataloader_idx)
        return [batch[0] + 1, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.note("transfer", str(device), dataloader_idx)
        return super().transfer_batch_to_device([batch[0] * 2, batch[1]], device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("after", dataloader_idx)
        return [batch[0] - 1, batch[1]]

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.loss(batch))


class TransferringData(Three):
    """Hooks of a data module, one of which the module has as well."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 3, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + dataloader_idx, batch[1]]


@pytest.mark.parametrize("data", [Three, TransferringData])
@pytest.mark.parametrize("module", [Transferring, OfLoaders])
def test_the_hooks_of_a_transfer_are_called_as_under_lightning(module: Any, data: Any, tmp_path: Path) -> None:
    ours, theirs, run, trainer = both(module, tmp_path, data, epochs=2)
    assert ours.calls == theirs.calls
    assert_same_weights(ours, theirs)
    name = "val_loss/dataloader_idx_1"
    assert run.metrics[name] == pytest.approx(float(trainer.callback_metrics[name]), rel=1e-6)
    expected = trainer.test(theirs, data(), verbose=False)[1]["test_loss/dataloader_idx_1"]
    assert isoscale.test(run, "last", data=data())["test_loss/dataloader_idx_1"] == pytest.approx(expected, rel=1e-6)
