"""LightningModules and LightningDataModules train unchanged, and to the same weights as under Lightning's Trainer.

One difference is meant: the batch of a loader is the batch of one update here. Under Lightning it is a micro-batch of
one device, of which `accumulate_grad_batches` and the number of devices make an update.
"""

import json
import math
import signal
import warnings
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.demos import boring_classes as boring
from lightning.pytorch.demos.lstm import LightningLSTM
from lightning.pytorch.demos.transformer import LightningTransformer
from safetensors.torch import load_file
from torch.utils.data import (
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import isoscale
from isoscale.errors import Stopped, UserError
from tests.engine.lightning import modules
from tests.engine.lightning.modules import Classifier, Points, points


def fit(module: Any, data: Any, run: Path, epochs: int | None = 3, **overrides: Any) -> isoscale.Run:
    recipe: dict[str, Any] = {
        "train": {"epochs": epochs, "device": "cpu", "threads": 1},
        "observe": {"every": 1, "tensorboard": 0, "level": "warning"},
    }
    return isoscale.Trainer(recipe, run=run, **overrides).fit(module, data)


def fit_lightning(module: Any, data: Any, epochs: int = 3, **options: Any) -> pl.Trainer:
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, **options,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, data)
    return trainer


def pair(make: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    module = make()
    return module, deepcopy(module)


ROUNDING = (1e-5, 1e-6)
"""(relative, absolute): sums in another order. Everything else is equal to the bit."""


def assert_same_weights(one: torch.nn.Module, two: torch.nn.Module, rtol: float = 0, atol: float = 0) -> None:
    ours, theirs = one.state_dict(), two.state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def lines(run: Path) -> list[tuple[Any, ...]]:
    """What metrics.jsonl holds, without times: (step, epoch, name, value)."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "epoch", "name", "value")
    return [tuple(entry[key] for key in keys) for entry in entries if not entry["name"].startswith("time/")]


def both(
    make: Any, tmp_path: Path, make_data: Any = Points, epochs: int = 3, **options: Any
) -> tuple[Any, Any, Any, Any]:
    """Train the same module here and under Lightning; (ours, theirs, run, trainer)."""
    ours, theirs = pair(make)
    before = deepcopy(ours.state_dict())
    run = fit(ours, make_data(), tmp_path / "run", epochs, **options.pop("overrides", {}))
    trainer = fit_lightning(theirs, make_data(), epochs, **options)
    moved = [
        name for name, value in ours.state_dict().items() if name in before and not torch.equal(value, before[name])
    ]
    assert moved, "nothing was trained"
    return ours, theirs, run, trainer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["BoringModel", "ManualOptimBoringModel", "DemoModel"])
def test_lightnings_own_small_modules_reach_the_same_weights(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = boring.BoringDataModule()
    ours, theirs, *_ = both(getattr(boring, name), tmp_path, lambda: data, epochs=2)
    assert_same_weights(ours, theirs)


class Transformer(LightningTransformer):
    def prepare_data(self) -> None:
        """Nothing to download."""


class Recurrent(LightningLSTM):
    def prepare_data(self) -> None:
        """Nothing to download."""


def test_lightnings_transformer_reaches_the_same_weights(tmp_path: Path) -> None:
    ours, theirs, *_ = both(
        lambda: modules.without_dropout(Transformer(vocab_size=20)), tmp_path,
        lambda: modules.TokenLoaders(12, 20, continued=False), epochs=2,
    )  # fmt: skip
    assert_same_weights(ours, theirs)


@pytest.mark.slow
def test_lightnings_recurrent_network_reaches_the_same_weights(tmp_path: Path) -> None:
    ours, theirs, *_ = both(
        lambda: modules.without_dropout(Recurrent(vocab_size=20)), tmp_path,
        lambda: modules.TokenLoaders(12, 20, continued=True), epochs=2,
    )  # fmt: skip
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize(
    "make",
    [
        Classifier, modules.DictOfStep, modules.DictOfEpoch, modules.TupleOfLists, modules.Plateau, modules.OneCycle,
        modules.Sequential, modules.LongCycle, modules.OwnSchedulerStep, modules.BatchAlone, modules.LateLayers,
        modules.WarmUp,
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_classifier_reaches_the_same_weights_and_metrics(make: Any, tmp_path: Path) -> None:
    ours, theirs, run, trainer = both(make, tmp_path, epochs=5)
    assert_same_weights(ours, theirs)
    for name in ("val_loss", "val_mean", "val_acc", "val_f1", "val_recall", "train_loss_epoch"):
        expected = float(trainer.callback_metrics[name])
        assert run.metrics[name] == pytest.approx(expected, rel=1e-5, abs=1e-6), name
    expected = float(trainer.callback_metrics["train_acc"])
    assert run.metrics["train_acc"] == pytest.approx(expected, abs=1e-6)


def test_a_plateau_scheduler_has_dropped_the_rate_as_often(tmp_path: Path) -> None:
    rates = []
    for train in (
        lambda module: fit(module, Points(), tmp_path / "run", 6),
        lambda module: fit_lightning(module, Points(), 6),
    ):
        torch.manual_seed(1)
        module = modules.Plateau()
        optimizers = module.configure_optimizers()
        module.configure_optimizers = lambda given=optimizers: given
        train(module)
        rates.append(optimizers["optimizer"].param_groups[0]["lr"])
    assert rates[0] == rates[1] < 1.5


def test_epoch_step_and_collected_outputs_are_what_lightning_shows(tmp_path: Path) -> None:
    ours, theirs, run, trainer = both(modules.Counting, tmp_path, overrides={"observe.every": 5})
    assert_same_weights(ours, theirs)
    assert [entry[:3] for entry in ours.seen] == [entry[:3] for entry in theirs.seen]
    for mine, other in zip(ours.seen, theirs.seen, strict=True):
        assert mine == pytest.approx(other) if mine[0] == "end" else mine == other
    assert run.metrics["val_collected"] == pytest.approx(float(trainer.callback_metrics["val_collected"]), rel=1e-5)


def test_hooks_around_batches_and_updates_come_in_lightnings_order_and_change_the_same_weights(tmp_path: Path) -> None:
    ours, theirs, *_ = both(modules.Hooked, tmp_path)
    assert {call[0] for call in ours.calls} == {*modules.HOOKS, "training_step"}
    assert ours.calls == theirs.calls
    assert_same_weights(ours, theirs)


def test_two_optimizers_with_manual_optimisation_reach_the_same_weights(tmp_path: Path) -> None:
    ours, theirs, run, trainer = both(modules.Adversarial, tmp_path)
    assert_same_weights(ours, theirs)
    assert ours.seen == theirs.seen
    assert ours.seen[-1] == 2 * len(ours.seen)
    for name in ("train_generator", "train_critic"):
        logged = [value for _, _, each, value in lines(run.directory.path) if each == name]
        assert logged[-1] == pytest.approx(float(trainer.callback_metrics[name]), rel=1e-5)


def test_clipping_by_the_recipe_equals_lightnings(tmp_path: Path) -> None:
    ours, theirs, *_ = both(Classifier, tmp_path, gradient_clip_val=0.02, overrides={"train.clip": 0.02})
    assert_same_weights(ours, theirs)


class Sizes(Classifier):
    """Remembers how many samples each of its steps was given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.sizes.append(len(batch[0]))
        return super().training_step(batch, batch_idx)


def test_the_micro_batches_of_a_batch_equal_lightnings_accumulated_batches(tmp_path: Path) -> None:
    """The loader's batch of 12 is cut into 3 here; Lightning adds up 3 batches of 4. 60 samples have no rest."""
    ours, theirs = pair(Sizes)
    fit(ours, Points(batch_size=12), tmp_path / "run", **{"train.accumulate": 3})
    fit_lightning(theirs, Points(batch_size=4), accumulate_grad_batches=3)
    assert ours.sizes == theirs.sizes == [4] * 15 * 3
    assert_same_weights(ours, theirs, *ROUNDING)


def test_a_module_with_loaders_of_its_own_is_its_data(tmp_path: Path) -> None:
    ours, theirs = pair(modules.OwnLoaders)
    run = fit(ours, ours, tmp_path / "run")
    trainer = fit_lightning(theirs, None)
    assert_same_weights(ours, theirs)
    assert run.metrics["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-5)


def test_a_last_smaller_batch_is_dropped_when_the_loader_says_so(tmp_path: Path) -> None:
    ours, theirs, *_ = both(Classifier, tmp_path, lambda: Points(batch_size=9, drop_last=True))
    assert_same_weights(ours, theirs)


def test_the_learning_rate_reaches_the_weights_at_the_last_step_of_an_unfinished_epoch(tmp_path: Path) -> None:
    ours, theirs = pair(modules.DictOfStep)
    fit(ours, Points(), tmp_path / "run", None, **{"train.steps": 13})
    fit_lightning(theirs, Points(), -1, max_steps=13)
    assert_same_weights(ours, theirs)


class Seen(Classifier):
    """Remembers the first feature of every training sample."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch[0][:, 0].tolist()
        return super().training_step(batch, batch_idx)


def test_a_shuffling_loader_is_given_the_order_of_the_recipe(tmp_path: Path) -> None:
    module, other = pair(Seen)
    fit(module, Points(shuffle=True), tmp_path / "one", 2, seed=3)
    fit(other, Points(shuffle=True), tmp_path / "two", 2, seed=3)
    everything = sorted(points(60).tensors[0][:, 0].tolist())
    assert sorted(module.seen[:60]) == sorted(module.seen[60:]) == everything
    assert module.seen[:60] != module.seen[60:]
    assert module.seen == other.seen


class Backwards(Sampler):
    """Every third sample, from the end."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count // 3

    def __iter__(self) -> Any:
        return iter([self.count - 1 - 3 * place for place in range(len(self))])


def test_the_order_of_a_custom_sampler_is_kept(tmp_path: Path) -> None:
    ours, theirs, *_ = both(Seen, tmp_path, lambda: Points(batch_size=6, sampler=Backwards(60)))
    assert ours.seen == pytest.approx(theirs.seen)
    assert len(ours.seen) == 3 * 20
    assert_same_weights(ours, theirs)


def samplers() -> dict[str, Any]:
    weights = [1.0] * 30 + [5.0] * 30
    own = torch.Generator().manual_seed(9)
    return {
        "weighted": WeightedRandomSampler(weights, 40),
        "weighted with a generator": WeightedRandomSampler(weights, 40, generator=own),
        "random with replacement": RandomSampler(range(60), replacement=True, num_samples=40),
        "subset": SubsetRandomSampler(range(5, 45)),
        "numpy": NumpySampler(),
        "batches": None,
    }


class NumpySampler(Sampler):
    def __init__(self) -> None: ...

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Any:
        return iter(np.random.permutation(60)[:40].tolist())


class ShuffledBatches(Sampler):
    """Batches of neighbours in a random order."""

    def __init__(self) -> None: ...

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Any:
        for place in torch.randperm(8).tolist():
            yield list(range(5 * place, 5 * place + 5))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(samplers()))
def test_a_run_with_a_random_sampler_goes_on_in_its_order(name: str, tmp_path: Path) -> None:
    def data() -> Any:
        if name == "batches":
            return Loaders(lambda: DataLoader(points(60), batch_sampler=ShuffledBatches()))
        return Points(batch_size=5, sampler=samplers()[name])

    straight, first = pair(Seen)
    second = deepcopy(first)
    fit(straight, data(), tmp_path / "straight", None, **{"train.steps": 20})
    fit(first, data(), tmp_path / "stopped", None, **{"train.steps": 7})
    torch.rand(3)
    fit(second, data(), tmp_path / "stopped", None, **{"train.steps": 20})
    assert second.seen == straight.seen and first.seen == straight.seen[: len(first.seen)]
    assert straight.seen[:40] != straight.seen[40:80]


class Loaders:
    """The loader methods of a data module and nothing else."""

    def __init__(self, make: Any, make_val: Any = None) -> None:
        self.make, self.make_val = make, make_val

    def train_dataloader(self) -> Any:
        return self.make()

    def val_dataloader(self) -> Any:
        return self.make_val() if self.make_val else None


def test_validation_reads_the_part_of_the_dataset_that_its_sampler_stands_for(tmp_path: Path) -> None:
    def data() -> Any:
        class Parts(Points):
            def val_dataloader(self) -> DataLoader:
                return DataLoader(self.train_set, batch_size=8, sampler=SubsetRandomSampler(range(20)))

        return Parts()

    _, _, run, trainer = both(Classifier, tmp_path, data)
    assert run.metrics["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-5)


class Drawn(Sampler):
    """A sampler with a generator that nobody can seed."""

    def __init__(self) -> None:
        self.own = np.random.default_rng(0)

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Any:
        return iter(self.own.permutation(60)[:20].tolist())


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda: DataLoader(points(60), batch_size=4, sampler=Drawn()), "another order each time"),
        (lambda: [1, 2, 3][:1], "a DataLoader, or an iterable"),
    ],
)
def test_a_loader_that_cannot_keep_the_laws_is_refused_in_words(loader: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        fit(Classifier(), Loaders(loader), tmp_path / "run")


def test_a_data_module_is_prepared_set_up_and_torn_down_as_under_lightning(tmp_path: Path) -> None:
    ours, theirs = Points(), Points()
    fit(Classifier(), ours, tmp_path / "run", 1)
    fit_lightning(Classifier(), theirs, 1)
    assert ours.calls == theirs.calls == ["prepare_data", "setup fit", "teardown fit"]


def test_a_data_module_of_an_ordinary_task_is_torn_down_too(tmp_path: Path) -> None:
    data = Points()
    fit(isoscale.Supervised(torch.nn.Linear(6, 3), "cross_entropy"), data, tmp_path / "run", 1)
    assert data.calls == ["prepare_data", "setup fit", "teardown fit"]


REFUSED = (
    "configure_sharded_model",
)  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_hook_that_is_not_called_is_refused(name: str, tmp_path: Path) -> None:
    module = type("Module", (Classifier,), {name: lambda self, *arguments: None})()
    before = dict(vars(module))
    with pytest.raises(UserError, match=name):
        fit(module, Points(), tmp_path / "run")
    assert vars(module).keys() == before.keys()


def test_every_hook_of_lightning_is_called_or_refused() -> None:
    from lightning.pytorch.core import hooks as theirs

    from isoscale.engine.lightning import module as ours

    known = {name for cls in (theirs.ModelHooks, theirs.DataHooks, theirs.CheckpointHooks) for name in vars(cls)}
    called = {
        "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end",
        "on_test_batch_start", "on_test_batch_end", "on_predict_batch_start", "on_predict_batch_end",
        "on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer",
        "prepare_data", "setup", "teardown", "configure_model", "train_dataloader",
        "val_dataloader", "test_dataloader", "predict_dataloader", "on_validation_model_zero_grad", *modules.HOOKS,
        "on_save_checkpoint", "on_load_checkpoint",
        *(f"on_{stage}_{end}" for stage in ("validation", "test", "predict") for end in ("start", "end")),
        *(f"on_{stage}_epoch_{end}" for stage in ("validation", "test", "predict") for end in ("start", "end")),
        *(f"on_{stage}_model_{mode}" for stage in ("validation", "test", "predict") for mode in ("eval", "train")),
    }  # fmt: skip
    hooks = {name for name in known if not name.startswith("_")}
    assert hooks - called - set(ours._REFUSED_HOOKS) == set()


def _step(**changes: Any) -> Any:
    return type("Module", (Classifier,), changes)()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training_step": lambda self, dataloader_iter: None}, "dataloader_iter"),
        ({"training_step": lambda self, batch, batch_idx: None}, "return its loss"),
        ({"configure_optimizers": lambda self: "adam"}, "not an optimizer"),
        ({"configure_optimizers": lambda self: [modules._sgd(self), modules._sgd(self)]}, "automatic_optimization"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        fit(_step(**changes), Points(), tmp_path / "run")


def _plateau(**entry: Any) -> Any:
    def configure(self: Any) -> Any:
        optimizer = modules._sgd(self)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **entry}}

    return _step(configure_optimizers=configure)


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({}, "name of a metric"),
        ({"monitor": "val_los"}, "val_loss"),
        ({"monitor": "val_loss", "interval": "step"}, "interval 'epoch'"),
        ({"monitor": "val_loss", "interval": "hour"}, "'hour'"),
        ({"monitor": "val_loss", "every": 3}, "every"),
    ],
)
def test_a_scheduler_that_could_not_move_is_refused(entry: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        fit(_plateau(**entry), Points(), tmp_path / "run", 1)


class Late(Classifier):
    """Logs what its scheduler watches from the third epoch on only; it never improves."""

    def on_validation_epoch_end(self) -> None:
        if self.current_epoch > 1:
            self.log("late", 1.0)

    def configure_optimizers(self) -> Any:
        optimizer = modules._sgd(self)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "late", "strict": False}}


