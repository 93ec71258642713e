"""After a training broke down: look for the cause from the last good state on, and tell it with the error."""

import traceback
from dataclasses import replace
from typing import TYPE_CHECKING

from isoscale.engine.diagnose import diagnose
from isoscale.engine.journal import NotFinite
from isoscale.engine.settings import Decisions, Settings
from isoscale.observe.observers import Observers

if TYPE_CHECKING:
    from isoscale.session import Session


def explain(session: "Session", observers: Observers, error: NotFinite) -> None:
    """Add to the message of a breakdown what caused it, as far as it can be found."""
    try:
        lines = [error.what, *_diagnose(session, observers, error.since)]
    except (Exception, KeyboardInterrupt) as failure:  # the breakdown is the news, not what hinders its explanation
        observers.note("".join(traceback.format_exception(failure)).rstrip(), "debug")
        reason = str(failure).partition("\n")[0]
        lines = [str(error), f"the cause was not found: {type(failure).__name__}: {reason}"]
    error.args = ("\n  ".join(lines),)


def _diagnose(session: "Session", observers: Observers, since: int) -> list[str]:
    engine, directory = session.engine, session.directory
    newest = directory.checkpoints().newest() if directory else None
    state = newest[1] if newest and newest[1][1]["progress"]["step"] < engine.progress.step else None
    lost = state is None and session.given is not None  # the first weights, of which nobody has a copy
    first = state[1]["progress"]["step"] if state else since if lost else 0
    until = engine.progress.step
    observers.note(f"looking for the cause: steps {first + 1} to {until} again, one by one; Ctrl-C leaves it")
    engine.release()
    again = type(session)(session.loaded, None, given=session.given).another_engine(
        _stopping(session.settings), _alone(engine.decided), Observers([]), state, keep=lost
    )
    again.progress.step = first
    try:
        return diagnose(again, until, directory.path if directory else None, frozen=lost)
    finally:
        again.release()


def _stopping(settings: Settings) -> Settings:
    """The same, without going back to a checkpoint."""
    return replace(settings, train=settings.train.model_copy(update={"nan": "stop"}))


def _alone(decided: Decisions) -> Decisions:
    """What was decided, for one process that runs step by step."""
    reduce = "flat" if decided.reduce == "overlap" else decided.reduce
    return replace(decided, program="eager", why="", reduce=reduce)
