"""The layers of a recipe's model or of a run's, without any training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from isoscale.data.batches import Batch
from isoscale.engine.build import place
from isoscale.engine.checks import check_task
from isoscale.engine.diagnose.layers import look_at
from isoscale.engine.figures import sample
from isoscale.engine.metrics.accumulators import Recorder
from isoscale.engine.precision import Precision
from isoscale.engine.settings import Settings
from isoscale.engine.splits import SplitMaker
from isoscale.engine.step.context import StepContext
from isoscale.engine.task import Task
from isoscale.engine.training_data import adapted, in_step
from isoscale.errors import UserError
from isoscale.observe.events import Layer
from isoscale.recipe.components import data_spec, instantiate, task_spec
from isoscale.recipe.load import load_recipe
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.schema import Recipe
from isoscale.recipe.trust import Trust
from isoscale.runs.run import Run
from isoscale.system import devices as accelerators

_CPU = accelerators.find("cpu")


@dataclass(frozen=True)
class Described:
    """The model of a recipe or a run as a table; the first layer is the model itself."""

    name: str
    layers: Sequence[Layer]
    without_shapes: str = ""
    """Why no shapes are known; empty where they are."""


def layers_of_run(run: Run, overrides: Sequence[str] = (), trust: Trust = Trust.PROJECT) -> Described:
    """As they were seen when the run began, or those of its recipe where something in it is changed."""
    recorded, given = run.record.get("layers"), run.record.get("given")
    if given and (overrides or not recorded):
        raise UserError(f"the task of this run, {given}, was given in Python, and no recipe can make or change it")
    if overrides or not recorded:
        described = layers_of_recipe(load_recipe(run.directory.recipe, overrides, check_components=True, trust=trust))
        return replace(described, name=run.path.name)
    layers = [Layer(**{**layer, "shape": layer["shape"] and tuple(layer["shape"])}) for layer in recorded]
    seen = any(layer.shape is not None for layer in layers)
    return Described(run.path.name, layers, "" if seen else "the run did not see them")


def layers_of_recipe(loaded: LoadedRecipe) -> Described:
    """Build the model and, where its data is there, run it on two samples."""
    recipe = loaded.recipe
    precision = Precision("64" if recipe.train.precision == "64" else "32", _CPU.kind)
    task = instantiate(task_spec(recipe.task))
    check_task(task)
    place(task, _CPU, precision, False, lambda text: None)
    reasons: list[str] = []

    def predict() -> None:
        try:
            with precision.applied():
                _predict(task, _two_samples(task, recipe, precision))
        except Exception as error:
            reasons.append(_in_one_line(error))
            raise

    layers = look_at(task, predict).layers
    return Described(loaded.name, layers, "".join(reasons))


def _two_samples(task: nn.Module, recipe: Recipe, precision: Precision) -> Batch:
    """Training samples as the network sees them."""
    transforms = [instantiate(transform) for transform in recipe.data.transforms]
    settings = Settings(seed=recipe.seed, data=recipe.data)
    data = adapted(task, instantiate(data_spec(recipe.data)), transforms)
    split = SplitMaker(data, settings, _CPU).train()
    return sample(split.source, 2, in_step(transforms), _CPU.device, precision.dtype)


def _predict(task: nn.Module, batch: Batch) -> Any:
    if not isinstance(task, Task):
        raise UserError(f"{type(task).__name__} is not an isoscale.Task, and its hooks would run")
    return StepContext("predict", task, Recorder(_CPU.device)).method(batch, 0)


def _in_one_line(error: Exception) -> str:
    words = str(error).partition("\n")[0]
    return words if isinstance(error, UserError) else f"{type(error).__name__}: {words}"
