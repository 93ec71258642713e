"""The Python calls: train, test and predict, from scripts and notebooks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from isoscale.runs.open import Given, open_run
from isoscale.runs.run import Run
from isoscale.runs.session import Session


def train(
    recipe: str | Path | dict[str, Any] | None = None,
    run: str | Path | None = None,
    *,
    profile: bool = False,
    trust: bool = False,
    **overrides: Any,
) -> Run:
    """Train a recipe: a preset's name, a file or a dict, with overrides such as `**{"train.epochs": 3}`.

    With `run`, the run in that directory is continued if there is one. With `profile`, it is shown where time went.
    With `trust`, a run of somebody else may name any class.
    """
    session = Session(open_run(recipe, overrides, run, profile=profile, trust=trust)).train()
    assert session.run.where is not None
    return Run(session.run.where, trust=trust)


def develop(
    recipe: str | Path | dict[str, Any] | None, overrides: Any, num_batches: int, profile: bool = False,
    trust: bool = False,
) -> dict[str, float]:  # fmt: skip
    """A few batches of everything (training, validation, test), nothing saved: does it run at all?"""
    few = {f"train.limit_{split}_batches": num_batches for split in ("train", "val", "test")}
    given = (
        list(overrides)
        if not isinstance(overrides, Mapping)
        else [f"{key}={value}" for key, value in overrides.items()]
    )
    limits = [f"{key}={value}" for key, value in {**few, "train.epochs": 1, "observe.every": 1}.items()]
    session = Session(open_run(recipe, given + limits, None, save=False, profile=profile, trust=trust)).train()
    assert session.trainer is not None
    return {**session.trainer.progress.values, **session.tested}


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
        session = Session(open_run(self._recipe, self._overrides, self._run, given)).train()
        assert session.run.where is not None
        return Run(session.run.where, task, data)
