"""Why a training broke down: the steps since the last good state again, eagerly, up to the one that is to blame."""

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isoscale.data.feeds.feed import Part
from isoscale.data.sources import locate
from isoscale.engine.diagnose.profile import Profile
from isoscale.engine.diagnose.reproducer import write_reproducer
from isoscale.engine.diagnose.trace import Origin, Tracer
from isoscale.engine.state.checkpoint import State
from isoscale.engine.step.step import loss_terms
from isoscale.engine.trainer import Trainer
from isoscale.errors import Stopped
from isoscale.observe.text import plain_number

HUGE = 1e6
GROWTH = 100
"""Times the largest weight at the start of the replay, from which on the weights are to blame and not a sample."""
MOST_SHOWN = 3
ADVICE = "Try a smaller optimizer.lr, train.clip=1 or a longer schedule.warmup"


@dataclass(frozen=True)
class Largest:
    """The largest absolute weight, and where it is."""

    value: float
    name: str

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> "Largest":
        """Of weights by name; what is not finite counts as infinite."""
        sizes = {name: float(tensor.detach().abs().max()) for name, tensor in weights.items() if tensor.numel()}
        finite = {name: size if size == size else torch.inf for name, size in sizes.items()}
        name = max(finite, key=lambda name: finite[name])
        return cls(finite[name], name)


@dataclass
class Finding:
    """What a replay has found out."""

    first_step: int
    """Where the replay began."""
    step: int
    """The number of the step that is to blame, counted from 1 as the logs count."""
    epoch: int
    origin: Origin | None
    samples: list[int]
    """The indices of the samples to blame, as far as they can be told apart; else all of the part."""
    told_apart: bool
    places: list[str]
    """Where these samples are."""
    before: Largest
    """At the start of the replay."""
    now: Largest
    """Before the step."""
    folder: Path | None = None
    """The reproducer."""

    @property
    def weights_grew(self) -> bool:
        """Whether the weights had left all reason before the step."""
        return self.now.value > max(GROWTH * self.before.value, 1.0) or self.now.value > HUGE

    def lines(self) -> list[str]:
        """For people."""
        where = f"step {self.step}, epoch {self.epoch}: "
        lines = [where + (str(self.origin) if self.origin else "no operation could be named")]
        if self.weights_grew:
            lines.append(self._growth())
        else:
            lines += self._sample_lines()
        if self.folder is not None:
            lines.append(f"this step alone, to try things out: python {self.folder / 'reproduce.py'}")
        return lines

    def _growth(self) -> str:
        was = f"; it was {plain_number(self.before.value)} at step {self.first_step}"
        largest = f"the largest is {plain_number(self.now.value)} in {self.now.name}"
        return f"the weights had grown: {largest}{was if self.before.value <= HUGE else ''}. {ADVICE}"

    def _sample_lines(self) -> list[str]:
        if not self.told_apart:
            return [f"one of the {len(self.samples)} samples of this part of the batch, or all together"]
        shown = [
            f"sample {index} of the training data" + (f": {place}" if place != f"sample {index}" else "")
            for index, place in zip(self.samples[:MOST_SHOWN], self.places, strict=False)
        ]
        more = len(self.samples) - len(shown)
        return shown + ([f"and {more} more samples of this part of the batch"] if more else [])

    def as_dict(self) -> dict[str, Any]:
        """For report.json."""
        origin = self.origin
        return {
            "step": self.step, "epoch": self.epoch, "replayed_from": self.first_step, "samples": self.samples,
            "told_apart": self.told_apart, "places": self.places, "weights_grew": self.weights_grew,
            "largest_weight": {"value": self.now.value, "name": self.now.name, "at_first": self.before.value},
            "found": "\n".join(self.lines()),
            "origin": None if origin is None else {
                "kind": origin.kind, "value": origin.value, "phase": origin.phase, "name": origin.name,
                "backward_of": origin.backward_of, **origin.where._asdict(),
                "entered": origin.entered and origin.entered._asdict(),
                "became_nan": origin.became_nan and origin.became_nan._asdict(),
            },
        }  # fmt: skip


class _Over(Exception):
    """The replay has ended, and why."""