def test_a_scheduler_that_is_not_strict_waits_for_its_metric(tmp_path: Path) -> None:
    ours, theirs, run, _ = both(Late, tmp_path, epochs=5)
    assert [value for _, _, name, value in lines(run.path) if name == "lr"] == [0.2] * 4 * 8 + [0.1] * 8
    assert_same_weights(ours, theirs)


@pytest.mark.parametrize(
    "override",
    [{"train.accumulate": 2}, {"parallel.reduce": "tree"}, {"train.clip": 1.0}, {"train.loss_weights": {"a": 1.0}}],
)
def test_manual_optimisation_refuses_what_would_not_reach_it(override: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="manual optimisation"):
        fit(modules.Adversarial(), Points(), tmp_path / "run", **override)


def test_hooks_that_see_whole_batches_refuse_micro_batches(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="whole batches"):
        fit(modules.Hooked(), Points(), tmp_path / "run", **{"train.accumulate": 2})


def test_hooks_of_an_update_work_with_micro_batches(tmp_path: Path) -> None:
    ours, theirs, *_ = both(modules.WarmUp, tmp_path, lambda: Points(batch_size=10), overrides={"train.accumulate": 2})
    assert_same_weights(ours, theirs, *ROUNDING)


class Averaged(Classifier):
    """Manual optimisation that leaves optimizer and schedule to the recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.rates: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        self.rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def configure_optimizers(self) -> None:
        return None


def test_manual_optimisation_follows_the_schedule_and_the_average_of_the_recipe(tmp_path: Path) -> None:
    module = Averaged()
    initial = deepcopy(module.state_dict())
    schedule = {"schedule.name": "linear", "train.ema": 0.5}
    run = fit(module, Points(), tmp_path / "run", 2, **schedule)
    assert module.rates == pytest.approx([1e-3 * (1 - step / 15) for step in range(16)])
    live = deepcopy(module.state_dict())
    averages = load_file(tmp_path / "run" / "checkpoints" / "last" / "average.safetensors")
    assert averages
    for name, average in averages.items():
        assert 0 < (average - live[name]).norm() < (initial[name] - live[name]).norm(), name
    assert math.isfinite(run.metrics["train/loss_epoch"])


class Noisy(Dataset):
    """A dataset that augments at random, as vision pipelines do."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        inputs, label = points(60)[index]
        noise = torch.rand(()) + float(np.random.rand())
        return inputs + noise, label


