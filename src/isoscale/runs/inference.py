"""Inference with a finished run: test, predict, and what there is to look at."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from isoscale.data.batches import Batch
from isoscale.data.combined import CombinedPlan
from isoscale.data.feeds.feed import Feed, Part, Slot
from isoscale.data.sources import Sources
from isoscale.data.streams import StreamPlan
from isoscale.engine.build import place
from isoscale.engine.config import Limit
from isoscale.engine.dataset_metrics import EvaluatedDataset, Store, evaluates_dataset, writes_predictions
from isoscale.engine.evaluation import evaluate, predict_batches, show_results
from isoscale.engine.evaluation import predict as predict_all
from isoscale.engine.figures import sample
from isoscale.engine.lightning.loaders import LoadedData
from isoscale.engine.metrics.accumulators import Recorder
from isoscale.engine.optim.loss_weights import Length, last_weights
from isoscale.engine.precision import Precision, resolve
from isoscale.engine.settings import Settings
from isoscale.engine.splits import Split, SplitMaker
from isoscale.engine.state.checkpoint import read
from isoscale.engine.state.tensor_files import save_tensors
from isoscale.engine.step.context import StepContext
from isoscale.engine.step.convolutions import as_products
from isoscale.engine.step.kernels import store_channels_last
from isoscale.engine.step.step import Forward
from isoscale.engine.training_data import adapted, in_step
from isoscale.engine.transforms import FittedStates, fitted
from isoscale.errors import UserError
from isoscale.observe.figures import Figure
from isoscale.observe.progress import Waiting
from isoscale.parallel import world
from isoscale.parallel.collectives import ALONE, Ranks
from isoscale.recipe.components import instantiate, own_weights
from isoscale.recipe.components import resolve as resolve_class
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.schema import Recipe
from isoscale.runs.given_data import Stored, check_rows, explained, fitting, for_other_data, in_split, sample_of
from isoscale.runs.run import Run
from isoscale.science.registry import applied_to
from isoscale.system import devices as accelerators
from isoscale.system.files import failures_in_words, own_folder, written_aside
from isoscale.system.moved import renamed_argument
from isoscale.system.printing import echo


@dataclass(frozen=True)
class _Watched:
    """A feed that says how far it is."""

    feed: Feed
    num_steps: int
    waiting: Waiting

    def parts(self, step: int) -> list[list[Part]]:
        self.waiting.at(step, self.num_steps)
        return self.feed.parts(step)

    def slot(self, step: int, num_steps: int) -> Slot:
        return self.feed.slot(step, num_steps)

    def close(self) -> None:
        self.feed.close()


class Application:
    """A task on the device, as a recipe says, ready to be applied to data."""

    def __init__(
        self, task: nn.Module, loaded: LoadedRecipe, data: Any, split: str, device: str = "auto", *,
        decided: Mapping[str, Any] = MappingProxyType({}), own_data: Callable[[], Any] | None = None,
        checkpoint: Path | None = None, length: Length | None = None,
    ) -> None:  # fmt: skip
        """`decided` is what a run has decided, whose `checkpoint` has what transforms measured; `length` is its own.

        Where no data is given, it is `own_data`.
        """
        self._length = length or Length(1000, 100)  # of which the end is all that counts
        self.loaded = loaded
        recipe = self.loaded.recipe
        self.settings = Settings(seed=recipe.seed, train=recipe.train, data=recipe.data)
        self.accelerator = accelerators.find(device)
        same = self.accelerator.kind == decided.get("device")
        self.precision = (
            Precision(decided["precision"], self.accelerator.kind)
            if same
            else resolve(recipe.train.precision, self.accelerator)
        )
        self.task = task
        place(self.task, self.accelerator, self.precision, False, lambda text: None)
        if same and decided.get("memory_format") == "channels_last":
            store_channels_last(self.task)
            as_products(self.task, decided.get("products") or [])
        self._is_handed = data is not None
        if self._is_handed:
            self.settings = for_other_data(self.settings)
        given = in_split(data, split, self.task) if own_data is None or self._is_handed else own_data()
        transforms = [instantiate(spec) for spec in recipe.data.transforms]
        self._data = adapted(self.task, given, transforms, say=_say)
        self.transforms = _fitted(in_step(transforms), checkpoint)
        self._sample: Batch = None
        self._feeds: list[Feed] = []
        self._loaded: LoadedData | None = None
        self._waiting = Waiting("batches")

    @classmethod
    def of_run(cls, run: Run, checkpoint: str | None, data: Any, split: str, device: str) -> "Application":
        """A finished run's task, on its own data or on other."""
        loaded, decided = run.to_build(), run.record.get("decided", {})
        return cls(
            run.live_task(checkpoint), loaded, data, split, device, decided=decided, own_data=run.data,
            checkpoint=run.checkpoint(checkpoint), length=_length(run),
        )  # fmt: skip

    def split(self, name: str, by_row: bool = False, limit: Limit = None) -> Split:
        """The data that is meant; of test data at most what the recipe says, if nothing else is."""
        maker = SplitMaker(self._data, self.settings, self.accelerator, say=_say, task=self.task)
        if limit is None and name == "test" and not by_row:
            limit = self.settings.train.limit_test_batches
        split = maker.evaluation(name, limit, by_row, by_row and writes_predictions(self.task))
        if split is None:
            systems = f"name {applied_to()} (--data PATH), " if _reader_of_paths(self.loaded.recipe) else ""
            others = [f"{other} (split={other!r}, --split {other})" for other in maker.others(name)]
            raise UserError(
                f"the data has no {name} part; take another one{': ' if others else ' (--split val), '}"
                f"{', '.join(others)}{', ' if others else ''}{systems}or give one: isoscale.test(run, data=...)"
            )
        self._feeds.append(split.feed)
        self._loaded = split.loaded
        self._sample = sample_of(split.source, self.accelerator.device)
        check = getattr(self.task, "check_data", None)
        if check is not None:
            check(name, split.source)
        return replace(split, feed=_Watched(split.feed, split.plan.steps_per_epoch, self._waiting))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """While the task is applied: in its precision, and with a word to whoever waits for it."""
        try:
            with self.precision.applied(), self._waiting, self._explained():
                yield
        finally:
            for feed in self._feeds:
                feed.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """What goes wrong with data that was handed over is said in words."""
        if not self._is_handed:
            yield
            return
        with explained(self.task, lambda: self._sample):
            yield

    def dataset(self, stage: str, split: Split) -> EvaluatedDataset:
        """A look at all samples of a split together."""
        return EvaluatedDataset(stage, _say, self.forward("predict"), split)

    def stored(self, prediction: torch.Tensor) -> torch.Tensor:
        """Predictions in the units of the stored targets, with a word where they cannot be."""
        found = Stored(self.task, self.transforms, self._sample)
        remark = found.remark(prediction)
        if remark is not None:
            _say(f"note: {remark}")
        return found(prediction)

    def forward(self, stage: str) -> Forward:
        """The task's step of a stage."""
        recorder = Recorder(self.accelerator.device)
        train = self.settings.train
        weights = last_weights(train.loss_weights, own_weights(train), self._length)
        context = StepContext(stage, self.task, recorder, self._loaded)
        made = Forward(self.task, context, self.transforms, self.precision, weights)
        made.transforms = fitting(self.task, self.transforms, self._sample)
        return made


