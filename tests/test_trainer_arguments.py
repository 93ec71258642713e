"""`isoscale.Trainer` takes the arguments and calls of Lightning's Trainer, or refuses them in words."""

import inspect
import warnings
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader

import isoscale
from isoscale.errors import UserError
from isoscale.recipe.lightning import ARGUMENTS, translate
from tests.engine.lightning.modules import Classifier, Points, points

QUIET = {"observe.tensorboard": 0, "observe.level": "warning", "train.threads": 1}
LIGHTNING_QUIET = {
    "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def trainer(**arguments: Any) -> isoscale.Trainer:
    return isoscale.Trainer(accelerator="cpu", **arguments, **QUIET)


def lightning(**arguments: Any) -> pl.Trainer:
    torch.set_num_threads(1)
    return pl.Trainer(accelerator="cpu", **{**LIGHTNING_QUIET, **arguments})


def quietly(call: Any, *arguments: Any, **named: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*arguments, **named)


def module() -> Classifier:
    torch.manual_seed(1)
    return Classifier()


def loaders(batch_size: int = 8, count: int = 64) -> tuple[DataLoader, DataLoader]:
    return DataLoader(points(count), batch_size=batch_size), DataLoader(points(30, seed=1), batch_size=8)


def assert_same(one: nn.Module, two: nn.Module, rtol: float = 0, atol: float = 0) -> None:
    ours, theirs = one.state_dict(), two.state_dict()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=rtol, atol=atol)