class Restarted:
    """A run straight to its end, and one that stopped on the way and went on in a fresh module."""

    def __init__(
        self, make: Any, make_data: Any, folder: Path, stop: int = 11, end: int = 20, **overrides: Any
    ) -> None:
        self.straight, first = pair(make)
        second = deepcopy(first)
        self.straight_run = fit(
            self.straight, make_data(), folder / "straight", None, **{"train.steps": end}, **overrides
        )
        fit(first, make_data(), folder / "stopped", None, **{"train.steps": stop}, **overrides)
        torch.rand(5)
        np.random.rand(5)
        fit(second, make_data(), folder / "stopped", None, **{"train.steps": end}, **overrides)
        self.first, self.second = first, second
        self.folder = folder

    def assert_equal(self, stop: int = 11) -> None:
        for (name, one), two in zip(self.straight.state_dict().items(), self.second.state_dict().values(), strict=True):
            assert torch.equal(one, two), name
        straight, stopped = lines(self.folder / "straight"), lines(self.folder / "stopped")
        # the end of the shorter run is evaluated, which the longer one passes by
        extra = [line for line in stopped if line not in straight]
        assert all(line[0] == stop and line[2].startswith("val") for line in extra)
        assert [line for line in stopped if line not in extra] == straight
        assert straight


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [modules.Sequential, modules.LongCycle, modules.DictOfEpoch, modules.Plateau, modules.Adversarial, modules.WarmUp],
)
def test_a_stopped_module_goes_on_to_the_same_bits_and_metrics(make: Any, tmp_path: Path) -> None:
    Restarted(make, lambda: Points(shuffle=True), tmp_path).assert_equal()


