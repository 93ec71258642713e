"""The errors a person reads, and the exit code that each of them becomes."""

DONE = 0
FAILED = 1
USER_CAN_FIX = 2
START_AGAIN = 75


class UserError(ValueError):
    """Something the user can fix: says what was found, what was expected and what to type."""

    exit_code = USER_CAN_FIX


class Stopped(Exception):
    """Training stopped on request, with a checkpoint: start the same command again to go on."""

    exit_code = START_AGAIN