def _length(run: Run) -> Length | None:
    """How long a run was to be trained; None where its record does not say."""
    num_steps, per_epoch = run.record.get("num_steps"), run.record.get("steps_per_epoch")
    return Length(num_steps, per_epoch) if num_steps and per_epoch else None


def _fitted(transforms: Sequence[Any], checkpoint: Path | None) -> Sequence[Any]:
    """The transforms of a recipe with what they measured at the start of the run."""
    if fitted(transforms) and checkpoint is not None:
        FittedStates(transforms).load(read(checkpoint)[0].get("transforms", {}), {})
    return transforms


@dataclass(frozen=True)
class Measured:
    """What a test finds."""

    metrics: dict[str, float]
    figures: dict[str, Figure]
    units: Mapping[str, str] = field(default_factory=dict)
    """Of metrics that have one, by their names without a stage."""
    of_all: str = "mean |error|"
    """What metrics of all parts of the data together are called, beside those of each part."""


def measure(
    run: str | Path | Run, checkpoint: str | None = None, data: Any = None, split: str = "test", device: str = "auto"
) -> Measured:
    """The metrics of a run's best weights (or of another checkpoint) on its test data, and what there is to look at."""
    return measured(Application.of_run(_cautioned(run, checkpoint), checkpoint, data, split, device), split)


