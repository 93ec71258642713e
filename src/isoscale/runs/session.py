"""One start of a training, from the lock on its directory to the record of how it ended."""

import gc
import math
import os
import shlex
import shutil
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict
from typing import Any

import torch

from isoscale.engine.build import build
from isoscale.engine.diagnose.memory import size
from isoscale.engine.figures import look
from isoscale.engine.metrics.windows import NotFinite
from isoscale.engine.settings import Decisions
from isoscale.engine.state.checkpoint import State
from isoscale.engine.state.replicas import told
from isoscale.engine.state.writer import NOWHERE
from isoscale.engine.trainer import Trainer
from isoscale.errors import PeerFailed, RunGone, RunLost, Stopped, UserError
from isoscale.observe.events import Ended, Started
from isoscale.observe.ranks.opening import last_words
from isoscale.observe.ranks.rank_map import rank_map
from isoscale.observe.text import duration
from isoscale.parallel import world
from isoscale.recipe.formats.tree import flat
from isoscale.runs import attempts
from isoscale.runs.directory import SUBMITTED, command_line, provenance
from isoscale.runs.fingerprint import Comparison, check_unchanged, compare, fingerprints, read_record, write_record
from isoscale.runs.git import changes_in_words
from isoscale.runs.lock import RunLock
from isoscale.runs.nan_report import explain
from isoscale.runs.open import OpenedRun
from isoscale.runs.outputs import Outputs
from isoscale.runs.rescue import rescue
from isoscale.runs.summary import continue_command, end_rows, next_commands, start_rows, system_lines
from isoscale.system import early_stop
from isoscale.system.devices import KINDS
from isoscale.system.printing import occupy

MOST_ROLLBACKS = 20
"""A training that goes back more often is not helped by it."""


class _WentBack(Stopped):
    """The training goes on from the last checkpoint: nothing that others need to hear of."""


