"""What is wrong with a recipe: every problem at once, each with its place and the nearest right name."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from isoscale.errors import UserError

KeyPath = tuple[str | int, ...]
DEFAULT = "default"


@dataclass(frozen=True)
class Problem:
    """One mistake: the key, what is wrong with it, where it was written and what was probably meant."""

    path: KeyPath
    message: str
    origin: str | None = None
    suggestion: str | None = None

    def __str__(self) -> str:
        text = ": ".join(part for part in (self.origin, dotted(self.path), self.message) if part)
        return f'{text}; did you mean "{self.suggestion}"?' if self.suggestion else text


class RecipeError(UserError):
    """A recipe that cannot be used, with all its problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems]
        if len(lines) > 1:
            lines.insert(0, f"{len(lines)} problems in the recipe:")
        super().__init__("\n".join(lines))


def dotted(path: KeyPath) -> str:
    """A key path as overrides write it: `data.transforms.0.scale`."""
    return ".".join(str(part) for part in path)


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that was probably meant, if any is close."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1)
    return by_lower[matches[0]] if matches else None


def with_origin(problem: Problem, origins: Mapping[KeyPath, str]) -> Problem:
    """The problem with the place where its key was written."""
    return problem if problem.origin else replace(problem, origin=_origin_at(problem.path, origins))


def _origin_at(path: KeyPath, origins: Mapping[KeyPath, str]) -> str | None:
    """The origin of the key itself, of what stands below it, or of the section around it."""
    for length in range(len(path), 0, -1):
        here = path[:length]
        below = (origin for key, origin in origins.items() if key[:length] == here)
        written = (origin for origin in (origins.get(here, DEFAULT), *below) if origin != DEFAULT)
        if found := next(written, None):
            return found
    return None
