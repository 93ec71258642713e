"""A sweep: one recipe with many settings, a run directory for each point, and a record of all of them."""

import json
import re
import shlex
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isoscale.errors import Problem, UserError, dotted
from isoscale.launch.job import POINTS
from isoscale.launch.submission import prepare
from isoscale.recipe.compare import ABSENT, LENGTHS, Difference, describe, differences, harmful
from isoscale.recipe.formats.tree import COMMAND_LINE
from isoscale.recipe.formats.yaml_reader import read_value
from isoscale.recipe.importing.reading import split
from isoscale.recipe.load import load_recipe, load_resolved, load_variants, to_build, to_train
from isoscale.recipe.loaded import LoadedRecipe
from isoscale.recipe.problems import RecipeError
from isoscale.recipe.seal import is_sealed, seal, with_seal
from isoscale.recipe.sweep import OWN_KEYS, SECTION, choices
from isoscale.recipe.trust import Trust, problems_of_foreign
from isoscale.runs.directory import RunDirectory
from isoscale.runs.run import Run
from isoscale.study.sweep.points import Values, names_of, points_of, text
from isoscale.system.files import refuse_link, write_aside

RECORD = "sweep.json"
RECIPE = "recipe.yaml"


@dataclass(frozen=True)
class Point:
    """One setting of a sweep."""

    name: str
    """That of its run directory."""
    values: Values
    words: list[str] | None = None
    """The same as overrides of the recipe, where the values are for keys of another program's file."""


@dataclass(frozen=True)
class Plan:
    """A sweep that was checked, point by point; nothing has happened yet."""

    loaded: LoadedRecipe
    recipes: dict[str, LoadedRecipe]
    """What each point trains, by its name."""
    points: list[Point]
    command: Sequence[str]
    world: int | None = None
    """The ranks of each point, which an input file of another program speaks of; None for those of this start."""

    def write(self, path: Path) -> "Sweep":
        """Make the directories of the sweep and of all its points; the record comes last."""
        is_ours = not path.exists() or not any(path.iterdir())
        try:
            path.mkdir(parents=True, exist_ok=True)
            write_aside(path / RECIPE, with_seal(self.loaded.with_sweep().to_yaml()))
            for name, loaded in self.recipes.items():
                prepare(path / name, loaded)
            write_points(path, self.points)
            _write_record(path, self._record())
        except (OSError, UserError) as error:
            if is_ours:
                shutil.rmtree(path, ignore_errors=True)  # nothing was earned yet: leave no litter
            reason = error.strerror if isinstance(error, OSError) else None
            raise UserError(
                f"cannot write the sweep {path}: {reason or error}; choose another directory with --run DIR"
            ) from None
        return Sweep.read(path)

    def _record(self) -> dict[str, Any]:
        checkpoint = self.loaded.recipe.checkpoint
        return {
            "name": self.loaded.name,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": list(self.command),
            "monitor": checkpoint.monitor,
            "mode": checkpoint.mode,
            "keys": list(self.points[0].values),
            "world": self.world,
            "points": [_entry(point) for point in self.points],
        }


def _is_plain(name: str) -> bool:
    """Whether a name is that of a directory in the sweep, and one line of a list."""
    return Path(name).name == name and name not in ("", "..") and name.isprintable()


def write_points(path: Path, points: Sequence[Point]) -> None:
    """The list that the tasks of an array find their directories in."""
    write_aside(path / POINTS, "".join(f"{point.name}\n" for point in points))


def _entry(point: Point) -> dict[str, Any]:
    words = {} if point.words is None else {"words": point.words}
    return {"directory": point.name, "values": point.values, **words}


