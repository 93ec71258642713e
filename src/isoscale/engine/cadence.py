"""How often something happens: "1 epoch", "500 steps", "10 minutes", "never"."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator

Unit = Literal["epoch", "step", "minute", "never"]
_PATTERN = re.compile(r"(\d+)\s*(epoch|step|minute)s?")


@dataclass(frozen=True)
class Cadence:
    """A count of a unit; `Cadence(2, "epoch")` is every second epoch."""

    count: int
    unit: Unit

    @classmethod
    def parse(cls, text: str) -> "Cadence":
        """Read "500 steps"; raises ValueError with the accepted forms."""
        if text.strip() == "never":
            return cls(1, "never")
        match = _PATTERN.fullmatch(text.strip())
        if not match or int(match[1]) < 1:
            raise ValueError(f'{text!r} is not a cadence: write "1 epoch", "500 steps", "10 minutes" or "never"')
        return cls(int(match[1]), match[2])  # type: ignore[arg-type]


def _as_text(value: object) -> object:
    return f"{value} steps" if isinstance(value, int) and not isinstance(value, bool) else value


def _check(text: str) -> str:
    Cadence.parse(text)
    return text


CadenceText = Annotated[str, BeforeValidator(_as_text), AfterValidator(_check)]
