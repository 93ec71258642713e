"""After a training broke down: look for the cause from the last good state on, and tell it with the error."""

import traceback
from dataclasses import replace

from torch import nn

from isoscale.engine.diagnose.nan import diagnose
from isoscale.engine.metrics.windows import NotFinite
from isoscale.engine.settings import Decisions, Settings
from isoscale.engine.trainer import Trainer
from isoscale.observe.observers import Observers
from isoscale.runs.open import OpenedRun


def explain(run: OpenedRun, trainer: Trainer, error: NotFinite) -> None:
    """Add to the message of a breakdown what caused it, as far as it can be found."""
    try:
        lines = [error.what, *_diagnose(run, trainer, error.since)]
    except (Exception, KeyboardInterrupt) as failure:  # the breakdown is the news, not what hinders its explanation
        trainer.observers.note("".join(traceback.format_exception(failure)).rstrip(), "debug")
        reason = str(failure).partition("\n")[0]
        lines = [str(error), f"the cause was not found: {type(failure).__name__}: {reason}"]
    error.args = ("\n  ".join(lines),)


def _diagnose(run: OpenedRun, trainer: Trainer, since: int) -> list[str]:
    directory, until = run.directory, trainer.progress.step
    newest = directory.checkpoints().newest() if directory else None
    state = newest[1] if newest and newest[1][1]["progress"]["step"] < until else None
    lost = state is None and run.given is not None  # the first weights, of which nobody has a copy
    first = state[1]["progress"]["step"] if state else since if lost else 0
    trainer.observers.note(f"looking for the cause: steps {first + 1} to {until} again, one by one; Ctrl-C leaves it")
    trainer.release()
    settings, decided = _stopping(run.settings), _alone(trainer.decided)
    again = run.another_trainer(settings, decided, Observers([]), state, begin=_leave_weights if lost else None)
    again.progress.step = first
    try:
        return diagnose(again, until, directory.path if directory else None, frozen=lost)
    finally:
        again.release()


def _leave_weights(task: nn.Module) -> None:
    """A task that was given in Python begins with the weights that it has now."""


def _stopping(settings: Settings) -> Settings:
    """The same, without going back to a checkpoint."""
    return replace(settings, train=settings.train.model_copy(update={"nan": "stop"}))


def _alone(decided: Decisions) -> Decisions:
    """What was decided, for one process that runs step by step."""
    reduce = "flat" if decided.reduce == "overlap" else decided.reduce
    return replace(decided, program="eager", why="", reduce=reduce)
