"""`self.logger` of a LightningModule: TensorBoard's writer, and ways to log beside `self.log`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.errors import UserError
from isoscale.observe.events import LoggedByTask
from isoscale.observe.observers import Observers
from isoscale.system.files import write_aside

HPARAMS = "hparams.yaml"


class SilentWriter:
    """Takes every call of a SummaryWriter and writes nothing: on all ranks but the first, and without TensorBoard."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._ignore

    def _ignore(self, *arguments: Any, **options: Any) -> None:
        pass


SILENT = SilentWriter()


class RunLogger:
    """The logger of a run, as a LightningModule and callbacks expect it.

    What is written by `experiment` goes to the folder `tensorboard` at once, whatever the step is called. After a
    stop, what it had written for steps after the checkpoint is dropped there, because it is written again.
    """

    def __init__(self, observers: Observers, view: TrainerView) -> None:
        """Tell `observers`; `view` knows the step, and whether this is the first rank."""
        self._observers = observers
        self._view = view
        self.hparams: dict[str, Any] = {}

    @property
    def experiment(self) -> Any:
        """TensorBoard's SummaryWriter, of which other ranks have one that writes nothing."""
        self._view.read.add("logger")
        writer = self._observers.writer() if self._is_heard else None
        return SILENT if writer is None else writer

    @property
    def _is_heard(self) -> bool:
        return self._view.is_global_zero and not self._view.is_capturing

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log numbers of the first rank, at a step, to metrics.jsonl, TensorBoard and all loggers of the run."""
        self._view.read.add("logger")
        if not self._is_heard:
            return
        values = {str(name): _number(name, value) for name, value in metrics.items()}
        at = self._view.global_step if step is None else int(step)
        self._observers.notify(LoggedByTask(at, self._view.current_epoch, values))

    def log_hyperparams(
        self, params: Any = None, metrics: Mapping[str, Any] | None = None, *arguments: Any, **options: Any
    ) -> None:
        """Keep what a network was made with in the file hparams.yaml of the run."""
        found = {} if params is None else vars(params) if not isinstance(params, Mapping) else params
        self.hparams |= {str(name): _plain(value) for name, value in found.items()}
        directory = self._observers.directory
        if directory is not None and self._view.is_global_zero and directory.is_dir():
            write_aside(directory / HPARAMS, yaml.safe_dump(self.hparams, sort_keys=False), synced=False)
        if metrics:
            self.log_metrics(metrics)

    def log_graph(self, model: nn.Module, input_array: Any = None) -> None:
        """Let TensorBoard draw a network, for an input or its `example_input_array`."""
        inputs = getattr(model, "example_input_array", None) if input_array is None else input_array
        if inputs is not None:
            self.experiment.add_graph(model, inputs)

    @property
    def name(self) -> str:
        """Of the run."""
        directory = self._observers.directory
        return "" if directory is None else directory.name

    @property
    def version(self) -> str:
        """None: each run has a folder of its own, which is continued."""
        return ""

    @property
    def save_dir(self) -> str | None:
        """The folder of runs."""
        directory = self._observers.directory
        return None if directory is None else str(directory.parent)

    @property
    def log_dir(self) -> str | None:
        """The folder of the run."""
        directory = self._observers.directory
        return None if directory is None else str(directory)

    root_dir = log_dir

    @property
    def group_separator(self) -> str:
        """Between a stage and a metric."""
        return "/"

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        """Nothing to do: checkpoints are in the run."""

    def save(self) -> None:
        """Bring to the files what was written."""
        self._observers.flush()

    def finalize(self, status: str = "success") -> None:
        """The same: whoever opened the files closes them."""
        self._observers.flush()


def log_hyperparameters(task: Any, loaded: Any, logger: RunLogger) -> None:
    """Keep what `save_hyperparameters` has saved of a module and its data."""
    for owner in (task, getattr(loaded, "owner", None)):
        hparams = getattr(owner, "hparams_initial", None) if getattr(owner, "_log_hyperparams", False) else None
        if hparams:
            logger.log_hyperparams(dict(hparams))


def _number(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise UserError(f"log_metrics: {name} is a tensor of shape {tuple(value.shape)}, which is not one number")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"log_metrics: {name} is a {type(value).__name__}, which is not a number") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(entry) for entry in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return str(value) if isinstance(value, Path | torch.dtype | torch.device) else repr(value)[:200]
