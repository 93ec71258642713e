"""What is wrong with a recipe: every problem at once, each with its place and the nearest right name."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from isoscale.errors import KeyPath, Problem, UserError

DEFAULT = "default"


class RecipeError(UserError):
    """A recipe that cannot be used, with all its problems."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems]
        if len(lines) > 1:
            lines.insert(0, f"{len(lines)} problems in the recipe:")
        super().__init__("\n".join(lines))


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
