"""`isoscale`, and `python -m isoscale`."""

import os
import signal
import sys

if __name__ == "__main__" and sys.path[0] == os.getcwd() and not sys.flags.safe_path:
    sys.path.append(sys.path.pop(0))  # `python -m` looks there first, also for what the libraries import

from isoscale.errors import INTERRUPTED, Stopped
from isoscale.system import early_stop
from isoscale.system.printing import forgive, shout


def run() -> None:
    """Run a command; to be told to stop before there is one, while its files are still read, is no failure."""
    forgive()
    try:
        if sys.argv[1:2] == ["train"]:
            early_stop.listen()
        from isoscale.cli.main import run as run_command
    except KeyboardInterrupt:
        shout("interrupted\n")
        os._exit(INTERRUPTED)
    except Stopped as stopped:
        os._exit(stopped.exit_code)
    try:
        run_command()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # there is nothing left to interrupt but the end of Python


if __name__ == "__main__":
    run()
