"""An error as the command line tells it: what happened, what to do, and how to see more."""

from isoscale.errors import FAILED, PeerFailed, exit_code, is_full_disk, message

HINT = "add --debug to the command to see the traceback"


def describe(error: BaseException) -> str:
    """The message; without a traceback, unless it is that of another rank, which can be seen nowhere else."""
    notes = [] if is_full_disk(error) else getattr(error, "__notes__", [])
    hints = [HINT] if exit_code(error) == FAILED and not isinstance(error, PeerFailed) else []
    text = "\n  ".join([f"error: {message(error)}", *notes, *hints])
    there = error.traceback if isinstance(error, PeerFailed) else ""
    return f"{text}\n{there}".rstrip()
