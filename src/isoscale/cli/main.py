"""The command line: one module per command, heavy imports only when a command runs."""

import sys
from typing import Annotated, NoReturn

import typer

from isoscale._version import __version__
from isoscale.cli import doctor
from isoscale.cli.data import data
from isoscale.cli.jobs import status as jobs
from isoscale.cli.jobs import submit
from isoscale.cli.jobs.job_options import JobCommand
from isoscale.cli.recipe import recipe
from isoscale.cli.runs import runs, tensorboard
from isoscale.cli.studies import scale, sweep
from isoscale.cli.train import apply, init, train
from isoscale.errors import FAILED, INTERRUPTED, USER_CAN_FIX, PeerFailed, Stopped, exit_code, is_full_disk, message
from isoscale.system import early_stop, signals
from isoscale.system.printing import echo, finish

_BESIDES = (["train"], ["sweep"], ["scale"], ["submit"])
"""Commands whose words are not what they are called for."""
HINT = "add --debug to the command to see the traceback"

app = typer.Typer(
    name="isoscale",
    help="Train a scientific model the same way on one core or a thousand GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("test", context_settings=apply.MORE_WORDS)(apply.test)
app.command("predict", context_settings=apply.MORE_WORDS)(apply.predict)
app.command("export")(train.export)
app.command("submit", cls=JobCommand)(submit.submit)
app.command("sweep", cls=JobCommand)(sweep.sweep)
app.command("status")(jobs.status)
app.command("cancel")(jobs.cancel)
app.command("logs")(jobs.logs)
app.command("scale", cls=JobCommand)(scale.scale)
app.command("compare")(runs.compare)
app.command("report")(runs.report)
app.command("reproduce")(runs.reproduce)
app.command("tensorboard")(tensorboard.tensorboard)
app.add_typer(runs.app, name="runs")
app.add_typer(recipe.app, name="recipe")
app.add_typer(data.app, name="data")
app.command("init")(init.init)
app.command("doctor")(doctor.doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"isoscale {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere in the command.")
    ] = False,
) -> None:
    """Train a scientific model the same way on one core or a thousand GPUs."""


def run() -> None:
    """Run a command and turn errors into a message and an exit code."""
    words = sys.argv[1:]
    # People add --debug at the end of the line that failed, where a command of a group would not know it.
    debug = "--debug" in words
    code: int | str | None = 0
    try:
        app(args=[word for word in words if word != "--debug"], prog_name="isoscale")
    except Stopped as stopped:
        code = stopped.exit_code
    except SystemExit as end:
        code = _told(end.code)
    except KeyboardInterrupt:  # before the command began
        code = _told(INTERRUPTED)
    except Exception as error:
        asked = early_stop.exit_code()  # it may have come out as any error
        code = exit_code(error) if asked is None else _told(asked)
        if asked is None and _speaks():
            if debug and not isinstance(error, PeerFailed):
                import traceback

                echo("".join(traceback.format_exception(error)).rstrip(), err=True)
            else:
                echo(describe(error), err=True)
    unwritten = finish()
    if unwritten and code == 0 and words[:1] not in _BESIDES and _speaks():
        echo(f"error: cannot write standard output: {unwritten}", err=True)
        code = USER_CAN_FIX
    _exit(code)


def _told(code: int | str | None) -> int | str | None:
    """An exit code, after saying that it is one of Ctrl-C."""
    if code == INTERRUPTED and _speaks() and not _has_launched():
        echo("interrupted", err=True)
    return code


def _speaks() -> bool:
    """Whether this process tells the user; several ranks cannot have met where their module was never imported."""
    world = sys.modules.get("isoscale.parallel.world")
    return world is None or world.speaks()


def _has_launched() -> bool:
    """Whether this process has started ranks, of which the first one speaks."""
    local = sys.modules.get("isoscale.launch.local")
    return local is not None and not local.is_rank()


def _exit(code: int | str | None) -> NoReturn:
    signals.end_with(code)
    world = sys.modules.get("isoscale.parallel.world")
    if world is not None and isinstance(code, int):
        world.end(code)
    sys.exit(code)


def describe(error: BaseException) -> str:
    """The message; without a traceback, unless it is that of another rank, which can be seen nowhere else."""
    notes = [] if is_full_disk(error) else getattr(error, "__notes__", [])
    hints = [HINT] if exit_code(error) == FAILED and not isinstance(error, PeerFailed) else []
    text = "\n  ".join([f"error: {message(error)}", *notes, *hints])
    there = error.traceback if isinstance(error, PeerFailed) else ""
    return f"{text}\n{there}".rstrip()
