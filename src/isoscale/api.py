"""The Python calls: train, test and predict, from scripts and notebooks."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from isoscale.data.sources import ROLES, Sources, as_source
from isoscale.engine import accelerator as accelerators
from isoscale.engine.assembly import place
from isoscale.engine.checkpoint import read
from isoscale.engine.evaluate import evaluate, show_results
from isoscale.engine.evaluate import predict as predict_all
from isoscale.engine.fitting import FittedStates, fitted
from isoscale.engine.loaders import is_data_module
from isoscale.engine.precision import Precision, resolve
from isoscale.engine.recorder import Recorder
from isoscale.engine.roles import Role, RoleMaker
from isoscale.engine.schedules import loss_weight
from isoscale.engine.settings import Settings
from isoscale.engine.stage import Stage
from isoscale.engine.step import Forward
from isoscale.engine.survey import Store, Survey, concludes, stored, surveys
from isoscale.errors import UserError
from isoscale.observe.exhibits import Exhibit
from isoscale.opening import open_session
from isoscale.recipe.components import instantiate
from isoscale.recipe.load import LoadedRecipe, load_recipe
from isoscale.run import Run
from isoscale.session import Given


def train(
    recipe: str | Path | dict[str, Any] | None = None,
    run: str | Path | None = None,
    *,
    profile: bool = False,
    **overrides: Any,
) -> Run:
    """Train a recipe: a preset's name, a file or a dict, with overrides such as `**{"train.epochs": 3}`.

    With `run`, the run in that directory is continued if there is one. With `profile`, it is shown where time went.
    """
    session = open_session(recipe, overrides, run, profile=profile).train()
    assert session.where is not None
    return Run(session.where)


def develop(
    recipe: str | Path | dict[str, Any] | None, overrides: Any, num_batches: int, profile: bool = False
) -> dict[str, float]:
    """A few batches of everything (training, validation, test), nothing saved: does it run at all?"""
    few = {f"train.limit_{role}_batches": num_batches for role in ("train", "val", "test")}
    given = (
        list(overrides)
        if not isinstance(overrides, Mapping)
        else [f"{key}={value}" for key, value in overrides.items()]
    )
    limits = [f"{key}={value}" for key, value in {**few, "train.epochs": 1, "observe.every": 1}.items()]
    session = open_session(recipe, given + limits, None, save=False, profile=profile).train()
    return {**session.engine.progress.values, **session.tested}


class Trainer:
    """Trains tasks and data that were made in Python, by a recipe's other sections."""

    def __init__(
        self, recipe: str | Path | dict[str, Any] | None = None, run: str | Path | None = None, **overrides: Any
    ) -> None:
        """A recipe (its `task` and `data.class` are not used), and where the run goes or continues."""
        self._recipe = {} if recipe is None else recipe
        self._run = run
        self._overrides = overrides

    def fit(self, task: nn.Module, data: Any = None) -> Run:
        """Train `task` on `data`: `isoscale.Sources`, a LightningDataModule, a loader, a Dataset or tensors.

        Without data, the task's own loaders are taken (`train_dataloader`, `val_dataloader`, …).
        """
        given = Given(task, task if data is None else data)
        session = open_session(self._recipe, self._overrides, self._run, given).train()
        assert session.where is not None
        return Run(session.where, task, data)


class _Application:
    """A finished run's task on the device, ready to be applied to data."""

    def __init__(self, run: Run, checkpoint: str | None, data: Any, role: str, device: str) -> None:
        self.loaded: LoadedRecipe = load_recipe(run.directory.recipe)
        recipe = self.loaded.recipe
        self.settings = Settings(seed=recipe.seed, train=recipe.train, data=recipe.data)
        decided = run.record["decided"]
        self.accelerator = accelerators.find(device)
        same = self.accelerator.kind == decided["device"]
        self.precision = (
            Precision(decided["precision"], self.accelerator.kind)
            if same
            else resolve(recipe.train.precision, self.accelerator)
        )
        self.task = run.task(checkpoint)
        place(self.task, self.accelerator, self.precision, False, lambda text: None)
        self._data = run.data() if data is None else _in_role(data, role)
        self.transforms = _fitted(recipe.data.transforms, run.checkpoint(checkpoint))

    def role(self, name: str) -> Role:
        limit = self.settings.train.limit_test_batches if name == "test" else None
        role = RoleMaker(self._data, self.settings, self.accelerator).evaluation(name, limit)
        if role is None:
            raise UserError(f"the data has no {name} part; give one: isoscale.test(run, data=...)")
        check = getattr(self.task, "check_data", None)
        if check is not None:
            check(name, role.source)
        return role

    def survey(self, stage: str, role: Role) -> Survey:
        """A look at all samples of a role together."""
        return Survey(stage, _say, self.forward("predict"), role)

    def stored(self, values: Any) -> Any:
        """Predictions in the units of the stored targets."""
        return stored(self.task, self.transforms, values)

    def forward(self, stage: str) -> Forward:
        recorder = Recorder(self.accelerator.device)
        weights = {name: loss_weight(weight, 1, 2) for name, weight in self.settings.train.loss_weights.items()}
        return Forward(self.task, Stage(stage, self.task, recorder), self.transforms, self.precision, weights)


