"""The graphed program: whole steps, several at a time, captured once and replayed.

The first steps of a run are trained eagerly; they are the warm-up, so that capturing moves nothing. A capture is then
proven: eager execution and replay of the same steps must agree to the bit, or the program is not used. First a single
step is captured; how many a launch then has follows from how long that takes the device.
"""

import random as python_random
import time
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isoscale.data.batches import Plan, copy_batch, map_tensors
from isoscale.data.feeds.feed import Feed, Part, Slot
from isoscale.engine.diagnose.profile import Marks, Profile
from isoscale.engine.lightning.batch_hooks import AroundBatch, SkipEpoch
from isoscale.engine.lightning.hooks import AfterStep
from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.engine.metrics import torchmetrics as metrics
from isoscale.engine.optim.optimizers import listeners
from isoscale.engine.state.registry import NUM_REPEATS, Registry, Snapshot
from isoscale.engine.step.conditions import (
    Conditions,
    WatchedIndex,
    in_words,
    noted_prints,
    noted_reads,
    shapes_in_words,
    signature,
)
from isoscale.engine.step.programs import EagerProgram, Inputs
from isoscale.errors import UserError
from isoscale.system.devices import Accelerator

NUM_WARMUP = 3
NUM_WORTH = 10
"""Replays from which on a capture was worth it."""
MOST_IN_VAIN = 3
"""Captures in a row that were not, before no more are made."""
MOST_SHAPES = 16
"""Shapes of batches from a dataset, before no more of them are captured where they are hardly ever met again."""
MOST_STEPS = 50
"""In a launch, unless the recipe says more."""
LAUNCH_SECONDS = 1e-2
"""A launch is long enough if the device is busy for so long: the host needs a hundredth of it."""
LONG_STEP = 1e-3
"""Seconds of the device for a step that needs no others beside it in a launch."""
CAPTURE_SECONDS = 0.25
"""For which the host may be busy to capture a launch of several steps, and again to prove it."""
NUM_TIMED = 3
_SKIPS = "training_step returns None for some batches, to skip them, which a replay would not decide anew"


class CaptureRefused(UserError):
    """The step cannot be captured, and why."""


@dataclass
class Captured:
    """A graph of several steps, and the tensors through which the host feeds it."""

    graph: torch.cuda.CUDAGraph
    slot: Slot
    rates: Tensor
    """A row of numbers for each step."""
    weights: Tensor | None
    number: Tensor
    counted: list[float]
    """What one replay adds to the weights that the recorder counts on the host."""
    marks: Marks = field(default_factory=list)
    """Events of a profile, which a replay records anew."""
    shown: tuple[Any, Any] = (None, None)
    """Output and batch of the step, for the hook at its end."""
    proven: bool = False
    """Whether a replay was seen to give the bits of eager execution."""


class ReadSlot:
    """A batch that was read on the host, at a fixed address."""

    def __init__(self, shards: list[list[Part]]) -> None:
        """Room for a batch like this one."""
        self._shards = map_tensors(shards, torch.clone)

    def take(self, shards: list[list[Part]]) -> None:
        """Copy a batch of the same shapes."""
        copy_batch(self._shards, shards)

    def fill(self, step: int) -> None:
        """What is read is taken, and not fetched anew."""

    def parts(self, offset: int) -> list[list[Part]]:
        """The parts of the step."""
        return self._shards