@dataclass
class _Replay:
    """Runs the steps of another program one by one and looks at each; one that is bad is run again, and watched."""

    engine: Trainer
    until: int
    frozen: bool
    """Whether every step starts from the first state: what a latch does to the steps after a bad one."""
    finding: Finding | None = None
    state: State | None = None
    watch: Tracer | None = None
    profile: Profile | None = field(default=None)

    def __post_init__(self) -> None:
        self._program = self.engine.parts.program
        self._first_step = self.engine.progress.step
        self._before: Largest | None = None

    def run(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """Run steps until one is bad."""
        registry = self.engine.parts.registry
        if self._before is None:
            self._before = Largest.of(dict(self.engine.parts.task.named_parameters()))
        for number in range(start, stop):
            if number >= self.until:
                raise _Over(f"steps {self._first_step + 1} to {self.until}, run again one by one, were all finite")
            state = _copied(registry.state())
            if self._program.run(number, number + 1, interrupted) == number:
                raise _Over("interrupted")
            if self._is_bad():
                registry.load(*state)
                self._find(number, state)
                raise _Over("found")
            if self.frozen:
                registry.load(*state)
        return stop

    run_visibly = run_eagerly = run

    def _is_bad(self) -> bool:
        parts = self.engine.parts
        latched = bool(parts.registry.tensors()["latch/latch"])
        loss = parts.train_context.recorder.read().pairs().get("loss", (0.0, 0.0))[0]
        return latched or not math.isfinite(loss) or not all(map(_is_finite, parts.task.parameters()))

    def _find(self, number: int, state: State) -> None:
        """Run a step under the watch."""
        step = self.engine.parts.step
        assert step is not None
        forward, watch = step.forward, Tracer(self.engine.parts.task)
        step.forward = _WatchedForward(forward, watch)  # type: ignore[assignment]
        forward.mark, forward.compute = watch.mark, watch.computing(forward.compute)
        with watch:
            self._program.run(number, number + 1, lambda: False)
            watch.look_at_weights()
        self.state, self.watch = state, watch
        self.finding = self._finding(number, watch, state)

    def _finding(self, number: int, watch: Tracer, state: State) -> Finding:
        origin, train = watch.blamed, self.engine.train
        part = watch.parts[origin.part if origin else 0]
        rows = origin.rows if origin else None
        samples = [part.samples.tolist()[row] for row in rows] if rows else part.samples.tolist()
        assert self._before is not None
        return Finding(
            self._first_step, number + 1, number // train.plan.steps_per_epoch + 1, origin, samples, bool(rows),
            [locate(train.source, sample) for sample in samples],
            self._before, Largest.of(_weights(self.engine.parts.task, state)),
        )  # fmt: skip


class _WatchedForward:
    """A forward pass that tells a watch which part is computed, and what its loss is."""

    def __init__(self, forward: Any, watch: Tracer) -> None:
        self._forward = forward
        self._watch = watch

    def __call__(self, part: Part, batch_idx: int) -> Any:
        self._watch.begin(part.batch, part.samples)
        output = self._forward(part, batch_idx)
        self._watch.look_at(pair.mean for pair in loss_terms(output, part.samples.shape[0]).values())
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward, name)


def diagnose(engine: Trainer, until: int, folder: Path | None, frozen: bool = False) -> list[str]:
    """Find the step, the samples, the layer and the operation; returns lines for people.

    `engine` is prepared, at the last good state, and observed by nobody; it runs at most to the step `until`. With
    `frozen` its weights are those before the bad step, and only that step is looked for. A reproducer is written below
    `folder`.
    """
    if engine.parts.step is None:
        return ["the cause was not looked for: the task updates its weights itself (manual optimisation)"]
    replay = _Replay(engine, until, frozen)
    engine.parts.program = replay
    try:
        engine.fit()
        reason = f"steps {replay._first_step + 1} to {until}, run again one by one, were all finite"
    except (_Over, Stopped) as over:
        reason = str(over)
    finding = replay.finding
    if finding is None:
        return [f"the cause was not found: {reason}"]
    assert replay.watch is not None and replay.state is not None
    if folder is not None:
        finding.folder = folder / "not_finite" / f"step_{finding.step:08d}"
        part = replay.watch.parts[finding.origin.part if finding.origin else 0]
        write_reproducer(finding.folder, engine, part, replay.state[0]["model"], finding.step - 1, finding.as_dict())
    return finding.lines()


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def _copied(state: State) -> State:
    tensors, values = state
    return {
        part: {name: tensor.clone() for name, tensor in group.items()} for part, group in tensors.items()
    }, deepcopy(values)


def _weights(task: nn.Module, state: State) -> dict[str, Tensor]:
    names = {name for name, _ in task.named_parameters()}
    return {name: tensor for name, tensor in state[0]["model"].items() if name in names}
