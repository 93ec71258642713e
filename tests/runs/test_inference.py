"""Data that people hand over for predictions and tests: the right rows, in order, in stored units, or words."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import isoscale
from isoscale.errors import UserError
from tests.helpers import QUIET

generator = torch.Generator().manual_seed(0)
ALL = torch.randn(200, 4, generator=generator)
TARGET = 100 + 10 * ALL @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]]) / 4
X, Y = ALL[:50], TARGET[:50]
ARRAY = X.numpy()
SOME = [7, 3, 30, 3]
UNITS = [{"class": "divide", "by": 2}, {"class": "normalize", "mean": 100, "std": 10, "key": "target"}]
RECIPE: dict[str, Any] = {
    "train": {"epochs": 3},
    "optimizer": {"lr": 0.1},
    "data": {"batch_size": 20, "transforms": UNITS},
}


class OfPredictions(Dataset):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> Any:
        return self._make(index)


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        yield from X


class Table:
    """As much of a pandas DataFrame as matters."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)

    def to_numpy(self) -> np.ndarray:
        return ARRAY


class Everywhere(LightningDataModule):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(X, Y), batch_size=7)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(X.flip(0)), batch_size=7)


class OnlyPredict(LightningDataModule):
    def predict_dataloader(self) -> DataLoader:
        return DataLoader(X, batch_size=7)


class Marked(Dataset):
    """As torchvision's, it says by `train` which part it is."""

    train = True

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index], Y[index]


def fit(path: Path, task: nn.Module, rows: Any = None, **sections: Any) -> isoscale.Run:
    rows = {"input": ALL, "target": TARGET} if rows is None else rows
    data = isoscale.Sources(train=rows, val=rows, test=rows)
    return isoscale.Trainer({**RECIPE, **sections}, run=path, **QUIET).fit(task, data)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    torch.manual_seed(0)
    task = isoscale.Supervised(nn.Linear(4, 1), "mse", ["mae"])
    return fit(tmp_path_factory.mktemp("runs") / "run", task)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("runs") / "plain"
    return fit(path, isoscale.Supervised(nn.Linear(4, 1)), (ALL, TARGET), data={"batch_size": 20})


@torch.no_grad()
def expected(run: isoscale.Run, rows: Tensor = X) -> Tensor:
    """By hand: the network sees half of the input and learns normalised targets."""
    return run.model()(rows / 2) * 10 + 100


def saved(folder: Path, kind: str) -> Any:
    path = folder / f"rows.{kind}"
    if kind == "mapped":
        return np.load(saved(folder, "npy"), mmap_mode="r")
    if kind == "archive":
        return np.load(saved(folder, "npz"))
    if kind == "text":
        return str(saved(folder, "npy"))
    if kind == "npy":
        np.save(path, ARRAY)
    elif kind == "npz":
        np.savez(path, input=ARRAY, target=Y.numpy())
    elif kind == "csv":
        np.savetxt(path, ARRAY, delimiter=",", fmt="%.9g")
    else:
        with h5py.File(path, "w") as file:
            file["input"] = ARRAY
    return path


def reversed_collate(samples: list[Any]) -> dict[str, Tensor]:
    return {"input": torch.stack([x for x, _ in samples]), "unused": torch.zeros(len(samples))}


