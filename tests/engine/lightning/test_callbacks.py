"""Callbacks, Lightning's own and a user's: called as under Lightning, saved with the run, the same on ranks."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import isoscale
from isoscale.engine.lightning.callbacks import _HOOKS
from isoscale.engine.state.checkpoint import read
from isoscale.errors import Stopped, UserError
from tests.engine.lightning.habits import Net, Points
from tests.engine.lightning.test_habits import stopping
from tests.engine.lightning.test_lightning import assert_same_weights, fit
from tests.engine.lightning.test_native_habits import Plain, data
from tests.engine.step.recorded_graphs import recorded_graphs
from tests.helpers import first_of
from tests.ranks import on_ranks

__all__ = ["recorded_graphs"]

PER_EPOCH = 8


class With(Net):
    """A module that brings callbacks, with a learning rate that moves."""

    def __init__(self, *callbacks: Any) -> None:
        super().__init__()
        self.brought = [callbacks]  # inside of a tuple, so that they are none of its attributes

    def configure_callbacks(self) -> Any:
        return list(self.brought[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]


def made(*callbacks: Any, cls: Any = With) -> Any:
    torch.manual_seed(1)
    return cls(*callbacks)


def fit_lightning(module: Any, epochs: int, root: Path, **options: Any) -> pl.Trainer:
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, enable_progress_bar=False, enable_model_summary=False,
        log_every_n_steps=1, default_root_dir=root, **{"logger": False, "num_sanity_val_steps": 1, **options},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, Points())
    return trainer


def lightnings() -> list[Any]:
    """Those that everybody uses."""
    return [
        theirs.EarlyStopping("val_loss", patience=1, min_delta=0.02), theirs.LearningRateMonitor(),
        theirs.ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True, filename="{epoch}-{step}"),
    ]  # fmt: skip


def told(callbacks: list[Any]) -> dict[str, Any]:
    """What they have decided; scores to the rounding of a mean."""
    stopping, rates, files = callbacks
    return {
        "stopped": (stopping.stopped_epoch, stopping.wait_count, round(float(stopping.best_score), 6)),
        "rates": {name: [round(rate, 9) for rate in found] for name, found in rates.lrs.items()},
        "best": (Path(files.best_model_path).name, round(float(files.best_model_score), 6)),
        "kept": {Path(path).name: round(float(score), 6) for path, score in files.best_k_models.items()},
        "last": Path(files.last_model_path).name,
    }


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.ckpt"))


@pytest.mark.slow
def test_early_stopping_best_checkpoint_and_learning_rates_are_lightnings(tmp_path: Path) -> None:
    ours, other = lightnings(), lightnings()
    module, same = made(*ours), made(*other)
    run = fit(module, Points(), tmp_path / "run", 9)
    trainer = fit_lightning(same, 9, tmp_path / "lightning", logger=CSVLogger(tmp_path / "lightning"))
    assert told(ours) == told(other)
    assert 0 < ours[0].stopped_epoch < 8
    assert trainer.global_step == read(run.checkpoint("last"))[1]["progress"]["step"]
    assert_same_weights(module, same)
    assert written(tmp_path / "run") == written(tmp_path / "lightning")
    assert all(path.parent == tmp_path / "run" / "checkpoints" for path in (tmp_path / "run").rglob("*.ckpt"))
    assert ours[2].dirpath is None  # as it came, for the next training


@pytest.mark.slow
@pytest.mark.parametrize("step", first_of([3, 11, 2 * PER_EPOCH, 29], 11))
def test_a_stop_is_not_to_be_seen_in_what_callbacks_decide(step: int, tmp_path: Path) -> None:
    straight, stopped, again = lightnings(), lightnings(), lightnings()
    fit(made(*straight), Points(), tmp_path / "straight", 9)
    with pytest.raises(Stopped):
        fit(stopping(made(*stopped), step), Points(), tmp_path / "run", 9)
    fit(made(*again), Points(), tmp_path / "run", 9)
    assert told(again) == told(straight)
    assert written(tmp_path / "run") == written(tmp_path / "straight")


class Failing(theirs.Callback):
    """Ends the process, as far as the run can tell."""

    def __init__(self, step: int | None) -> None:
        self.step = step
        self.told: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("lost")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.told.append((str(exception), trainer.global_step))

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.slow
def test_files_that_were_written_after_the_last_checkpoint_are_written_again(tmp_path: Path) -> None:
    straight, again, failing = lightnings(), lightnings(), Failing(2 * PER_EPOCH + 3)
    often = {"checkpoint.every": "5 steps"}
    fit(made(*straight, Failing(None)), Points(), tmp_path / "straight", 9, **often)
    with pytest.raises(RuntimeError, match="lost"):
        fit(made(*lightnings(), failing), Points(), tmp_path / "run", 9, **often)
    assert failing.told == [("lost", 19)]
    fit(made(*again, Failing(None)), Points(), tmp_path / "run", 9, **often)
    assert told(again) == told(straight)
    assert written(tmp_path / "run") == written(tmp_path / "straight")


class Own:
    """As people write them, but for a base class: counts, thaws the backbone at an epoch, stops."""

    def __init__(self, stop: int | None = 19) -> None:
        self.stop, self.count, self.seen = stop, 0, []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.backbone.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.backbone.requires_grad_(True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.count += 1
        self.seen.append((trainer.global_step, trainer.current_epoch, batch_idx, trainer.is_last_batch))
        if self.count == self.stop:
            trainer.should_stop = True

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(("validated", trainer.global_step, trainer.sanity_checking))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(("epoch", trainer.current_epoch, trainer.global_step))


class OwnDerived(Own, theirs.Callback):
    """Lightning wants them derived."""


def test_a_callback_that_counts_changes_the_module_and_stops_does_it_as_under_lightning(tmp_path: Path) -> None:
    ours, other = Own(), OwnDerived()
    module, same = made(ours), made(other)
    run = fit(module, Points(), tmp_path / "run", 4)
    fit_lightning(same, 4, tmp_path / "lightning", enable_checkpointing=False)
    assert ours.seen == other.seen
    assert ours.seen[-2:] == [("validated", 19, False), ("epoch", 2, 19)]
    assert run.summary()["status"] == "done"
    assert_same_weights(module, same)
    assert not any(name.startswith("on_") for name in vars(module))


class StopsInStep(With):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.trainer.should_stop = self.global_step == 5
        return super().training_step(batch, batch_idx)


class StopsAtOnce(With):
    def on_train_start(self) -> None:
        self.trainer.should_stop = True


class StopsBeforeAnEpoch(With):
    def on_train_epoch_start(self) -> None:
        self.trainer.should_stop = self.current_epoch == 1


class StopsAfterValidation(With):
    def on_validation_end(self) -> None:
        self.trainer.should_stop = not self.trainer.sanity_checking


@pytest.mark.parametrize(
    ("cls", "every"),
    [(StopsInStep, None), (StopsAtOnce, None), (StopsBeforeAnEpoch, None), (StopsAfterValidation, 4)],
)
def test_a_module_that_asks_to_end_ends_where_lightning_ends(cls: Any, every: int | None, tmp_path: Path) -> None:
    ours, same = made(cls=cls), made(cls=cls)
    run = fit(ours, Points(), tmp_path / "run", 4, **({"train.evaluate": f"{every} steps"} if every else {}))
    trainer = fit_lightning(
        same, 4, tmp_path / "lightning", enable_checkpointing=False, val_check_interval=every or 1.0
    )  # fmt: skip
    assert (run.summary()["step"], run.summary()["status"]) == (trainer.global_step, "done")
    assert_same_weights(ours, same)


@pytest.mark.parametrize("step", first_of([3, 12, 18, 19], 12, 19))
def test_such_a_callback_does_not_notice_a_stop(step: int, tmp_path: Path) -> None:
    straight, again = Own(), Own()
    module = made(straight)
    fit(module, Points(), tmp_path / "straight", 4)
    with pytest.raises(Stopped):
        fit(stopping(made(Own()), step), Points(), tmp_path / "run", 4)
    last = made(again)
    fit(last, Points(), tmp_path / "run", 4)
    assert again.seen == straight.seen
    assert_same_weights(module, last)


class LoggingAtTheEnd(With):
    def on_train_epoch_end(self) -> None:
        self.log("epochs_left", 3.0 - self.current_epoch, on_epoch=True)


def test_early_stopping_sees_what_the_module_logs_at_the_end_of_an_epoch(tmp_path: Path) -> None:
    found = []
    for train in (lambda module: fit(module, Points(), tmp_path / "run", 6),
                  lambda module: fit_lightning(module, 6, tmp_path / "other", enable_checkpointing=False)):  # fmt: skip
        early = theirs.EarlyStopping("epochs_left", stopping_threshold=1.5)
        train(made(early, cls=LoggingAtTheEnd))
        found.append((early.stopped_epoch, float(early.best_score)))
    assert found[0] == found[1] == (2, 2.0)


@pytest.mark.usefixtures("recorded_graphs")
def test_captured_steps_with_callbacks_are_eager_ones(tmp_path: Path) -> None:
    shas, seen = set(), []
    for program in ("eager", "graphed"):
        own = Own()
        run = fit(made(own), Points(num_train=64), tmp_path / program, 4, **{"train.program": program})
        shas.add(run.summary()["weights_sha256"])
        seen.append(own.seen)
        assert run.record["decided"]["program"] == program
    assert len(shas) == 1
    assert seen[0] == seen[1]


@pytest.mark.usefixtures("recorded_graphs")
def test_callbacks_that_see_no_batch_leave_launches_of_many_steps(tmp_path: Path) -> None:
    shas = set()
    for program in ("eager", "auto"):
        brought = [theirs.EarlyStopping("val_loss"), theirs.ModelCheckpoint(monitor="val_loss")]
        run = fit(
            made(*brought), Points(num_train=512), tmp_path / program, 2,
            **{"train.program": program, "train.steps_per_launch": 4, "observe.every": 64},
        )  # fmt: skip
        shas.add(run.summary()["weights_sha256"])
    assert len(shas) == 1
    assert "4 steps per launch" in (tmp_path / "auto" / "log.txt").read_text()


@pytest.mark.usefixtures("recorded_graphs")
def test_a_callback_inside_of_a_step_is_called_in_every_step(tmp_path: Path) -> None:
    class Norms:
        seen = 0

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.seen += 1

    own = Norms()
    run = fit(made(own), Points(), tmp_path / "run", 2)
    assert own.seen == 2 * PER_EPOCH
    assert "on_before_optimizer_step of the callback Norms" in run.record["decided"]["why"]


class Spy(theirs.Callback):
    calls: list[Any]


def _noting(name: str, place: Any) -> Any:
    def hook(self: Any, *arguments: Any) -> None:
        is_callback = isinstance(self, Spy)
        trainer = arguments[0] if is_callback else self.trainer
        count = len(arguments) - 2 * is_callback
        place(self).append((is_callback, name, trainer.global_step, trainer.current_epoch, count))

    return hook


def test_every_hook_of_callbacks_comes_when_it_does_under_lightning(tmp_path: Path) -> None:
    calls: list[Any] = []
    names = [name for name in _HOOKS if name != "on_exception"]
    spy = type("EverySpy", (Spy,), {name: _noting(name, lambda self: calls) for name in names})
    own = [name for name in names if hasattr(pl.LightningModule, name)]
    cls = type("Noting", (With,), {name: _noting(name, lambda self: calls) for name in own})
    fit(made(spy(), cls=cls), Points(), tmp_path / "run", 2)
    ours = calls.copy()
    calls.clear()
    fit_lightning(made(spy(), cls=cls), 2, tmp_path / "lightning", enable_checkpointing=False)
    assert ours == calls


class Remembering(With):
    """Puts something into checkpoints."""

    def on_fit_start(self) -> None:
        self.loaded: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()
        checkpoint["mine"] = {"step": self.global_step, "tensor": torch.arange(3.0), "names": ["a", ("b", 1)]}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.brought.append(checkpoint)


class Adding:
    """A callback with state, and more of it in the checkpoint."""

    def __init__(self) -> None:
        self.total, self.loaded = 0.0, None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *others: Any) -> None:
        self.total += float(outputs["loss"])

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = self.total

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["added"]


class CountingPoints(Points):
    """A data module with state."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count + 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def test_what_save_hooks_put_into_a_checkpoint_comes_back_to_load_hooks(tmp_path: Path) -> None:
    straight, stopped, again = Adding(), Adding(), Adding()
    fit(made(straight, cls=Remembering), CountingPoints(), tmp_path / "straight", 2)
    with pytest.raises(Stopped):
        fit(stopping(made(stopped, cls=Remembering), 11), CountingPoints(), tmp_path / "run", 2)
    module, points = made(again, cls=Remembering), CountingPoints()
    fit(module, points, tmp_path / "run", 2)
    loaded = module.brought[-1]
    assert loaded["mine"]["step"] == loaded["global_step"] == 11
    assert loaded["mine"]["names"] == ["a", ("b", 1)]
    assert torch.equal(loaded["mine"]["tensor"], torch.arange(3.0))
    assert again.loaded == pytest.approx(stopped.total)
    assert again.total == straight.total
    assert points.count == 1


