"""`self.log`, `trainer.callback_metrics` and `self.logger`, beside Lightning."""

import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torchmetrics
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn import functional

import isoscale
from isoscale.engine.step.context import StepContext
from isoscale.errors import Stopped, UserError
from isoscale.observe.metric_log import read_metrics
from tests.engine.lightning.modules import CLASSES, FEATURES, Points
from tests.engine.lightning.test_lightning import ExaminedPoints, fit, fit_lightning
from tests.engine.step.recorded_graphs import recorded_graphs
from tests.ranks import fit_on

__all__ = ["recorded_graphs"]

HOOKS = (
    "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_validation_start",
    "on_validation_epoch_start", "on_validation_batch_start", "on_validation_batch_end", "on_validation_epoch_end",
    "on_validation_end", "on_train_epoch_end", "on_train_end", "on_fit_end",
)  # fmt: skip


class Net(pl.LightningModule):
    """Logs in most of the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Linear(FEATURES, CLASSES)
        self.train_acc = torchmetrics.classification.MulticlassAccuracy(CLASSES)
        self.val_acc = torchmetrics.classification.MulticlassAccuracy(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        self.train_acc(logits, batch[1])
        self.log("train_loss", loss, on_epoch=True, prog_bar=True)
        self.log("step_only", loss * 2)
        self.log("epoch_only", loss * 3, on_step=False, on_epoch=True)
        self.log("both_acc", self.train_acc, on_step=True, on_epoch=True)
        self.log("hidden", loss, logger=False)
        self.log("shared", loss, on_step=True)
        self.log("loss", loss * 4)
        self.log("largest", loss, reduce_fx="max", on_step=False, on_epoch=True)
        self.log("smallest", loss, reduce_fx=torch.min, on_step=False, on_epoch=True)
        self.log("total", loss, reduce_fx=sum, on_step=True, on_epoch=True)
        if batch_idx % 3 == 0:
            self.log("now_and_then", float(self.global_step))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self.net(batch[0])
        loss = functional.cross_entropy(logits, batch[1])
        self.val_acc.update(logits, batch[1])
        self.log("val_loss", loss, True)
        self.log("acc", self.val_acc)
        self.log("shared", loss)
        self.log("weighed", loss, batch_size=batch_idx + 1)
        self.log_dict({"one": loss, "two": 2 * loss}, on_step=True, on_epoch=True)

    def on_train_epoch_start(self) -> None:
        self.log("epoch", float(self.current_epoch))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late", float(self.global_step))

    def on_validation_epoch_end(self) -> None:
        self.log("val_late", 0.5 + self.current_epoch)

    def on_train_epoch_end(self) -> None:
        self.log("train_late", 0.25 + self.current_epoch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def recording(cls: type[pl.LightningModule]) -> Any:
    """The module, which writes down in every hook what it finds in its trainer."""

    def seeing(name: str) -> Any:
        def hook(self: Any, *arguments: Any) -> Any:
            if not self.trainer.sanity_checking:
                shown = (self.trainer.callback_metrics, self.trainer.logged_metrics, self.trainer.progress_bar_metrics)
                self.seen.append((name, *({key: float(value) for key, value in each.items()} for each in shown)))
            return getattr(cls, name)(self, *arguments)

        return hook

    made = type("Recording", (cls,), {name: seeing(name) for name in HOOKS})()
    made.seen = []
    return made


def test_every_hook_finds_the_metrics_that_it_finds_under_lightning(tmp_path: Path) -> None:
    ours, theirs = recording(Net), recording(Net)
    fit(ours, Points(), tmp_path / "run", 3)
    fit_lightning(theirs, Points(), 3)
    assert [entry[0] for entry in ours.seen] == [entry[0] for entry in theirs.seen]
    for (name, *mine), (_, *other) in zip(ours.seen, theirs.seen, strict=True):
        for kind, found, expected in zip(("callback", "logged", "progress bar"), mine, other, strict=True):
            for key in ("one_step", "two_step"):  # of single batches of a validation, which are not kept here
                expected.pop(key, None)
            assert sorted(found) == sorted(expected), (name, kind)
            assert found == pytest.approx(expected, rel=1e-5), (name, kind)


def rows(path: Path) -> list[tuple[int, str, float]]:
    found = read_metrics(path / "metrics.jsonl")
    return [(row["step"], row["name"], row["value"]) for row in found if not row["name"].startswith("time/")]


def test_names_are_kept_and_a_name_of_both_stages_is_the_validations(tmp_path: Path) -> None:
    module, theirs = Net(), Net()
    run = fit(module, Points(), tmp_path / "run", 2)
    expected = fit_lightning(theirs, Points(), 2).callback_metrics
    of_validation = {"val_loss", "acc", "shared", "weighed", "one_epoch", "two_epoch", "val_late"}
    of_epochs = {"train_loss_epoch", "epoch_only", "both_acc_epoch", "largest", "smallest", "total_epoch", "epoch",
                 "train_late"}  # fmt: skip
    of_steps = {"train_loss_step", "step_only", "both_acc_step", "train/shared", "loss", "total_step", "late",
                "now_and_then"}  # fmt: skip
    means = {"step_only_epoch", "train/shared_epoch", "loss_epoch", "late_epoch", "now_and_then_epoch"}
    own = {"train/loss", "train/loss_epoch", "lr"}
    names = {name for _, name, _ in rows(run.path)}
    assert names == of_validation | of_epochs | of_steps | means | own
    for name in of_validation | of_epochs - {"train/shared"}:
        assert run.metrics[name] == pytest.approx(float(expected[name]), rel=1e-5), name
    assert run.history("late") == [(step, float(step)) for step in range(1, 17)]
    assert len(run.history("train/shared")) == 16 and len(run.history("shared")) == 2


class Watched(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), logger=False)


@pytest.mark.parametrize("monitor", ["acc", "val/acc"])
def test_a_monitor_finds_a_metric_by_its_name_and_by_the_one_of_earlier_versions(monitor: str, tmp_path: Path) -> None:
    keys = {"checkpoint.monitor": monitor, "checkpoint.mode": "max"}
    module = Watched()
    run = fit(module, Points(), tmp_path / "run", 2, **keys)
    best = run.record["best"]
    assert best["name"] == monitor and best["value"] is not None and run.has_best
    assert "acc" not in run.metrics  # logger=False


class Refused(Net):
    """Logs something, somewhere."""

    def __init__(self, hook: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.wanted, self.options = hook, options

    def _maybe(self, hook: str) -> None:
        if hook == self.wanted:
            self.log(**{"name": "x", "value": 1.0, **self.options})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self._maybe("training_step")
        return functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def on_fit_start(self) -> None:
        self._maybe("on_fit_start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._maybe("on_train_batch_end")

    def on_validation_end(self) -> None:
        self._maybe("on_validation_end")

    def on_train_epoch_end(self) -> None:
        self._maybe("on_train_epoch_end")

    def on_train_end(self) -> None:
        self._maybe("on_train_end")

    def on_fit_end(self) -> None:
        self._maybe("on_fit_end")


REFUSED = [
    ("on_fit_start", {}, "cannot be called in on_fit_start"), ("on_fit_end", {}, "cannot be called in on_fit_end"),
    ("on_train_end", {}, "cannot be called in on_train_end"),
    ("on_validation_end", {}, "cannot be called in on_validation_end"),
    ("on_train_epoch_end", {"on_step": True}, "belongs to no step"),
    ("training_step", {"on_step": False, "on_epoch": False}, "would log nothing"),
    ("training_step", {"reduce_fx": torch.median}, "only mean, sum, min, max are possible"),
    ("training_step", {"reduce_fx": "median"}, "only mean, sum, min, max are possible"),
    ("training_step", {"value": torch.ones(2)}, "tensor of shape"), ("training_step", {"value": "a"}, "got a str"),
    ("training_step", {"value": {"a": 1.0}}, "got a dict"), ("training_step", {"value": None}, "got a NoneType"),
    ("training_step", {"value": torchmetrics.MeanMetric()}, "no attribute of the module"),
]  # fmt: skip


@pytest.mark.parametrize(("hook", "options", "words"), REFUSED)
def test_what_lightning_refuses_to_log_is_refused_in_words(
    hook: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        fit(Refused(hook, options), Points(), tmp_path / "run", 1)
    with pytest.raises(Exception):  # noqa: B017 - of several kinds
        fit_lightning(Refused(hook, options), Points(), 1)


@pytest.mark.parametrize("value", [3, True, np.float32(0.5), np.int64(4), torch.tensor([2.0]), torch.tensor(7)])
def test_numbers_of_all_kinds_are_logged(value: Any, tmp_path: Path) -> None:
    run = fit(Refused("training_step", {"value": value}), Points(), tmp_path / "run", 1)
    assert run.metrics["x"] == float(value)


def test_one_name_cannot_be_logged_in_two_ways(tmp_path: Path) -> None:
    class Twice(Refused):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0, prog_bar=batch_idx == 1)
            return super().training_step(batch, batch_idx)

    with pytest.raises(UserError, match="called twice in training_step with different options"):
        fit(Twice("", {}), Points(), tmp_path / "run", 1)


class Collection(Net):
    """Logs a MetricCollection in both stages."""

    def __init__(self) -> None:
        super().__init__()
        kinds = torchmetrics.classification
        made = {"recall": kinds.MulticlassRecall(CLASSES), "precision": kinds.MulticlassPrecision(CLASSES)}
        self.many = torchmetrics.MetricCollection(made)
        self.val_many = self.many.clone(prefix="val_")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        self.many(logits, batch[1])
        self.log_dict(self.many, on_step=True, on_epoch=True)
        return functional.cross_entropy(logits, batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_many.update(self.net(batch[0]), batch[1])
        self.log_dict(self.val_many)


def test_a_metric_collection_has_lightnings_values(tmp_path: Path) -> None:
    run = fit(Collection(), Points(), tmp_path / "run", 2)
    expected = fit_lightning(Collection(), Points(), 2).callback_metrics
    for name in ("val_recall", "val_precision", "recall_epoch", "precision_epoch", "recall_step"):
        assert run.metrics[name] == pytest.approx(float(expected[name]), rel=1e-5), name


def test_a_stop_changes_nothing_of_what_is_logged_and_shown(tmp_path: Path) -> None:
    straight, first, second = recording(Net), recording(Net), recording(Net)
    fit(straight, Points(), tmp_path / "straight", 3)

    class Stopping(type(first)):  # type: ignore[misc]
        def on_train_batch_end(self, *arguments: Any) -> None:
            super().on_train_batch_end(*arguments)
            if self.global_step == 11:
                signal.raise_signal(signal.SIGTERM)

    first.__class__ = Stopping
    with pytest.raises(Stopped, match=r"at step 1[12]"):
        fit(first, Points(), tmp_path / "stopped", 3)
    stop = max(step for step, *_ in rows(tmp_path / "stopped"))
    fit(second, Points(), tmp_path / "stopped", 3)
    assert rows(tmp_path / "stopped") == rows(tmp_path / "straight")
    again = [entry for entry in second.seen if entry[0] not in ("on_train_start", "on_train_epoch_start")]
    tail = [entry for entry in straight.seen if entry[0] not in ("on_train_start", "on_train_epoch_start")]
    assert 0 < stop < 24 and again == tail[len(tail) - len(again) :]


class Echo(Net):
    """Logs again what it finds in callback_metrics."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("echo", self.trainer.callback_metrics["train_loss"])

    def on_validation_epoch_end(self) -> None:
        self.log("val_echo", self.trainer.callback_metrics["val_loss"])

    def on_train_epoch_end(self) -> None:
        self.log("epoch_echo", self.trainer.callback_metrics["train_loss"])