READ_ONLY = ARRAY.copy()
READ_ONLY.flags.writeable = False
WAYS: dict[str, Any] = {
    "a tensor": X,
    "a tensor in float64": X.double(),
    "a parameter": nn.Parameter(X),
    "a tensor that requires gradients": X.clone().requires_grad_(),
    "a tensor that is not contiguous": X.t().contiguous().t(),
    "an array": ARRAY,
    "an array in float64": ARRAY.astype(np.float64),
    "an array in big-endian order": ARRAY.astype(">f4"),
    "an array that is not contiguous": np.asfortranarray(ARRAY),
    "an array read backwards": ARRAY[::-1].copy()[::-1],
    "an array that may not be written": READ_ONLY,
    "a tuple of input and target": (X, Y),
    "a list of input and target": [ARRAY, Y.numpy()],
    "a tuple of the input alone": (X,),
    "a dict of the input alone": {"input": ARRAY},
    "a dict with the target": {"input": X, "target": Y},
    "a dict with more than that": {"input": X, "weight": Y, "name": torch.arange(50)},
    "a TensorDataset of the input alone": TensorDataset(X),
    "a TensorDataset": TensorDataset(X, Y),
    "a Dataset of inputs": OfPredictions(lambda index: X[index]),
    "a Dataset of arrays": OfPredictions(lambda index: ARRAY[index]),
    "a Dataset of pairs": OfPredictions(lambda index: (X[index], Y[index])),
    "a Dataset of dicts": OfPredictions(lambda index: {"input": X[index]}),
    "a Dataset with an attribute train": Marked(),
    "a Subset": Subset(TensorDataset(ALL, TARGET), range(50)),
    "a ConcatDataset": ConcatDataset([TensorDataset(X[:20], Y[:20]), TensorDataset(X[20:], Y[20:])]),
    "a loader": DataLoader(TensorDataset(X, Y), batch_size=8),
    "a loader of inputs": DataLoader(X, batch_size=8),
    "a loader that shuffles": DataLoader(TensorDataset(X, Y), batch_size=8, shuffle=True),
    "a loader that drops the last batch": DataLoader(TensorDataset(X, Y), batch_size=8, drop_last=True),
    "a loader with a batch sampler": DataLoader(
        TensorDataset(X, Y), batch_sampler=BatchSampler(SequentialSampler(X), 8, True)
    ),
    "a loader with its own collate function": DataLoader(
        TensorDataset(X, Y), batch_size=8, collate_fn=reversed_collate
    ),
    "a loader with workers": DataLoader(TensorDataset(X, Y), batch_size=8, num_workers=1),
    "Sources": isoscale.Sources(test={"input": X, "target": Y}),
    "Sources of a tensor": isoscale.Sources(test=X),
    "a data module": Everywhere(),
    "a mapped file": "mapped",
    "an archive": "archive",
    "a path as text": "text",
    "a file .npy": "npy",
    "a file .npz": "npz",
    "a file .csv": "csv",
    "a file .h5": "h5",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_row_is_predicted_in_order_and_in_stored_units(way: str, run: isoscale.Run, tmp_path: Path):
    data = saved(tmp_path, WAYS[way]) if isinstance(WAYS[way], str) else WAYS[way]
    found = isoscale.predict(run, data=data)
    assert found.keys() == {"prediction"}
    torch.testing.assert_close(found["prediction"], expected(run), rtol=1e-5, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_every_row_is_predicted_without_transforms_too(way: str, plain: isoscale.Run, tmp_path: Path):
    data = saved(tmp_path, WAYS[way]) if isinstance(WAYS[way], str) else WAYS[way]
    with torch.no_grad():
        rows = plain.model()(X)
    torch.testing.assert_close(isoscale.predict(plain, data=data)["prediction"], rows, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampler",
    [SOME, SubsetRandomSampler(SOME), SubsetRandomSampler(torch.tensor(SOME))],
    ids=["own", "random", "tensor"],
)
def test_chosen_samples_come_in_the_order_in_which_they_were_chosen(sampler: Any, run: isoscale.Run):
    loader = DataLoader(TensorDataset(X, Y), batch_size=3, sampler=sampler)
    torch.testing.assert_close(isoscale.predict(run, data=loader)["prediction"], expected(run, X[SOME]))


@pytest.mark.parametrize("split", ["train", "val", "test", "predict"])
def test_data_may_be_handed_over_for_any_split(split: str, run: isoscale.Run):
    for data in (X, isoscale.Sources(**{split: X}), DataLoader(X, batch_size=8)):
        torch.testing.assert_close(isoscale.predict(run, data=data, split=split)["prediction"], expected(run))


def test_a_data_module_is_asked_for_the_split(run: isoscale.Run):
    for data, rows in ((Everywhere(), X.flip(0)), (OnlyPredict(), X)):
        found = isoscale.predict(run, data=data, split="predict")["prediction"]
        torch.testing.assert_close(found, expected(run, rows))


def test_a_row_that_is_not_a_number_spoils_only_itself(run: isoscale.Run):
    rows = X.clone()
    rows[7, 2] = torch.nan
    found = isoscale.predict(run, data=rows)["prediction"]
    assert found.isnan().nonzero().tolist() == [[7, 0]]
    torch.testing.assert_close(found[8:], expected(run)[8:])


REFUSED: dict[str, tuple[Any, str]] = {
    "another name": ({"x": X}, r"reads 'input', but a batch is a dict of 'x': rename it to 'input'"),
    "a list of samples": (list(ARRAY), r"50 arrays of one shape in a list: .* numpy.stack\(rows\)"),
    "a list of numbers": ([0.5, 0.25], r"not float 0.5: make one of them, such as torch.tensor"),
    "a list of lists": (X.tolist(), r"not float .*: make one of them, such as torch.tensor"),
    "one sample": (X[0], r"Then give x\[None\]|samples of the names, shapes and types"),
    "no samples": (X[:0], "has no samples"),
    "more features": (torch.randn(50, 5), r"a sample has 'input' 5 float32|a sample is 5 float32"),
    "words": (np.array(["a", "b"]), "an array of <U1"),
    "a DataFrame": (Table(), r"from a Table: say which columns are what, .*to_numpy\(\)"),
    "a generator": ((row for row in X), "cannot read samples from generator"),
    "an IterableDataset": (Endless(), r"has no places to address.*torch.stack\(list\(dataset\)\)"),
    "a loader without batches": (DataLoader(TensorDataset(X), batch_size=None), "50 rows of 200 samples"),
    "random draws": (DataLoader(TensorDataset(X), sampler=RandomSampler(X, True)), "at random .RandomSampler"),
    "weighted draws": (
        DataLoader(TensorDataset(X), sampler=WeightedRandomSampler([1.0] * 50, 9)),
        "at random .WeightedRandomSampler",
    ),
    "another part": (isoscale.Sources(predict=X), r"no test part; take another one: predict \(split='predict'"),
    "another loader": (OnlyPredict(), r"no test part; take another one: predict \(split='predict'"),
    "a file that is not there": ("nowhere.npy", "data='nowhere.npy' is taken for a file of samples"),
    "a file of another kind": (__file__, "is taken for a file of samples"),
    "different lengths": ((X, Y[:7]), r"numbers of rows are \[7, 50\]"),
    "an object": (object(), "cannot read samples from object"),
    "nothing but numbers": (range(50), "one number, int64"),
    "a set": ({1.0, 2.0}, "cannot read samples from set"),
    "no test loader": (LightningDataModule(), "the data has no test part"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_predicted_is_refused_in_words(what: str, run: isoscale.Run):
    data, words = REFUSED[what]
    with pytest.raises(UserError, match=words):
        isoscale.predict(run, data=data)


def test_a_stream_is_predicted_in_its_own_order(run: isoscale.Run):
    found = isoscale.predict(run, data=DataLoader(Endless(), batch_size=8))["prediction"]  # the last has 2
    torch.testing.assert_close(found, expected(run, X))


def test_whole_numbers_are_taken_or_refused_in_words(run: isoscale.Run, plain: isoscale.Run):
    rows = torch.arange(200).view(50, 4)
    torch.testing.assert_close(isoscale.predict(run, data=rows)["prediction"], expected(run, rows.float()))
    with pytest.raises(UserError, match=r"a sample is 4 int64\. Give samples of the names, shapes and types"):
        isoscale.predict(plain, data=rows)


@pytest.mark.parametrize("data", [X, (X,), {"input": X}, TensorDataset(X), isoscale.Sources(test=X)], ids=type)
def test_a_test_without_targets_is_refused_in_words(data: Any, run: isoscale.Run):
    with pytest.raises(UserError, match=r"there are no targets: a batch is .* give a tuple \(x, y\), or a dict"):
        isoscale.test(run, data=data)


@pytest.mark.parametrize(
    "data",
    [(X, Y), {"input": X, "target": Y}, TensorDataset(X, Y), DataLoader(TensorDataset(X, Y), 7, shuffle=True)],
    ids=type,
)
def test_metrics_of_handed_data_are_in_stored_units(data: Any, run: isoscale.Run):
    found = isoscale.test(run, data=data)
    apart = expected(run) - Y
    assert found["test/mae"] == pytest.approx(float(apart.abs().mean()), rel=1e-5)
    assert found["test/loss"] == pytest.approx(float((apart / 10).square().mean()), rel=1e-4), "what is optimised"


def test_limits_of_a_training_do_not_cut_what_is_predicted(tmp_path: Path):
    run = fit(tmp_path / "run", isoscale.Supervised(nn.Linear(4, 1)), train={"epochs": 1, "limit_test_batches": 1})
    assert len(isoscale.predict(run)["prediction"]) == len(isoscale.predict(run, data=ALL)["prediction"]) == 200
    run = fit(tmp_path / "over", isoscale.Supervised(nn.Linear(4, 1)), train={"epochs": 1, "overfit_batches": 1})
    assert len(isoscale.predict(run, data=ALL, split="val")["prediction"]) == 200


def test_nothing_reads_on_when_all_is_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("isoscale.data.feeds.residency.SHARE_OF_DEVICE", 0)
    run = fit(tmp_path / "run", isoscale.Supervised(nn.Linear(4, 1)), train={"epochs": 1})
    before = threading.active_count()
    isoscale.predict(run, data=X)
    isoscale.test(run, data=(X, Y))
    assert threading.active_count() == before


class Own(isoscale.Task):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found, true = self.model(batch["input"]), batch["target"]
        self.log("mae", (self.in_stored_units(found.detach()) - self.in_stored_units(true)).abs().mean())
        return (found - true).square().mean()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(batch["input"])


class Light(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return (self(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    return fit(tmp_path_factory.mktemp("runs") / "run", Own())


class TestATaskOfOnesOwn:
    @pytest.mark.parametrize(
        "data",
        [
            {"input": X},
            {"input": ARRAY, "target": Y},
            OfPredictions(lambda index: {"input": X[index]}),
            DataLoader(TensorDataset(X, Y), batch_size=8, collate_fn=reversed_collate),
        ],
        ids=type,
    )
    def test_predicts_every_row_in_stored_units(self, data: Any, own_run: isoscale.Run):
        torch.testing.assert_close(isoscale.predict(own_run, data=data)["prediction"], expected(own_run))

    def test_can_log_metrics_in_stored_units(self, own_run: isoscale.Run):
        apart = expected(own_run, ALL) - TARGET
        assert isoscale.test(own_run)["test/mae"] == pytest.approx(float(apart.abs().mean()), rel=1e-5)

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (X, "a batch is one tensor, whose parts have no names"),
            ((X, Y), "a batch is a tuple"),
            ({"x": X}, "has 'x'"),
        ],
        ids=["tensor", "tuple", "dict"],
    )
    def test_says_what_it_cannot_read(self, data: Any, words: str, own_run: isoscale.Run):
        with pytest.raises(UserError, match=words):
            isoscale.predict(own_run, data=data)

    def test_says_what_it_misses(self, tmp_path: Path):
        run = fit(tmp_path / "run", Own(), data={"batch_size": 20})
        with pytest.raises(
            UserError, match=r"Own cannot take this data \(KeyError: 'target'\): a sample has 'input' 4"
        ):
            isoscale.test(run, data={"input": X})

    def test_must_say_what_it_predicts(self, tmp_path: Path):
        class Silent(Own):
            predict_step = isoscale.Task.predict_step

        run = fit(tmp_path / "run", Silent())
        with pytest.raises(UserError, match="Silent does not say what it predicts: give it a predict_step"):
            isoscale.predict(run, data={"input": X})

    def test_must_return_tensors(self, tmp_path: Path):
        class Several(Own):
            def predict_step(self, batch: Any, batch_idx: int) -> Any:
                return self.model(batch["input"]), 1

        run = fit(tmp_path / "run", Several())
        with pytest.raises(UserError, match="predict_step returned tuple; it must return a tensor or a dict"):
            isoscale.predict(run, data={"input": X})


@pytest.fixture(scope="module")
def light_run(tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    path = tmp_path_factory.mktemp("runs") / "run"
    return fit(path, Light(), (ALL, TARGET), data={"batch_size": 20}, optimizer={})


class TestALightningModule:
    @pytest.mark.parametrize(
        "data",
        [
            X,
            ARRAY,
            ARRAY.astype(np.float64),
            DataLoader(X, 8, shuffle=True),
            OnlyPredict(),
            isoscale.Sources(predict=X),
        ],
        ids=type,
    )
    def test_predicts_every_row(self, data: Any, light_run: isoscale.Run):
        with torch.no_grad():
            rows = light_run.model()(X)
        torch.testing.assert_close(isoscale.predict(light_run, data=data, split="predict")["prediction"], rows)

    def test_says_what_it_cannot_read(self, light_run: isoscale.Run):
        with pytest.raises(
            UserError, match=r"Light cannot take this data \(TypeError: .*: a sample is a tuple of 4 flo"
        ):
            isoscale.predict(light_run, data=(X, Y))


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    path = tmp_path_factory.mktemp("runs") / "run"
    return isoscale.train("images/digits", run=path, **{"train.epochs": 1, **QUIET})


class TestAClassifierOfImages:
    def test_predicts_whatever_images_come_in(self, digits_run: isoscale.Run):
        rows = digits_run.data().test.fetch(torch.arange(50))
        images, labels = rows["input"], rows["target"]
        assert images.dtype == torch.uint8
        whole = isoscale.predict(digits_run)
        pairs = TensorDataset(images, labels)
        for data in (
            images, images.numpy(), images.double(), (images, labels), {"input": images}, pairs,
            DataLoader(pairs, 9, shuffle=True), Subset(pairs, range(50)),
        ):  # fmt: skip
            found = isoscale.predict(digits_run, data=data)
            assert found["class"].equal(whole["class"][:50])
            torch.testing.assert_close(found["probability"], whole["probability"][:50])
        assert isoscale.test(digits_run, data=(images, labels))["test/accuracy"] > 0.3
        with pytest.raises(UserError, match="there are no targets"):
            isoscale.test(digits_run, data=images)
