"""`isoscale runs send`: what was logged, to a logger."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from isoscale.cli import complete
from isoscale.system.printing import echo

if TYPE_CHECKING:
    from pathlib import Path

    from isoscale.observe.events import Observer
    from isoscale.runs.run import Run


def send(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Directory or name of a run.", autocompletion=complete.runs)
    ],
    logger: Annotated[str, typer.Argument(metavar="LOGGER", help="mlflow, wandb, comet, neptune or a class path.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Its arguments, such as tracking_uri=http://host:5000."),
    ] = None,
) -> None:
    """Send what a run has logged to a logger; what was sent there before is not sent again."""
    from isoscale.recipe.loggers import build_logger
    from isoscale.runs.run import Run

    found = Run.find(run)
    observer = build_logger(_spec(logger, arguments or []), (logger,))
    num_events = _tell(found, observer, logger)
    echo(f"{found.path}: {num_events:,} entries sent to {logger}")
    for purpose, command in _commands(observer, found.path):
        echo(f"  {purpose}: {command}")


def _spec(logger: str, words: list[str]) -> dict[str, Any]:
    from isoscale.errors import Problem
    from isoscale.recipe.formats.tree import COMMAND_LINE, from_plain, plain
    from isoscale.recipe.overrides import apply_overrides
    from isoscale.recipe.problems import RecipeError

    problems: list[Problem] = []
    node = apply_overrides(from_plain({"class": logger}, COMMAND_LINE, problems), words, problems)
    if problems:
        raise RecipeError(problems)
    spec: dict[str, Any] = plain(node)
    return spec


def _tell(run: "Run", observer: "Observer", logger: str) -> int:
    from isoscale.errors import UserError
    from isoscale.observe.loggers.background import reason
    from isoscale.runs.replay import events

    told = list(events(run))
    try:
        for event in told:
            observer.notify(event)
        observer.close()
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"cannot send {run.path} to {logger}: {reason(error)}\n"
            "what has arrived is remembered: type the same again to send the rest"
        ) from error
    return len(told)


def _commands(observer: "Observer", directory: "Path") -> list[tuple[str, str]]:
    ask = getattr(observer, "commands", None)
    return ask(directory) if ask else []
