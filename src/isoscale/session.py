"""One start of a training: find or make the run, build what the recipe says, train, and write down how it went."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isoscale.data.hashing import derive_key
from isoscale.engine.checkpoint import State, read_weights
from isoscale.engine.evaluate import evaluate
from isoscale.engine.memory import size
from isoscale.engine.roles import RoleMaker, fingerprint
from isoscale.engine.run_directory import RunDirectory, command_line, provenance
from isoscale.engine.settings import Decisions, Settings
from isoscale.engine.state import ModuleState, copy_weights
from isoscale.engine.trainer import Trainer as Engine
from isoscale.errors import Stopped, UserError
from isoscale.observe.console import Console
from isoscale.observe.events import Ended, Started
from isoscale.observe.metric_log import MetricLog
from isoscale.observe.observers import Observers
from isoscale.observe.tensorboard import TensorBoard
from isoscale.observe.text_log import TextLog
from isoscale.recipe.compare import describe, differences, harmful
from isoscale.recipe.components import data_spec, instantiate, task_spec
from isoscale.recipe.load import LoadedRecipe, load_recipe
from isoscale.recipe.schema import InitFrom, Recipe

SOURCE_TYPES = str | Path | dict[str, Any] | None


@dataclass
class Given:
    """Task and data that were made in Python instead of by the recipe."""

    task: nn.Module
    data: Any


@dataclass
class Session:
    """A training about to start or to go on."""

    loaded: LoadedRecipe
    directory: RunDirectory | None
    """None: nothing is saved."""
    notes: list[str] = field(default_factory=list)
    given: Given | None = None

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

    def train(self) -> "Session":
        """Train to the end, or to where someone asks to stop."""
        record = self.directory.read() if self.directory else {}
        if self.directory:
            self.directory.create(self.loaded.to_yaml())
            if not record:
                self.directory.update(**provenance(command_line()), name=self.loaded.name, seed=self.recipe.seed)
        observers = Observers([Console(self.recipe.observe.level, self.recipe.observe.format)])
        try:
            self._train(observers, record)
        finally:
            observers.close()
        return self

    def _train(self, observers: Observers, record: dict[str, Any]) -> None:
        decided = Decisions.from_dict(record["decided"]) if "decided" in record else Decisions.make(self.settings)
        for note in self.notes:
            observers.note(note)
        state = self._saved_state(observers)
        metric_log = self._open_logs(observers, state)
        self.engine = engine = Engine(self.settings, decided, observers, self.directory, metric_log)
        try:
            task, data, transforms = self._build()
            if state is None:
                self._load_initial_weights(task)
            engine.prepare(task, data, transforms)
            self._check_data(record)
            if state is not None:
                engine.restore(state)
            self._begin(observers, state is not None)
            engine.fit()
        except Stopped as stopped:
            self._end(observers, "stopped", str(stopped))
            raise
        except BaseException as error:
            self._end(observers, "failed", str(error) or type(error).__name__)
            engine.release()
            if not record and self.directory and not engine.started:
                shutil.rmtree(self.directory.path, ignore_errors=True)  # nothing was earned yet: leave no litter
            raise
        self._end(observers, "done", "")

    def _saved_state(self, observers: Observers) -> State | None:
        if self.directory is None:
            return None
        found = self.directory.checkpoints().newest(lambda text: observers.note(text, "warning"))
        return found[1] if found else None

    def _open_logs(self, observers: Observers, state: State | None) -> MetricLog | None:
        """metrics.jsonl, log.txt and TensorBoard, cut back to where the checkpoint was written."""
        if self.directory is None:
            return None
        written = state[1]["log"]["bytes"] if state else 0
        step = state[1]["progress"]["step"] if state else 0
        metric_log = MetricLog(self.directory.metrics, written)
        observers.add(metric_log)
        observers.add(TextLog(self.directory.log))
        if self.recipe.observe.tensorboard:
            observers.add(TensorBoard(self.directory.tensorboard, step + 1))
        return metric_log

    def _build(self) -> tuple[nn.Module, Any, Sequence[Any]]:
        """Task, data and transforms; the initial weights are a function of the seed."""
        torch.manual_seed(derive_key(self.recipe.seed, "initial weights")[0])
        transforms = [instantiate(transform) for transform in self.recipe.data.transforms]
        if self.given is not None:
            return self.given.task, self.given.data, transforms
        return instantiate(task_spec(self.recipe.task)), instantiate(data_spec(self.recipe.data)), transforms

    def _load_initial_weights(self, task: nn.Module) -> None:
        init = self.recipe.task.init_from
        if init is None:
            return
        init = InitFrom(run=init) if isinstance(init, str) else init
        own, _ = ModuleState(task).state()
        weights = load_weights(init.run)
        names = own.keys() | weights.keys()
        excluded = frozenset(name for name in names if any(fnmatch(name, pattern) for pattern in init.exclude))
        copy_weights(task, weights, excluded)

    def _check_data(self, record: dict[str, Any]) -> None:
        """The data of a continued run must be what it was."""
        roles = {"train": self.engine.train, "val": self.engine.val}
        found = {name: fingerprint(role.source) for name, role in roles.items() if role is not None}
        before = record.get("data")
        if before is not None and before != found:
            changed = [name for name in found if before.get(name) != found[name]]
            raise UserError(f"the data ({', '.join(changed)}) is not the data that this run was started with")
        self._record(data=found)

    def _begin(self, observers: Observers, continued: bool) -> None:
        engine = self.engine
        self._record(status="running", decided=engine.decided.as_dict(), num_steps=engine.plan.num_steps,
                     given=type(self.given.task).__qualname__ if self.given else None)  # fmt: skip
        name, where = self.loaded.name, str(self.directory.path) if self.directory else "(nothing is saved)"
        rows = summary_rows(self, continued)
        plan = engine.plan
        observers.notify(Started(name, where, rows, engine.progress.step, plan.num_steps, plan.batches.steps_per_epoch))

    def _end(self, observers: Observers, status: Any, message: str) -> None:
        engine = self.engine
        progress = engine.progress
        best = getattr(engine, "best", None)
        values = {
            "status": status, "message": message, "step": progress.step, "seconds": round(progress.seconds, 3),
            "peak_memory": _peak_memory(engine), "decided": engine.decided.as_dict(),
        }  # fmt: skip
        if best is not None:
            values["epoch"] = progress.step // engine.train.plan.steps_per_epoch
            values["best"] = {"name": best.monitor, "value": best.value, "step": best.step}
        self._record(**values)
        if status != "failed":
            observers.notify(Ended(status, progress.step, end_rows(self), next_commands(self, status)))

    def _record(self, **values: Any) -> None:
        if self.directory is not None and self.directory.path.is_dir():
            self.directory.update(**values)

    def evaluate(self, role_name: str) -> dict[str, float]:
        """Metrics of the engine's present weights on another role's data; empty if there is none."""
        engine = self.engine
        data = self.given.data if self.given else instantiate(data_spec(self.recipe.data))
        role = RoleMaker(data, self.settings, engine.parts.accelerator).evaluation(
            role_name, self.settings.train.limit_test_batches
        )
        if role is None:
            return {}
        with engine.parts.precision.applied():
            return evaluate(engine.parts.forward(role_name), role.feed, role.plan)


def _peak_memory(engine: Engine) -> int | None:
    parts = getattr(engine, "parts", None)
    return parts.accelerator.peak_memory if parts is not None else None


def summary_rows(session: Session, continued: bool) -> list[tuple[str, str]]:
    """The start-up summary."""
    engine, recipe = session.engine, session.recipe
    parts, plan = engine.parts, engine.train.plan
    count = sum(parameter.numel() for parameter in parts.task.parameters())
    val = f", {len(engine.val.source):,} validation" if engine.val else ""
    rows = [
        ("device", parts.accelerator.description),
        ("precision", parts.precision.name),
        ("program", _program(engine)),
        ("model", f"{type(getattr(parts.task, 'model', parts.task)).__name__}, {count:,} parameters"),
        ("data", f"{len(engine.train.source):,} training{val} samples, on the {_residency(engine)}"),
        ("batch", f"{plan.batch_size} samples, {plan.steps_per_epoch} steps an epoch"),
        ("length", f"{engine.plan.num_steps:,} steps, {engine.plan.num_steps / plan.steps_per_epoch:g} epochs"),
        ("seed", str(recipe.seed)),
    ]
    if continued:
        rows.append(("goes on", f"from step {engine.progress.step:,}"))
    return rows


def _program(engine: Engine) -> str:
    decided = engine.decided
    return f"{decided.program} ({decided.why})" if decided.why else decided.program


def _residency(engine: Engine) -> str:
    return engine.train.residency


def end_rows(session: Session) -> list[tuple[str, str]]:
    """The end summary."""
    engine = session.engine
    rows = []
    if engine.best.value is not None:
        epoch = -(-(engine.best.step or 0) // engine.train.plan.steps_per_epoch)
        rows.append(
            ("best", f"{engine.best.monitor} {engine.best.value:.4g} at epoch {epoch}, step {engine.best.step}")
        )
    rate = engine.journal.mean_rate
    if rate is not None:
        rows.append(("rate", f"{rate:,.0f} samples/s"))
    rows.append(("time", f"{engine.progress.seconds:.1f} s of training"))
    rows.append(("peak memory", size(engine.parts.accelerator.peak_memory)))
    return rows


def next_commands(session: Session, status: str) -> list[tuple[str, str]]:
    """What to type next."""
    if session.directory is None:
        return []
    path = session.directory.path
    if status == "stopped":
        return [("go on", f"isoscale train --run {path}")]
    commands = [] if session.given else [("test it", f"isoscale test {path}")]
    epochs = session.recipe.train.epochs
    longer = f"train.epochs={2 * epochs}" if epochs else f"train.steps={2 * session.engine.plan.num_steps}"
    commands.append(("train longer", f"isoscale train --run {path} {longer}"))
    if session.recipe.observe.tensorboard:
        commands.append(("curves", f"tensorboard --logdir {path / 'tensorboard'}"))
    return commands


def open_session(
    source: SOURCE_TYPES, overrides: Any, run: str | Path | None, given: Given | None = None, save: bool = True
) -> Session:
    """Find the run that is meant, or plan a new one."""
    directory = RunDirectory(Path(run)) if run is not None else None
    check = given is None
    if directory is not None and directory.exists:
        return _continued(source, overrides, directory, given)
    if directory is not None and directory.path.exists() and any(directory.path.iterdir()):
        raise UserError(f"{directory.path} is not empty and holds no run; choose another directory with --run DIR")
    loaded = load_recipe(source, overrides, check_components=check)
    if not save:
        return Session(loaded, None, given=given)
    return Session(loaded, directory or RunDirectory.fresh(loaded.name), given=given)


def _continued(source: SOURCE_TYPES, overrides: Any, directory: RunDirectory, given: Given | None) -> Session:
    """Continue a run, refusing changes that would make it another one."""
    stored = load_recipe(directory.recipe)
    wanted = load_recipe(directory.recipe if source is None else source, overrides, check_components=given is None)
    changes = [change for change in differences(stored.values, wanted.values) if change.path != ("name",)]
    refused = harmful(changes)
    if refused:
        raise UserError(
            f"{directory.path} holds a run of another recipe:\n{describe(refused)}\n"
            "start a new run (leave out --run, or name another directory), or take these changes back"
        )
    notes = [f"continues the run in {directory.path}"]
    if changes:
        notes.append(f"changed since the last start:\n{describe(changes)}")
    loaded = LoadedRecipe(wanted.recipe, wanted.values, wanted.origins, directory.read().get("name") or stored.name)
    return Session(loaded, directory, notes, given)


def load_weights(where: str) -> dict[str, torch.Tensor]:
    """Weights of a run, a checkpoint, a .safetensors file, or a .pt file (read without running code from it)."""
    from safetensors.torch import load_file

    from isoscale.run import Run

    path = Path(where)
    if Run.exists(path):
        return read_weights(Run.load(path).checkpoint())
    if (path / "manifest.json").exists():
        return read_weights(path)
    if not path.is_file():
        raise UserError(f"task.init_from: there is no run, checkpoint or file of weights at {where}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"task.init_from: cannot read weights from {where}: {error}") from None
    return dict(loaded.get("state_dict", loaded))
