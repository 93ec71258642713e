"""The Python calls: train, test and predict, from scripts and notebooks."""

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isoscale.engine.lightning.callbacks import defines
from isoscale.engine.lightning.given_loaders import given_loaders
from isoscale.errors import Stopped, UserError, nearest
from isoscale.parallel.environments import find as environment
from isoscale.parallel.environments.batch import batch_end
from isoscale.recipe.importing.reading import split
from isoscale.recipe.lightning import ARGUMENTS, translate
from isoscale.recipe.load import load_recipe
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.schema import Recipe
from isoscale.runs.ckpt import load_ckpt
from isoscale.runs.directory import ROOT
from isoscale.runs.export import export
from isoscale.runs.given_data import in_split
from isoscale.runs.inference import Application, batch_predictions, measured
from isoscale.runs.open import Given, open_run
from isoscale.runs.run import Run
from isoscale.runs.session import Session
from isoscale.system.printing import echo


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


class RunCheckpoints:
    """The checkpoints of a run as Lightning's ModelCheckpoint tells of them; files are written when asked for."""

    def __init__(self, run: Run) -> None:
        """Those of `run`."""
        self._run = run
        section = run.to_build().recipe.checkpoint
        self.monitor, self.mode = section.monitor, section.mode
        self.dirpath = str(run.directory.checkpoints().folder)

    @property
    def best_model_path(self) -> str:
        """A `.ckpt` file with the best weights, in the run directory."""
        return self._file("best" if self._run.has_best else "last")

    @property
    def last_model_path(self) -> str:
        """A `.ckpt` file with the last weights, in the run directory."""
        return self._file("last")

    @property
    def best_model_score(self) -> Tensor | None:
        """The value of the metric that chose the best weights."""
        value = (self._run.record.get("best") or {}).get("value")
        return None if value is None else torch.tensor(value)

    def _file(self, name: str) -> str:
        step = self._run.checkpoint(name).name
        path = self._run.path / f"{name}-{step}.ckpt"
        if not path.exists():
            export(self._run, path, name)
        return str(path)


