"""The recipe section that says what people see of a run."""

from typing import Annotated, Literal

from pydantic import Field

from isoscale.config import Config


class Observe(Config):
    """What is logged, how often and where to."""

    every: Annotated[int, Field(ge=1)] = 50
    """Steps between two log lines. The device is read once for each, never in between."""
    tensorboard: Literal[0, 1] = 1
    """0: nothing. 1: scalars for TensorBoard in the run's `tensorboard` folder."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """How much the console says."""
    format: Literal["text", "json"] = "text"
    """Console output for people (text) or for programs (json, one object a line)."""