def _fitted(specs: Sequence[Any], checkpoint: Path) -> list[Any]:
    """The transforms of a recipe with what they measured at the start of the run."""
    transforms = [instantiate(spec) for spec in specs]
    if fitted(transforms):
        FittedStates(transforms).load(read(checkpoint)[0].get("transforms", {}), {})
    return transforms


@dataclass(frozen=True)
class Measured:
    """What a test finds."""

    metrics: dict[str, float]
    exhibits: dict[str, Exhibit]
    units: Mapping[str, str]
    """Of metrics that have one, by their names without a stage."""


def measure(
    run: str | Path | Run, checkpoint: str | None = None, data: Any = None, role: str = "test", device: str = "auto"
) -> Measured:
    """The metrics of a run's best weights (or of another checkpoint) on its test data, and what there is to look at."""
    application = _Application(_as_run(run), checkpoint, data, role, device)
    with application.precision.applied():
        part, stage = application.role(role), "val" if role == "val" else "test"
        values = evaluate(application.forward(stage), part.feed, part.plan)
        survey = application.survey(stage, part)
        if surveys(application.task):
            values = {**values, **survey.metrics()}
    return Measured(values, survey.exhibits, getattr(application.task, "units", {}))


def test(
    run: str | Path | Run, checkpoint: str | None = None, data: Any = None, role: str = "test", device: str = "auto"
) -> dict[str, float]:
    """The metrics of a run's best weights (or of another checkpoint) on its test data."""
    return measure(run, checkpoint, data, role, device).metrics


def predict(
    run: str | Path | Run, checkpoint: str | None = None, data: Any = None, role: str = "test", device: str = "auto",
    folder: Path | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What a run's best weights predict for every sample of a part of its data, in the order of the source.

    With a folder, they are written there, as .npy files; a task that brings them into a shape of its own does so while
    it makes them.
    """
    application = _Application(_as_run(run), checkpoint, data, role, device)
    store = Store(folder)
    with application.precision.applied():
        part = application.role(role)
        if concludes(application.task):
            application.task.conclude(application.survey("predict", part), store)  # type: ignore[operator]
        else:
            found = predict_all(application.forward("predict"), part.feed, part.plan)
            named = found if isinstance(found, dict) else {"prediction": application.stored(found)}
            for name, values in named.items():
                store.put(name, values.numpy())
    return store.finish()


def exhibits(
    run: str | Path | Run, checkpoint: str | None = None, data: Any = None, role: str = "val", device: str = "auto"
) -> dict[str, Exhibit]:
    """What a run's task shows of a part of its data, by name: figures and pictures. Empty where it shows nothing."""
    application = _Application(_as_run(run), checkpoint, data, role, device)
    with application.precision.applied():
        part = application.role(role)
        survey = application.survey("val" if role == "val" else "test", part)
        if surveys(application.task):
            survey.metrics()
        return {**survey.exhibits, **show_results(application.forward("predict"), part)}


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _in_role(data: Any, name: str) -> Any:
    """Data for one role: as it is where it has roles, a plain loader, dataset or tensors for the role asked."""
    if isinstance(data, DataLoader):
        return Sources(**{name: as_source(data.dataset, data.collate_fn)})
    if is_data_module(data) or any(hasattr(data, role) for role in ROLES):
        return data
    return Sources(**{name: data})


def _as_run(run: str | Path | Run) -> Run:
    return run if isinstance(run, Run) else Run.find(str(run))