class Trainer:
    """Trains tasks and data that were made in Python: by a recipe, or by the arguments of Lightning's Trainer."""

    def __init__(
        self, recipe: str | Path | dict[str, Any] | None = None, run: str | Path | None = None, **arguments: Any
    ) -> None:
        """A recipe (its `task` and `data.class` are not used), and where the run goes or continues.

        Further arguments are keys of the recipe, such as `**{"train.epochs": 3}`, and those of Lightning's Trainer
        (`max_epochs=3`), which are translated into such keys, or refused with what to do instead.

        Files are always read as `weights_only=True` reads them, also where its calls are allowed to run code.
        """
        lightning = {name: value for name, value in arguments.items() if name in ARGUMENTS}
        own = {name: value for name, value in arguments.items() if name not in ARGUMENTS}
        _check_known(own)
        says_length = bool({"train.epochs", "train.steps", "train"} & own.keys())
        self._said = translate(lightning, whole=recipe is None and bool(lightning) and not says_length)
        self._recipe = {} if recipe is None else recipe
        self._directory = run
        self._overrides = {**self._said.values, **own}
        self._run: Run | None = None
        self._model: nn.Module | None = None
        self._data: Any = None
        self._session: Session | None = None
        self.callbacks = self._said.callbacks
        self.callback_metrics: dict[str, Tensor] = {}
        """The values of the last fit, validate or test, by name."""

    def fit(
        self, model: nn.Module | None = None, train_dataloaders: Any = None, val_dataloaders: Any = None,
        datamodule: Any = None, ckpt_path: str | Path | None = None, weights_only: bool | None = None, *,
        task: nn.Module | None = None, data: Any = None,
    ) -> Run:  # fmt: skip
        """Train a task or a LightningModule on data, or on the loaders of its own methods.

        Data is `isoscale.Sources`, a LightningDataModule, a loader, a Dataset or tensors, for training alone or for
        training and validation.

        `ckpt_path="last"` continues the newest run of this module, and the path of a run that one.
        """
        found = model if task is None else task
        if not isinstance(found, nn.Module):
            raise UserError("fit needs what to train: trainer.fit(model, …), an nn.Module with a training_step")
        train = train_dataloaders if data is None else data
        if datamodule is not None and (train is not None or val_dataloaders is not None):
            raise UserError("fit takes loaders or a datamodule, not both")
        given_data = datamodule if datamodule is not None else given_loaders(found, train=train, val=val_dataloaders)
        self._model, self._data = found, given_data
        notes = list(self._said.notes)
        directory = self._continued(ckpt_path, type(found).__qualname__, notes)
        root = ROOT if self._said.root is None else Path(self._said.root)
        given = Given(found, found if given_data is None else given_data, self.callbacks, root, notes)
        began, saves = time.time(), not self._said.dev
        opened = open_run(self._recipe, self._overrides, directory, given, save=saves, profile=self._said.profile)
        self._session = Session(opened)
        try:
            self._session.train()
        except Stopped as stopped:
            if not self._is_own_deadline(str(stopped), began):
                raise
        if opened.where is None:
            assert self._session.trainer is not None
            self._remember(self._session.trainer.progress.values)
            return None  # type: ignore[return-value]
        self._run = Run(opened.where, found, given_data)
        self._remember(self._run.metrics)
        if self._session.trainer is not None:  # by the names that hooks found them under, too
            self.callback_metrics |= self._session.trainer.parts.view.metrics.callback
        return self._run

    def validate(
        self, model: nn.Module | None = None, dataloaders: Any = None, ckpt_path: str | Path | None = None,
        verbose: bool = True, datamodule: Any = None, weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """The metrics of a module on validation data: one dict for each loader, as Lightning returns them."""
        return self._measured("val", model, dataloaders, ckpt_path, verbose, datamodule)

    def test(
        self, model: nn.Module | None = None, dataloaders: Any = None, ckpt_path: str | Path | None = None,
        verbose: bool = True, datamodule: Any = None, weights_only: bool | None = None,
    ) -> list[dict[str, float]]:  # fmt: skip
        """The metrics of a module on test data: one dict for each loader, as Lightning returns them.

        Without `model` it is the one that was trained, with its best weights; `ckpt_path` names others: "best",
        "last", or a file.
        """
        return self._measured("test", model, dataloaders, ckpt_path, verbose, datamodule)

    def predict(
        self, model: nn.Module | None = None, dataloaders: Any = None, datamodule: Any = None,
        return_predictions: bool | None = None, ckpt_path: str | Path | None = None, weights_only: bool | None = None,
    ) -> list[Any] | None:  # fmt: skip
        """What `predict_step` returns for each batch of the prediction data, as Lightning lists it.

        With `return_predictions=False` it is only called.
        """
        application = self._application("predict", model, dataloaders, ckpt_path, datamodule)
        found = batch_predictions(application, "predict", self._said.dev or self._said.limit_predict)
        return None if return_predictions is False else found

    def save_checkpoint(self, filepath: str | Path, weights_only: bool | None = None) -> None:
        """Write the last weights of the run as a `.ckpt` file, which `load_from_checkpoint` reads."""
        if environment.find().rank == 0:
            export(self._trained, Path(filepath).with_suffix(".ckpt"), "last")

    @property
    def current_epoch(self) -> int:
        """Finished epochs of the run."""
        return int(self._run.record.get("epoch") or 0) if self._run else 0

    @property
    def global_step(self) -> int:
        """Finished optimizer steps of the run."""
        return int(self._run.record.get("step") or 0) if self._run else 0

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        """The last value of everything that was logged."""
        return {name: torch.tensor(value) for name, value in self._run.metrics.items()} if self._run else {}

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that keeps checkpoints; without one, what tells of those of the run."""
        return self._own_checkpoints or (RunCheckpoints(self._run) if self._run else None)

    @property
    def _own_checkpoints(self) -> Any:
        """The first callback that keeps checkpoints, of those given and those of `configure_callbacks`."""
        engine = None if self._session is None else self._session.trainer
        every = [*self.callbacks, *(() if engine is None else engine.parts.view.callbacks)]
        return next((each for each in every if hasattr(each, "best_model_path")), None)

    @property
    def log_dir(self) -> str | None:
        """The run directory."""
        return str(self._run.path) if self._run else None

    @property
    def loggers(self) -> list[Any]:
        """The loggers that were given; isoscale writes what they would."""
        return list(self._said.logger or [])

    @property
    def logger(self) -> Any:
        """The first of them."""
        return next(iter(self.loggers), None)

    @property
    def is_global_zero(self) -> bool:
        """Whether this process is the one to speak and write."""
        return environment.find().rank == 0

    def _continued(self, ckpt_path: str | Path | None, task: str, notes: list[str]) -> str | Path | None:
        """The directory of the run that is meant; None for a new one."""
        if ckpt_path is None or (ckpt_path == "last" and self._directory is not None):
            return self._directory
        if ckpt_path == "last":
            runs = Run.all(ROOT if self._said.root is None else Path(self._said.root))
            mine = [run for run in runs if run.record.get("given") == task]
            if not mine:
                notes.append(f"ckpt_path='last': there is no run of {task} yet, and this one begins")
            return mine[-1].path if mine else None
        if ckpt_path in ("best", "hrc", "hpc", "registry"):
            raise UserError(
                f"ckpt_path={ckpt_path!r}: a run goes on from its last state, ckpt_path='last'; a new one begins with "
                "the best weights of another by Trainer(…, **{'task.init_from': RUN})"
            )
        path = Path(ckpt_path)
        inside = next((folder for folder in (path, *path.parents) if Run.exists(folder)), None)
        if inside is None or path.is_file():
            raise UserError(
                f"ckpt_path={str(path)!r}: to go on needs the run, ckpt_path=RUN or 'last': a file of Lightning has "
                "another program's optimizer and position. A new run begins with its weights by "
                f"Trainer(…, **{{'task.init_from': {str(path)!r}}})"
            )
        return inside

    def _is_own_deadline(self, reason: str, began: float) -> bool:
        """Whether it was `max_time` that ended the training, which is no failure."""
        limit, job_ends = self._said.max_time, batch_end()
        is_ours = limit is not None and (job_ends is None or job_ends > began + limit)
        return is_ours and "deadline" in reason

    def _remember(self, values: Mapping[str, float]) -> None:
        self.callback_metrics = {name: torch.tensor(value) for name, value in values.items() if "time/" not in name}

    @property
    def _trained(self) -> Run:
        if self._run is None:
            raise UserError("nothing has been trained yet: call trainer.fit first, or give the model")
        return self._run

    def _measured(
        self, stage: str, model: nn.Module | None, dataloaders: Any, ckpt_path: Any, verbose: bool, datamodule: Any
    ) -> list[dict[str, float]]:
        application = self._application(stage, model, dataloaders, ckpt_path, datamodule)
        limit = application.settings.train.limit_val_batches if stage == "val" else None
        values = measured(application, stage, limit).metrics
        application.task.cpu()
        self._remember(values)
        if verbose and environment.find().rank == 0:
            echo("\n".join(f"{name}: {value:.6g}" for name, value in values.items()))
        return _by_loader(values)

    def _application(
        self, stage: str, model: nn.Module | None, dataloaders: Any, ckpt_path: Any, datamodule: Any
    ) -> Application:
        """The module with the weights that are meant, on the data that is."""
        found = self._model if model is None else model
        if found is None:
            raise UserError("give the model: nothing has been trained yet")
        unheard = [f"{name} of {type(each).__name__}" for each in self.callbacks for name in _HOOKS_OF.get(stage, ())
                   if defines(each, name)]  # fmt: skip
        if unheard and environment.find().rank == 0:
            echo(f"callbacks are called in fit only: {', '.join(unheard)} is not; define it in the module", err=True)
        if model is None and ckpt_path is None and self._run is not None:
            ckpt_path = "best"
        if ckpt_path == "best":  # as Lightning has it: that of the callback which keeps checkpoints, if there is one
            own = getattr(self._own_checkpoints, "best_model_path", "")
            ckpt_path = own or ("best" if self._trained.has_best else "last")
        if ckpt_path in ("best", "last"):
            found = Run(self._trained.path, found).live_task(str(ckpt_path))
        elif ckpt_path is not None and Run.exists(ckpt_path):
            found = Run(ckpt_path, found).live_task()
        elif ckpt_path is not None:
            load_ckpt(Path(ckpt_path), found)
        if isinstance(dataloaders, nn.Module) or (dataloaders is not None and datamodule is not None):
            raise UserError("give loaders or a datamodule, not both")
        data = datamodule if datamodule is not None else given_loaders(found, **{stage: dataloaders})
        data = data if data is not None else self._data if self._data is not None else found
        loaded: LoadedRecipe = load_recipe(self._recipe, self._overrides)
        device = loaded.recipe.train.device
        return Application(found, loaded, None, stage, device, own_data=lambda: in_split(data, stage, found))


_HOOKS_OF = {
    stage: [f"on_{stage}_{when}" for when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")]
    + ["write_on_batch_end", "write_on_epoch_end"] * (stage == "predict")
    for stage in ("test", "predict")
}
"""Of callbacks, which nobody calls outside of a training."""


def _check_known(own: Mapping[str, Any]) -> None:
    """Refuse what is neither a key of a recipe nor an argument of Lightning's Trainer."""
    _, rest = split(own)
    for name in rest:
        first = str(name).partition(".")[0].removeprefix("~")
        if "." not in str(name) and first not in Recipe.model_fields:
            meant = nearest(str(name), [*ARGUMENTS, *Recipe.model_fields])
            hint = f'; did you mean "{meant}"?' if meant else ""
            raise UserError(
                f"Trainer has no argument {name!r}{hint} It takes keys of a recipe, **{{'train.epochs': 3}}, and the "
                "arguments of Lightning's Trainer, max_epochs=3"
            )


_OF_LOADER = re.compile(r"(.*)/dataloader_idx_(\d+)")


def _by_loader(values: Mapping[str, float]) -> list[dict[str, float]]:
    """Metrics as Lightning returns them: a dict for each loader, told apart by how their names end."""
    matches = {name: _OF_LOADER.fullmatch(name) for name in values}
    count = max((int(match[2]) for match in matches.values() if match), default=0) + 1
    found: list[dict[str, float]] = [{} for _ in range(count)]
    for name, value in values.items():
        match = matches[name]
        for place in [int(match[2])] if match else range(count):
            found[place][name] = value
    return found
