"""What a session says at its start and at its end: label and text, and what to type next."""

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from isoscale.data.mixture import Mixture, MixturePlan, system_probabilities
from isoscale.data.sources import Source
from isoscale.data.tiles import TiledCrops, TileOrder
from isoscale.data.window_order import WindowOrder, describe_windows
from isoscale.engine.diagnose.memory import size
from isoscale.engine.trainer import Trainer
from isoscale.observe.ranks.rank_map import rank_rows
from isoscale.observe.tables import aligned
from isoscale.observe.text import duration, number, plain_number
from isoscale.parallel.environments import find as environment
from isoscale.parallel.health.preflight import NAMES
from isoscale.parallel.rank_info import Facts
from isoscale.runs.open import OpenedRun

if TYPE_CHECKING:
    from isoscale.engine.splits import Split


_INTERFACES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def start_rows(run: OpenedRun, trainer: Trainer) -> list[tuple[str, str]]:
    """The start-up summary."""
    parts, plan = trainer.parts, trainer.train.plan
    num_steps = trainer.plan.num_steps
    count = sum(parameter.numel() for parameter in parts.task.parameters())
    val = f", {len(trainer.val.source):,} validation" if trainer.val else ""
    batch = batch_words(plan.batch_size, run.ranks.world_size)
    return [
        ("device", f"{parts.accelerator.description}{_of_visible(run, trainer)}{_why_threads(trainer)}"),
        *_ranks(run, trainer),
        ("precision", parts.precision.name),
        ("program", _program(trainer)),
        ("model", f"{type(getattr(parts.task, 'model', parts.task)).__name__}, {count:,} parameters"),
        ("data", f"{len(trainer.train.source):,} training{val} samples, on the {trainer.train.residency}"),
        *_order(trainer),
        ("batch", f"{batch}, {counted(plan.steps_per_epoch, 'step')} per epoch"),
        ("length", f"{counted(num_steps, 'step')}, {counted(num_steps / plan.steps_per_epoch, 'epoch')}"),
        ("seed", str(run.recipe.seed)),
    ]


def batch_words(size: int, world: int) -> str:
    """How large a batch is, and whether there is something in it for all ranks."""
    return f"{counted(size, 'sample')}{f' (for {size} of {world} ranks; others wait)' if size < world else ''}"


def _ranks(run: OpenedRun, trainer: Trainer) -> list[tuple[str, str]]:
    """How many processes train together, how their gradients are added, and where each of them is."""
    ranks, decided = run.ranks, trainer.decided
    if ranks.alone:
        return []
    hosts = len(set(ranks.hosts))
    on = f" on {hosts} hosts" if hosts > 1 else ""
    interface = os.environ.get(_INTERFACES.get(ranks.backend, ""), "") if hosts > 1 else ""
    through = f"{NAMES[ranks.backend]}{f' ({interface})' if interface else ''}"
    return [
        ("ranks", f"{ranks.world_size}{on}, {decided.reduce} reduction over {through}"),
        *rank_rows(ranks.facts, decided.threads),
        *visible_rows(ranks.facts),
    ]


def _why_threads(trainer: Trainer) -> str:
    return f": {trainer.decided.threads_why}" if trainer.decided.threads_why else ""


def _of_visible(run: OpenedRun, trainer: Trainer) -> str:
    """How many devices one process leaves idle, which is easily not meant."""
    count = trainer.parts.accelerator.count() if run.ranks.alone else 1
    return f", 1 of {count} visible" if count > 1 else ""


def visible_rows(facts: Sequence[Facts]) -> list[tuple[str, str]]:
    """The variables that hide devices from ranks, where they are set."""
    found = {each.visible for each in facts}
    words = found.pop() if len(found) == 1 else "not the same on all ranks, see run.json"
    return [("visible", words)] if words else []


def _order(trainer: Trainer) -> list[tuple[str, str]]:
    """How well samples are mixed, where that is less than completely."""
    order, source = trainer.train.order, trainer.train.source
    if isinstance(source, TiledCrops) and isinstance(order, TileOrder):
        memory = "" if trainer.train.residency == "disk" else f", {size(source.buffer_bytes)} with those read ahead"
        return [("tiles", f"{source.describe()}{memory}")]
    if not isinstance(order, WindowOrder):
        return []
    return [("order", describe_windows(order, trainer.train.plan.batch_size))]


def _program(trainer: Trainer) -> str:
    decided = trainer.decided
    return f"{decided.program} ({decided.why})" if decided.why else decided.program