def test_what_a_checkpoint_cannot_hold_is_refused_by_name(tmp_path: Path) -> None:
    class Bad(With):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["layer"] = {"inner": nn.Linear(1, 1)}

    with pytest.raises(UserError, match=r"on_save_checkpoint wants to save \['layer'\]\['inner'\].*Linear"):
        fit(made(cls=Bad), Points(), tmp_path / "run", 1)


class Saved(With):
    """Settings that Lightning saves."""

    def __init__(self, width: int = 8, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scale = scale


def test_a_checkpoint_file_is_lightnings(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module, files = Saved(scale=0.25), theirs.ModelCheckpoint(save_last=True)
    module.brought = [(files,)]
    fit(module, Points(), tmp_path / "run", 2)
    again = Saved.load_from_checkpoint(files.last_model_path)
    assert (again.scale, again.hparams["width"]) == (0.25, 8)
    assert_same_weights(module, again)
    torch.manual_seed(1)
    same, other = Saved(scale=0.25), theirs.ModelCheckpoint(save_last=True)
    same.brought = [(other,)]
    fit_lightning(same, 2, tmp_path / "lightning")
    ours, expected = (torch.load(each.last_model_path, weights_only=False) for each in (files, other))
    assert expected.keys() <= ours.keys()
    for name in ("epoch", "global_step", "hyper_parameters", "lr_schedulers", "pytorch-lightning_version"):
        assert ours[name] == expected[name], name
    momenta = [next(iter(each["optimizer_states"][0]["state"].values())) for each in (ours, expected)]
    assert torch.equal(momenta[0]["momentum_buffer"], momenta[1]["momentum_buffer"])
    assert ours["callbacks"].keys() == expected["callbacks"].keys()
    assert not list((tmp_path / "run").rglob(".*ckpt*"))


def test_callbacks_of_the_settings_see_an_ordinary_task_and_those_of_a_module_replace_them(tmp_path: Path) -> None:
    from isoscale.engine.lightning.callbacks import chosen

    class Mild(theirs.EarlyStopping): ...

    given = [Own(), theirs.ModelCheckpoint(), theirs.EarlyStopping("a")]
    module = made(Mild("b"))
    assert chosen(given, module, print) == [given[0], *module.brought[0], given[1]]

    class Counted(Plain):
        def configure_callbacks(self) -> Any:
            return [counter]

    counter = Own(None)
    isoscale.Trainer(
        run=tmp_path / "run", **{"train.epochs": 2, "data.batch_size": 8, "train.device": "cpu"}
    ).fit(task := Counted(), data())  # fmt: skip
    assert counter.count == 24
    assert counter.seen[-1] == ("epoch", 1, 24)
    assert [each[1] for each in counter.seen if isinstance(each[0], int)] == [0] * 12 + [1] * 12
    assert not {"_trainer", "_hooks_of_callbacks", "on_fit_start"} & vars(task).keys()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: theirs.GradientAccumulationScheduler({0: 2}), "train.accumulate"),
        (theirs.BatchSizeFinder, "data.batch_size"), (theirs.LearningRateFinder, "optimizer.lr"),
        (lambda: theirs.ModelPruning("l1_unstructured"), "in the constructor"),
        (lambda: theirs.StochasticWeightAveraging(0.1), "train.ema"), (lambda: Own, "is a class"),
        (lambda: type("Old", (), {"on_epoch_end": lambda self: None})(), "on_train_epoch_end"),
    ],
)  # fmt: skip
def test_a_callback_that_cannot_work_is_refused_by_name(make: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        fit(made(make()), Points(), tmp_path / "run", 1)


class OfTheHead(With):
    """The optimizer knows what is trained at the start."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD((each for each in self.parameters() if each.requires_grad), lr=0.1, momentum=0.9)


CHANGING: dict[str, Any] = {
    "BackboneFinetuning": lambda: theirs.BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=0.01),
    "EMAWeightAveraging": lambda: theirs.EMAWeightAveraging(decay=0.9),
    "LambdaCallback": lambda: theirs.LambdaCallback(
        on_train_epoch_start=lambda trainer, module: module.backbone.requires_grad_(trainer.current_epoch != 1)
    ),
    "Timer": lambda: theirs.Timer("00:10:00:00"),
    "RichProgressBar": theirs.RichProgressBar,
    "ModelSummary": theirs.ModelSummary,
    "DeviceStatsMonitor": lambda: theirs.DeviceStatsMonitor(cpu_stats=False),
    "WeightAveraging": theirs.WeightAveraging,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(CHANGING, "BackboneFinetuning"))
def test_other_callbacks_of_lightning_reach_its_weights_and_do_not_notice_a_stop(name: str, tmp_path: Path) -> None:
    ours, same = (made(CHANGING[name](), cls=OfTheHead) for _ in range(2))
    fit(ours, Points(), tmp_path / "run", 3)
    fit_lightning(same, 3, tmp_path / "other", enable_checkpointing=False, logger=CSVLogger(tmp_path / "other"))
    assert_same_weights(ours, same)
    for step in (3, 11, 2 * PER_EPOCH):
        with pytest.raises(Stopped):
            fit(stopping(made(CHANGING[name](), cls=OfTheHead), step), Points(), tmp_path / f"run{step}", 3)
        again = made(CHANGING[name](), cls=OfTheHead)
        fit(again, Points(), tmp_path / f"run{step}", 3)
        assert_same_weights(ours, again)


def test_an_unknown_attribute_of_the_trainer_says_so(tmp_path: Path) -> None:
    class Asking:
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            assert trainer.model is pl_module
            assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (1.0, 1)
            assert trainer.num_val_batches == [4]
            assert len(trainer.train_dataloader) == trainer.num_training_batches == PER_EPOCH
            assert trainer.checkpoint_callback is None
            assert not trainer.should_stop
            trainer.nonsense  # noqa: B018

    with pytest.raises(AttributeError, match="no 'nonsense' under isoscale"):
        fit(made(Asking()), Points(), tmp_path / "run", 1)


def _on_rank(path: str, callbacks: list[Any], stop: int | None = None) -> Any:
    module = made(*callbacks)
    keys = {"train.epochs": 9, "train.threads": 1, "train.device": "cpu", "observe.tensorboard": 0}
    try:
        isoscale.Trainer(run=path, **keys).fit(module if stop is None else stopping(module, stop), Points(4))
    except Stopped:
        return None
    return callbacks


def _decided(path: str, stop: int | None = None) -> Any:
    found = _on_rank(path, [lightnings()[0], lightnings()[2]], stop)
    return found and told([found[0], theirs.LearningRateMonitor(), found[1]])


class OnOneRank(Own):
    """Only the second rank wants to stop."""

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        super().on_train_batch_end(trainer, *others)
        if trainer.global_rank == 0:
            trainer.should_stop = False


def _asked(path: str) -> Any:
    return _on_rank(path, [OnOneRank()])[0].seen


@pytest.mark.full
def test_two_ranks_decide_alike_and_as_one(tmp_path: Path) -> None:
    alone = [lightnings()[0], lightnings()[2]]
    fit(made(*alone), Points(), tmp_path / "one", 9)
    two = on_ranks(2, _decided, str(tmp_path / "two"))
    assert two[0] == two[1]
    expected = told([alone[0], theirs.LearningRateMonitor(), alone[1]])
    assert two[0]["stopped"][:2] == expected["stopped"][:2]
    assert two[0]["best"][0] == expected["best"][0]
    assert written(tmp_path / "two") == written(tmp_path / "one")
    assert on_ranks(2, _decided, str(tmp_path / "again"), 11) == [None, None]
    assert on_ranks(2, _decided, str(tmp_path / "again")) == two
    assert written(tmp_path / "again") == written(tmp_path / "two")


@pytest.mark.slow
def test_a_rank_that_asks_to_end_ends_all_after_the_same_batch(tmp_path: Path) -> None:
    seen = on_ranks(2, _asked, str(tmp_path / "run"))
    assert seen[0] == seen[1]
    assert seen[0][-1] == ("epoch", 2, 19)
