"""The science of one batch: what a task is, and the one that covers the common case."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

from isoscale.data.batches import Batch
from isoscale.data.sources import Source, column
from isoscale.engine.metrics.losses import (
    IGNORED,
    check_labels,
    check_scores,
    class_numbers,
    find_loss,
    find_metric,
    name_of,
    takes_classes,
)
from isoscale.engine.metrics.torchmetrics import is_metric, update
from isoscale.engine.metrics.weighted_sum import Tally, WeightedSum
from isoscale.errors import UserError
from isoscale.observe.figures import Figure

if TYPE_CHECKING:
    from isoscale.engine.dataset_metrics import EvaluatedDataset, Store

__all__ = ["Supervised", "Tally", "Task", "WeightedSum", "check_labels", "class_numbers"]


OLD_HOOKS = {
    "measure": "fit_statistics",
    "prepare": "precompute",
    "get_ready": "prepare_training",
    "survey": "evaluate_dataset",
    "survey_is_enough": "dataset_metrics_only",
    "conclude": "write_predictions",
}
"""What hooks were called once: tasks that define them still train, with a warning."""


class TaskRanks(Protocol):
    """The ranks that train together, as a task sees them."""

    rank: int
    world_size: int

    def all_gather(self, value: Any, what: str) -> list[Any]:
        """The values of all ranks, on every rank; all of them must ask. `what` says what for, where one is missed.

        Values are plain data, tensors and arrays: nothing that is sent can hold code.
        """


class Training(Protocol):
    """The training data, for a task that measures it."""

    source: Source
    ranks: TaskRanks
    say: Callable[[str], None]
    """Tells the user something."""

    def __call__(self, count: int) -> Batch:
        """The first samples, after the transforms, on the device."""


class Task(nn.Module):
    """Model, loss and metrics. The method names are those of a LightningModule.

    A step returns its loss: a mean over the batch, a `WeightedSum(sum, weight)`, or a dict of named terms of these.
    """

    units: ClassVar[Mapping[str, str]] = {}
    """Of logged metrics, where they have any: `{"energy": "meV"}`."""

    of_all: ClassVar[str] = "mean |error|"
    """What `isoscale test` calls metrics of all data together, beside those of each part of it."""

    dataset_metrics_only: ClassVar[bool] = False
    """Whether `evaluate_dataset` finds all that `isoscale test` is to say, so that the data is gone through once."""

    predicts_on_ranks: ClassVar[bool] = False
    """Whether ranks share the work of `write_predictions`, of which the first one puts everything into the store."""

    as_stored: ClassVar[frozenset[str]] = frozenset()
    """Entries of a batch that are not cast to the precision of the weights: the task needs all of their digits."""

    target_key: str = "target"
    """The entry of a batch that a tensor from `predict_step` predicts, and in whose stored units it is written."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Take hooks by their old names, and let `super()` find ours by them."""
        super().__init_subclass__(**options)
        for old, new in OLD_HOOKS.items():
            if old in vars(cls):
                warnings.warn(f"{cls.__name__}.{old} is now called {new}: rename it", FutureWarning, stacklevel=2)
                setattr(cls, new, vars(cls)[old])
            elif new in vars(cls):
                setattr(cls, old, vars(cls)[new])

    @property
    def curve_columns(self) -> Mapping[str, str]:
        """The metrics of `observe.curve` whose columns have names of their own; `rmse` is the root of the loss."""
        return {}

    def adapt(self, data: Any, ranks: TaskRanks, say: Callable[[str], None]) -> Any:
        """The data as this task reads it, where that is not as it is stored: with the neighbours of atoms, say.

        Called at every start on all ranks, which may share the work. `say` tells the user something.
        """
        return data

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """The loss of a training batch."""
        raise NotImplementedError(f"{type(self).__name__} needs a training_step(self, batch, batch_idx)")

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        """The loss of a validation batch; by default the same as in training."""
        return self.training_step(batch, batch_idx)

    def test_step(self, batch: Batch, batch_idx: int) -> Any:
        """The loss of a test batch; by default the same as in validation."""
        return self.validation_step(batch, batch_idx)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """What `isoscale predict` writes: a tensor or a dict of tensors, one row per sample.

        A tensor is written in the units of the stored target, the tensors of a dict as they are.
        """
        if type(self).forward is nn.Module.forward:
            raise UserError(f"{type(self).__name__} does not say what it predicts: give it a predict_step or a forward")
        return self(batch)

    def check_data(self, split: str, source: Source) -> None:
        """Refuse data that cannot be learned, before training starts; `split` is train, val or test."""

    def fit_statistics(self, training: Training) -> None:
        """Set what is measured on data rather than learned, such as the scale of the inputs.

        Called once before the first step of a run, on all ranks, which must find the same; `training(count)` gives
        samples after the transforms.
        """

    def weights_from(self, found: Any) -> Mapping[str, Tensor] | None:
        """The weights in a file of another program, by the names that they have here; None where it is not known.

        `found` is what `torch.load` made of the file that `task.init_from` names.
        """
        return None

    def prepare_training(self, source: Source, transforms: Sequence[Any]) -> None:
        """Prepare what the training steps need to know of all training data, and of what was done to a batch before.

        Called at every start of a training, on the device, when the transforms have measured what they measure.
        """

    def precompute(self, batch: Batch) -> Batch:
        """What a training step makes of samples before anything learned comes in, each sample by itself.

        Done once to data that stays on the device, where there is room for it; a step takes both, with the same bits.
        """
        return batch

    def evaluate_dataset(self, dataset: "EvaluatedDataset") -> dict[str, float]:
        """Metrics that need all samples of an evaluation together; empty where none is due.

        Called after every evaluation, on all ranks, which must do the same. `dataset.show` adds figures to the numbers.
        """
        return {}

    def write_predictions(self, dataset: "EvaluatedDataset", store: "Store") -> None:
        """What `isoscale predict` writes, where that is not one row per sample: put it into `store`."""
        raise NotImplementedError

    def show_inputs(self, source: Source, batch: Batch) -> dict[str, Figure]:
        """What to look at of the training data, by name.

        `batch` holds the first samples of `source` as the network sees them in training, on the host.
        """
        return {}

    def show_results(self, source: Source, outputs: dict[str, Tensor]) -> dict[str, Figure]:
        """What to look at after an evaluation, by name.

        `outputs` is what `predict_step` returned for every sample of `source`, in its order, on the host; one tensor is
        called `prediction`, in the units of the stored target.
        """
        return {}

    def in_stored_units(self, values: Tensor) -> Tensor:
        """Predictions or targets of a step in the units of the stored target, for metrics; the loss needs none of it.

        Undoes transforms of `target_key` that have an `inverse`. The engine replaces this method while it runs steps;
        outside of it nothing was transformed.
        """
        return values

    def configure_optimizers(self) -> Any:
        """An optimizer of the task's own; None takes the recipe's."""
        return None

    def log(self, name: str, value: Any, weight: Tensor | float | None = None, *, root: bool = False) -> None:
        """Record a metric, a mean over the batch or a pair, without waiting for the device; with `root`, its root.

        The engine replaces this method while it trains; outside of it there is nobody to tell.
        """


