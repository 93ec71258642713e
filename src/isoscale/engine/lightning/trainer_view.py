"""What a LightningModule and callbacks see as their trainer."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from isoscale.engine.config import Cadence
from isoscale.engine.lightning.optimizers import LightningOptimizer
from isoscale.engine.lightning.trainer_metrics import TrainerMetrics
from isoscale.engine.state.progress import Progress
from isoscale.errors import UserError
from isoscale.parallel.collectives import ALONE, Ranks
from isoscale.system import devices


def _nothing(given: Any) -> None:
    """Nothing is to be done."""


class TrainerView:
    """What a LightningModule sees as `self.trainer`, and callbacks as `trainer`."""

    accumulate_grad_batches = 1
    """A batch is the batch of one update here, whatever the micro-batches are."""
    sanity_checking = False
    """Whether an evaluation is rehearsed before training begins."""
    stage = "train"
    """What is at work: train, val, test or predict."""
    ckpt_path = None
    datamodule: Any = None
    fast_dev_run = received_sigterm = interrupted = False
    barebones = overfit_batches = False
    min_epochs: int | None = None
    min_steps: int | None = None
    precision = "32-true"
    default_root_dir = "."
    """The directory of the run, where there is one."""
    saves = False
    """Whether files are written at all."""
    log_every_n_steps = 50
    val_check_interval: int | float = 1.0
    check_val_every_n_epoch: int | None = 1

    def __init__(
        self, progress: Progress, num_steps: int, steps_per_epoch: int, ranks: Ranks = ALONE,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """`progress` knows the number of finished steps between launches."""
        self.progress = progress
        self.ranks = ranks
        self.is_global_zero = ranks.is_main
        self.world_size, self.global_rank, self.local_rank = ranks.world_size, ranks.rank, ranks.local_rank
        self.num_nodes = len(set(ranks.hosts))
        self.num_devices = ranks.world_size // self.num_nodes
        self.node_rank = list(dict.fromkeys(ranks.hosts)).index(ranks.hosts[ranks.rank])
        self.device_ids = list(range(self.num_devices))
        self.max_steps = self.estimated_stepping_batches = num_steps
        self.num_training_batches = steps_per_epoch
        self.num_val_batches: list[int] = []
        self.num_sanity_val_batches: list[int] = []
        self.max_epochs = -(-num_steps // steps_per_epoch)
        self.optimizers: list[Optimizer] = []
        self._wrapped: list[LightningOptimizer] = []
        self.before_update: Callable[[Optimizer], None] = _nothing
        self.after_update: Callable[[Optimizer], None] = _nothing
        """What precedes and follows an update by an optimizer that a module got from `self.optimizers()`."""
        self.gradient_clip_val: float | None = None
        self.schedulers: list[Any] = []
        self.lr_scheduler_configs: list[Any] = []
        self.metrics = TrainerMetrics()
        self.is_capturing = False
        self.logger: Any = None
        self.loggers: list[Any] = []
        self.log_dir: str | None = None
        self.hook: str | None = None
        """The hook that is running, where one is: `self.log` means something else in each."""
        self.lightning_module: Any = None
        self.callbacks: list[Any] = []
        self.homeless: list[Any] = []
        """Callbacks that were given the directory of the run for their files."""
        self.written: list[str] = []
        """The checkpoint files that were written."""
        self.note: Callable[[str], None] = _nothing
        """Says something to the user."""
        self.told: set[type] = set()
        """Whose hyperparameters it was said of that files do not hold them all."""
        self.write: Callable[[Any, bool], None] | None = None
        """Writes a checkpoint file."""
        self.before_monitors: Callable[[], None] = lambda: None
        """Makes what the task has logged at the end of an epoch known to callbacks that look at it."""
        self.strategy = Strategy(ranks, device or torch.device("cpu"))
        self.accelerator = SimpleNamespace(get_device_stats=_device_stats)
        self.updates: Callable[[], int] | None = None
        """Counts the updates of manual optimisation, of which a batch may have several."""
        self.read: set[str] = set()
        """What somebody has asked for that changes from step to step."""
        self._finished: int | None = None
        self._ahead = self._is_over = False
        self.between_batches = False
        """Whether the last batch is over and no other has begun."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainerView":
        """Itself: a copy of a module, as averages of weights are, has the same trainer."""
        return self

    def describe(self, every: int, cadence: Cadence, num_val_batches: int | None, folder: Path | None) -> None:
        """Say how often is logged and evaluated, on how many batches, and where the files of the run are."""
        self.log_every_n_steps = every
        self.num_val_batches = [] if num_val_batches is None else [num_val_batches]
        self.num_sanity_val_batches = [min(1, each) for each in self.num_val_batches]
        cadence = cadence.in_steps(self.num_training_batches)
        if cadence.unit == "epoch":
            self.check_val_every_n_epoch = int(cadence.count)
        elif cadence.unit == "step":
            self.val_check_interval = cadence.count
            is_inside = cadence.count <= self.num_training_batches
            is_inside = cadence.of_epoch or (is_inside and self.num_training_batches % cadence.count == 0)
            self.check_val_every_n_epoch = 1 if is_inside else None
        self.default_root_dir = os.path.realpath(folder or ".")

    def wrap(self, optimizers: Sequence[Optimizer]) -> list[LightningOptimizer]:
        """Optimizers as a module gets them, the same objects every time."""
        if [wrapped.optimizer for wrapped in self._wrapped] != list(optimizers):
            self._wrapped = [LightningOptimizer(optimizer, self) for optimizer in optimizers]
        return list(self._wrapped)

    def begin_epoch(self) -> None:
        """The next step belongs to a new epoch."""
        self._ahead = True

    def end_training(self) -> None:
        """The last epoch is complete, whether all of its steps were taken or not."""
        self._is_over = True

    def finish(self, step: int) -> None:
        """So many steps are finished."""
        self._finished, self._ahead = step, False
        self.metrics.finish_step()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """While a step is captured, its Python code runs once more than it should: what it writes is left out."""
        self.is_capturing = True
        try:
            yield
        finally:
            self.is_capturing = False

    @contextmanager
    def in_hook(self, name: str) -> Iterator[None]:
        """While a hook of the module or of a callback runs: what is logged meanwhile is logged in that hook."""
        before, self.hook = self.hook, name
        try:
            yield
        finally:
            self.hook = before

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        """The newest value of everything logged, as callbacks get it."""
        self.read.add("callback_metrics")
        return self.metrics.callback

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The newest values as loggers get them."""
        self.read.add("callback_metrics")
        return self.metrics.logged

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        """The newest values of what was logged with `prog_bar=True`."""
        self.read.add("callback_metrics")
        return self.metrics.progress_bar

    @property
    def _step(self) -> int:
        return self.progress.step if self._finished is None else self._finished

    @property
    def current_epoch(self) -> int:
        """The running epoch, from 0; it lasts until the next one begins."""
        self.read.add("current_epoch")
        step = self._step
        if self._is_over:
            return -(-step // self.num_training_batches)
        return (step if self._ahead else max(0, step - 1)) // self.num_training_batches

    @property
    def global_step(self) -> int:
        """Finished optimizer steps."""
        self.read.add("global_step")
        return self._step - self.progress.skipped if self.updates is None else self.updates()

    @property
    def is_last_batch(self) -> bool:
        """Whether the running batch, or the one that is just over, is the last one of its epoch."""
        self.read.add("global_step")
        running = self._step + (not self.between_batches and self.training)
        return running % self.num_training_batches == 0

    @property
    def training(self) -> bool:
        """Whether training batches are at work."""
        return self.stage == "train"

    @property
    def validating(self) -> bool:
        """Whether validation batches are at work."""
        return self.stage == "val"

    @property
    def testing(self) -> bool:
        """Whether test batches are at work."""
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        """Whether predictions are made."""
        return self.stage == "predict"

    @property
    def state(self) -> Any:
        """What Lightning calls the state of a trainer: its function (always fit) and its stage."""
        stages = {"train": "train", "val": "sanity_check" if self.sanity_checking else "validate"}
        return SimpleNamespace(fn="fit", stage=stages.get(self.stage, self.stage), status="running", finished=False)

    @property
    def should_stop(self) -> bool:
        """Whether somebody, on this rank, has asked training to end after the running batch."""
        return self.progress.should_stop

    @should_stop.setter
    def should_stop(self, wanted: bool) -> None:
        self.progress.should_stop = bool(wanted)

    @property
    def may_end(self) -> bool:
        """Whether training is to end, and may: `min_epochs` and `min_steps` have the last word."""
        enough = self._step >= (self.min_steps or 0)
        return self.should_stop and enough and self._step // self.num_training_batches >= (self.min_epochs or 0)

    @property
    def model(self) -> Any:
        """The module; nothing wraps it."""
        return self.lightning_module

    @property
    def train_dataloader(self) -> Any:
        """The training loader, made anew: to look at it, not to read batches from it."""
        return self._loader("train_dataloader")

    @property
    def val_dataloaders(self) -> Any:
        """The validation loader, or several; the same."""
        return self._loader("val_dataloader")

    def _loader(self, method: str) -> Any:
        make = getattr(self.datamodule, method, None)
        return make() if callable(make) else None

    @property
    def enable_validation(self) -> bool:
        """Whether there is anything to validate on."""
        return bool(self.num_val_batches)

    @property
    def early_stopping_callback(self) -> Any:
        """The first callback that stops early, if there is one."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """The callbacks that stop early."""
        return self._of_class("EarlyStopping")

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that writes checkpoint files, if there is one."""
        return next(iter(self.checkpoint_callbacks), None)

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that write checkpoint files."""
        return self._of_class("Checkpoint")

    def _of_class(self, name: str) -> list[Any]:
        return [each for each in self.callbacks if any(cls.__name__ == name for cls in type(each).__mro__)]

    @property
    def fit_loop(self) -> Any:
        """What callbacks ask of Lightning's loop."""
        progress = SimpleNamespace(is_last_batch=self.is_last_batch)
        epoch_loop = SimpleNamespace(
            _batches_that_stepped=self._step, batch_progress=progress, global_step=self.global_step,
            val_loop=SimpleNamespace(_has_run=self.progress.evaluated_at > 0),
        )  # fmt: skip
        return SimpleNamespace(
            epoch_loop=epoch_loop, max_epochs=self.max_epochs, max_batches=self.num_training_batches,
            min_epochs=self.min_epochs,
        )  # fmt: skip

    @property
    def _logger_connector(self) -> Any:
        """Whether Lightning's own monitors are to log at this step."""
        due = (self._step + 1) % self.log_every_n_steps == 0 or self.should_stop
        return SimpleNamespace(should_update_logs=due)

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = False, storage_options: Any = None) -> None:
        """Write Lightning's checkpoint of the present state; all ranks call it, the first one writes."""
        if storage_options is not None:
            raise UserError("trainer.save_checkpoint writes to files: leave storage_options out")
        if self.write is not None and self.saves:
            self.write(filepath, bool(weights_only))
        self.strategy.barrier()

    def print(self, *words: Any, **options: Any) -> None:
        """Print on the first rank."""
        if self.is_global_zero:
            print(*words, **options)  # noqa: T201

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"self.trainer has no {name!r} under isoscale")