class Session:
    """A training about to start or to go on."""

    def __init__(self, run: OpenedRun) -> None:
        """Train `run`, new or continued."""
        self.run = run
        self.trainer: Trainer | None = None
        """From when it was built."""
        self.tested: dict[str, float] = {}
        """Metrics on the test data, measured where nothing is saved."""
        self._waits: list[float] = []
        """Seconds that each rank waited for others, where that is measured."""
        self._was_prepared = False
        """Whether the directory was made for a job or a sweep, and is not this start's to remove."""
        self._began: float | None = None
        """When training began, for the ledger; one that goes back to a checkpoint has begun before."""
        self._first_step, self._seconds_before = 0, 0.0
        """Where this start began."""
        self._lock: RunLock | None = None
        """Says whether the directory is still there and still this process's."""
        self._rescued_after: RunGone | None = None
        """Said that the directory is gone, whereupon the state was saved elsewhere."""
        self._listening = ExitStack()
        """From the first step until the end is written down: to be told to stop once more must not disturb that."""

    def train(self) -> "Session":
        """Train to the end, or to where someone asks to stop; nobody else may train in the directory meanwhile."""
        run = self.run
        occupy()
        with self._listening, world.guarded(on_abort=self._give_up, timeout=run.recipe.parallel.timeout):
            with RunLock(run.directory.path, run.notes.append) if run.directory else nullcontext() as self._lock:
                if run.directory and self._lock:
                    run.directory.guard = self._lock.check
                while not self._start():
                    pass  # it went back to the last checkpoint
            run.ranks.any(False, "the end of all ranks")  # who goes on from here finds the run complete
        return self

    def _give_up(self, why: str) -> None:
        """Write down why this process ends while its main thread is stuck."""
        with suppress(RunLost, RunGone):  # nowhere to write it
            self._record(status="failed", message=why, **self._ended_attempt("failed"))

    def _start(self) -> bool:
        """Train from the last checkpoint on; False when it has to be done again from there."""
        run = self.run
        record, decided = self._remembered() if run.ranks.is_main else ({}, None)
        record, values = run.ranks.broadcast((record, decided and decided.as_dict()), "the record of the run")
        decided = decided or Decisions.from_dict(values)
        threads, generator = torch.get_num_threads(), torch.get_rng_state()
        outputs = Outputs(run, self._rank_status)  # or says what is missing
        if run.directory and "isoscale" not in record:
            origin = provenance(command_line())
            run.directory.update(**origin, name=run.loaded.name, seed=run.recipe.seed)
            run.directory.create(run.loaded.to_yaml())  # from here on there is a run
            if origin["code"] and origin["code"]["diff"]:
                run.notes.append(f"run.json keeps the {changes_in_words(origin['code']['diff'])}; reports show them")
        try:
            return self._train(outputs, record, decided)
        finally:
            torch.set_num_threads(threads)
            torch.set_rng_state(generator)  # or else every network made after a training would start equal
            outputs.close()
            if KINDS[decided.device].can_capture:
                gc.collect()  # a captured graph that is freed later, in a process forked from this one, would abort it

    def _remembered(self) -> tuple[dict[str, Any], Decisions]:
        """The record of the run, and what was decided at its first start, or is decided now."""
        run = self.run
        record = run.directory.read() if run.directory and run.directory.exists else {}
        if record.get("status") == SUBMITTED:  # nothing but a job was there before: this is no continuation
            record, self._was_prepared = {}, True
            run.notes.clear()
        if "decided" not in record:
            return record, Decisions.make(run.settings, run.ranks.world_size, run.ranks.fewest_cores)
        try:
            return record, Decisions.from_dict(record["decided"])
        except (KeyError, TypeError) as error:
            raise UserError(f"{run.directory and run.directory.record} is damaged: decided: {error}") from None

    def _train(self, outputs: Outputs, record: dict[str, Any], decided: Decisions) -> bool:
        run = self.run
        outputs.open_text_log(self._lock)
        if run.ranks.is_main:
            outputs.open_rank_log()
        for note in run.notes:
            outputs.observers.note(note)
        state = told(self._saved_state(outputs), run.ranks)
        if not run.ranks.is_main:
            outputs.open_rank_log()  # rank 0 listens, and the run has its directory
        outputs.open_metrics(state)
        before, self.trainer = self.trainer, None
        with self._rescued_if_gone(outputs, state):
            try:
                # Guarded here, so that what is written down is the reason on whichever rank.
                with world.guarded(), last_words(outputs.rank_log), self._rescued_if_gone(outputs, state):
                    self._fit(outputs, record, decided, state, before)
            except _WentBack:
                self._release()
                return False
            except Stopped as stopped:
                self._end(outputs, decided, "stopped", str(stopped))
                raise
            except BaseException as error:
                started = self._has_started
                is_written_down = isinstance(error, RunLost | RunGone)
                if (started or not record) and not is_written_down:
                    # a start that was refused leaves the record of the run alone
                    self._try_to_fail(outputs, decided, error, state)
                self._release()
                if not record and not started and not self._was_prepared and not is_written_down:
                    self._remove()
                raise
            self._end(outputs, decided, "done", "")
            return True

    def _saved_state(self, outputs: Outputs) -> State | None:
        directory = self.run.directory
        if directory is None:
            return None
        checkpoints = directory.checkpoints()
        found = checkpoints.newest(lambda text: outputs.observers.note(text, "warning"))
        if found is None and any(checkpoints.folder.glob("step_*")):
            raise UserError(
                f"no checkpoint in {checkpoints.folder} can be read; restore one from a copy, or remove "
                f"{directory.path} to start again from the beginning"
            )
        return found[1] if found else None

    def _fit(
        self, outputs: Outputs, record: dict[str, Any], decided: Decisions, state: State | None, before: Trainer | None
    ) -> None:
        """Build the training, and train; `before` is what trained up to where it goes back to a checkpoint."""
        run, observers = self.run, outputs.observers
        task, data, transforms = run.components()
        saving = run.where is not None
        begin = (lambda task: run.load_initial_weights(task, observers.note)) if state is None else None
        built = build(task, data, transforms, run.settings, decided, observers, run.ranks, saving, begin)
        directory = run.directory
        output = directory.output(run.recipe.checkpoint.keep, outputs.metric_log) if directory else NOWHERE
        self.trainer = trainer = Trainer(
            built, run.settings, decided, observers, output, run.profile, run.ranks, saving
        )  # fmt: skip
        trainer.rolled_back = [(first, last) for first, last in record.get("rolled_back", [])]
        self._check_data(trainer, outputs, record)
        if state is not None:
            trainer.restore(state)
        self._begin(trainer, outputs, state is not None)
        if saving:
            self._listening.enter_context(trainer.stop.listening(aloud=run.ranks.is_main))
        asked = before.stop.reason if before is not None else None
        trainer.stop.reason = trainer.stop.reason or asked or early_stop.asked()  # where nobody listened
        try:
            trainer.fit()
        except NotFinite as error:  # on all ranks alike
            if run.recipe.train.nan == "rollback":
                self._go_back(trainer, error)
            with world.guarded(timeout=math.inf):  # a search that takes long is no rank that hangs
                if run.ranks.is_main:
                    explain(run, trainer, error)
                run.ranks.any(False, "the diagnosis of rank 0")
            raise
        if trainer.profile is not None:
            self._waits = run.ranks.all_gather(trainer.profile.seconds("waiting"), "how long every rank waited")
        if not saving:
            split = trainer.split(run.data(), "test", run.settings.train.limit_test_batches)
            if split is not None:
                with trainer.parts.precision.applied():
                    self.tested = trainer.evaluations.measure("test", split)

    def _check_data(self, trainer: Trainer, outputs: Outputs, record: dict[str, Any]) -> None:
        """The data of a continued run must be what it was; what was compared is said."""
        run, observers = self.run, outputs.observers
        found, before = fingerprints(trainer.sources), record.get("data")
        changed = [name for name in {**(before or {}), **found} if (before or found).get(name) != found.get(name)]
        if run.directory is None:
            check_unchanged(changed, Comparison({}), run.where)
            return
        known = read_record(run.directory.path) if before is not None else None
        comparison = compare(known, trainer.sources)
        check_unchanged(changed, comparison, run.where)
        self._record(data=found)
        write_record(run.directory.path, comparison.entries)
        if before is None:
            return
        everything = f"`isoscale data check {shlex.quote(str(run.where))}` compares all of it"
        for name, how in comparison.doubtful.items():
            observers.note(f"the data may have changed since the run began: {name}: {how}; {everything}", "warning")
        more = f"; {everything}" if comparison.unread else ""
        observers.note(f"compared with the data that the run began with: {comparison.said}{more}")

    def _begin(self, trainer: Trainer, outputs: Outputs, continued: bool) -> None:
        """Write down, and tell, what starts here."""
        run, observers, progress, plan = self.run, outputs.observers, trainer.progress, trainer.plan
        if continued and run.directory:
            run.directory.create(run.loaded.to_yaml())  # nothing refuses its changes any more
        self._first_step, self._seconds_before = progress.step, progress.seconds
        hosts = [socket.gethostname()] if run.ranks.alone else run.ranks.hosts
        device = trainer.parts.accelerator
        outputs.say_of_rank(f"on {hosts[run.ranks.rank]}, process {os.getpid()}: {device.description}")
        if not run.ranks.is_main:
            return
        begun: dict[str, Any] = {}
        if self._began is None:
            self._began = time.monotonic()
            begun["stretches"] = attempts.begun(self._attempts(), progress.step, hosts)
        self._record(status="running", decided=trainer.decided.as_dict(), num_steps=plan.num_steps,
                     steps_per_epoch=plan.batches.steps_per_epoch,
                     device=device.description, starts=self._starts(trainer),
                     given=type(run.given.task).__qualname__ if run.given else None,
                     callbacks=run.given.callback_names if run.given else [], **begun)  # fmt: skip
        rows = start_rows(run, trainer)
        layers = look(trainer.parts).layers
        if run.ranks.backend == "gloo" and not run.ranks.alone and device.kind != "cpu":
            observers.note("several ranks share a device: sums over ranks go through the host, over Gloo", "warning")
        self._record(layers=[asdict(layer) for layer in layers], ranks=run.ranks.world_size,
                     hosts=list(run.ranks.hosts), map=rank_map(run.ranks.facts, trainer.decided.threads))  # fmt: skip
        outputs.open_curve(trainer)
        if continued and progress.step >= plan.num_steps:
            observers.note(f"this run is complete: all its {plan.num_steps:,} steps are done")
        where = str(run.directory.path) if run.directory else ""
        observers.notify(Started(run.loaded.name, where, rows, progress.step, plan.num_steps,
                                 plan.batches.steps_per_epoch, flat(run.loaded.values), layers,
                                 tuple(system_lines(trainer.train, trainer.val))))  # fmt: skip

    def _attempts(self) -> list[attempts.Attempt]:
        return list(self.run.directory.read().get("stretches", [])) if self.run.directory else []

    def _starts(self, trainer: Trainer) -> list[dict[str, Any]]:
        """From which steps on the run was so long and logged so often; what a later start did anew does not count."""
        before = self.run.directory.read().get("starts", []) if self.run.directory else []
        observe = self.run.recipe.observe
        own = {"step": trainer.progress.step, "num_steps": trainer.plan.num_steps, "every": observe.every,
               "curve": observe.curve}  # fmt: skip
        return [*(start for start in before if start["step"] < own["step"]), own]

    def _go_back(self, trainer: Trainer, error: NotFinite) -> None:
        """Leave out what is not finite from the last checkpoint up to here, and say so; unless that did not help."""
        run, windows = self.run, trainer.rolled_back
        if (windows and error.step <= windows[-1][1]) or len(windows) >= MOST_ROLLBACKS or run.where is None:
            return
        saved = trainer.progress.saved_at
        if run.directory:
            run.directory.update(rolled_back=[*windows, (saved, error.step)])
        run.notes = [f"not finite between step {error.since} and step {error.step}: goes back to step {saved} and "
                     "leaves out such steps"]  # fmt: skip
        raise _WentBack from error

    @contextmanager
    def _rescued_if_gone(self, outputs: Outputs, state: State | None) -> Iterator[None]:
        """Nothing more is written to a run that is lost; of one that is gone, the state is saved elsewhere."""
        try:
            yield
        except RunLost:
            outputs.forget_files()
            raise
        except RunGone as gone:
            if gone is not self._rescued_after:
                self._rescue(outputs, gone, state)
            raise

    def _rescue(self, outputs: Outputs, gone: RunGone, state: State | None) -> None:
        """Save the state elsewhere, and say with the error where, and how to go on."""
        assert self._lock is not None
        self._rescued_after = gone
        with world.guarded(timeout=math.inf):  # writing that takes long is no rank that hangs
            before = self.run.directory
            try:
                gone.add_note(rescue(self.run, self.trainer, self._lock, outputs.metric_log, state))
            except (OSError, UserError) as failure:
                gone.add_note(f"the state could not be saved elsewhere: {failure}")
            if self.run.directory is not before:
                decided = self.trainer.decided if self.trainer else None
                self._end(outputs, decided, "failed", str(gone))
                gone.add_note(f"go on from there: {continue_command(self.run)}")

    def _try_to_fail(self, outputs: Outputs, decided: Decisions, error: BaseException, state: State | None) -> None:
        """Write down what went wrong; what hinders that must not hide it."""
        try:
            with self._rescued_if_gone(outputs, state):
                self._fail(outputs, decided, error)
        except OSError:  # a full disk
            pass
        except (RunLost, RunGone) as other:
            for line in (str(other), *getattr(other, "__notes__", [])):
                error.add_note(line)

    def _fail(self, outputs: Outputs, decided: Decisions, error: BaseException) -> None:
        """Write down what went wrong; after a second Ctrl-C, say how to go on."""
        directory, observers = self.run.directory, outputs.observers
        can_go_on = directory is not None and directory.checkpoints().pointed("last") is not None
        if isinstance(error, KeyboardInterrupt):
            self._end(outputs, decided, "failed", "interrupted")
            if can_go_on:
                observers.note(f"go on from the last checkpoint: {continue_command(self.run)}")
            return
        message, trace = str(error), error.traceback if isinstance(error, PeerFailed) else ""
        if not isinstance(error, UserError | PeerFailed):
            message, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
        if trace:
            observers.note(trace.rstrip(), "debug")  # for log.txt
            if can_go_on:
                error.add_note(f"once that is repaired, go on from the last checkpoint: {continue_command(self.run)}")
        self._end(outputs, decided, "failed", message)

    def _end(self, outputs: Outputs, decided: Decisions | None, status: Any, message: str) -> None:
        """Write down, and tell, how it ended."""
        run, trainer = self.run, self.trainer
        if status != "failed":
            outputs.end_rank_log()
        if not run.ranks.is_main:
            return
        if status != "failed" and run.directory:
            run.directory.check_saved()
        step, seconds = (trainer.progress.step, trainer.progress.seconds) if trainer else (0, 0.0)
        values = {"status": status, "message": message, "step": step, "seconds": round(seconds, 3),
                  "peak_memory": self._peak_memory}  # fmt: skip
        if decided is not None:
            values["decided"] = decided.as_dict()
        if trainer is not None:
            best = trainer.best
            values["epoch"] = step // trainer.train.plan.steps_per_epoch
            values["best"] = {"name": best.monitor, "value": best.value, "step": best.step}
        self._record(**values, **self._ended_attempt(status))
        if trainer is not None and trainer.profile is not None and trainer.started:
            self._record(profile=[asdict(action) for action in trainer.profile.actions()])
            outputs.show_profile(trainer.profile, self._waits)
        if status == "failed" or trainer is None:
            for logger in outputs.loggers:  # the console and log.txt tell a failure in their own way
                logger.notify(Ended(status, step))
            return
        metrics = dict(trainer.progress.values)
        if trainer.best.value is not None:
            metrics[f"best/{trainer.best.monitor}"] = trainer.best.value
        rows = end_rows(trainer, self.tested, self._rate(trainer))
        commands = [*next_commands(run, trainer, status), *outputs.logger_commands()]
        outputs.observers.notify(Ended(status, step, rows, commands, metrics))

    def _rate(self, trainer: Trainer) -> float | None:
        """Samples a second of this start: of the training alone, or of all of it where that was short."""
        if trainer.journal.mean_rate is not None:
            return trainer.journal.mean_rate
        plan, progress = trainer.train.plan, trainer.progress
        samples = plan.samples_before(progress.step) - plan.samples_before(self._first_step)
        seconds = progress.seconds - self._seconds_before
        return samples / seconds if samples and seconds else None

    def _ended_attempt(self, status: str) -> dict[str, Any]:
        """The ledger for the record; nothing where training had not begun."""
        if self._began is None:
            return {}
        step = self.trainer.progress.step if self.trainer is not None else self._first_step
        seconds = time.monotonic() - self._began
        return {"stretches": attempts.ended(self._attempts(), status, step, seconds, self._peak_memory)}

    @property
    def _has_started(self) -> bool:
        """Whether a step may have been taken."""
        return self.trainer is not None and self.trainer.started

    @property
    def _peak_memory(self) -> int | None:
        return self.trainer.parts.accelerator.peak_memory if self.trainer is not None else None

    def _rank_status(self) -> str:
        """What people look for when they compare ranks."""
        profile, memory = self.trainer.profile if self.trainer else None, self._peak_memory
        waited = [f"waited {duration(profile.seconds('waiting'))} for other ranks"] if profile else []
        return ", ".join([*([f"peak memory {size(memory)}"] if memory else []), *waited])

    def _record(self, **values: Any) -> None:
        if self.run.directory is not None:
            self.run.directory.check()
            self.run.directory.update(**values)

    def _release(self) -> None:
        if self.trainer is not None:
            self.trainer.release()

    def _remove(self) -> None:
        """Nothing was earned yet: leave no litter, and nothing of others."""
        directory = self.run.directory
        if directory:
            with suppress(RunLost, RunGone):
                directory.guard()
                shutil.rmtree(directory.path, ignore_errors=True)