def measured(application: Application, split: str, limit: Limit = None) -> Measured:
    """The metrics of a task on a split, and what there is to look at."""
    with application.applied():
        part, stage = application.split(split, limit=limit), "val" if split == "val" else "test"
        enough = evaluates_dataset(application.task) and getattr(application.task, "dataset_metrics_only", False)
        values = {} if enough else evaluate(application.forward(stage), part.feed, part.plan)
        dataset = application.dataset(stage, part)
        if evaluates_dataset(application.task):
            values = {**values, **dataset.metrics()}
    return Measured(values, dataset.figures, **_wording(application.task))


def _wording(task: Any) -> dict[str, Any]:
    """How a task speaks of its metrics."""
    return {name: getattr(task, name) for name in ("units", "of_all") if hasattr(task, name)}


def other_data(run: Run, paths: Sequence[str], split: str) -> Sources:
    """Other data than that of a run, in files that its class of data reads (`from_paths`), for one split.

    That method gets the paths and, of the arguments that the recipe gives the class, those that it names.
    """
    recipe = run.to_build().recipe
    read = _reader_of_paths(recipe)
    if read is None:
        raise UserError(f"--data is for runs that learn from {applied_to()}, and {run.path} learns from others")
    named = inspect.signature(read).parameters
    found = read(list(paths), **{key: value for key, value in recipe.data.arguments.items() if key in named})
    if getattr(found, split, None) is None:
        raise UserError(f"{', '.join(paths)}: there are no targets to compare with; isoscale predict needs none")
    return found


def _reader_of_paths(recipe: Recipe) -> Callable[..., Sources] | None:
    """How a recipe's class of data reads other files than those of the recipe, where it can."""
    return None if recipe.data.class_ is None else getattr(resolve_class(recipe.data.class_), "from_paths", None)


@renamed_argument("role", "split")
def test(
    run: str | Path | Run, checkpoint: str | None = None, data: Any = None, split: str = "test", device: str = "auto"
) -> dict[str, float]:
    """The metrics of a run's best weights (or of another checkpoint) on its test data, or on `data` with targets."""
    return measure(run, checkpoint, data, split, device).metrics


