"""The evaluations of a training: what its present weights are worth, on data that the ranks share out."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

from isoscale.engine.agreement import Agreement
from isoscale.engine.assembly import Assembly
from isoscale.engine.boundaries import Planner
from isoscale.engine.dataset_metrics import DatasetEvaluator
from isoscale.engine.evaluation import evaluate
from isoscale.engine.lightning.module import forget
from isoscale.engine.metrics.monitored import check_monitors, check_without_evaluation
from isoscale.engine.optim.schedules import loss_weight
from isoscale.engine.settings import Settings
from isoscale.engine.splits import Split, limited
from isoscale.engine.state.progress import Progress
from isoscale.observe.events import Logged
from isoscale.observe.observers import Observers
from isoscale.parallel.collectives import Ranks
from isoscale.parallel.reduction import Reducer


@dataclass
class Evaluations:
    """Measures the weights of a training as they are at the step that it has reached."""

    parts: Assembly
    plan: Planner
    settings: Settings
    progress: Progress
    agreed: Agreement
    observers: Observers
    ranks: Ranks
    make_reducer: Callable[[], Reducer]
    shows: bool
    """Whether anybody looks at more than numbers."""

    def __post_init__(self) -> None:
        """What the task measures of all data together is measured besides."""
        self._whole = DatasetEvaluator(self.parts, self.plan, self.observers, self._reducer_of, self.shows)

    @property
    def loss_weights(self) -> dict[str, float]:
        """The weights of named loss terms at the present step."""
        weights, last = self.settings.train.loss_weights, max(0, self.progress.step - 1)
        return {name: loss_weight(weight, last, self.parts.rate) for name, weight in weights.items()}

    def validate(self, split: Split) -> dict[str, float]:
        """The values of the present weights, or of their averages; broken off where a stop is asked for."""
        zero_grad = getattr(self.parts.task, "on_validation_model_zero_grad", None)
        if zero_grad is not None:  # as under Lightning: gradients that no update has used are gone then
            zero_grad()
        with self.parts.ema.swapped_in() if self.parts.ema else nullcontext():
            self.agreed.begin_evaluation()
            values = self.measure("val", split, self.agreed.in_evaluation)
        self.parts.train_context.enter()
        return values

    def measure(self, stage: str, split: Split, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """The values of the present weights on a split's data."""
        values = self._means(stage, split, interrupted)
        return {**values, **self._whole.after(stage, split, self.progress.step, interrupted)}

    def finish(self, split: Split) -> dict[str, float]:
        """What the task measures where training ends before its plan does."""
        values = self._whole.last(split, self.progress.step)
        self.parts.train_context.enter()
        return values

    def begin(self, split: Split | None) -> None:
        """What the task measures before its first step."""
        values = self._whole.before(split) if split is not None and not self.progress.step else {}
        self.parts.train_context.enter()
        if values:
            self.progress.values = values
            self.observers.notify(Logged(0, 0, values))

    def rehearse(self, split: Split | None) -> None:
        """Evaluate one batch before training: a mistake in it shows now, and the monitored metric must be there."""
        if self.progress.step:
            return
        if split is None or self.plan.evaluate.unit == "never":
            check_without_evaluation(self.settings)
            return
        rehearsed = replace(split, plan=limited(split.plan, 1))
        values = {**self._means("val", rehearsed), **self._whole.rehearse(rehearsed)}
        self.parts.train_context.enter()
        forget(self.parts.task)
        check_monitors(self.settings, [*values, "train/loss_epoch"], self.observers.note)

    def _means(self, stage: str, split: Split, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float]:
        forward = self.parts.forward(stage, self.loss_weights)
        return evaluate(forward, split.feed, split.plan, interrupted, self._reducer_of(split))

    def _reducer_of(self, split: Split) -> Reducer | None:
        whole = self.ranks.alone and split.plan.num_shards == 1
        return None if whole else self.make_reducer()