for _old, _new in OLD_HOOKS.items():
    setattr(Task, _old, getattr(Task, _new))


class Supervised(Task):
    """Any `nn.Module` from inputs to predictions, with a loss and metrics against targets.

    Metrics are in the units of the stored target, whatever transforms do to it; the loss is what is optimised. Outputs
    of another shape than the target, such as scores of classes or a mean with its deviation, are left as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[..., Any] = "mse",
        metrics: Sequence[str | Callable[..., Any]] = (),
        input: str = "input",
        target: str = "target",
    ) -> None:
        """Losses and metrics by name or as callables; `input` and `target` name the tensors of a dict batch."""
        super().__init__()
        self.model = model
        if isinstance(loss, nn.Module):
            self.criterion = loss  # so that what it learns and keeps is trained, moved and saved
        self._loss = find_loss(loss)
        self._takes_classes = takes_classes(loss)
        self._ignored = int(getattr(loss, "ignore_index", IGNORED))
        self._label_ranges: dict[str, tuple[int, int] | None] = {}
        self._metrics = {_name(metric): find_metric(metric) for metric in metrics if not is_metric(metric)}
        objects = {_name(metric): metric for metric in metrics if is_metric(metric)}
        self._objects = nn.ModuleDict({f"of_{stage}": _copies(objects) for stage in ("train", "val", "test")})
        self._names = list(objects)
        self._keys = input, target
        self.input_key = input
        self.target_key = target

    def forward(self, input: Tensor) -> Tensor:
        """The model's prediction."""
        return self.model(input)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """The loss, and the metrics beside it."""
        return self._step(batch, "train")

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        """The loss, and the metrics beside it."""
        return self._step(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> Any:
        """The loss, and the metrics beside it."""
        return self._step(batch, "test")

    def _step(self, batch: Batch, stage: str) -> Any:
        input, target = self.split(batch)
        prediction = self.model(input)
        if self._takes_classes:
            check_scores(prediction, stage, self._label_ranges.get(stage))
        if self._metrics or self._names:
            found = prediction.detach()
            if found.numel() == target.numel():  # else it is something else than a prediction of the target
                self._measure(self.in_stored_units(found), self.in_stored_units(target), stage)
            else:
                self._measure(found, target, stage)
        return self._judge(prediction, target, batch, stage)

    def _measure(self, prediction: Tensor, target: Tensor, stage: str) -> None:
        """Log the metrics."""
        for name, metric in self._metrics.items():
            self.log(name, metric(prediction, target))
        if self._names:
            self._count(prediction, target, stage)

    def _judge(self, prediction: Tensor, target: Tensor, batch: Batch, stage: str) -> Any:
        """The loss of a prediction."""
        return self._loss(prediction, target)

    def _count(self, prediction: Tensor, target: Tensor, stage: str) -> None:
        """Add a batch to the stage's torchmetrics objects."""
        is_probability = target.is_floating_point() and target.shape == prediction.shape
        if self._takes_classes and not is_probability:
            target = class_numbers(prediction, target)
        for name in self._names:
            metric = self._objects[f"of_{stage}"][name]  # type: ignore[index]
            update(metric, prediction, target)
            self.log(name, metric)

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        """The model's prediction."""
        if type(self).split is not Supervised.split:
            return self.model(self.split(batch)[0])
        return self.model(self.input_of(batch))

    def check_data(self, split: str, source: Source) -> None:
        """Refuse labels that are not the number of a class, where the loss wants such and they are in memory."""
        target = self.targets(source) if self._takes_classes else None
        if target is not None:
            one_each = target.dim() == 1 or target.shape[1:] == (1,)
            num_classes = _num_scores(self.model) if one_each else None
            self._label_ranges[split] = check_labels(target, split, num_classes, self._ignored)

    def targets(self, source: Source) -> Tensor | None:
        """The targets of all samples of a source, where they are in memory."""
        found = column(source, self._keys[1])
        return column(source, 1) if found is None else found

    def fit_statistics(self, training: Training) -> None:
        """Let the model measure its inputs, if it has a `fit_statistics` of its own."""
        fit = getattr(self.model, "fit_statistics", None)
        if fit is None and callable(fit := getattr(self.model, "measure", None)):
            warnings.warn(
                f"{type(self.model).__name__}.measure is now called fit_statistics", FutureWarning, stacklevel=2
            )
        if callable(fit):
            fit(lambda count: self.split(training(count))[0])

    def split(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Input and target of a batch: by key of a dict, by place of a tuple."""
        input_key, target_key = self._keys
        if isinstance(batch, dict) and input_key in batch and target_key in batch:
            return batch[input_key], batch[target_key]
        if isinstance(batch, list | tuple) and len(batch) > 1:
            return batch[0], batch[1]
        self.input_of(batch)
        raise UserError(
            f"there are no targets: a batch is {_described(batch)}. A loss and metrics need both: give a tuple (x, y), "
            f"or a dict {{{input_key!r}: x, {target_key!r}: y}}; predictions need no targets"
        )

    def input_of(self, batch: Batch) -> Tensor:
        """The input of a batch that needs no target: by key of a dict, by place of a tuple, or all there is."""
        if isinstance(batch, Tensor):
            return batch
        key = self._keys[0]
        if isinstance(batch, dict) and key not in batch:
            raise UserError(
                f"the task reads {key!r}, but a batch is {_described(batch)}: rename it to {key!r}, or tell the task "
                f"its name, isoscale.Supervised(..., input=NAME)"
            )
        return batch[key] if isinstance(batch, dict) else batch[0]


def _described(batch: Batch) -> str:
    if isinstance(batch, dict):
        return f"a dict of {', '.join(map(repr, batch))}"
    return f"a {type(batch).__name__} of {len(batch)}" if isinstance(batch, list | tuple) else "one tensor"


def _num_scores(model: nn.Module) -> int | None:
    """How many values a model gives for each sample, where its last layer says so; else the first batch will."""
    while isinstance(model, nn.Sequential) and len(model):
        softmax = isinstance(model[-1], nn.LogSoftmax | nn.Identity) and len(model) > 1
        model = model[-2] if softmax else model[-1]
    return model.out_features if isinstance(model, nn.Linear) else None


def _name(metric: str | Callable[..., Any]) -> str:
    return name_of(metric).lower()


def _copies(metrics: dict[str, Any]) -> nn.ModuleDict:
    """Each stage counts for itself."""
    return nn.ModuleDict({name: deepcopy(metric) for name, metric in metrics.items()})
