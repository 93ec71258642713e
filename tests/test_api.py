"""The Python calls, as scripts and notebooks use them."""

import inspect
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import isoscale
from isoscale.errors import Stopped
from isoscale.science.images import Digits
from tests.helpers import QUIET, sha, train

generator = torch.Generator().manual_seed(0)
X = torch.randn(256, 4, generator=generator)
Y = X @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
SETTINGS = {"train": {"epochs": 4}, "data": {"batch_size": 32}, "optimizer": {"lr": 0.2}}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Rows(Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[index], Y[index]


def regression() -> isoscale.Supervised:
    torch.manual_seed(0)
    return isoscale.Supervised(nn.Linear(4, 1), "mse")


def test_train_returns_a_run_with_its_metrics():
    run = isoscale.train("images/digits", **{"train.epochs": 3, **QUIET})
    assert run.path.parent == Path("runs") and run.status == "done"
    assert run.metrics["val/accuracy"] > 0.5
    assert [step for step, _ in run.history("val/loss")] == [23, 46, 69]
    assert isoscale.Run.exists(run.path) and isoscale.Run.load(run.path).metrics == run.metrics
    assert "done" in repr(run)


def test_the_model_is_a_plain_module_that_gives_the_test_accuracy_by_hand(tmp_path: Path):
    run = train(tmp_path / "a", train__epochs=3)
    model = run.model()
    assert isinstance(model, nn.Module) and not isinstance(model, isoscale.Task) and not model.training
    test = Digits().test
    assert test is not None
    batch = test.fetch(torch.arange(len(test)))
    scores = model((batch["input"].float() / 16).flatten(1))
    by_hand = (scores.argmax(1) == batch["target"]).double().mean().item()
    assert isoscale.test(run)["test/accuracy"] == pytest.approx(by_hand, abs=1e-12)
    torch.testing.assert_close(isoscale.predict(run)["probability"], scores.softmax(1))


def test_a_directory_without_a_run_is_none(tmp_path: Path):
    assert not isoscale.Run.exists(tmp_path)
    with pytest.raises(isoscale.UserError, match="there is no run"):
        isoscale.Run.load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        {"input": X, "target": Y},
        {"input": X.numpy(), "target": Y.numpy()},
        TensorDataset(X, Y),
        Rows(),
        isoscale.Sources(train=(X, Y), val=(X, Y), test=(X, Y)),
        DataLoader(Rows(), batch_size=32, shuffle=True),
    ],
    ids=["tuple", "dict", "arrays", "TensorDataset", "Dataset", "Sources", "DataLoader"],
)
def test_a_task_made_in_python_trains_on_whatever_people_have(data, tmp_path: Path):
    run = isoscale.Trainer(SETTINGS, run=tmp_path / "a", **QUIET).fit(regression(), data)
    losses = [value for _, value in run.history("train/loss_epoch")]
    assert len(losses) == 4 and losses[-1] < 0.2 * losses[0]
    assert isinstance(run.model(), nn.Linear)
    assert isoscale.test(run, data=(X, Y)).keys() == {"test/loss"}
    assert isoscale.predict(run, data=DataLoader(Rows()))["prediction"].shape == (256, 1)


def test_a_run_made_in_python_is_tested_on_its_own_data_and_never_on_other(tmp_path: Path):
    data = isoscale.Sources(train=(X, Y), test=(X, Y))
    run = isoscale.Trainer(SETTINGS, run=tmp_path / "a", **QUIET).fit(regression(), data)
    assert isoscale.test(run) == isoscale.test(run, data=(X, Y))
    with pytest.raises(isoscale.UserError, match="Python"):
        isoscale.test(run.path)
    run = isoscale.Trainer(SETTINGS, run=tmp_path / "b", **QUIET).fit(regression(), (X, Y))
    with pytest.raises(isoscale.UserError, match="the data has no test part"):
        isoscale.test(run)


def test_a_run_made_in_python_is_continued_in_python(tmp_path: Path):
    def fit(epochs: int, path: str) -> isoscale.Run:
        return isoscale.Trainer(SETTINGS, run=path, **{"train.epochs": epochs, **QUIET}).fit(regression(), (X, Y))

    fit(2, "a")
    assert sha(fit(4, "a")) == sha(fit(4, "b"))
    with pytest.raises(isoscale.UserError, match=r"Trainer\(recipe, run='a'\)"):
        isoscale.train(run="a")


def test_training_twice_in_one_process_gives_the_same_weights(tmp_path: Path):
    assert sha(train(tmp_path / "a", train__epochs=1)) == sha(train(tmp_path / "b", train__epochs=1))


def test_training_in_a_thread_gives_the_same_weights(tmp_path: Path):
    found = []
    thread = threading.Thread(target=lambda: found.append(sha(train(tmp_path / "a", train__epochs=1))))
    thread.start()
    thread.join()
    assert found == [sha(train(tmp_path / "b", train__epochs=1))]


def test_a_loop_over_settings_leaves_a_run_for_each():
    runs = [isoscale.train("images/digits", **{"optimizer.lr": lr, "train.steps": 5, **QUIET}) for lr in (1e-3, 1e-2)]
    assert [run.path for run in isoscale.Run.all()] == [run.path for run in runs]
    assert isoscale.Run.find().path == runs[-1].path


def test_an_interrupt_saves_and_the_same_call_goes_on(tmp_path: Path):
    class Interrupting(isoscale.Supervised):
        steps = 0

        def training_step(self, batch, batch_idx):
            self.steps += 1
            if self.steps == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return super().training_step(batch, batch_idx)

    torch.manual_seed(0)
    task = Interrupting(nn.Linear(4, 1), "mse")
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(Stopped, match="stopped by SIGINT at step 5 of 32"):
        isoscale.Trainer(SETTINGS, run="a", **QUIET).fit(task, (X, Y))
    assert signal.getsignal(signal.SIGINT) is before
    run = isoscale.Trainer(SETTINGS, run="a", **QUIET).fit(regression(), (X, Y))
    assert sha(run) == sha(isoscale.Trainer(SETTINGS, run="b", **QUIET).fit(regression(), (X, Y)))


def test_a_mistake_is_an_error_that_says_what_was_meant():
    with pytest.raises(isoscale.UserError, match=r'train.epoch: unknown key; did you mean "epochs"\?'):
        isoscale.train("images/digits", **{"train.epoch": 1})
    with pytest.raises(isoscale.UserError, match="wrap a plain network"):
        isoscale.Trainer().fit(nn.Linear(4, 1), (X, Y))
    assert list(Path().glob("runs/*")) == []


def test_everything_public_says_what_it_is_for():
    for name in isoscale.__all__:
        thing = getattr(isoscale, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, name
            for method, function in inspect.getmembers(thing, inspect.isfunction):
                own = function.__module__.startswith("isoscale") and not method.startswith("_")
                assert not own or function.__doc__, f"{name}.{method}"


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = isoscale.trian