class Interrupting(modules.Sequential):
    """Asks to stop in a hook, once."""

    def __init__(self, hook: str, step: int) -> None:
        super().__init__()
        self.hook, self.step = hook, step

    def _maybe(self, hook: str) -> None:
        if hook == self.hook and self.global_step == self.step:
            signal.raise_signal(signal.SIGTERM)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._maybe("on_train_batch_end")

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._maybe("on_validation_batch_start")

    def on_train_epoch_end(self) -> None:
        self._maybe("on_train_epoch_end")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "step"), [("on_train_batch_end", 11), ("on_validation_batch_start", 16), ("on_train_epoch_end", 8)]
)
def test_a_stop_by_signal_is_invisible_to_weights_and_metrics(hook: str, step: int, tmp_path: Path) -> None:
    straight, stopped = pair(lambda: Interrupting("never", 0))
    going_on = deepcopy(stopped)
    stopped.hook, stopped.step = hook, step
    fit(straight, Points(shuffle=True), tmp_path / "straight")
    with pytest.raises(Stopped, match=f"at step {step}"):
        fit(stopped, Points(shuffle=True), tmp_path / "stopped")
    fit(going_on, Points(shuffle=True), tmp_path / "stopped")
    assert_same_weights(straight, going_on)
    assert lines(tmp_path / "stopped") == lines(tmp_path / "straight")


