"""What the commands of `isoscale data` have in common."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isoscale.data.tools.downloads import Report


@contextmanager
def progress() -> Iterator["Report"]:
    """Bars on a terminal; nothing in a log."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bars: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def report(name: str, done: int, total: int | None) -> None:
            if name not in bars:
                bars[name] = progress.add_task(name)
            progress.update(bars[name], completed=done, total=total)

        yield report


def split_words(words: list[str]) -> tuple[list[str], dict[str, Any]]:
    """Paths, and the values of key=value; a file whose name has an equals sign is a file."""
    from isoscale.errors import Problem
    from isoscale.recipe.formats.tree import COMMAND_LINE, plain
    from isoscale.recipe.formats.yaml_reader import read_value
    from isoscale.recipe.problems import RecipeError

    paths: list[str] = []
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier() or Path(word).exists():
            paths.append(word)
        else:  # "3:" is a range here, not a mapping
            values[key] = text if text.endswith(":") else plain(read_value(text, COMMAND_LINE, (key,), problems))
    if problems:
        raise RecipeError(problems)
    return paths, values
