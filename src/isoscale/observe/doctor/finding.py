"""What is found about one subject, on this machine or on several."""

from dataclasses import dataclass, replace
from typing import Any, Literal

GIB = 2**30
Verdict = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Amount:
    """A number that was measured, and so is another one on every host."""

    value: float
    unit: str

    def __str__(self) -> str:
        return f"{_number(self.value)} {self.unit}"


@dataclass(frozen=True)
class Finding:
    """What was found about one subject."""

    subject: str
    verdict: Verdict
    text: str
    advice: str = ""
    """What to do, unless all is well."""
    host: str = ""
    """Where, in words; empty where it holds for all."""
    amounts: tuple[Amount, ...] = ()
    """What was measured, told after the text."""

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Finding":
        """From the words of a message."""
        return cls(**{**values, "amounts": tuple(Amount(**amount) for amount in values["amounts"])})

    def complete(self) -> "Finding":
        """The same, its amounts in the text."""
        return replace(self, text=", ".join([self.text, *map(str, self.amounts)]), amounts=())

    def shown(self) -> dict[str, str]:
        """The finding for programs."""
        text = self.complete().text
        return {
            "subject": self.subject, "verdict": self.verdict, "host": self.host, "text": text, "advice": self.advice,
        }  # fmt: skip


def span(least: tuple[Amount, str], most: tuple[Amount, str]) -> str:
    """From the least to the most of an amount, each with its host; one number where they look the same."""
    if str(least[0]) == str(most[0]):
        return str(least[0])
    return f"{_number(least[0].value)} ({least[1]}) to {_number(most[0].value)} ({most[1]}) {least[0].unit}"


def in_gib(num_bytes: float) -> str:
    """A number of bytes in words."""
    return f"{num_bytes / GIB:.1f} GiB"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.2g}"