@dataclass(frozen=True)
class Sweep:
    """A sweep in its directory."""

    path: Path
    record: dict[str, Any]

    @staticmethod
    def exists(path: Path) -> bool:
        """Whether there is a sweep in a directory."""
        return (path / RECORD).is_file()

    @classmethod
    def read(cls, path: Path) -> "Sweep":
        """The sweep in a directory."""
        try:
            sweep = cls(path, dict(json.loads((path / RECORD).read_text(encoding="utf-8"))))
            names = [point.name for point in sweep.points]
            outside = [name for name in names if not _is_plain(name)]
            if outside:
                raise ValueError(f"{outside[0]!r} is not a directory in it")
            return sweep
        except FileNotFoundError:
            raise UserError(f"there is no sweep in {path}: no {RECORD}; `isoscale runs list` shows sweeps") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path / RECORD} is damaged: {error}") from None

    @staticmethod
    def all(root: Path) -> list[Path]:
        """The directories of all sweeps below a folder."""
        return [path.parent for path in sorted(root.glob(f"*/{RECORD}"))]

    @property
    def points(self) -> list[Point]:
        """The points in the order of the sweep."""
        return [Point(entry["directory"], entry["values"], entry.get("words")) for entry in self.record["points"]]

    @property
    def keys(self) -> set[str]:
        """The keys in which points differ, also by their names in the recipe where the sweep has others."""
        words = [word for point in self.points for word in point.words or ()]
        return {*self.record["keys"], *(word.removeprefix("~").partition("=")[0] for word in words)}

    @property
    def larger_is_better(self) -> bool:
        """The direction in which the monitored metric gets better."""
        return self.record["mode"] == "max"

    @property
    def changes(self) -> list[str]:
        """What was changed since the points were prepared, as overrides."""
        return list(self.record.get("changes", {}).values())

    def folder(self, point: Point) -> Path:
        """The run directory of a point."""
        return self.path / point.name

    def restore(self, points: Sequence[Point]) -> None:
        """Prepare those points anew whose directories somebody has removed; one that is a link is refused."""
        for point in points:
            refuse_link(self.folder(point))
        missing = [point for point in points if not Run.exists(self.folder(point))]
        recipes = load_variants(
            self.path / RECIPE, (), {point.name: point.values for point in missing if point.words is None}
        )
        recipes |= {
            point.name: load_recipe(self.path / RECIPE, point.words) for point in missing if point.words is not None
        }
        for name, loaded in recipes.items():
            prepare(self.path / name, loaded)

    def is_complete(self, point: Point) -> bool:
        """Whether a point that is done has trained as long as the sweep now says."""
        if not any(dotted(path) in self.record.get("changes", {}) for path in LENGTHS):
            return True
        wanted, trained = (load_recipe(path / RECIPE).recipe.train for path in (self.path, self.folder(point)))
        return (wanted.epochs, wanted.steps) == (trained.epochs, trained.steps)


def plan(
    recipe: str | None, words: Sequence[str], command: Sequence[str], check_components: bool = True,
    world: int | None = None, trust: Trust = Trust.NAMED,
) -> Plan:  # fmt: skip
    """Check a recipe at every point of its sweep; `words` are overrides, also such as `seed=0,1,2`.

    `trust` says whose choice of classes is followed.
    """
    overrides = with_lists(words)
    loaded = load_recipe(recipe, overrides, world=world)
    values = points_of(loaded)
    points = [Point(*pair) for pair in zip(names_of(values), values, strict=True)]
    by_name = {point.name: point.values for point in points}
    recipes = load_variants(recipe, overrides, by_name, check_components=check_components, world=world, trust=trust)
    for each in recipes.values() if trust is not Trust.CHECKED else ():
        to_train(each, trust)
    _check_different(points, recipes)
    return Plan(loaded, recipes, [_in_words(point, loaded, recipes) for point in points], command, world)


def _in_words(point: Point, loaded: LoadedRecipe, recipes: Mapping[str, LoadedRecipe]) -> Point:
    """A point with what it sets in the recipe, where its own keys mean nothing there."""
    if not split(point.values)[0]:
        return point
    changes = differences(loaded.values, recipes[point.name].values)
    return replace(point, words=[_as_word(change) for change in changes])


def with_lists(words: Sequence[str]) -> list[str]:
    """Overrides in which several values with commas between them stand as lists below `sweep`."""
    return [_with_list(word) for word in words]


