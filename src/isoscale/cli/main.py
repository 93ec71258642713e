"""The command line: one module a command, heavy imports only when a command runs."""

import os
import sys
from typing import Annotated

import typer

from isoscale._version import __version__
from isoscale.cli import apply, recipe, runs, train
from isoscale.errors import FAILED, Stopped, UserError

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
app.add_typer(runs.app, name="runs")
app.add_typer(recipe.app, name="recipe")

_debug = False


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"isoscale {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train a scientific model the same way on one core or a thousand GPUs."""
    global _debug
    _debug = debug


def run() -> None:
    """Run a command and turn errors into a message and an exit code."""
    code = 0
    try:
        app()
    except UserError as error:
        code = _report(error, error.exit_code)
    except Stopped as stopped:
        code = stopped.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the reader of our output has gone, as in `isoscale … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        code = _report(error, FAILED)
    sys.exit(code)


def _report(error: Exception, code: int) -> int:
    if _debug:
        import traceback

        traceback.print_exc()
    else:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        hint = "" if isinstance(error, UserError) else "\n(isoscale --debug … shows where)"
        print(f"error: {kind}{error}{hint}", file=sys.stderr)
    return code