def test_the_count_of_manual_updates_goes_on(tmp_path: Path) -> None:
    restarted = Restarted(modules.Adversarial, Points, tmp_path)
    assert restarted.straight.seen == restarted.second.seen


def test_a_dataset_that_augments_at_random_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    restarted = Restarted(Classifier, lambda: Loaders(lambda: DataLoader(Noisy(), batch_size=8)), tmp_path)
    restarted.assert_equal()
    assert len(set(lines(tmp_path / "straight"))) > 10


class Examined(Classifier):
    """Tests and predicts, with hooks of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", torch.nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]).softmax(1)

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append("on_test_batch_end")

    def on_test_end(self) -> None:
        self.calls.append("on_test_end")

    def on_predict_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.calls.append("on_predict_batch_start")


class ExaminedPoints(Points):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(points(25, seed=2), batch_size=10)

    def predict_dataloader(self) -> DataLoader:
        return DataLoader(points(25, seed=2), batch_size=10)


def test_test_and_predict_equal_lightnings(tmp_path: Path) -> None:
    ours, theirs, run, trainer = both(Examined, tmp_path, ExaminedPoints)
    attributes = set(vars(ours))
    expected = trainer.test(theirs, ExaminedPoints(), verbose=False)[0]["test_loss"]
    rows = torch.cat(trainer.predict(theirs, ExaminedPoints()))
    assert isoscale.test(run, "last", data=ExaminedPoints())["test_loss"] == pytest.approx(expected, rel=1e-5)
    found = isoscale.predict(run, "last", data=ExaminedPoints(), split="predict")
    torch.testing.assert_close(found["prediction"], rows, rtol=1e-5, atol=1e-6)
    assert ours.calls == theirs.calls == ["on_test_batch_end"] * 3 + ["on_test_end"] + ["on_predict_batch_start"] * 3
    assert set(vars(ours)) == attributes


class PlainTask(isoscale.Supervised):
    """Hooks of an ordinary task."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(modules.FEATURES, modules.CLASSES), "cross_entropy")
        self.calls: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.calls.append("update")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(batch_idx)