def end_rows(trainer: Trainer, tested: Mapping[str, float], rate: float | None) -> list[tuple[str, str]]:
    """The end summary."""
    rows = []
    if trainer.best.value is not None:
        epoch = -(-(trainer.best.step or 0) // trainer.train.plan.steps_per_epoch)
        rows.append(
            ("best", f"{trainer.best.monitor} {number(trainer.best.value)} at epoch {epoch}, step {trainer.best.step}")
        )
    if tested:
        of_all = {name: value for name, value in tested.items() if name.count("/") <= 1} or tested  # of parts: many
        rows.append(("test", "  ".join(f"{name} {number(value)}" for name, value in of_all.items())))
    if rate is not None:
        rows.append(("rate", f"{plain_number(rate)} samples/s"))
    rows.append(("time", f"{duration(trainer.progress.seconds)} of training"))
    rows.append(("peak memory", size(trainer.parts.accelerator.peak_memory)))
    return rows


def next_commands(run: OpenedRun, trainer: Trainer, status: str) -> list[tuple[str, str]]:
    """What to type next."""
    if run.directory is None:
        return []
    path = shlex.quote(str(run.directory.path))
    if status == "stopped":
        return [("go on", continue_command(run))]
    commands = []
    if not run.given:
        commands = [*_tests(trainer, path), ("train longer", f"{continue_command(run)} {longer(run, trainer)}")]
    if run.recipe.observe.tensorboard:
        commands.append(("curves", f"isoscale tensorboard {path}"))
    if not run.given:
        commands.append(("report", f"isoscale report {path}"))
    return commands


def _tests(trainer: Trainer, path: str) -> list[tuple[str, str]]:
    """How to measure the best weights, on whichever data there is."""
    split = "" if trainer.has_test else " --split val"
    return [("test it", f"isoscale test {path}{split}")] if trainer.has_test or trainer.val else []


def continue_command(run: OpenedRun) -> str:
    """What to type, or to call in Python, to go on with a run."""
    assert run.directory is not None
    path = str(run.directory.path)
    return (
        f"isoscale.Trainer(recipe, run={path!r}).fit(task, data)"
        if run.given
        else f"isoscale train --run {shlex.quote(path)}{_devices(run)}"
    )


def _devices(run: OpenedRun) -> str:
    """The option that starts as many ranks again, where it was that which started them."""
    local = not run.ranks.alone and environment.find().launcher == environment.Local.name
    return f" --devices {run.ranks.world_size}" if local else ""


def longer(run: OpenedRun, trainer: Trainer) -> str:
    """The override that doubles the training, of whichever limit ended it."""
    section, per_epoch = run.recipe.train, trainer.train.plan.steps_per_epoch
    by_steps = section.steps is not None and (section.epochs is None or section.steps <= section.epochs * per_epoch)
    return f"train.steps={2 * section.steps}" if by_steps else f"train.epochs={2 * section.epochs}"  # type: ignore[operator]


def counted(count: float, word: str) -> str:
    """`1 epoch`, `2,300 steps`, `1.5 epochs`."""
    return f"{plain_number(count)} {word}" + ("" if count == 1 else "s")


MOST_SYSTEMS = 15
"""That are named one by one."""
MOST_LETTERS = 32
"""Of a name; the end of a path tells more than its beginning."""


def system_lines(train: "Split", val: "Split | None") -> list[str]:
    """The systems of training and of validation, where they have names."""
    splits = {"training": train, **({"validation": val} if val is not None else {})}
    return [line for name, split in splits.items() for line in _lines(name, split)]


def _lines(name: str, split: "Split") -> list[str]:
    systems = _systems(split.source)
    names = [str(getattr(system, "name", "")) for system in systems]
    if not all(names):
        return []
    unit = getattr(systems[0], "sample_unit", None)
    return _table({
        f"{name} system": [_shortened(each) for each in names],
        "samples": _numbers([len(system) for system in systems]),
        **({unit: _numbers([getattr(system, "sample_size", 0) for system in systems])} if unit else {}),
        **(_batches(split, name == "training") if len(systems) == 1 or isinstance(split.source, Mixture) else {}),
    })  # fmt: skip


def _systems(source: Source) -> Sequence[Source]:
    """Those of a mixture, or those whose samples stand side by side in a batch."""
    found: Sequence[Source] = getattr(source, "systems" if isinstance(source, Mixture) else "sources", [source])
    return found


def _batches(split: "Split", drawn: bool) -> dict[str, list[str]]:
    """How many batches of what size each system has, and how likely each is drawn."""
    plans = split.plan.plans if isinstance(split.plan, MixturePlan) else [split.plan]
    counts = [plan.steps_per_epoch for plan in plans]
    columns = {"batch": _numbers([plan.batch_size for plan in plans]), "batches": _numbers(counts)}
    if drawn and isinstance(split.source, Mixture):
        columns["probability"] = [f"{value:.4f}" for value in system_probabilities(split.source.probabilities, counts)]
    return columns


def _numbers(values: Sequence[int]) -> list[str]:
    return [f"{value:,}" if value else "" for value in values]


def _shortened(name: str) -> str:
    """The end of a path from a folder on, where there is one to begin with."""
    if len(name) <= MOST_LETTERS:
        return name
    end = name[1 - MOST_LETTERS :]
    return f"…{end[max(0, end.find('/')) :]}"


def _table(columns: dict[str, list[str]]) -> list[str]:
    """Names to the left, numbers to the right; a column of nothing is left out."""
    found = [[title, *cells[:MOST_SYSTEMS]] for title, cells in columns.items() if any(cells)]
    more = max(map(len, columns.values())) - MOST_SYSTEMS
    rows = aligned(list(zip(*found, strict=True)), 1, "  ")
    return [*rows, f"  … {more} more system{'s' * (more > 1)}"] if more > 0 else rows