def echoed(run: isoscale.Run) -> None:
    for name, other in (("echo", "train_loss_step"), ("val_echo", "val_loss"), ("epoch_echo", "train_loss_epoch")):
        assert run.history(other)
        values = [value for _, value in run.history(other)]
        assert [value for _, value in run.history(name)] == pytest.approx(values, rel=1e-6), name


def _made_echo() -> tuple[Any, Any]:
    return Echo(), Points(batch_size=4)


@pytest.mark.slow
def test_two_ranks_see_the_metrics_of_the_whole_batch(tmp_path: Path) -> None:
    run = fit_on(2, tmp_path / "two", _made_echo, train__epochs=2, observe__every=1)
    echoed(run)
    alone = fit(Echo(), Points(), tmp_path / "one", 2)
    assert [value for _, value in run.history("echo")] == pytest.approx(
        [value for _, value in alone.history("echo")], rel=1e-4
    )


@pytest.mark.usefixtures("recorded_graphs")
def test_a_captured_step_shows_its_metrics(tmp_path: Path) -> None:
    run = fit(Echo(), Points(), tmp_path / "run", 4)
    assert run.record["decided"]["program"] == "graphed", run.record["decided"]["why"]
    echoed(run)


class Writing(Echo):
    """Writes by its logger, in a hook."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.logger is self.trainer.logger and self.loggers == [self.logger]
        self.logger.experiment.add_scalar("own/step", self.global_step, self.global_step)
        self.logger.log_metrics({"given": torch.tensor(0.5) * self.global_step})

    def on_validation_epoch_end(self) -> None:
        writer = self.logger.experiment
        writer.add_image("picture", torch.rand(3, 4, 4), self.global_step)
        writer.add_histogram("weights", self.net.weight, self.global_step)
        writer.add_text("words", "some", self.global_step)
        writer.add_figure("drawn", Figure(), self.global_step)


def written(path: Path) -> EventAccumulator:
    return EventAccumulator(str(path / "tensorboard" / "experiment"), {"scalars": 0, "images": 0}).Reload()


def test_the_experiment_of_the_logger_is_tensorboards_writer(tmp_path: Path) -> None:
    module = Writing(width=5)
    run = fit(module, Points(), tmp_path / "run", 1, **{"observe.tensorboard": 1})
    found = written(run.path)
    assert [(event.step, event.value) for event in found.Scalars("own/step")] == [(n, n) for n in range(1, 9)]
    assert {"picture", "drawn"} <= set(found.Tags()["images"]) and found.Tags()["histograms"] == ["weights"]
    assert run.history("given") == [(step, 0.5 * step) for step in range(1, 9)]
    beside = EventAccumulator(str(run.path / "tensorboard" / "train")).Reload()
    assert len(beside.Scalars("given")) == 8 and len(beside.Scalars("train_loss_step")) == 8
    assert (run.path / "hparams.yaml").read_text() == "width: 5\n"


def test_a_run_that_goes_on_shows_once_what_was_written_after_its_checkpoint(tmp_path: Path) -> None:
    class Failing(Writing):
        def on_train_batch_end(self, *arguments: Any) -> None:
            super().on_train_batch_end(*arguments)
            if self.global_step == 11:
                raise KeyError("a mistake")

    keys = {"observe.tensorboard": 1}
    with pytest.raises(KeyError):
        fit(Failing(), Points(), tmp_path / "run", 2, **keys)
    assert [event.step for event in written(tmp_path / "run").Scalars("own/step")] == [*range(1, 12)]
    run = fit(Writing(), Points(), tmp_path / "run", 2, **keys)
    assert [event.step for event in written(run.path).Scalars("own/step")] == [*range(1, 17)]
    assert [step for step, _ in run.history("given")] == [*range(1, 17)]


def test_without_tensorboard_the_writer_takes_every_call_and_writes_nothing(tmp_path: Path) -> None:
    run = fit(Writing(), Points(), tmp_path / "run", 1)
    assert not (run.path / "tensorboard").exists() and run.history("given")


def test_the_logger_knows_where_the_run_is(tmp_path: Path) -> None:
    found: dict[str, Any] = {}

    class Looking(Echo):
        def on_fit_start(self) -> None:
            logger = self.logger
            found.update(name=logger.name, version=logger.version, save_dir=logger.save_dir, log_dir=logger.log_dir)
            found.update(root_dir=logger.root_dir, of_trainer=self.trainer.log_dir, watch=hasattr(logger, "watch"))

    fit(Looking(), Points(), tmp_path / "run", 1)
    run = str(tmp_path / "run")
    assert found == {
        "name": "run", "version": "", "save_dir": str(tmp_path), "log_dir": run, "root_dir": run, "of_trainer": run,
        "watch": False,
    }  # fmt: skip


class WritingInTheStep(Echo):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.logger.log_metrics({"given": 1.0})
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("recorded_graphs")
def test_a_step_that_writes_by_its_logger_is_not_captured(tmp_path: Path) -> None:
    run = fit(WritingInTheStep(), Points(), tmp_path / "run", 2)
    assert "training_step writes by self.logger" in run.record["decided"]["why"]
    assert [step for step, _ in run.history("given")] == [*range(16)]


def test_a_run_that_an_earlier_version_began_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def state_of_before(self: StepContext) -> Any:
        tensors, values = self.recorder.state()
        return {"buffer": tensors["buffer"]}, values

    fit(Net(), Points(), tmp_path / "straight", None, **{"train.steps": 16})
    with monkeypatch.context() as patched:
        patched.setattr(StepContext, "state", state_of_before)
        fit(Net(), Points(), tmp_path / "run", None, **{"train.steps": 11})
    run = fit(Net(), Points(), tmp_path / "run", None, **{"train.steps": 16})
    straight = isoscale.Run(tmp_path / "straight")
    for name in ("train_loss_epoch", "train_loss_step", "acc", "epoch_only"):
        assert run.history(name)[-1] == pytest.approx(straight.history(name)[-1]), name


class ReadingMetrics(Echo):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + len(self.trainer.callback_metrics))


@pytest.mark.usefixtures("recorded_graphs")
def test_a_step_that_reads_metrics_is_not_captured(tmp_path: Path) -> None:
    run = fit(ReadingMetrics(), Points(), tmp_path / "run", 2)
    assert "training_step reads the metrics of self.trainer" in run.record["decided"]["why"]


class Tested(Echo):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("acc", 0.25)


def test_a_test_gives_the_names_that_the_module_logs(tmp_path: Path) -> None:
    run = fit(Tested(), Points(), tmp_path / "run", 1)
    assert isoscale.test(run, "last", data=ExaminedPoints()) == {"acc": 0.25}


def test_early_stopping_watches_a_metric_by_its_name(tmp_path: Path) -> None:
    class Stalling(Echo):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("acc", 0.5)

        def on_validation_epoch_end(self) -> None: ...

    keys = {"train.early_stopping": {"monitor": "acc", "mode": "max", "patience": 2}}
    run = fit(Stalling(), Points(), tmp_path / "run", 6, **keys)
    assert run.record["epoch"] == 3


def test_a_module_may_call_a_metric_as_the_engine_calls_its_loss(tmp_path: Path) -> None:
    class Same(Refused):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("train/loss", 7.0, on_epoch=True, on_step=True)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("val/loss", 8.0)
            return functional.cross_entropy(self.net(batch[0]), batch[1])

    run = fit(Same("", {}), Points(), tmp_path / "run", 1)
    assert (run.metrics["train/loss_step"], run.metrics["train/loss_epoch"], run.metrics["val/loss"]) == (7, 7, 8)