def test_the_hooks_of_an_ordinary_task_are_called_too(tmp_path: Path) -> None:
    task = PlainTask()
    fit(task, Points(batch_size=30), tmp_path / "run", 1)
    assert task.calls == ["update", 0, "update", 1]


class LoggingLate(Classifier):
    """Logs at the end of a batch, and looks at the metrics of the epoch when it ends."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[dict[str, float]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("late", float(self.global_step))

    def on_train_epoch_end(self) -> None:
        names = ("train_loss", "train_loss_epoch", "train_acc")
        self.shown.append({name: float(self.trainer.callback_metrics[name]) for name in names})


def test_what_the_end_of_a_batch_logs_belongs_to_that_batch(tmp_path: Path) -> None:
    run = fit(LoggingLate(), Points(), tmp_path / "run", 2)
    assert run.history("late") == [(step, float(step)) for step in range(1, 17)]
    of_samples = 8 * sum(range(9, 16)) + 4 * 16  # the last batch has 4 of the 60
    assert run.metrics["late_epoch"] == pytest.approx(of_samples / 60, rel=1e-6)


def test_the_metrics_of_an_epoch_are_there_when_it_ends(tmp_path: Path) -> None:
    ours, theirs, *_ = both(LoggingLate, tmp_path, epochs=3)
    assert [sorted(shown) for shown in ours.shown] == [sorted(shown) for shown in theirs.shown]
    for mine, other in zip(ours.shown, theirs.shown, strict=True):
        assert mine == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("training_epoch_end", "on_train_epoch_end"), ("validation_epoch_end", "on_validation_epoch_end"),
        ("on_epoch_start", "on_train_epoch_start"), ("training_step_end", "training_step itself"),
        ("on_pretrain_routine_start", "on_fit_start"), ("on_batch_end", "on_train_batch_end"),
    ],
)  # fmt: skip
def test_hooks_of_lightning_1_are_refused_with_what_took_their_place(name: str, instead: str, tmp_path: Path) -> None:
    module = type("Module", (Classifier,), {name: lambda self, *arguments: None})()
    with pytest.raises(UserError, match=rf"Lightning 1, .*{name} \(use {instead}\)"):
        fit(module, Points(), tmp_path / "run")


def test_a_training_step_of_lightning_1_is_refused(tmp_path: Path) -> None:
    class TwoOptimizers(Classifier):
        def training_step(self, batch: Any, batch_idx: int, optimizer_idx: int) -> Any:  # type: ignore[override]
            return super().training_step(batch, batch_idx)

    with pytest.raises(UserError, match=r"takes batch, batch_idx, optimizer_idx, as in Lightning 1"):
        fit(TwoOptimizers(), Points(), tmp_path / "run")


def test_a_module_is_left_as_it_was(tmp_path: Path) -> None:
    module = Classifier()
    attributes = set(vars(module))
    fit(module, Points(), tmp_path / "run", 1)
    assert set(vars(module)) == {*attributes, "_as_it_came"}
    assert module._trainer is None
    with pytest.raises(RuntimeError, match="not attached"):
        _ = module.trainer
    with pytest.warns(UserWarning, match="self.log"):
        module.log("something", 1.0)
    assert all(parameter.requires_grad for parameter in module.parameters())


def test_a_module_can_be_trained_by_lightning_afterwards(tmp_path: Path) -> None:
    ours, theirs = pair(modules.Counting)
    fit(ours, Points(), tmp_path / "run", 1)
    theirs.load_state_dict(ours.state_dict())
    fit_lightning(ours, Points(), 2)
    fit_lightning(theirs, Points(), 2)
    assert_same_weights(ours, theirs)


def test_an_error_in_training_leaves_the_module_clean(tmp_path: Path) -> None:
    class Failing(modules.Adversarial):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.toggle_optimizer(self.optimizers()[0])
            raise RuntimeError("out of luck")

    module = Failing()
    attributes = set(vars(module))
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(module, Points(), tmp_path / "run", 1)
    assert set(vars(module)) == {*attributes, "_as_it_came"}
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.slow
def test_nothing_of_isoscale_imports_lightning() -> None:
    import subprocess
    import sys

    code = "import sys, isoscale.engine.lightning.hooks\n"
    code += "sys.exit(any('lightning' in name.split('.')[0] for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