class GraphedProgram:
    """Replays captured launches; steps before the first capture run eagerly."""

    def __init__(
        self, eager: EagerProgram, feed: Feed, plan: Plan, inputs: Inputs, steps_per_launch: int | None,
        log_every: int, registry: Registry, accelerator: Accelerator, proven: Callable[[int], None],
        fall_back: Callable[[str], None] | None, view: TrainerView, is_compiled: bool, after_step: AfterStep | None,
        reads: bool, varying: set[str],
    ) -> None:  # fmt: skip
        """`proven` is told when a replay gave the right bits, `fall_back` why a capture is refused (None: an error).

        Without `steps_per_launch` the number follows from the time of a step. With `reads`, batches are read on the
        host one by one, and may have any shapes. `varying` names the operations whose bits vary, as they are met.
        """
        self._eager = eager
        self._step = eager.step
        self._feed = feed
        self._plan = plan
        self._inputs = inputs
        self._registry = registry
        self._accelerator = accelerator
        self._proven = proven
        self._fall_back = fall_back
        self.view = view
        self._is_compiled = is_compiled
        self._after_step = after_step
        self._reads = reads
        self._varying = varying
        compute = self._step.forward.compute
        self._around = compute if isinstance(compute, AroundBatch) and compute.has_ends else None
        self._is_single = reads or self._around is not None
        """Whether the host has something to do between any two steps."""
        self._count = 1 if steps_per_launch is None or self._is_single else steps_per_launch
        self._is_settled = steps_per_launch is not None or self._is_single
        self._log_every = log_every
        self._draws = False
        self._conditions: Conditions | None = None
        """Under which the present graphs were captured."""
        self._replayed = self._in_vain = 0
        self._graphs: dict[tuple[int, Hashable], Captured] = {}
        self._met: set[Hashable] = set()
        self._pool: Any = None
        self._warm = 0
        self._profile: Profile | None = None
        self.refused: str | None = None
        """Why training goes on eagerly, if it does."""

    @property
    def pool(self) -> Any:
        """The memory of the graphs, which others may share: they are never replayed at once."""
        return self._pool

    @property
    def profile(self) -> Profile | None:
        """Told when steps begin, where somebody wants to know where time goes."""
        return self._profile

    @profile.setter
    def profile(self, profile: Profile | None) -> None:
        self._profile = self._eager.profile = profile

    def run_visibly(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """Run the last step eagerly: what a replay leaves in the gradients' memory is the next replay's to change."""
        reached = self.run(start, stop - 1, interrupted)
        return self._eager.run(reached, stop, interrupted) if reached == stop - 1 else reached

    def run_eagerly(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """Run every step eagerly."""
        return self._eager.run(start, stop, interrupted)

    def run(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """Replay launches of several steps, and of single ones for the rest."""
        self._drop_outdated()
        number = self._warm_up(start, stop, interrupted)
        while number < stop:
            if self.refused is not None:
                return self._eager.run(number, stop, interrupted)
            if interrupted():
                return number
            count = self._count if stop - number >= self._count else 1
            try:
                self._launch(number, count)
            except SkipEpoch:
                return self._eager.skip_from(number)
            number += count
        return number

    def _drop_outdated(self) -> None:
        """Capture anew where somebody has changed the task or its optimizer since: a replay would not know."""
        if self._conditions is None or self.refused is not None:
            return
        changed = self._outdated()
        if changed is None:
            return
        self._graphs.clear()
        self._met.clear()
        self._pool, self._conditions, self._warm = None, None, 0
        self._in_vain = self._in_vain + 1 if self._replayed < NUM_WORTH else 0
        self._replayed = 0
        if self._in_vain >= MOST_IN_VAIN and self._fall_back is not None:
            self._refuse(f"the task changes {changed} too often between launches")

    def _outdated(self) -> str | None:
        """What has changed since the graphs were captured."""
        assert self._conditions is not None
        epoch = None if self._conditions.epoch is None else self.view.current_epoch
        return self._conditions.difference(Conditions.of(self._step, epoch))

    def _warm_up(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """Train the first steps eagerly, and see what they draw random numbers from."""
        if self._warm >= NUM_WARMUP or self.refused is not None:
            return start
        end = min(stop, start + NUM_WARMUP - self._warm)
        before = _host_generators()
        done = self._eager.run(start, end, interrupted)
        if done > end:  # the rest of the epoch is skipped
            return done
        self._warm += done - start
        if not self._reads:
            self._met.update(self._plan.kind(number) for number in range(start, done))
        reason = None
        if done > start:
            self._draws = self._generator.get_offset() != 0
            if _drew_on_host() or (not self._reads and before != _host_generators()):
                reason = (
                    "the step draws random numbers on the host, which a replay would not draw again; draw them on the "
                    "device (torch.rand(…, device=self.device)), or by isoscale.rng, which is keyed by sample"
                )
        if self._draws:  # a replay is given the seed of one part of one step
            share = self._plan.share(self._plan.size(start))
            if sum(len(shard) for shard in share.parts) > 1:
                reason = "the step draws on torch's random generator, anew in every part of a batch"
            self._count, self._is_settled = 1, True
        if any(not metrics.in_place(metric) for metric in self._step.forward.context.metrics.values()):
            reason = "the task logs torchmetrics objects that it does not update in place"
        if any(gradient.is_sparse for gradient in self._step.gradients):
            reason = "gradients are sparse, and what an update makes of them has another size in every step"
        if self._step.num_skipped:
            reason = _SKIPS
        reason = self._agreed(reason)
        if reason is not None:
            self._refuse(reason)
        return done

    @property
    def _generator(self) -> Any:
        return torch.cuda.default_generators[self._accelerator.device.index or 0]

    def _agreed(self, reason: str | None) -> str | None:
        """Why any of the ranks cannot capture, so that all do the same."""
        reasons = self._step.reducer.ranks.all_gather(reason, "whether the step can be captured")
        return next((each for each in reasons if each is not None), None)

    def _launch(self, number: int, count: int) -> None:
        """Run the steps of a launch, by replaying them if that can be done.

        Batches of a shape that was not met before are run eagerly: what is made at first sight (compiled code, say)
        cannot be made in a capture. The next launch of a kind is captured and run eagerly, the one after it proven:
        a replay that only fits the batch it was captured at shows there. From then on, launches are replayed.
        """
        if self._around is not None:
            self._drop_outdated()  # a hook may have changed what the step reads
        shards = self._eager.fetch(number) if self._reads else None
        kind = self._plan.kind(number) if shards is None else signature(shards)
        captured = self._graphs.get((count, kind))
        if kind not in self._met:
            self._meet(kind, shards)
            self._run_eagerly(number, count, shards)
        elif captured is None:
            self._try_capture((count, kind), number, count, shards)
        elif not captured.proven:
            self._prove(captured, number, count, shards)
        elif self._around is not None and not self._begin(captured, number, shards):
            with self._around.replayed():  # the hook at its start has been called
                self._run_eagerly(number, count, shards)
        else:
            self._replay(captured, number, count, shards)
            self._replayed += 1
            if self._profile is not None:
                self._profile.replayed(captured.marks)

    def _meet(self, kind: Hashable, shards: list[list[Part]] | None) -> None:
        self._met.add(kind)
        if shards is not None and len(self._met) > MOST_SHAPES and self._replayed < len(self._met):
            shapes = shapes_in_words([part.batch for shard in shards for part in shard])
            self._refuse(
                f"the shapes of batches change from step to step (now {shapes}), and a captured step is for one shape; "
                "pad or pack the samples to fixed sizes in collate_fn"
            )

    def _run_eagerly(self, number: int, count: int, shards: list[list[Part]] | None) -> None:
        if shards is None:
            self._eager.run_all(number, number + count, lambda: False)
        else:
            self._eager.run_on(shards, number)
            self._eager.finish(number)

    def _try_capture(self, key: tuple[int, Hashable], number: int, count: int, shards: list[list[Part]] | None) -> None:
        """Capture a launch, put everything back, and run it eagerly."""
        before, reseed = self._snapshot(), self._step.reseed
        counted = list(self._step.recorder.counted)
        conditions = Conditions.of(self._step, self.view.current_epoch)
        self.view.read.clear()
        task = self._step.forward.task
        reads = nullcontext() if self._is_compiled else noted_reads(task)  # compiled code is for one class
        try:
            with noted_prints(self.view.read), self.view.capturing(), reads as read:
                self._graphs[key] = self._capture(number, count, shards)
            reason = before.replaced(self._registry) or self._frozen_in(conditions)
            conditions.read = read
        except Exception as error:  # whatever a user's step does that a capture does not allow
            reason = in_words(error)
            end_broken_capture(self._generator)
        conditions.put_back()
        epoch, conditions.epoch = conditions.epoch, None
        self._conditions = self._conditions or conditions
        if self._conditions.read is not None and conditions.read is not None:
            self._conditions.read |= conditions.read
        if "current_epoch" in self.view.read:
            self._conditions.epoch = epoch
        reason = self._agreed(reason)
        if reason is not None:
            torch.cuda.synchronize()
            self._step.recorder.counted, self._step.reseed = counted, reseed
            before.restore(self._registry)
            self._refuse(reason)
        self._run_eagerly(number, count, shards)

    def _snapshot(self) -> Snapshot:
        """A copy of the state: on the host where the device has no room for two more."""
        return self._registry.snapshot(self._accelerator.available_memory // 2)

    def _frozen_in(self, before: "Conditions") -> str | None:
        """What the capture has turned into a constant although it changes from step to step."""
        changed = before.difference(Conditions.of(self._step, before.epoch))
        if changed is not None:
            return f"training_step changes {changed}, which a replay would not do again"
        if any(listeners(optimizer) for optimizer in self._step.optimizers):
            return "somebody has put hooks on the steps of the optimizer, which run on the host"
        read = self.view.read
        if self._step.num_skipped:
            return _SKIPS
        if "logger" in read:
            return "training_step writes by self.logger, which a replay would not do again: use self.log(name, tensor)"
        if "callback_metrics" in read:
            return "training_step reads the metrics of self.trainer, which a replay would not see changing"
        if "global_step" in read:
            return "training_step reads self.global_step, which a replay would not see changing"
        if "batch_idx" in read:
            return "training_step uses batch_idx, which a replay would not see changing"
        if "print" in read:
            return "training_step prints, which a replay would not do again: log values by self.log(name, tensor)"
        return None

    def _capture(self, number: int, count: int, shards: list[list[Part]] | None) -> Captured:
        device = self._accelerator.device
        slot: Slot = ReadSlot(shards) if shards is not None else self._feed.slot(number, count)
        slot.fill(number)
        rates = torch.empty(count, len(self._inputs.numbers(number)), dtype=torch.float32, device=device)
        weights = rates.new_empty(count, len(self._inputs.weights)) if self._inputs.weights else None
        number_tensor = torch.zeros((), dtype=torch.int64, device=device)
        captured = Captured(torch.cuda.CUDAGraph(), slot, rates, weights, number_tensor, [])
        recorder = self._step.recorder
        before = list(recorder.counted)
        torch.cuda.synchronize()
        # thread_local: the thread that reads ahead may allocate and copy meanwhile
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(captured.graph, self._pool, stream, capture_error_mode="thread_local"):
            if self._profile is None:
                self._trace(captured, number, count)
            else:
                with self._profile.captured() as captured.marks:
                    self._trace(captured, number, count)
        self._pool = self._pool or captured.graph.pool()
        captured.counted = [after - earlier for after, earlier in zip(recorder.counted, before, strict=True)]
        recorder.counted = before
        return captured

    def _trace(self, captured: Captured, number: int, count: int) -> None:
        """Issue the operations of the launch into the graph."""
        step, keyed, around = self._step, self._step.random.used, self._around
        reseed, step.reseed = step.reseed, None
        for offset in range(count):
            weights = {} if captured.weights is None else self._inputs.named(captured.weights[offset])
            moment = captured.number + offset if keyed else 0
            batch_idx = (number + offset) % self._plan.steps_per_epoch
            if not self._is_compiled:
                batch_idx = WatchedIndex(batch_idx, self.view.read)
            if self._profile is not None:
                self._profile.begin()
            rate = self._inputs.rate_of(captured.rates[offset])
            with around.replayed() if around is not None else nullcontext():
                step(captured.slot.parts(offset), number + offset, batch_idx, rate, weights, moment)
            if around is not None:
                captured.shown = around.output, around.batch
                around.forget()
        step.reseed = reseed

    def _replay(
        self, captured: Captured, number: int, count: int, shards: list[list[Part]] | None,
        used: list[list[float]] | None = None,
    ) -> None:  # fmt: skip
        """Replay a launch; with the rates `used` by its eager steps this is a rehearsal, of which no hook hears."""
        if used is not None or self._around is None or not self._around.has_start:  # else it is filled already
            self._fill(captured, number, shards)
        rows = used if used is not None else self._rows(number, count)
        captured.rates.copy_(self._inputs.sent(rows))
        if captured.weights is not None:
            captured.weights.copy_(self._inputs.weight_rows(number, count))
        captured.number.fill_(number)
        self._reseed(number)
        captured.graph.replay()
        if used is not None:
            return
        self._step.recorder.count(captured.counted)
        if self._after_step is None:
            self.view.finish(number + count)
            return
        self._after_step.move(number + count)
        if self._around is not None:
            self._around.output, self._around.batch = map_tensors(captured.shown, torch.clone)
            self._around.batch_idx = number % self._plan.steps_per_epoch
        self._after_step.end(number + count)

    def _fill(self, captured: Captured, number: int, shards: list[list[Part]] | None) -> None:
        """Bring the samples of a launch to where the graph reads them."""
        if isinstance(captured.slot, ReadSlot) and shards is not None:
            captured.slot.take(shards)
        captured.slot.fill(number)

    def _begin(self, captured: Captured, number: int, shards: list[list[Part]] | None) -> bool:
        """Let the hook at the start of a batch see it; whether the graph still holds after that."""
        assert self._around is not None
        if not self._around.has_start:
            return True
        self._fill(captured, number, shards)
        self._reseed(number)
        part = next(part for shard in captured.slot.parts(0) for part in shard)
        self._step.random.step, self._step.random.samples = number, part.samples
        self._around.begin(self._step.forward.prepared(part), number % self._plan.steps_per_epoch)
        self._drop_outdated()
        return self._conditions is not None and self.refused is None

    def _reseed(self, number: int) -> None:
        """Let a step draw what it draws eagerly: a replay begins with the seed that the generator has."""
        if self._draws and self._step.reseed is not None:
            self._step.reseed(number, self._step.reducer.owned[0])

    def _rows(self, number: int, count: int) -> list[list[float]]:
        """The rates of a launch; a task's own schedulers run ahead to the last of its steps."""
        rows = [self._inputs.numbers(number)]
        for step in range(number + 1, number + count):
            if self._after_step is not None:
                self._after_step.move(step)
            rows.append(self._inputs.numbers(step))
        return rows

    def _prove(self, captured: Captured, number: int, count: int, shards: list[list[Part]] | None) -> None:
        """Run a launch eagerly, go back, replay it: the two must agree, and what remains is the eager result."""
        used = self._inputs.record(number, count)
        before = self._snapshot()
        began = time.perf_counter()
        try:
            if count == 1:
                self._eager.run_on(self._eager.fetch(number) if shards is None else shards, number)
            else:
                self._eager.run_all(number, number + count, lambda: False)
        except SkipEpoch:
            used()
            raise
        torch.cuda.synchronize()
        eager_seconds = (time.perf_counter() - began) / count
        rows = used()
        replaced = self._agreed(before.replaced(self._registry) or (_SKIPS if self._step.num_skipped else None))
        if replaced or (self._around is not None and self._outdated() is not None):  # by the hook at its start, say
            if count == 1:
                self._eager.finish(number)
            if replaced:
                self._refuse(replaced)
            return
        after, counted = self._snapshot(), list(self._step.recorder.counted)
        before.restore(self._registry)
        self._replay(captured, number, count, shards, rows)
        differs = self._agreed(after.difference(self._registry))
        if differs is not None and self._varying:
            differs = self._agreed(self._outside(self._snapshot(), before, number, shards, rows))
        captured.proven = differs is None
        if differs is None and not self._is_settled:
            self._settle_count(captured, eager_seconds)
        after.restore(self._registry)
        self._step.recorder.counted = counted
        if count == 1:  # only now: hooks may record something, which no replay does
            self._eager.finish(number)
        if differs is None:
            self._proven(self._count)
        else:
            self._refuse(f"replaying it does not give the bits of running it ({differs})")

    def _settle_count(self, captured: Captured, eager_seconds: float) -> None:
        """Let a launch be long enough for the host to keep ahead, and no longer to capture than that is worth."""
        began = self._accelerator.moment()
        for _ in range(NUM_TIMED):
            captured.graph.replay()
        seconds = max(1e-6, began.seconds_until(self._accelerator.moment()) / NUM_TIMED)
        most = min(MOST_STEPS, int(LAUNCH_SECONDS / seconds), int(CAPTURE_SECONDS / eager_seconds))
        if seconds >= LONG_STEP or self._varying:
            most = 1
        count = largest_divisor(self._log_every, max(1, most))
        self._count = self._step.reducer.ranks.broadcast(count, "steps per launch")
        self._is_settled = True

    def _outside(
        self, replayed: Snapshot, before: Snapshot, number: int, shards: list[list[Part]] | None,
        rows: list[list[float]],
    ) -> str | None:  # fmt: skip
        """The first tensor of a replay that is farther from eager repeats than these are from each other."""
        conditions, counted = Conditions.of(self._step, None), list(self._step.recorder.counted)
        repeats = replayed.among_repeats()
        for _ in range(NUM_REPEATS):
            before.restore(self._registry)
            for step, row in enumerate(rows, number):
                with self._around.replayed() if self._around is not None else nullcontext():
                    self._eager.repeat(self._feed.parts(step) if shards is None else shards, step, row)
            repeats.add(self._registry)
        conditions.put_back()
        self._step.recorder.counted = counted
        return repeats.outside()

    def _refuse(self, reason: str) -> None:
        self._graphs.clear()
        self.refused = reason
        if self._fall_back is None:
            raise CaptureRefused(
                f"train.program is graphed, but the step cannot be captured: {reason}; use train.program=auto"
            )
        self._fall_back(reason)


def largest_divisor(log_every: int, most: int) -> int:
    """The largest divisor of the logging interval that is at most `most`."""
    return max(count for count in range(1, most + 1) if log_every % count == 0)


def end_broken_capture(generator: torch.Generator) -> None:
    """Give a generator a new state: a capture that was broken off leaves the old one in the belief that it goes on."""
    generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())


def _drew_on_host() -> bool:
    """Whether something was drawn from torch's generator since it was last seeded, for a part of a step."""
    generator = torch.default_generator
    fresh = torch.Generator().manual_seed(generator.initial_seed())
    return not torch.equal(generator.get_state(), fresh.get_state())


def _host_generators() -> tuple[Any, ...]:
    """Where Python's and numpy's generators are."""
    state = np.random.get_state(legacy=False)["state"]
    return python_random.getstate(), state["pos"], state["key"].tobytes()