def test_every_argument_of_lightnings_trainer_is_known_and_its_default_accepted():
    parameters = dict(inspect.signature(pl.Trainer.__init__).parameters)
    del parameters["self"]
    assert parameters.keys() == ARGUMENTS.keys()
    found = translate({name: parameter.default for name, parameter in parameters.items()})
    assert found.values == {"train.epochs": 1000}


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ({"max_epochs": 3}, {"train.epochs": 3}),
        ({"max_steps": 30}, {"train.epochs": None, "train.steps": 30}),
        ({"max_epochs": 3, "max_steps": 30}, {"train.epochs": 3, "train.steps": 30}),
        ({"max_epochs": None}, {"train.epochs": 1000}),
        ({"max_epochs": 1, "precision": "bf16-mixed"}, {"train.epochs": 1, "train.precision": "bf16"}),
        ({"max_epochs": 1, "precision": 16}, {"train.epochs": 1, "train.precision": "fp16"}),
        ({"max_epochs": 1, "accelerator": "cpu", "devices": 1}, {"train.epochs": 1, "train.device": "cpu"}),
        ({"max_epochs": 1, "gradient_clip_val": 1}, {"train.epochs": 1, "train.clip": 1.0}),
        ({"max_epochs": 1, "limit_val_batches": 0}, {"train.epochs": 1, "train.evaluate": "never"}),
        ({"max_epochs": 1, "val_check_interval": 0.25}, {"train.epochs": 1, "train.evaluate": "0.25 epochs"}),
        ({"max_epochs": 1, "val_check_interval": 5}, {"train.epochs": 1, "train.evaluate": "5 steps of each epoch"}),
        (
            {"max_epochs": 1, "val_check_interval": 5, "check_val_every_n_epoch": None},
            {"train.epochs": 1, "train.evaluate": "5 steps"},
        ),
        ({"max_epochs": 4, "check_val_every_n_epoch": 2}, {"train.epochs": 4, "train.evaluate": "2 epochs"}),
        ({"max_epochs": 1, "log_every_n_steps": 5}, {"train.epochs": 1, "observe.every": 5}),
        ({"max_epochs": 1, "deterministic": True}, {"train.epochs": 1, "train.deterministic": "true"}),
        ({"max_epochs": 9, "min_epochs": 2, "min_steps": 3},
         {"train.epochs": 9, "train.min_epochs": 2, "train.min_steps": 3}),
        ({"max_epochs": 1, "max_time": "00:01:00:00"}, {"train.epochs": 1, "train.stop_after": 3600.0}),
        ({"max_epochs": 1, "max_time": timedelta(minutes=1)}, {"train.epochs": 1, "train.stop_after": 60.0}),
        (
            {"max_epochs": 1, "accumulate_grad_batches": 4, "limit_train_batches": 8},
            {"train.epochs": 1, "data.loader_batches": 4, "train.limit_train_batches": 2},
        ),
        ({"max_epochs": 1, "logger": False}, {"train.epochs": 1, "observe.tensorboard": 0}),
    ],
)  # fmt: skip
def test_arguments_become_keys_of_a_recipe(arguments: dict[str, Any], values: dict[str, Any]):
    assert translate(arguments).values == values


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"strategy": "fsdp"}, "strategy='fsdp'.*train.recompute"),
        ({"devices": 4}, "torchrun --nproc-per-node 4"),
        ({"devices": [1]}, "CUDA_VISIBLE_DEVICES=1"),
        ({"precision": "16-true"}, "bf16-mixed"),
        ({"accelerator": "tpu"}, "there is cpu"),
        ({"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "configure_gradient_clipping"),
        ({"reload_dataloaders_every_n_epochs": 1}, "set_epoch"),
        ({"barebones": True}, "leave it out"),
        ({"model_registry": "mine"}, "isoscale.export"),
        ({"max_epochs": -1}, "without end"),
        ({"max_epochs": 0}, "nothing would be trained"),
        ({"max_time": {"hours": 1}}, "max_epochs or max_steps too"),
        ({"limit_train_batches": 3, "accumulate_grad_batches": 2}, "multiple"),
        ({"val_check_interval": timedelta(hours=1)}, "number of batches"),
        ({"plugins": [object()]}, "no place here"),
        ({"log_every_n_steps": 0}, "large number"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(arguments: dict[str, Any], words: str):
    with pytest.raises(UserError, match=words):
        isoscale.Trainer(**{"max_epochs": 1, **arguments} if "max_time" not in arguments else arguments)


def test_a_keyword_that_nobody_knows_is_refused_with_the_nearest():
    with pytest.raises(UserError, match='did you mean "max_epochs"'):
        isoscale.Trainer(max_epoch=3)
    with pytest.raises(UserError, match='did you mean "train"'):
        isoscale.Trainer(trian={"epochs": 3})


def test_a_logger_of_another_program_is_refused_and_those_that_every_run_has_are_not(tmp_path: Path):
    own = [TensorBoardLogger(tmp_path), CSVLogger(tmp_path)]
    assert len(translate({"max_epochs": 1, "logger": own}).notes) == 2
    with pytest.raises(UserError, match=r"observe.loggers.*'wandb'"):
        translate({"logger": type("WandbLogger", (), {})()})


@pytest.mark.slow
def test_a_script_of_lightning_trains_to_the_same_weights_and_metrics():
    ours, theirs = module(), module()
    train, val = loaders()
    options = {"max_epochs": 3, "gradient_clip_val": 0.5, "val_check_interval": 0.5}
    mine, other = trainer(**options), lightning(**options)
    run = mine.fit(ours, train, val)
    quietly(other.fit, theirs, *loaders())
    assert_same(ours, theirs)
    assert (mine.current_epoch, mine.global_step) == (other.current_epoch, other.global_step)
    assert [step for step, _ in run.history("val_loss")] == [4, 8, 12, 16, 20, 24]
    for name in ("val_loss", "val_acc", "val_f1", "train_loss_epoch"):
        expected = float(other.callback_metrics[name])
        assert float(mine.callback_metrics[name]) == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    assert mine.validate(ours, val, verbose=False)[0]["val_loss"] == pytest.approx(
        quietly(other.validate, theirs, val, verbose=False)[0]["val_loss"], rel=1e-6
    )


@pytest.mark.parametrize("count", [96, 32])
def test_accumulated_batches_of_a_loader_make_the_update_that_they_make_under_lightning(count: int):
    ours, theirs = module(), module()
    mine = trainer(max_epochs=2, accumulate_grad_batches=4)
    mine.fit(ours, *loaders(4, count))
    other = lightning(max_epochs=2, accumulate_grad_batches=4)
    quietly(other.fit, theirs, *loaders(4, count))
    assert mine.global_step == other.global_step == 2 * count // 16
    assert_same(ours, theirs, 1e-5, 1e-6)


class Measuring(Classifier):
    """Remembers how many samples its steps saw."""

    sizes: set[int] = set()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.sizes.add(len(batch[0]))
        return super().training_step(batch, batch_idx)


def test_accumulated_batches_are_computed_one_by_one():
    Measuring.sizes.clear()
    trainer(max_epochs=1, accumulate_grad_batches=4).fit(Measuring(), *loaders(4, 32))
    assert Measuring.sizes == {4}


def test_batches_that_do_not_make_a_whole_update_are_refused_where_the_loader_drops_some():
    train = DataLoader(points(42), batch_size=4, drop_last=True)
    with pytest.raises(UserError, match="accumulate_grad_batches=4"):
        trainer(max_epochs=1, accumulate_grad_batches=4).fit(module(), train)


def test_a_datamodule_and_loaders_are_taken_by_name_but_not_together():
    one, two = module(), module()
    trainer(max_epochs=1).fit(one, datamodule=Points())
    trainer(max_epochs=1).fit(model=two, train_dataloaders=loaders(8, 60)[0], val_dataloaders=loaders()[1])
    assert_same(one, two)
    with pytest.raises(UserError, match="not both"):
        trainer(max_epochs=1).fit(one, loaders()[0], datamodule=Points())


class Predicting(Classifier):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return {"scores": self(batch[0]), "index": batch_idx}


@pytest.mark.slow
def test_test_and_predict_return_what_lightning_returns():
    torch.manual_seed(1)
    ours = Predicting()
    theirs = deepcopy(ours)
    val = loaders()[1]
    mine, other = trainer(limit_predict_batches=3), lightning(max_epochs=1, limit_predict_batches=3)
    assert mine.test(ours, val, verbose=False)[0].keys() == {"test_loss"}
    assert float(mine.callback_metrics["test_loss"]) == pytest.approx(
        quietly(other.test, theirs, val, verbose=False)[0]["test_loss"]
    )
    found, expected = mine.predict(ours, val), quietly(other.predict, theirs, val)
    assert [each["index"] for each in found] == [0, 1, 2] and len(expected) == 3
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one["scores"], two["scores"])


def test_after_fit_the_best_weights_are_tested_and_files_of_them_can_be_loaded_by_lightning():
    torch.manual_seed(1)
    ours = Predicting(width=7)
    mine = trainer(max_epochs=2, **{"checkpoint.monitor": "val_loss"})
    run = mine.fit(ours, *loaders())
    val = loaders()[1]
    best = mine.test(dataloaders=val, verbose=False)
    path = mine.checkpoint_callback.best_model_path
    assert mine.test(ours, val, ckpt_path=path, verbose=False) == best
    assert float(mine.checkpoint_callback.best_model_score) == pytest.approx(run.record["best"]["value"])
    loaded = quietly(Predicting.load_from_checkpoint, path, map_location="cpu")
    assert loaded.hparams.width == 7
    assert_same(loaded, run.task("best"))
    contents = torch.load(path, weights_only=True)
    assert {"state_dict", "hyper_parameters", "epoch", "global_step", "pytorch-lightning_version"} <= contents.keys()
    assert list(contents["state_dict"]) == list(ours.state_dict())
    assert contents["epoch"] == (contents["global_step"] - 1) // 8


def test_the_best_weights_are_those_that_a_checkpoint_callback_keeps():
    torch.manual_seed(1)
    keeping = ModelCheckpoint(monitor="val_loss", mode="max")  # the worst ones, so that no other rule chooses them
    mine = trainer(max_epochs=2, callbacks=[keeping])
    mine.fit(Predicting(), *loaders())
    val = loaders()[1]
    kept = mine.test(dataloaders=val, ckpt_path=keeping.best_model_path, verbose=False)
    assert mine.test(dataloaders=val, ckpt_path="best", verbose=False) == kept
    assert mine.test(dataloaders=val, ckpt_path="last", verbose=False) != kept
    assert float(keeping.best_model_score) > float(mine.callback_metrics["test_loss"])


class Writing(pl.Callback):
    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None: ...

    def on_predict_batch_end(self, *arguments: Any) -> None: ...


def test_what_a_test_or_a_prediction_does_not_do_is_said(capsys: pytest.CaptureFixture[str]):
    mine, val = trainer(callbacks=[Writing(), EarlyStopping("val_loss")]), loaders()[1]
    mine.test(Predicting(), val, verbose=False)
    assert "on_test_epoch_end of Writing is not" in capsys.readouterr().err
    assert mine.predict(Predicting(), val, return_predictions=False) is None
    assert "on_predict_batch_end of Writing is not" in capsys.readouterr().err
    mine.validate(Predicting(), val, verbose=False)
    assert not capsys.readouterr().err


def test_hyperparameters_that_are_objects_are_left_out_with_a_word():
    class Holding(Classifier):
        def __init__(self, width: int = 5, activation: Any = None) -> None:
            super().__init__(width)
            self.save_hyperparameters()

    run = trainer(max_epochs=1).fit(Holding(activation=nn.Tanh()), *loaders())
    written = isoscale.export(run, "module.ckpt")
    assert torch.load("module.ckpt", weights_only=True)["hyper_parameters"]["width"] == 5
    assert "activation" in written.notes[0] and "load_from_checkpoint" in written.notes[0]


def test_weights_of_a_file_that_holds_code_are_refused(tmp_path: Path):
    torch.save({"state_dict": {}, "hyper_parameters": {"thing": Points}}, tmp_path / "foreign.ckpt")
    with pytest.raises(UserError, match="without running code"):
        trainer(max_epochs=1).validate(module(), loaders()[1], ckpt_path=tmp_path / "foreign.ckpt")


def test_ckpt_path_last_continues_the_newest_run_of_the_module():
    ours, whole = module(), module()
    run = trainer(max_epochs=1).fit(ours, *loaders())
    again = module()
    longer = trainer(max_epochs=2).fit(again, *loaders(), ckpt_path="last")
    assert longer.path == run.path
    trainer(max_epochs=2).fit(whole, *loaders())
    assert_same(again, whole)


@pytest.mark.parametrize(("path", "words"), [("best", "'last'"), ("some.ckpt", "task.init_from")])
def test_what_cannot_be_continued_is_refused(path: str, words: str):
    Path("some.ckpt").touch()
    with pytest.raises(UserError, match=words):
        trainer(max_epochs=1).fit(module(), *loaders(), ckpt_path=path)


def test_fast_dev_run_tries_everything_and_saves_nothing(tmp_path: Path):
    mine = trainer(fast_dev_run=2)
    mine.fit(module(), *loaders())
    assert "val_loss" in mine.callback_metrics
    assert not (tmp_path / "runs").exists()


def test_default_root_dir_is_where_runs_go(tmp_path: Path):
    run = trainer(max_epochs=1, default_root_dir=tmp_path / "here").fit(module(), *loaders())
    assert run.path.parent == tmp_path / "here"


def test_max_time_ends_a_training_and_not_the_script(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("isoscale.engine.stopping._MARGIN", 0.0)
    run = trainer(max_epochs=100000, max_time={"seconds": 1}).fit(module(), *loaders())
    assert run.status == "stopped" and run.record["step"] < 800000


class Counting:
    """A callback of one's own."""

    def __init__(self, start: int = 0) -> None:
        self.start = start


def test_callbacks_of_python_and_of_the_recipe_reach_the_engine(monkeypatch: pytest.MonkeyPatch):
    from isoscale.runs import session

    seen: list[Any] = []
    build = session.build
    monkeypatch.setattr(session, "build", lambda *args, **kw: seen.append(args[3].callbacks) or build(*args, **kw))
    given = EarlyStopping("val_loss")
    spec = [{"class": f"{__name__}.Counting", "start": 3}, f"{__name__}.Counting"]
    options = {"accelerator": "cpu", "callbacks": given, "run": "a", **QUIET}
    isoscale.Trainer(max_epochs=1, **options, **{"train.callbacks": spec}).fit(module(), *loaders())
    assert seen[0][0] is given and [each.start for each in seen[0][1:]] == [3, 0]
    assert isoscale.Run("a").record["callbacks"] == ["lightning.pytorch.callbacks.early_stopping.EarlyStopping"]
    with pytest.raises(UserError, match=r"train\.callbacks"):
        isoscale.Trainer(max_epochs=2, **options).fit(module(), *loaders())


def test_a_callback_of_a_recipe_that_is_not_there_is_refused_before_anything_is_built():
    with pytest.raises(UserError, match=r"train.callbacks.0.*Countin"):
        isoscale.train("images/digits", **{"train.callbacks": [f"{__name__}.Countin"], "train.epochs": 1})


def test_early_stopping_waits_for_min_epochs():
    stopping = {"train.early_stopping": {"monitor": "val_loss", "mode": "max", "patience": 1}}
    assert trainer(max_epochs=9, **stopping).fit(module(), *loaders()).record["epoch"] == 2
    assert trainer(max_epochs=9, min_epochs=4, **stopping).fit(module(), *loaders()).record["epoch"] == 4
