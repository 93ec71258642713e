"""The graphed program: whole steps, several at a time, captured once and replayed.

The first steps of a run are trained eagerly; they are the warm-up, so that capturing moves nothing. A capture is then
rehearsed: replay and eager execution of the same steps must agree to the bit, or the program is not used.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isoscale.data.batches import Plan
from isoscale.data.feeds.feed import Feed, Slot
from isoscale.engine.diagnose.profile import Marks, Profile
from isoscale.engine.lightning.module import TrainerView
from isoscale.engine.metrics import torchmetrics as metrics
from isoscale.engine.optim.optimizers import listeners
from isoscale.engine.state.module_state import ModuleSnapshot
from isoscale.engine.state.registry import Registry
from isoscale.engine.step.programs import EagerProgram, Inputs, launches
from isoscale.engine.step.step import Step
from isoscale.errors import UserError
from isoscale.system.devices import Accelerator

NUM_WARMUP = 3
NUM_WORTH = 10
"""Replays from which on a capture was worth it."""
MOST_IN_VAIN = 3
"""Captures in a row that were not, before no more are made."""
MOST_COMPARED = 1000
"""Entries of a list that are compared between launches: what is longer is a vocabulary, say, and no setting."""
_FED = ("params", "lr")
"""What a captured step does not hold as a constant."""


class CaptureRefused(UserError):
    """The step cannot be captured, and why."""


@dataclass
class Captured:
    """A graph of several steps, and the tensors through which the host feeds it."""

    graph: torch.cuda.CUDAGraph
    slot: Slot
    rates: Tensor
    weights: Tensor | None
    number: Tensor
    counted: list[float]
    """What one replay adds to the weights that the recorder counts on the host."""
    marks: Marks = field(default_factory=list)
    """Events of a profile, which a replay records anew."""
    proven: bool = False
    """Whether a replay was seen to give the bits of eager execution."""


class Conditions:
    """What a captured step holds as constants: where tensors are, modes, attributes, settings of the optimizers."""

    def __init__(self, step: Step, epoch: int | None) -> None:
        """As they are now; the epoch is None where the step does not ask for it."""
        self.epoch = epoch
        self._task, optimizers = step.forward.task, step.optimizers
        self._module = ModuleSnapshot(self._task, optimizers, MOST_COMPARED)
        self._places = [
            (name, id(tensor), tensor.data_ptr(), tuple(tensor.shape))
            for name, tensor in (*self._task.named_parameters(), *self._task.named_buffers())
        ]
        self._settings = [
            [
                (key, id(value) if isinstance(value, Tensor) else value)
                for key, value in group.items()
                if key not in _FED
            ]
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        self._listeners = [listeners(optimizer) for optimizer in optimizers]

    def difference(self, other: "Conditions") -> str | None:
        """What is not as it was, in words."""
        one, two = self._module, other._module
        changed = two.changed(one)
        if changed:
            return ".".join(["self", *filter(None, changed[0])])
        for words, before, after in (
            ("the training mode of modules", one.modes, two.modes),
            ("which parameters require gradients", one.trainable, two.trainable),
            ("which parameters and buffers there are", self._places, other._places),
            ("settings of the optimizer", self._settings, other._settings),
            ("hooks on the optimizer", self._listeners, other._listeners),
            ("what depends on self.current_epoch", self.epoch, other.epoch),
        ):
            if before != after:
                return words
        return None

    def put_back(self) -> None:
        """Undo what running the Python code of a step has done to the task."""
        self._module.restore(self._task)


class WatchedIndex(int):
    """The number of a batch, which notes that somebody makes use of it."""

    _seen: set[str]

    def __new__(cls, value: int, seen: set[str]) -> "WatchedIndex":
        """A number whose use is noted in `seen`."""
        index = super().__new__(cls, value)
        index._seen = seen
        return index


def _noting(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: WatchedIndex, *others: Any) -> Any:
        self._seen.add("batch_idx")
        return plain(self, *others)

    return method


for _name in (
    "eq", "ne", "lt", "le", "gt", "ge", "mod", "rmod", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv",
    "rtruediv", "floordiv", "rfloordiv", "divmod", "pow", "bool", "index", "int", "float", "hash", "and", "format",
):  # fmt: skip
    setattr(WatchedIndex, f"__{_name}__", _noting(f"__{_name}__"))


class GraphedProgram:
    """Replays captured launches; steps before the first capture run eagerly."""

    def __init__(
        self, step: Step, feed: Feed, plan: Plan, inputs: Inputs, steps_per_launch: int, registry: Registry,
        accelerator: Accelerator, proven: Callable[[], None], fall_back: Callable[[str], None] | None,
        view: TrainerView, is_compiled: bool, after_step: Callable[[int], None] | None,
    ) -> None:  # fmt: skip
        """`proven` is told when a replay gave the right bits, `fall_back` why a capture is refused (None: an error)."""
        self._view = view
        self._is_compiled = is_compiled
        self._conditions: Conditions | None = None
        """Under which the present graphs were captured."""
        self._replayed = self._in_vain = 0
        self._proven = proven
        self._step = step
        self._eager = EagerProgram(step, feed, plan, inputs, steps_per_launch, after_step)
        self._feed = feed
        self._plan = plan
        self._inputs = inputs
        self._steps_per_launch = steps_per_launch
        self._registry = registry
        self._accelerator = accelerator
        self._fall_back = fall_back
        self._graphs: dict[tuple[int, Hashable], Captured] = {}
        self._met: set[Hashable] = set()
        self._pool: Any = None
        self._warm = 0
        self._profile: Profile | None = None
        self.refused: str | None = None
        """Why training goes on eagerly, if it does."""

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
        start = self._warm_up(start, stop, interrupted)
        if self.refused is not None:
            return self._eager.run(start, stop, interrupted)
        for number, count in launches(start, stop, self._steps_per_launch):
            if interrupted():
                return number
            if not self._launch(number, count):
                return self._eager.run(number + count, stop, interrupted)
        return stop

    def _drop_outdated(self) -> None:
        """Capture anew where somebody has changed the task or its optimizer since: a replay would not know."""
        if self._conditions is None or self.refused is not None:
            return
        changed = self._conditions.difference(self._now())
        if changed is None:
            return
        self._graphs.clear()
        self._met.clear()
        self._pool, self._conditions, self._warm = None, None, 0
        self._in_vain = self._in_vain + 1 if self._replayed < NUM_WORTH else 0
        self._replayed = 0
        if self._in_vain >= MOST_IN_VAIN and self._fall_back is not None:
            self._refuse(f"the task changes {changed} too often between launches")

    def _now(self) -> "Conditions":
        epoch = self._conditions.epoch if self._conditions is not None else None
        return Conditions(self._step, None if epoch is None else self._view.current_epoch)

    def _warm_up(self, start: int, stop: int, interrupted: Callable[[], bool]) -> int:
        """Train the first steps eagerly, and see whether they draw on torch's generator."""
        if self._warm >= NUM_WARMUP or self.refused is not None:
            return start
        end = min(stop, start + NUM_WARMUP - self._warm)
        done = self._eager.run(start, end, interrupted)
        self._warm += done - start
        self._met.update(self._plan.kind(number) for number in range(start, done))
        reason = None
        generator = torch.cuda.default_generators[self._accelerator.device.index or 0]
        if done > start and generator.get_offset() != 0:
            reason = "the step draws on torch's random generator"
        if any(not metrics.in_place(metric) for metric in self._step.forward.context.metrics.values()):
            reason = "the task logs torchmetrics objects that it does not update in place"
        reason = self._agreed(reason)
        if reason is not None:
            self._refuse(reason)
        return done

    def _agreed(self, reason: str | None) -> str | None:
        """Why any of the ranks cannot capture, so that all do the same."""
        reasons = self._step.reducer.ranks.all_gather(reason, "whether the step can be captured")
        return next((each for each in reasons if each is not None), None)

    def _launch(self, number: int, count: int) -> bool:
        """Run the steps of a launch; False if they turned out not to be capturable and ran eagerly.

        Batches of a shape that was not met before are run eagerly: what is made at first sight (compiled code, say)
        cannot be made in a capture. The next launch of a kind is captured and run eagerly, the one after it rehearsed:
        a replay that only fits the batch it was captured at shows there. From then on, launches are replayed.
        """
        key = count, self._plan.kind(number)
        captured = self._graphs.get(key)
        if key[1] not in self._met:
            self._eager.run(number, number + count, lambda: False)
            self._met.add(key[1])
        elif captured is None:
            self._try_capture(key, number, count)
        elif not captured.proven:
            self._rehearse(captured, number, count)
        else:
            self._replay(captured, number, count)
            self._replayed += 1
            if self._profile is not None:
                self._profile.replayed(captured.marks)
        return self.refused is None

    def _try_capture(self, key: tuple[int, Hashable], number: int, count: int) -> None:
        """Capture a launch, put everything back, and run it eagerly."""
        before, reseed = self._registry.snapshot(), self._step.reseed
        counted = list(self._step.recorder.counted)
        conditions = Conditions(self._step, self._view.current_epoch)
        self._view.read.clear()
        try:
            self._graphs[key] = self._capture(number, count)
            reason = before.replaced(self._registry) or self._frozen_in(conditions)
        except Exception as error:  # whatever a user's step does that a capture does not allow
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        conditions.put_back()
        epoch, conditions.epoch = conditions.epoch, None
        self._conditions = self._conditions or conditions
        if "current_epoch" in self._view.read:
            self._conditions.epoch = epoch
        reason = self._agreed(reason)
        if reason is not None:
            torch.cuda.synchronize()
            self._step.recorder.counted, self._step.reseed = counted, reseed
            before.restore(self._registry)
            self._refuse(reason)
        self._eager.run(number, number + count, lambda: False)

    def _frozen_in(self, before: "Conditions") -> str | None:
        """What the capture has turned into a constant although it changes from step to step."""
        changed = before.difference(Conditions(self._step, before.epoch))
        if changed is not None:
            return f"training_step changes {changed}, which a replay would not do again"
        if any(listeners(optimizer) for optimizer in self._step.optimizers):
            return "somebody has put hooks on the steps of the optimizer, which run on the host"
        if "global_step" in self._view.read:
            return "training_step reads self.global_step, which a replay would not see changing"
        if "batch_idx" in self._view.read:
            return "training_step uses batch_idx, which a replay would not see changing"
        return None

    def _capture(self, number: int, count: int) -> Captured:
        device = self._accelerator.device
        slot = self._feed.slot(number, count)
        slot.fill(number)
        rates = torch.empty(count, dtype=torch.float32, device=device)
        weights = rates.new_empty(count, len(self._inputs.weights)) if self._inputs.weights else None
        number_tensor = torch.zeros((), dtype=torch.int64, device=device)
        captured = Captured(torch.cuda.CUDAGraph(), slot, rates, weights, number_tensor, [])
        self._fill(captured, number, count)
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
        step, keyed = self._step, self._step.random.used
        reseed, step.reseed = step.reseed, None
        for offset in range(count):
            weights = {} if captured.weights is None else self._inputs.named(captured.weights[offset])
            time = captured.number + offset if keyed else 0
            batch_idx = (number + offset) % self._plan.steps_per_epoch
            if not self._is_compiled:
                batch_idx = WatchedIndex(batch_idx, self._view.read)
            if self._profile is not None:
                self._profile.begin()
            rate = captured.rates[offset] if self._inputs.tensor_lr else self._inputs.rates(number + offset, 1)[0]
            step(captured.slot.parts(offset), number + offset, batch_idx, rate, weights, time)
        step.reseed = reseed

    def _fill(self, captured: Captured, number: int, count: int) -> None:
        captured.rates.copy_(self._inputs.rate_tensor([self._inputs.rate(number + k) for k in range(count)]))
        if captured.weights is not None:
            captured.weights.copy_(self._inputs.weight_rows(number, count))
        captured.number.fill_(number)

    def _replay(self, captured: Captured, number: int, count: int) -> None:
        captured.slot.fill(number)
        self._fill(captured, number, count)
        captured.graph.replay()
        self._view.finish(number + count)
        recorder = self._step.recorder
        recorder.counted = [total + more for total, more in zip(recorder.counted, captured.counted, strict=True)]

    def _rehearse(self, captured: Captured, number: int, count: int) -> None:
        """Replay, go back, run the same steps eagerly: what remains is the eager result, and the two must agree."""
        counted = list(self._step.recorder.counted)
        before = self._registry.snapshot()
        self._replay(captured, number, count)
        replayed = self._registry.snapshot()
        before.restore(self._registry)
        self._step.recorder.counted = counted
        self._eager.run(number, number + count, lambda: False)
        differs = self._agreed(self._registry.snapshot().difference(replayed))
        captured.proven = differs is None
        if differs is None:
            self._proven()
        else:
            self._refuse(f"replaying it does not give the bits of running it ({differs})")

    def _refuse(self, reason: str) -> None:
        self._graphs.clear()
        self.refused = reason
        if self._fall_back is None:
            raise CaptureRefused(
                f"train.program is graphed, but the step cannot be captured: {reason}; use train.program=auto"
            )
        self._fall_back(reason)