@dataclass
class Strategy:
    """How the ranks of a training agree, in Lightning's words."""

    ranks: Ranks
    root_device: torch.device

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first rank."""
        return self.ranks.is_main

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks have decided so, or at least one."""
        if all:
            return not self.ranks.any(not decision, "a decision of callbacks")
        return self.ranks.any(bool(decision), "a decision of callbacks")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The value of a rank, on every rank."""
        return self.ranks.all_gather(obj, "a word of a callback")[src] if src else self.ranks.broadcast(obj)

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        self.ranks.any(False, f"a barrier{f' ({name})' if name else ''}")

    def reduce(self, tensor: Any, group: Any = None, reduce_op: str = "mean") -> Any:
        """The mean, or the sum, over all ranks."""
        if not isinstance(tensor, Tensor) or self.ranks.alone:
            return tensor
        if str(reduce_op).lower() not in ("mean", "avg", "sum"):
            raise UserError(f"trainer.strategy.reduce knows 'mean' and 'sum', not {reduce_op!r}")
        total = tensor.detach().clone()
        self.ranks.all_reduce(total, "a sum of a callback")
        return total if str(reduce_op).lower() == "sum" else total / self.ranks.world_size

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint file, if it is there."""
        if self.is_global_zero:
            Path(filepath).unlink(missing_ok=True)


def _device_stats(device: torch.device) -> dict[str, Any]:
    return devices.of(torch.device(device)).memory_stats()
