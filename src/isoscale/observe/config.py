"""The recipe section that says what people see of a run."""

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from isoscale.config import Config

RESERVED = ("recipe.yaml", "run.json", "metrics.jsonl", "log.txt", "report.html")
"""Files that a run has of its own."""


def _file_in_run(name: str) -> str:
    if not name or "/" in name or name.startswith(".") or name in RESERVED:
        raise ValueError(f"{name!r} is not the name of a file to write into the run directory: write lcurve.out")
    return name


def _told_apart(tags: dict[str, str]) -> dict[str, str]:
    twice = next((tag for tag, count in Counter(tags.values()).items() if count > 1), None)
    if twice is not None:
        raise ValueError(f"two metrics would be {twice!r}, and their curves one: give each a tag of its own")
    if not all(tags.values()):
        raise ValueError("a tag is empty: write what TensorBoard shall call the metric")
    return tags


class Observe(Config):
    """What is logged, how often and where to."""

    every: Annotated[int, Field(ge=1)] = 50
    """Steps between two log lines. The device is read once for each, never in between."""
    tensorboard: Literal[0, 1, 2] = 1
    """What the run's `tensorboard` folder gets. 0: nothing. 1: scalars. 2: also pictures, predictions, figures,
    histograms of parameters and gradients, the model's graph and the settings; each evaluation then takes longer."""
    tensorboard_tags: Annotated[dict[str, str], AfterValidator(_told_apart)] = {}
    """What TensorBoard calls a metric, {val/loss: Loss/valid}, so that charts are shared with other programs. A metric
    that is named here is written to the folder `tagged` by that tag, whatever its stage; others stay as they are."""
    loggers: list[Any] = []
    """Further loggers: mlflow, wandb, comet, neptune or a class path, alone or as {class, arguments}."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """How much the console says."""
    format: Literal["text", "json"] = "text"
    """Console output for people (text) or for programs (json, one object per line)."""
    log: Literal["main", "collect", "workers"] = "main"
    """Whose words are kept where several ranks train. main: rank 0 speaks for all. collect: what every rank says and
    prints appears on the console and in log.txt of rank 0, each line with its rank. workers: every other rank writes a
    file of its own, log-rank1.txt and so on, beside log.txt."""
    log_file: str | None = None
    """A file that gets what log.txt gets, besides it."""
    curve: Annotated[str, AfterValidator(_file_in_run)] | None = None
    """A file in the run directory that gets the learning curve as a table of plain text, such as `lcurve.out`: the
    errors on training and validation data after the first step, every `every` steps and after each evaluation."""
