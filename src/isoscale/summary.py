"""What a session says at its start and at its end: label and text, and what to type next."""

import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from isoscale.data.quality import describe_windows
from isoscale.data.window_order import WindowOrder
from isoscale.engine.memory import size
from isoscale.observe.text import duration, number, plain_number
from isoscale.parallel import environment
from isoscale.parallel.facts import Facts
from isoscale.parallel.preflight import NAMES
from isoscale.rank_map import rank_rows

if TYPE_CHECKING:
    from isoscale.engine.trainer import Trainer as Engine
    from isoscale.session import Session

_INTERFACES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}


def start_rows(session: "Session") -> list[tuple[str, str]]:
    """The start-up summary."""
    engine, recipe = session.engine, session.recipe
    parts, plan = engine.parts, engine.train.plan
    num_steps = engine.plan.num_steps
    count = sum(parameter.numel() for parameter in parts.task.parameters())
    val = f", {len(engine.val.source):,} validation" if engine.val else ""
    batch = batch_words(plan.batch_size, session.ranks.world)
    return [
        ("device", f"{parts.accelerator.description}{_of_visible(session)}"),
        *_ranks(session),
        ("precision", parts.precision.name),
        ("program", _program(engine)),
        ("model", f"{type(getattr(parts.task, 'model', parts.task)).__name__}, {count:,} parameters"),
        ("data", f"{len(engine.train.source):,} training{val} samples, on the {engine.train.residency}"),
        *_order(engine),
        ("batch", f"{batch}, {counted(plan.steps_per_epoch, 'step')} an epoch"),
        ("length", f"{counted(num_steps, 'step')}, {counted(num_steps / plan.steps_per_epoch, 'epoch')}"),
        ("seed", str(recipe.seed)),
    ]


def batch_words(size: int, world: int) -> str:
    """How large a batch is, and whether there is something in it for all ranks."""
    return f"{counted(size, 'sample')}{f' (for {size} of {world} ranks; others wait)' if size < world else ''}"


def _ranks(session: "Session") -> list[tuple[str, str]]:
    """How many processes train together, how their gradients are added, and where each of them is."""
    ranks, decided = session.ranks, session.engine.decided
    if ranks.alone:
        return []
    hosts = len(set(ranks.hosts))
    on = f" on {hosts} hosts" if hosts > 1 else ""
    interface = os.environ.get(_INTERFACES.get(ranks.backend, ""), "") if hosts > 1 else ""
    through = f"{NAMES[ranks.backend]}{f' ({interface})' if interface else ''}"
    return [
        ("ranks", f"{ranks.world}{on}, {decided.reduce} reduction over {through}"),
        *rank_rows(ranks.facts, decided.threads),
        *visible_rows(ranks.facts),
    ]


def _of_visible(session: "Session") -> str:
    """How many devices one process leaves idle, which is easily not meant."""
    kind = session.engine.parts.accelerator.kind
    count = torch.accelerator.device_count() if session.ranks.alone and kind in ("cuda", "xpu") else 1
    return f", 1 of {count} visible" if count > 1 else ""


def visible_rows(facts: Sequence[Facts]) -> list[tuple[str, str]]:
    """The variables that hide devices from ranks, where they are set."""
    found = {each.visible for each in facts}
    words = found.pop() if len(found) == 1 else "not the same on all ranks, see run.json"
    return [("visible", words)] if words else []


def _order(engine: "Engine") -> list[tuple[str, str]]:
    """How well samples are mixed, where that is less than completely."""
    order = engine.train.order
    if not isinstance(order, WindowOrder):
        return []
    return [("order", describe_windows(order, engine.train.plan.batch_size))]


def _program(engine: "Engine") -> str:
    decided = engine.decided
    return f"{decided.program} ({decided.why})" if decided.why else decided.program


def end_rows(session: "Session") -> list[tuple[str, str]]:
    """The end summary."""
    engine = session.engine
    rows = []
    if engine.best.value is not None:
        epoch = -(-(engine.best.step or 0) // engine.train.plan.steps_per_epoch)
        rows.append(
            ("best", f"{engine.best.monitor} {number(engine.best.value)} at epoch {epoch}, step {engine.best.step}")
        )
    if session.tested:
        rows.append(("test", "  ".join(f"{name} {number(value)}" for name, value in session.tested.items())))
    rate = session.rate()
    if rate is not None:
        rows.append(("rate", f"{plain_number(rate)} samples/s"))
    rows.append(("time", f"{duration(engine.progress.seconds)} of training"))
    rows.append(("peak memory", size(engine.parts.accelerator.peak_memory)))
    return rows


def next_commands(session: "Session", status: str) -> list[tuple[str, str]]:
    """What to type next."""
    if session.directory is None:
        return []
    path = shlex.quote(str(session.directory.path))
    if status == "stopped":
        return [("go on", continue_command(session))]
    commands = []
    if not session.given:
        commands = [*_tests(session, path), ("train longer", f"{continue_command(session)} {longer(session)}")]
    if session.recipe.observe.tensorboard:
        commands.append(("curves", f"isoscale tensorboard {path}"))
    if not session.given:
        commands.append(("report", f"isoscale report {path}"))
    return commands


def _tests(session: "Session", path: str) -> list[tuple[str, str]]:
    """How to measure the best weights, on whichever data there is."""
    engine = session.engine
    role = "" if engine.has_test else " --role val"
    return [("test it", f"isoscale test {path}{role}")] if engine.has_test or engine.val else []


def continue_command(session: "Session") -> str:
    """What to type, or to call in Python, to go on with a run."""
    assert session.directory is not None
    path = str(session.directory.path)
    return (
        f"isoscale.Trainer(recipe, run={path!r}).fit(task, data)"
        if session.given
        else f"isoscale train --run {shlex.quote(path)}{_devices(session)}"
    )


def _devices(session: "Session") -> str:
    """The option that starts as many ranks again, where it was that which started them."""
    local = not session.ranks.alone and environment.find().launcher == environment.Local.name
    return f" --devices {session.ranks.world}" if local else ""


def longer(session: "Session") -> str:
    """The override that doubles the training, of whichever limit ended it."""
    section, per_epoch = session.recipe.train, session.engine.train.plan.steps_per_epoch
    by_steps = section.steps is not None and (section.epochs is None or section.steps <= section.epochs * per_epoch)
    return f"train.steps={2 * section.steps}" if by_steps else f"train.epochs={2 * section.epochs}"  # type: ignore[operator]


def counted(count: float, word: str) -> str:
    """`1 epoch`, `2,300 steps`, `1.5 epochs`."""
    return f"{plain_number(count)} {word}" + ("" if count == 1 else "s")
