"""Who is told what happens in a start of a run, and the files that keep it: logs, TensorBoard, loggers, curves."""

from collections.abc import Callable
from contextlib import closing

from isoscale.engine.diagnose.profile import Profile
from isoscale.engine.state.checkpoint import State
from isoscale.engine.trainer import Trainer
from isoscale.errors import RunGone, UserError
from isoscale.observe.learning_curve import LearningCurve
from isoscale.observe.loggers.background import Background
from isoscale.observe.metric_log import MetricLog, read_metrics
from isoscale.observe.observers import Fence, Observers
from isoscale.observe.ranks.opening import RankLog, open_rank_log, told_apart, watchers
from isoscale.observe.tables import profile_lines, rank_lines
from isoscale.observe.tensorboard.observer import TensorBoard
from isoscale.observe.text_log import TextLog
from isoscale.recipe.loggers import build_loggers, send_command
from isoscale.runs.lock import RunLock
from isoscale.runs.open import OpenedRun


class Outputs:
    """All who watch one start of a run; the first ones are there when it is made, the others are opened one by one."""

    def __init__(self, run: OpenedRun, rank_status: Callable[[], str]) -> None:
        """Raises where a logger is missing or a file cannot be written; `rank_status` tells how this rank is."""
        self._run = run
        self._rank_status = rank_status
        self._built = build_loggers(run.recipe.observe.loggers) if run.directory else []
        self.observers = Observers(watchers(run.recipe.observe, run.ranks, run.where), run.where)
        self.metric_log: MetricLog | None = None
        self.loggers: list[Background] = []
        self.rank_log: RankLog | None = None

    def open_text_log(self, lock: RunLock | None) -> None:
        """log.txt; from here on nobody writes where another process trains."""
        run = self._run
        if run.directory and lock:
            run.directory.check()
            self.observers.add(Fence(lock.check_owner), first=True)
            self.observers.add(TextLog(run.directory.log, told_apart(run.recipe.observe, run.ranks)))

    def open_rank_log(self) -> None:
        """What other ranks say, or where this one says it; rank 0 comes first."""
        run = self._run
        self.rank_log = open_rank_log(run.recipe.observe, run.ranks, self.observers, run.where, self._rank_status)

    def open_metrics(self, state: State | None) -> None:
        """metrics.jsonl and TensorBoard, cut back to where the checkpoint was written, and loggers."""
        directory, section = self._run.directory, self._run.recipe.observe
        if directory is None:
            return
        try:
            written = state[1]["log"]["bytes"] if state else 0
            step = state[1]["progress"]["step"] if state else 0
        except (KeyError, TypeError) as error:
            raise UserError(f"the checkpoint does not fit this run: it lacks {error}") from None
        self.metric_log = MetricLog(directory.metrics, written)
        self.observers.add(self.metric_log)
        if section.tensorboard:
            board = TensorBoard(directory.tensorboard, step + 1, section.tensorboard, self.observers.note,
                                self._check_place, section.tensorboard_tags)  # fmt: skip
            self.observers.add(board)
        for logger, spec in zip(self._built, section.loggers, strict=True):
            self.loggers.append(Background(logger, self.observers.note, send_command(directory.path, spec)))
            self.observers.add(self.loggers[-1])

    def _check_place(self) -> None:
        """For those that can be done without: an error of theirs ends no training, and the next save will notice."""
        try:
            assert self._run.directory is not None
            self._run.directory.check()
        except RunGone as gone:
            raise FileNotFoundError(str(gone)) from None

    def open_curve(self, trainer: Trainer) -> None:
        """The learning curve, with what was logged before this start."""
        directory, section = self._run.directory, self._run.recipe.observe
        if directory and section.curve:
            columns = getattr(trainer.parts.task, "curve_columns", {})
            validated = trainer.plan.evaluate.unit != "never"
            history = read_metrics(directory.metrics)
            path = directory.path / section.curve
            self.observers.add(LearningCurve(path, section.every, columns, validated, history))

    def say_of_rank(self, text: str) -> None:
        """Something about this rank alone, where several are told apart."""
        if self.rank_log is not None and not self._run.ranks.alone:
            self.rank_log.say(text)

    def end_rank_log(self) -> None:
        """Say how this rank is in the end."""
        if self.rank_log is not None:
            self.say_of_rank(self._rank_status())
            self.rank_log.finish()

    def show_profile(self, profile: Profile, waits: list[float]) -> None:
        """Where the time went; `waits` are the seconds that each rank waited for others."""
        trace = self._run.directory.trace if self._run.directory else None
        written = [f"trace of some steps, for ui.perfetto.dev: {trace}"] if trace and trace.exists() else []
        of_ranks = rank_lines(waits, profile.travelled, profile.exposed)
        lines = ["where the time went", *profile_lines(profile.actions()), *of_ranks, *written]
        self.observers.note("\n".join(lines))

    def logger_commands(self) -> list[tuple[str, str]]:
        """What to type to look at the run in its loggers."""
        directory = self._run.directory
        return [command for logger in self.loggers for command in logger.commands(directory.path)] if directory else []

    def forget_files(self) -> None:
        """Write nothing more to a run that another process trains."""
        self.observers.forget(Fence, MetricLog, TextLog, LearningCurve, TensorBoard)

    def close(self) -> None:
        """Loggers first, while the console can still say what was not sent."""
        with closing(self.observers):
            for logger in self.loggers:
                logger.close()
