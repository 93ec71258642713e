"""One start of a training: find or make the run, build what the recipe says, train, and write down how it went."""

import gc
import math
import os
import shlex
import shutil
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isoscale import early_stop
from isoscale.breakdown import explain
from isoscale.data.hashing import derive_key
from isoscale.data.sources import Source
from isoscale.engine.checkpoint import State
from isoscale.engine.fingerprint import Comparison, compare, read_record, samples_hash, write_record
from isoscale.engine.git import changes_in_words
from isoscale.engine.journal import NotFinite
from isoscale.engine.lock import RunLock
from isoscale.engine.memory import size
from isoscale.engine.profile import Profile
from isoscale.engine.run_directory import RunDirectory, command_line, provenance
from isoscale.engine.settings import Decisions, Settings
from isoscale.engine.sharing import told
from isoscale.engine.show import look
from isoscale.engine.trainer import Trainer as Engine
from isoscale.errors import PeerFailed, RunGone, RunLost, Stopped, UserError
from isoscale.launch import stretches
from isoscale.launch.submission import SUBMITTED
from isoscale.observe.events import Ended, Observer, Started
from isoscale.observe.fence import Fence
from isoscale.observe.learning_curve import LearningCurve
from isoscale.observe.loggers.background import Background
from isoscale.observe.metric_log import MetricLog, read_metrics
from isoscale.observe.observers import Observers
from isoscale.observe.profile import profile_lines, rank_lines
from isoscale.observe.tensorboard import TensorBoard
from isoscale.observe.text import duration
from isoscale.observe.text_log import TextLog
from isoscale.parallel import world
from isoscale.parallel.ranks import ALONE, Ranks
from isoscale.printing import occupy
from isoscale.rank_logs import RankLog, last_words, open_rank_log, told_apart, watchers
from isoscale.rank_map import rank_map
from isoscale.recipe.components import data_spec, instantiate, task_spec
from isoscale.recipe.load import LoadedRecipe
from isoscale.recipe.loggers import build_loggers, send_command
from isoscale.recipe.schema import InitFrom, Recipe
from isoscale.recipe.tree import flat
from isoscale.rescue import rescue
from isoscale.summary import continue_command, end_rows, next_commands, start_rows
from isoscale.system_table import system_lines
from isoscale.weights import start_from

MOST_ROLLBACKS = 20
"""A training that goes back more often is not helped by it."""