def _with_list(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals or key.startswith(("~", f"{SECTION}.")):
        return word
    problems: list[Problem] = []
    several = read_value(f"[{value}]", COMMAND_LINE, (), problems).value
    is_one = problems or not isinstance(several, list) or len(several) < 2
    return word if is_one else f"{SECTION}.{key}=[{value}]"


def _check_different(points: Sequence[Point], recipes: Mapping[str, LoadedRecipe]) -> None:
    seen: dict[str, Point] = {}
    for point in points:
        first = seen.setdefault(json.dumps(recipes[point.name].values, sort_keys=True), point)
        if first is not point:
            raise UserError(
                f"two points of the sweep are the same training: {_shown(first)} and {_shown(point)}; keep one of them"
            )


def _shown(point: Point) -> str:
    return " ".join(f"{key}={text(value)}" for key, value in point.values.items())


def _section(loaded: LoadedRecipe) -> dict[str, Any]:
    """The sweep by key, without what is not said."""
    section = loaded.recipe.sweep
    own = {key: value for key, value in section.model_dump(exclude_defaults=True).items() if key in OWN_KEYS}
    entries = choices(section)
    return own | {key: entry if isinstance(entry, list) else entry.model_dump() for key, entry in entries.items()}


def check_new(path: Path) -> None:
    """Refuse a directory that holds something else."""
    if Run.exists(path):
        raise UserError(f"{path} holds a single run; choose another directory for the sweep with --run DIR")
    if path.exists() and not (path.is_dir() and _is_half_made(path)):
        raise UserError(f"{path} is there and holds no sweep; choose another directory with --run DIR")


def _is_half_made(path: Path) -> bool:
    """Whether a directory holds nothing, or only what comes before the record: a kill or a full disk stopped it."""
    files = [each for each in path.rglob("*") if each.is_symlink() or not each.is_dir()]
    return all(re.sub(r"^\.(.*)-\d+$", r"\1", each.name) in (RECIPE, POINTS, "run.json") for each in files)


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write sweep.json, sealed as this user's."""
    own = {key: value for key, value in record.items() if key != "seal"}
    write_aside(path / RECORD, json.dumps({**own, "seal": seal(json.dumps(own))}, indent=1))


def _to_train(sweep: Sweep, trust: Trust) -> None:
    """Refuse a sweep of somebody else that names what may do harm; with trust, it becomes this user's own."""
    record = {key: value for key, value in sweep.record.items() if key != "seal"}
    if trust is Trust.ALL:
        for folder in (sweep.path, *map(sweep.folder, sweep.points)):
            RunDirectory(folder).adopt()
        _write_record(sweep.path, record)
        return
    loaded = to_build(load_recipe(sweep.path / RECIPE, sweep.changes), trust)
    if is_sealed(json.dumps(record), sweep.record.get("seal", "")):
        return
    points = {point.name: point.values for point in sweep.points if point.words is None}
    variants = load_variants(sweep.path / RECIPE, sweep.changes, points)
    words = [load_recipe(sweep.path / RECIPE, [*sweep.changes, *point.words]) for point in sweep.points if point.words]
    for each in (loaded, *variants.values(), *words):
        problems = problems_of_foreign(each.values, [sweep.path / RECORD])
        if problems:
            raise RecipeError(problems)


def reopen(path: Path, recipe: str | None, words: Sequence[str], trust: Trust = Trust.NAMED) -> Sweep:
    """A sweep to go on with, refusing changes that would make it another one; others are kept in its record.

    Where nothing is to be trained, nothing is written.
    """
    sweep = Sweep.read(path)
    if trust is not Trust.CHECKED:
        _to_train(sweep, trust)
    if recipe is None and not words:
        return sweep
    stored = load_resolved(path / RECIPE)
    wanted = load_recipe(
        str(path / RECIPE) if recipe is None else recipe, with_lists(words), world=sweep.record.get("world")
    )
    changes = differences(*({**loaded.values, SECTION: _section(loaded)} for loaded in (stored, wanted)))
    refused = [*harmful(changes), *(change for change in changes if dotted(change.path) in sweep.keys)]
    if refused:
        raise UserError(
            f"{path} holds a sweep of another recipe:\n{describe(refused)}\n"
            "start a new sweep (leave out --run, or name another directory), or take these changes back"
        )
    kept = {dotted(change.path): _as_word(change) for change in changes if change.path[0] not in ("name", "launch")}
    record = {**sweep.record, "changes": sweep.record.get("changes", {}) | kept}
    if trust is not Trust.CHECKED:
        write_aside(path / RECIPE, with_seal(wanted.with_sweep().to_yaml()))
        _write_record(path, record)
    return Sweep(path, record)


def _as_word(change: Difference) -> str:
    key = dotted(change.path)
    return f"~{key}" if change.new is ABSENT else f"{key}={json.dumps(change.new)}"


def command_to_go_on(sweep: Sweep, *options: str) -> str:
    """What to type to go on with a sweep."""
    return " ".join(["isoscale sweep --run", shlex.quote(str(sweep.path)), *options])
