"""A run that is about to be trained: which one it is, by which recipe, and among which ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isoscale.data.hashing import derive_key
from isoscale.engine.build import build
from isoscale.engine.settings import Decisions, Settings
from isoscale.engine.state.checkpoint import State
from isoscale.engine.trainer import Trainer
from isoscale.observe.observers import Observers
from isoscale.parallel.collectives import ALONE, Ranks
from isoscale.recipe.components import data_spec, instantiate, task_spec
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.schema import InitFrom, Recipe
from isoscale.runs.directory import RunDirectory
from isoscale.runs.init_from import start_from


@dataclass
class Given:
    """Task and data that were made in Python instead of by the recipe."""

    task: nn.Module
    data: Any


@dataclass
class OpenedRun:
    """What a start of a training is about."""

    loaded: LoadedRecipe
    directory: RunDirectory | None = None
    """None: nothing is saved, or another rank does it."""
    notes: list[str] = field(default_factory=list)
    """What to tell the user when it starts."""
    given: Given | None = None
    profile: bool = False
    """Whether to measure where the time goes."""
    ranks: Ranks = ALONE
    where: Path | None = None
    """The directory of the run, also on ranks that do not write to it; None: nothing is saved."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self.loaded.recipe

    @property
    def settings(self) -> Settings:
        """The recipe's sections for the engine."""
        recipe = self.recipe
        return Settings(
            recipe.seed, recipe.optimizer, recipe.schedule, recipe.train, recipe.data, recipe.parallel,
            recipe.checkpoint, recipe.observe,
        )  # fmt: skip

    def components(self) -> tuple[nn.Module, Any, Sequence[Any]]:
        """Task, data and transforms; the initial weights are a function of the seed."""
        torch.manual_seed(derive_key(self.recipe.seed, "initial weights")[0])
        transforms = [instantiate(transform) for transform in self.recipe.data.transforms]
        if self.given is not None:
            return self.given.task, self.given.data, transforms
        return instantiate(task_spec(self.recipe.task)), instantiate(data_spec(self.recipe.data)), transforms

    def another_trainer(
        self, settings: Settings, decided: Decisions, observers: Observers, state: State | None = None,
        ranks: Ranks = ALONE, begin: Callable[[nn.Module], None] | None = None,
    ) -> Trainer:  # fmt: skip
        """A trainer like the run's own that writes nothing: in a given state, or at the beginning.

        There, `begin` sets the weights where not the recipe says them.
        """
        task, data, transforms = self.components()
        begin = begin or (lambda task: self.load_initial_weights(task, observers.note))
        built = build(task, data, transforms, settings, decided, observers, ranks, begin=None if state else begin)
        trainer = Trainer(built, settings, decided, observers, ranks=ranks, saving=False)
        if state is not None:
            trainer.restore(state)
        return trainer

    def data(self) -> Any:
        """The data alone."""
        return self.given.data if self.given else instantiate(data_spec(self.recipe.data))

    def load_initial_weights(self, task: nn.Module, say: Callable[[str], None]) -> None:
        """Give a task the weights that the recipe lets it begin with."""
        init = self.recipe.task.init_from
        if init is not None:
            start_from(InitFrom(run=init) if isinstance(init, str) else init, task, say)