class _WentBack(Stopped):
    """The training goes on from the last checkpoint: nothing that others need to hear of."""


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
    tested: dict[str, float] = field(default_factory=dict)
    """Metrics on the test data, measured where nothing is saved."""
    profile: bool = False
    """Whether to measure where the time goes."""
    ranks: Ranks = ALONE
    where: Path | None = None
    """The directory of the run, also on ranks that do not write to it; None: nothing is saved."""
    _waits: list[float] = field(default_factory=list, init=False)
    """Seconds that each rank waited for others, where that is measured."""
    _loggers: list[Background] = field(default_factory=list, init=False)
    _rank_log: RankLog | None = field(default=None, init=False)
    _was_prepared: bool = field(default=False, init=False)
    """Whether the directory was made for a job or a sweep, and is not this start's to remove."""
    _began: float | None = field(default=None, init=False)
    """When training began, for the ledger; one that goes back to a checkpoint has begun before."""
    _before: Engine | None = field(default=None, init=False)
    """What trained up to a place from which it goes back to a checkpoint."""
    _lock: RunLock | None = field(default=None, init=False)
    """Says whether the directory is still there and still this process's."""
    _rescued_after: RunGone | None = field(default=None, init=False)
    """Said that the directory is gone, whereupon the state was saved elsewhere."""
    _listening: ExitStack = field(default_factory=ExitStack, init=False)
    """From the first step until the end is written down: to be told to stop once more must not disturb that."""

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
        """Train to the end, or to where someone asks to stop; nobody else may train in the directory meanwhile."""
        timeout = self.recipe.parallel.timeout
        occupy()
        with self._listening, world.guarded(on_abort=self._give_up, timeout=timeout):
            with RunLock(self.directory.path, self.notes.append) if self.directory else nullcontext() as self._lock:
                if self.directory and self._lock:
                    self.directory.guard = self._lock.check
                while not self._start():
                    pass  # it went back to the last checkpoint
            self.ranks.any(False, "the end of all ranks")  # who goes on from here finds the run complete
        return self

    def _give_up(self, why: str) -> None:
        """Write down why this process ends while its main thread is stuck."""
        with suppress(RunLost, RunGone):  # nowhere to write it
            self._record(status="failed", message=why, **self._ended_stretch("failed"))

    def _start(self) -> bool:
        """Train from the last checkpoint on; False when it has to be done again from there."""
        record, decided = self._told()
        threads, generator = torch.get_num_threads(), torch.get_rng_state()
        loggers = build_loggers(self.recipe.observe.loggers) if self.directory else []  # or says what is missing
        watching = watchers(self.recipe.observe, self.ranks, self.where)  # or says that one cannot write
        if self.directory and "isoscale" not in record:
            origin = provenance(command_line())
            self.directory.update(**origin, name=self.loaded.name, seed=self.recipe.seed)
            self.directory.create(self.loaded.to_yaml())  # from here on there is a run
            if origin["code"] and origin["code"]["diff"]:
                self.notes.append(f"run.json keeps the {changes_in_words(origin['code']['diff'])}; reports show them")
        observers = Observers(watching)
        try:
            return self._train(observers, record, decided, loggers)
        finally:
            torch.set_num_threads(threads)
            torch.set_rng_state(generator)  # or else every network made after a training would start equal
            with closing(observers):
                for logger in self._loggers:
                    logger.close()  # while the console can still say what was not sent
            if decided.device == "cuda":
                gc.collect()  # a captured graph that is freed later, in a process forked from this one, would abort it

    def _told(self) -> tuple[dict[str, Any], Decisions]:
        """What rank 0 remembers, on every rank."""
        record, decided = self._remembered() if self.ranks.is_first else ({}, None)
        record, values = self.ranks.tell((record, decided and decided.as_dict()), "the record of the run")
        return record, decided or Decisions.from_dict(values)

    def _remembered(self) -> tuple[dict[str, Any], Decisions]:
        """The record of the run, and what was decided at its first start, or is decided now."""
        record = self.directory.read() if self.directory and self.directory.exists else {}
        if record.get("status") == SUBMITTED:  # nothing but a job was there before: this is no continuation
            record, self._was_prepared = {}, True
            self.notes.clear()
        if "decided" not in record:
            return record, Decisions.make(self.settings, self.ranks.world, self.ranks.fewest_cores)
        try:
            return record, Decisions.from_dict(record["decided"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{self.directory and self.directory.record} is damaged: decided: {error}") from None

    def _train(
        self, observers: Observers, record: dict[str, Any], decided: Decisions, loggers: Sequence[Observer]
    ) -> bool:
        if self.directory and self._lock:
            self.directory.check()
            observers.add(Fence(self._lock.check_owner), first=True)
            observers.add(TextLog(self.directory.log, told_apart(self.recipe.observe, self.ranks)))
        if self.ranks.is_first:
            self._open_rank_log(observers)
        for note in self.notes:
            observers.note(note)
        state = told(self._saved_state(observers), self.ranks)
        if not self.ranks.is_first:
            self._open_rank_log(observers)  # rank 0 listens, and the run has its directory
        metric_log = self._open_logs(observers, state)
        self._open_loggers(observers, loggers)
        self._before = getattr(self, "engine", None)
        self.engine = engine = Engine(
            self.settings, decided, observers, self.directory, metric_log, self.profile, self.ranks,
            self.where is not None,
        )  # fmt: skip
        engine.rolled_back = [(first, last) for first, last in record.get("rolled_back", [])]
        with self._rescued_if_gone(observers, metric_log, state):
            return self._train_and_write_down(observers, metric_log, record, state)

    def _train_and_write_down(
        self, observers: Observers, metric_log: MetricLog | None, record: dict[str, Any], state: State | None
    ) -> bool:
        engine = self.engine
        try:
            # Guarded here, so that what is written down is the reason on whichever rank.
            with world.guarded(), last_words(self._rank_log), self._rescued_if_gone(observers, metric_log, state):
                self._fit(observers, record, state)
        except _WentBack:
            engine.release()
            return False
        except Stopped as stopped:
            self._end(observers, "stopped", str(stopped))
            raise
        except BaseException as error:
            is_written_down = isinstance(error, RunLost | RunGone)
            if (engine.started or not record) and not is_written_down:
                # a start that was refused leaves the record of the run alone
                self._try_to_fail(observers, error, metric_log, state)
            engine.release()
            if not record and not engine.started and not self._was_prepared and not is_written_down:
                self._remove()
            raise
        self._end(observers, "done", "")
        return True

    @contextmanager
    def _rescued_if_gone(
        self, observers: Observers, metric_log: MetricLog | None, state: State | None
    ) -> Iterator[None]:  # fmt: skip
        """Nothing more is written to a run that is lost; of one that is gone, the state is saved elsewhere."""
        try:
            yield
        except RunLost:
            observers.forget(Fence, MetricLog, TextLog, LearningCurve, TensorBoard)
            raise
        except RunGone as gone:
            if gone is not self._rescued_after:
                self._rescue(observers, gone, metric_log, state)
            raise

    def _rescue(
        self, observers: Observers, gone: RunGone, metric_log: MetricLog | None, state: State | None
    ) -> None:  # fmt: skip
        """Save the state elsewhere, and say with the error where, and how to go on."""
        assert self._lock is not None
        self._rescued_after = gone
        with world.guarded(timeout=math.inf):  # writing that takes long is no rank that hangs
            before = self.directory
            try:
                gone.add_note(rescue(self, self._lock, metric_log, state))
            except (OSError, UserError) as failure:
                gone.add_note(f"the state could not be saved elsewhere: {failure}")
            if self.directory is not before:
                self._end(observers, "failed", str(gone))
                gone.add_note(f"go on from there: {continue_command(self)}")

    def _try_to_fail(
        self, observers: Observers, error: BaseException, metric_log: MetricLog | None, state: State | None
    ) -> None:
        """Write down what went wrong; what hinders that must not hide it."""
        try:
            with self._rescued_if_gone(observers, metric_log, state):
                self._fail(observers, error)
        except OSError:  # a full disk
            pass
        except (RunLost, RunGone) as other:
            for line in (str(other), *getattr(other, "__notes__", [])):
                error.add_note(line)

    def _remove(self) -> None:
        """Nothing was earned yet: leave no litter, and nothing of others."""
        if self.directory:
            with suppress(RunLost, RunGone):
                self.directory.guard()
                shutil.rmtree(self.directory.path, ignore_errors=True)

    def _fit(self, observers: Observers, record: dict[str, Any], state: State | None) -> None:
        engine = self.engine
        task, data, transforms = self._build()
        engine.prepare(task, data, transforms, self._load_initial_weights if state is None else None)
        self._check_data(observers, record)
        if state is not None:
            engine.restore(state)
        self._begin(observers, state is not None)
        if self.where is not None:
            self._listening.enter_context(engine.stop.listening(aloud=self.ranks.is_first))
        asked = self._before.stop.reason if self._before is not None else None  # on the way back to a checkpoint
        engine.stop.reason = engine.stop.reason or asked or early_stop.asked()  # where nobody listened
        try:
            engine.fit()
        except NotFinite as error:  # on all ranks alike
            if self.recipe.train.nan == "rollback":
                self._go_back(error)
            with world.guarded(timeout=math.inf):  # a search that takes long is no rank that hangs
                if self.ranks.is_first:
                    explain(self, observers, error)
                self.ranks.any(False, "the diagnosis of rank 0")
            raise
        if engine.profile is not None:
            self._waits = self.ranks.hear(engine.profile.seconds("waiting"), "how long every rank waited")
        if self.where is None:
            self.tested = self.evaluate("test")

    def _go_back(self, error: NotFinite) -> None:
        """Leave out what is not finite from the last checkpoint up to here, and say so; unless that did not help."""
        windows = self.engine.rolled_back
        if (windows and error.step <= windows[-1][1]) or len(windows) >= MOST_ROLLBACKS or self.where is None:
            return
        saved = self.engine.progress.saved_at
        if self.directory:
            self.directory.update(rolled_back=[*windows, (saved, error.step)])
        self.notes = [f"not finite between step {error.since} and step {error.step}: goes back to step {saved} and "
                      "leaves out such steps"]  # fmt: skip
        raise _WentBack from error

    def _open_rank_log(self, observers: Observers) -> None:
        section = self.recipe.observe
        self._rank_log = open_rank_log(section, self.ranks, observers, self.where, self._rank_status)

    def _rank_status(self) -> str:
        """What people look for when they compare ranks."""
        profile, memory = self.engine.profile, _peak_memory(self.engine)
        waited = [f"waited {duration(profile.seconds('waiting'))} for other ranks"] if profile else []
        return ", ".join([*([f"peak memory {size(memory)}"] if memory else []), *waited])

    def _say(self, text: str) -> None:
        if self._rank_log is not None and not self.ranks.alone:
            self._rank_log.say(text)

    def _saved_state(self, observers: Observers) -> State | None:
        if self.directory is None:
            return None
        checkpoints = self.directory.checkpoints()
        found = checkpoints.newest(lambda text: observers.note(text, "warning"))
        if found is None and any(checkpoints.folder.glob("step_*")):
            raise UserError(
                f"no checkpoint in {checkpoints.folder} can be read; restore one from a copy, or remove "
                f"{self.directory.path} to start again from the beginning"
            )
        return found[1] if found else None

    def _open_logs(self, observers: Observers, state: State | None) -> MetricLog | None:
        """metrics.jsonl and TensorBoard, cut back to where the checkpoint was written."""
        if self.directory is None:
            return None
        try:
            written = state[1]["log"]["bytes"] if state else 0
            step = state[1]["progress"]["step"] if state else 0
        except (KeyError, TypeError) as error:
            raise UserError(f"the checkpoint does not fit this run: it lacks {error}") from None
        metric_log = MetricLog(self.directory.metrics, written)
        observers.add(metric_log)
        if self.recipe.observe.tensorboard:
            level = self.recipe.observe.tensorboard
            observers.add(TensorBoard(self.directory.tensorboard, step + 1, level, observers.note, self._check_place))
        return metric_log

    def _check_place(self) -> None:
        """For those that can be done without: an error of theirs ends no training, and the next save will notice."""
        try:
            assert self.directory is not None
            self.directory.check()
        except RunGone as gone:
            raise FileNotFoundError(str(gone)) from None

    def _open_loggers(self, observers: Observers, loggers: Sequence[Observer]) -> None:
        for logger, spec in zip(loggers, self.recipe.observe.loggers, strict=False):  # without a directory, no logger
            assert self.directory is not None
            self._loggers.append(Background(logger, observers.note, send_command(self.directory.path, spec)))
            observers.add(self._loggers[-1])

    def _logger_commands(self) -> list[tuple[str, str]]:
        where = self.directory.path if self.directory else Path()
        return [command for logger in self._loggers for command in logger.commands(where)]

    def _build(self) -> tuple[nn.Module, Any, Sequence[Any]]:
        """Task, data and transforms; the initial weights are a function of the seed."""
        torch.manual_seed(derive_key(self.recipe.seed, "initial weights")[0])
        transforms = [instantiate(transform) for transform in self.recipe.data.transforms]
        if self.given is not None:
            return self.given.task, self.given.data, transforms
        return instantiate(task_spec(self.recipe.task)), instantiate(data_spec(self.recipe.data)), transforms

    def _load_initial_weights(self, task: nn.Module) -> None:
        init = self.recipe.task.init_from
        if init is not None:
            init = InitFrom(run=init) if isinstance(init, str) else init
            start_from(init, task, self.engine.observers.note)

    def another_engine(
        self, settings: Settings, decided: Decisions, observers: Observers, state: State | None, keep: bool = False
    ) -> Engine:
        """An engine like the run's own that writes nothing: in a given state, or at the beginning.

        With `keep`, a task that was given in Python begins with the weights that it has now.
        """
        self.engine = engine = Engine(settings, decided, observers)
        task, data, transforms = self._build()
        begin = _leave_weights if keep else self._load_initial_weights
        engine.prepare(task, data, transforms, begin if state is None else None)
        if state is not None:
            engine.restore(state)
        return engine

    def _check_data(self, observers: Observers, record: dict[str, Any]) -> None:
        """The data of a continued run must be what it was; what was compared is said."""
        found = fingerprints(self.engine)
        before = record.get("data")
        changed = [name for name in {**(before or {}), **found} if (before or found).get(name) != found.get(name)]
        if self.directory is None:
            check_data(changed, Comparison({}), self.where)
            return
        known = read_record(self.directory.path) if before is not None else None
        comparison = compare(known, sources(self.engine))
        check_data(changed, comparison, self.where)
        self._record(data=found)
        write_record(self.directory.path, comparison.entries)
        if before is not None:
            self._say_compared(observers, comparison)

    def _say_compared(self, observers: Observers, comparison: Comparison) -> None:
        everything = f"`isoscale data check {shlex.quote(str(self.where))}` compares all of it"
        for name, how in comparison.doubtful.items():
            observers.note(f"the data may have changed since the run began: {name}: {how}; {everything}", "warning")
        more = f"; {everything}" if comparison.unread else ""
        observers.note(f"compared with the data that the run began with: {comparison.said}{more}")

    def _begin(self, observers: Observers, continued: bool) -> None:
        engine = self.engine
        if continued and self.directory:
            self.directory.create(self.loaded.to_yaml())  # nothing refuses its changes any more
        self._first_step, self._seconds_before = engine.progress.step, engine.progress.seconds
        self._say(f"on {self._hosts()[self.ranks.rank]}, process {os.getpid()}: {engine.parts.accelerator.description}")
        if not self.ranks.is_first:
            return
        begun: dict[str, Any] = {}
        if self._began is None:
            self._began = time.monotonic()
            begun["stretches"] = stretches.begun(self._stretches(), engine.progress.step, self._hosts())
        self._record(status="running", decided=engine.decided.as_dict(), num_steps=engine.plan.num_steps,
                     device=engine.parts.accelerator.description, starts=self._starts(),
                     given=type(self.given.task).__qualname__ if self.given else None, **begun)  # fmt: skip
        name, where = self.loaded.name, str(self.directory.path) if self.directory else ""
        rows = start_rows(self)
        plan = engine.plan
        layers = look(engine.parts).layers
        if self.ranks.backend == "gloo" and not self.ranks.alone and engine.parts.accelerator.kind != "cpu":
            observers.note("several ranks share a device: sums over ranks go through the host, over Gloo", "warning")
        self._record(layers=[asdict(layer) for layer in layers], ranks=self.ranks.world, hosts=list(self.ranks.hosts),
                     map=rank_map(self.ranks.facts, engine.decided.threads))  # fmt: skip
        self._open_curve(observers)
        if continued and engine.progress.step >= plan.num_steps:
            observers.note(f"this run is complete: all its {plan.num_steps:,} steps are done")
        observers.notify(Started(name, where, rows, engine.progress.step, plan.num_steps,
                                 plan.batches.steps_per_epoch, flat(self.loaded.values), layers,
                                 tuple(system_lines(engine.train, engine.val))))  # fmt: skip

    def _open_curve(self, observers: Observers) -> None:
        """The learning curve, with what was logged before this start."""
        section, engine = self.recipe.observe, self.engine
        if self.directory and section.curve:
            columns = getattr(engine.parts.task, "curve_columns", {})
            validated = engine.plan.evaluate.unit != "never"
            history = read_metrics(self.directory.metrics)
            path = self.directory.path / section.curve
            observers.add(LearningCurve(path, section.every, columns, validated, history))

    def _stretches(self) -> list[stretches.Stretch]:
        return list(self.directory.read().get("stretches", [])) if self.directory else []

    def _hosts(self) -> Sequence[str]:
        return [socket.gethostname()] if self.ranks.alone else self.ranks.hosts

    def _starts(self) -> list[dict[str, Any]]:
        """From which steps on the run was so long and logged so often; what a later start did anew does not count."""
        engine = self.engine
        before = self.directory.read().get("starts", []) if self.directory else []
        observe = self.recipe.observe
        own = {"step": engine.progress.step, "num_steps": engine.plan.num_steps, "every": observe.every,
               "curve": observe.curve}  # fmt: skip
        return [*(start for start in before if start["step"] < own["step"]), own]

    def _fail(self, observers: Observers, error: BaseException) -> None:
        """Write down what went wrong; after a second Ctrl-C, say how to go on."""
        if isinstance(error, KeyboardInterrupt):
            self._end(observers, "failed", "interrupted")
            if self.directory and self.directory.checkpoints().pointed("last"):
                observers.note(f"go on from the last checkpoint: {continue_command(self)}")
            return
        message, trace = str(error), error.traceback if isinstance(error, PeerFailed) else ""
        if not isinstance(error, UserError | PeerFailed):
            message, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        if trace:
            observers.note(trace.rstrip(), "debug")  # for log.txt
            if self.directory and self.directory.checkpoints().pointed("last"):
                error.add_note(f"once that is repaired, go on from the last checkpoint: {continue_command(self)}")
        self._end(observers, "failed", message)

    def _end(self, observers: Observers, status: Any, message: str) -> None:
        if status != "failed" and self._rank_log is not None:
            self._say(self._rank_status())
            self._rank_log.finish()
        if not self.ranks.is_first:
            return
        if status != "failed" and self.directory:
            self.directory.check_saved()
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
        self._record(**values, **self._ended_stretch(status))
        if engine.profile is not None and engine.started:
            self._report_profile(observers, engine.profile)
        if status != "failed":
            metrics = dict(progress.values)
            if best is not None and best.value is not None:
                metrics[f"best/{best.monitor}"] = best.value
            commands = [*next_commands(self, status), *self._logger_commands()]
            observers.notify(Ended(status, progress.step, end_rows(self), commands, metrics))
            return
        for logger in self._loggers:  # the console and log.txt tell a failure in their own way
            logger.notify(Ended(status, progress.step))

    def _ended_stretch(self, status: str) -> dict[str, Any]:
        """The ledger for the record; nothing where training had not begun."""
        if self._began is None:
            return {}
        step, seconds = self.engine.progress.step, time.monotonic() - self._began
        return {"stretches": stretches.ended(self._stretches(), status, step, seconds, _peak_memory(self.engine))}

    def _report_profile(self, observers: Observers, profile: Profile) -> None:
        actions = profile.actions()
        self._record(profile=[asdict(action) for action in actions])
        trace = self.directory.trace if self.directory else None
        written = [f"trace of some steps, for ui.perfetto.dev: {trace}"] if trace and trace.exists() else []
        of_ranks = rank_lines(self._waits, profile.travelled, profile.exposed)
        observers.note("\n".join(["where the time went", *profile_lines(actions), *of_ranks, *written]))

    def _record(self, **values: Any) -> None:
        if self.directory is not None:
            self.directory.check()
            self.directory.update(**values)

    def rate(self) -> float | None:
        """Samples a second of this start: of the training alone, or of all of it where that was short."""
        engine = self.engine
        if engine.journal.mean_rate is not None:
            return engine.journal.mean_rate
        plan, progress = engine.train.plan, engine.progress
        samples = plan.samples_before(progress.step) - plan.samples_before(self._first_step)
        seconds = progress.seconds - self._seconds_before
        return samples / seconds if samples and seconds else None

    def evaluate(self, role_name: str) -> dict[str, float]:
        """Metrics of the engine's present weights on another role's data; empty if there is none."""
        engine = self.engine
        data = self.given.data if self.given else instantiate(data_spec(self.recipe.data))
        role = engine.role(data, role_name, self.settings.train.limit_test_batches)
        if role is None:
            return {}
        with engine.parts.precision.applied():
            return engine.evaluations.measure(role_name, role)


def _leave_weights(task: nn.Module) -> None:
    pass


def sources(engine: Engine) -> dict[str, Source]:
    """The data that an engine reads, by role."""
    roles = {"train": engine.train, "val": engine.val}
    return {name: role.source for name, role in roles.items() if role is not None}


def fingerprints(engine: Engine) -> dict[str, str]:
    """Short hashes of some samples of the data that an engine reads, by role."""
    return {name: samples_hash(source) for name, source in sources(engine).items()}


def check_data(roles: Sequence[str], comparison: Comparison, where: Path | None) -> None:
    """Refuse data of which some samples, or other values, are not as they were."""
    if not roles and not comparison.changed:
        return
    found = [f"{name}: {how}" for name, how in sorted(comparison.changed.items())]
    found = found if len(found) <= 5 else [*found[:5], f"and {len(found) - 5} more"]
    words = f" ({', '.join(sorted(roles))})" if roles else ""
    raise UserError(
        "\n  ".join([f"the data{words} is not the data that this run was started with", *found])
        + "\nrestore it from a copy, or start a new run that begins with the weights of this one: "
        f"task.init_from={shlex.quote(str(where))}"
    )


def _peak_memory(engine: Engine) -> int | None:
    parts = getattr(engine, "parts", None)
    return parts.accelerator.peak_memory if parts is not None else None
