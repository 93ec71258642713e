"""What a job asks for: the recipe's `launch` section, a cluster profile over it, options of the command over both."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from isoscale.errors import Problem, UserError, nearest
from isoscale.recipe.formats.tree import plain
from isoscale.recipe.formats.yaml_reader import read_yaml
from isoscale.recipe.launch import Launch, time_seconds
from isoscale.recipe.problems import RecipeError
from isoscale.recipe.validation import validate

NOTICE = 120
MAX_REQUEUES = 100


@dataclass(frozen=True)
class Resources:
    """Processes and GPUs, counted out."""

    nodes: int
    tasks_per_node: int
    gpus_per_node: int

    @property
    def num_tasks(self) -> int:
        """Number of ranks."""
        return self.nodes * self.tasks_per_node

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        if self.gpus_per_node and self.tasks_per_node == self.gpus_per_node:
            return f"{nodes} × {self.gpus_per_node} GPU{'s' * (self.gpus_per_node > 1)}"
        gpus = f" and {self.gpus_per_node} GPU{'s' * (self.gpus_per_node > 1)}" if self.gpus_per_node else ""
        return f"{nodes} × {self.tasks_per_node} task{'s' * (self.tasks_per_node > 1)}{gpus}"


def merged(*layers: Mapping[str, Any]) -> Launch:
    """One section of several, later ones winning; variables are merged one by one."""
    values: dict[str, Any] = {}
    for layer in layers:
        given = {key: value for key, value in layer.items() if value not in (None, [], {})}
        env = {**values.get("env", {}), **given.get("env", {})}
        values = {**values, **given, **({"env": env} if env else {})}
    return checked(values, "command line")


def checked(values: Mapping[str, Any], origin: str, lines: Mapping[str, str] | None = None) -> Launch:
    """The section with these values; a UserError that names all that is wrong, and where it was written."""
    recipe, problems = validate({"launch": dict(values)})
    if recipe is not None:
        return recipe.launch
    raise RecipeError([_at_home(problem, origin, lines or {}) for problem in problems])


def _at_home(problem: Problem, origin: str, lines: Mapping[str, str]) -> Problem:
    path = problem.path[1:]
    suggestion = problem.suggestion.removeprefix("launch.") if problem.suggestion else None
    return Problem(path, problem.message, lines.get(str(path[0]) if path else "", origin), suggestion)


def resources(launch: Launch, num_gpus: int | None = None) -> Resources:
    """Count out nodes, tasks and GPUs; `num_gpus` is the number of GPUs in total."""
    gpus = launch.gpus_per_node or 0
    nodes = launch.nodes or 1
    if num_gpus is not None:
        nodes, gpus = _spread(num_gpus, gpus, launch.nodes)
    tasks = launch.tasks_per_node or gpus or 1
    if gpus and tasks > gpus:
        raise UserError(
            f"{tasks} tasks on a node with {gpus} GPU{'s' * (gpus > 1)}: one task trains on one GPU; "
            f"leave out --tasks-per-node"
        )
    return Resources(nodes, tasks, gpus)


def _spread(num_gpus: int, per_node: int, nodes: int | None) -> tuple[int, int]:
    """Nodes, and GPUs on each of them."""
    if not per_node and nodes is None:
        raise UserError(
            f"-n {num_gpus} says how many GPUs in total, but not how many a node has: add --gpus-per-node G, or "
            "--cluster NAME with a profile that says so"
        )
    most = per_node or num_gpus
    if nodes is None:
        nodes = -(-num_gpus // most)
    if num_gpus % nodes or num_gpus // nodes > most:
        unit = nodes if num_gpus % nodes and per_node == 0 else most
        fitting = dict.fromkeys(count for count in (num_gpus // unit * unit, -(-num_gpus // unit) * unit) if count)
        raise UserError(
            f"{num_gpus} GPUs in total cannot be shared equally by {nodes} nodes"
            + (f" with {per_node} per node" if per_node else "")
            + f"; use {' or '.join(f'-n {count}' for count in fitting)}, or other numbers of nodes and GPUs a node"
        )
    return nodes, num_gpus // nodes


def notice(launch: Launch) -> int:
    """Seconds before the time limit at which the training is told."""
    limit = time_seconds(launch.time) if launch.time is not None else None
    if launch.notice is None:
        return NOTICE if limit is None else min(NOTICE, limit // 4)
    if limit is not None and 2 * launch.notice > limit:
        raise UserError(
            f"launch.notice: {launch.notice} s before the end of {launch.time} leaves less than half of the time to "
            f"train; take at most {limit // 2}, or a longer --time"
        )
    return launch.notice


def profile_folder() -> Path:
    """Where a user's profiles are."""
    base = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".config") / "isoscale" / "clusters"


def own_profiles() -> dict[str, Path]:
    """The user's profiles, by name."""
    return {path.stem: path for path in sorted(profile_folder().glob("*.yaml"))}


def examples() -> dict[str, Traversable]:
    """The profiles that come with the package, to be copied and changed."""
    found = files("isoscale").joinpath("launch", "clusters").iterdir()
    return {entry.name.removesuffix(".yaml"): entry for entry in sorted(found, key=lambda entry: entry.name)}


def read_profile(name: str) -> dict[str, Any]:
    """The values of a user's profile, checked; a UserError says what there is where there is no such one."""
    path = own_profiles().get(name)
    if path is None:
        raise UserError(_unknown(name))
    problems: list[Problem] = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the profile {path}: {error}") from None
    node = read_yaml(text, str(path), problems)
    if problems:
        raise RecipeError(problems)
    if not isinstance(node.value, dict):
        raise UserError(f"{path} must be made of `key: value` lines, such as `partition: gpu`")
    values = plain(node)
    checked(values, str(path), {key: str(child.origin) for key, child in node.value.items()})
    return values


def _unknown(name: str) -> str:
    mine, shipped, folder = own_profiles(), examples(), profile_folder()
    lines = [f'there is no cluster profile "{name}"']
    guess = nearest(name, mine)
    lines[0] += f'; did you mean "{guess}"?' if guess else ""
    lines.append(f"yours, in {folder}: {', '.join(mine) or 'none yet'}")
    lines.append("to start from one of the examples, copy it there and change it:")
    lines += [f"  mkdir -p {folder} && cp {path} {folder}/{example}.yaml" for example, path in shipped.items()]
    return "\n".join(lines)