@renamed_argument("role", "split")
def predict(
    run: str | Path | Run, checkpoint: str | None = None, data: Any = None, split: str = "test", device: str = "auto",
    folder: Path | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What a run's best weights predict for every sample of a part of its data, in the order of the source.

    `data` is other data than the run's own: tensors or arrays with or without targets, a Dataset, a loader, the path of
    a file, or `Sources` or a LightningDataModule, of which `split` names the part. A prediction that is one tensor is
    called `prediction` and is in the units of the stored target.

    With a folder, they are written there, as .npy files; a task that brings them into a shape of its own does so while
    it makes them.
    """
    application = Application.of_run(_cautioned(run, checkpoint), checkpoint, data, split, device)
    with Store(folder) as store, application.applied():
        return _predicted(application, application.split(split, by_row=True), store)


def _predicted(application: Application, part: Split, store: Store) -> dict[str, torch.Tensor]:
    """What a task predicts for a split, put into a store."""
    if writes_predictions(application.task):
        application.task.write_predictions(application.dataset("predict", part), store)  # type: ignore[operator]
    else:
        found = predict_all(application.forward("predict"), part.feed, part.plan)
        several = isinstance(part.plan, CombinedPlan)
        plans, outputs = (part.plan.plans, found) if isinstance(part.plan, CombinedPlan) else ([part.plan], [found])
        named = {}
        for number, (plan, output) in enumerate(zip(plans, outputs, strict=True)):
            check_rows(application.task, output, plan.num_read if isinstance(plan, StreamPlan) else plan.num_samples)
            of_one = output if isinstance(output, dict) else {"prediction": application.stored(output)}
            end = f"/dataloader_idx_{number}" if several else ""
            named.update({f"{name}{end}": values for name, values in of_one.items()})
        for name, values in named.items():
            store.put(name, (values.float() if values.dtype == torch.bfloat16 else values).numpy())
    return store.finish()


def batch_predictions(application: Application, split: str, limit: Limit = None) -> list[Any]:
    """What `predict_step` returns for every batch, in the order of the data, on the host, as Lightning lists it."""
    with application.applied():
        part = application.split(split, by_row=True, limit=limit)
        return predict_batches(application.forward("predict"), part.feed, part.plan)


class Written(NamedTuple):
    """Predictions in files."""

    place: Path
    """A file, or the folder that they are in."""
    arrays: dict[str, torch.Tensor]
    is_main: bool
    """Whether this process, of several ranks, is the one to speak of it."""


def write_predictions(
    run: Run, out: Path | None, checkpoint: str | None = None, paths: Sequence[str] = (), split: str = "test"
) -> Written:
    """Predict a split of a run's data, or data at `paths`, into a file or a folder.

    Several ranks share the work where each writes a part of what is predicted, as of whole boxes.
    """
    if out is not None:
        _check_out(out)
    ranks = world.join(accelerators.find().kind)
    with world.guarded():
        data = other_data(run, paths, "predict") if paths else None
        split = "predict" if paths else split
        application = Application.of_run(_cautioned(run, checkpoint, ranks), checkpoint, data, split, "auto")
        with application.applied():
            part = application.split(split, by_row=True)
            has_files = writes_predictions(application.task) and getattr(part.source, "writes_files", False)
            gathers = writes_predictions(application.task) and getattr(application.task, "predicts_on_ranks", False)
            if not (ranks.alone or has_files or gathers):
                raise UserError(
                    f"{type(application.task).__name__} predicts on one rank, and this is rank {ranks.rank} of "
                    f"{ranks.world_size}: leave out --devices, or start the command once"
                )
            place = out or run.path / ("predictions" if has_files else "predictions.npz")
            if place.suffix in HDF5 and not has_files:
                raise UserError(f"--out {place}: {WRITTEN_AS}; HDF5 is for whole boxes")
            if place.suffix in ARRAYS and not place.is_dir():
                if not (ranks.alone or gathers):
                    raise UserError(f"--out {place}: several ranks write into a folder, or into one .h5 file")
                folder, only = None, None
            else:
                folder, only = (place.parent, place.name) if place.suffix in HDF5 else (place, None)
                with failures_in_words(folder):
                    folder.mkdir(exist_ok=True) if out else own_folder(folder)
            with Store(folder, ranks, only) as store:
                found = _predicted(application, part, store)
            if folder is None and ranks.is_main:
                _write_arrays(place, found)
        ranks.any(False, "the end of all ranks")
    return Written(place, found, ranks.is_main)


HDF5 = (".h5", ".hdf5")
ARRAYS = (".npz", ".safetensors")
WRITTEN_AS = "predictions are written as .npz or .safetensors, or into a folder"


def _check_out(path: Path) -> None:
    """Refuse a place that cannot be written, before the work."""
    if not path.is_dir() and path.suffix and path.suffix not in (*ARRAYS, *HDF5):
        raise UserError(f"--out {path}: {WRITTEN_AS}")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: there is no folder {path.parent}")


def _write_arrays(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with failures_in_words(path), written_aside(path) as file:
        if path.suffix == ".npz":
            arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
            np.savez(file, **arrays)
        else:
            save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, file.name)


@renamed_argument("role", "split")
def figures(
    run: str | Path | Run, checkpoint: str | None = None, data: Any = None, split: str = "val", device: str = "auto"
) -> dict[str, Figure]:
    """What a run's task shows of a part of its data, by name: figures and pictures. Empty where it shows nothing."""
    application = Application.of_run(_as_run(run), checkpoint, data, split, device)
    with application.applied():
        part = application.split(split)
        dataset = application.dataset("val" if split == "val" else "test", part)
        if evaluates_dataset(application.task):
            dataset.metrics()
        return {**dataset.figures, **show_results(application.forward("predict"), part)}


def example(run: str | Path | Run, checkpoint: str | None, count: int) -> tuple[Batch, list[str]]:
    """A few training samples of a run as its network sees them, and the names of the transforms that made them so."""
    application = Application.of_run(_as_run(run), checkpoint, None, "train", "cpu")
    source, transforms = application.split("train").source, application.transforms
    batch = sample(source, count, transforms, torch.device("cpu"), application.precision.dtype)
    return batch, [type(transform).__name__ for transform in transforms]


def _say(text: str) -> None:
    echo(text, err=True)


def _cautioned(run: str | Path | Run, checkpoint: str | None, ranks: Ranks = ALONE) -> Run:
    """The run, after a word to the user where it has not come to its end."""
    found = _as_run(run)
    caution = found.caution(checkpoint)
    if caution is not None and ranks.is_main:
        _say(caution)
    return found


def _as_run(run: str | Path | Run) -> Run:
    return run if isinstance(run, Run) else Run.find(str(run))
