"""The command line: one module a command, heavy imports only when a command runs."""

import sys
from typing import Annotated

import typer

from isoscale._version import __version__
from isoscale.cli import apply, compare, data, doctor, init, recipe, report, runs, tensorboard, train
from isoscale.errors import Stopped

INTERRUPTED = 130
"""How typer ends a command at Ctrl-C, as shells expect."""

app = typer.Typer(
    name="isoscale",
    help="Train a scientific model the same way on one core or a thousand GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train")(train.train)
app.command("test")(apply.test)
app.command("predict")(apply.predict)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.command("tensorboard")(tensorboard.tensorboard)
app.add_typer(runs.app, name="runs")
app.add_typer(recipe.app, name="recipe")
app.add_typer(data.app, name="data")
app.command("init")(init.init)
app.command("doctor")(doctor.doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"isoscale {__version__}")
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
    code = 0
    try:
        app(args=[word for word in words if word != "--debug"], prog_name="isoscale")
    except Stopped as stopped:
        code = stopped.exit_code
    except SystemExit as end:
        if end.code == INTERRUPTED:
            print("interrupted", file=sys.stderr)
        raise
    except Exception as error:
        code = _report(error, debug)
    sys.exit(code)


def _report(error: Exception, debug: bool) -> int:
    from isoscale.cli.failure import describe, exit_code

    if debug:
        import traceback

        traceback.print_exception(error)
    else:
        print(describe(error), file=sys.stderr)
    return exit_code(error)
