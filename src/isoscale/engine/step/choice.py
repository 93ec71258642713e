"""Which step program a training runs, and why; the program and its step, put together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from isoscale.data.generators import NUMPY, PYTHON
from isoscale.data.hashing import derive_key
from isoscale.data.sources import is_vectorised
from isoscale.engine.assembly import Assembly
from isoscale.engine.lightning import hooks
from isoscale.engine.lightning import manual_optimization as manual
from isoscale.engine.lightning.batch_hooks import AroundBatch, compiled, wrapped
from isoscale.engine.lightning.callbacks import BETWEEN_PARTS, defines
from isoscale.engine.lightning.closure_step import ClosureStep, why_closure
from isoscale.engine.lightning.optimizers import needs_closure
from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.engine.lightning.transfer import hooks_on_host
from isoscale.engine.optim.own_update import OwnUpdate
from isoscale.engine.settings import Decisions, Settings
from isoscale.engine.splits import read_dataset
from isoscale.engine.step.activations import Recompute
from isoscale.engine.step.cuda_graph import GraphedProgram
from isoscale.engine.step.ddp import Overlap
from isoscale.engine.step.programs import EagerProgram, Inputs, ManualProgram, Program
from isoscale.engine.step.step import Forward, Step
from isoscale.errors import UserError
from isoscale.parallel.reduction import Reducer
from isoscale.system.devices import Accelerator


@contextmanager
def compilation_explained() -> Iterator[None]:
    """Say in words what torch.compile cannot do."""
    try:
        yield
    except RuntimeError as error:
        if "does not currently support double backward" not in str(error):
            raise
        raise UserError(
            "the loss depends on derivatives of the network, such as forces, and torch.compile cannot differentiate "
            "those once more; use train.program=auto, which captures steps on CUDA, or train.program=eager"
        ) from error


@dataclass
class ProgramMaker:
    """Chooses and builds the program of a training."""

    parts: Assembly
    forward: Forward
    optimizers: list[Any]
    settings: Settings
    decided: Decisions
    num_steps: int
    view: TrainerView
    say: Callable[[str], None]
    reducer: Reducer
    own_update: OwnUpdate | None = None
    """By the task's own optimizer, where it can be captured."""

    def __post_init__(self) -> None:
        """What every program needs."""
        self._skipped: int | None = None
        """The first step that was skipped, of which has been told."""
        self._reseed = self.parts.reseed
        self.hooks_on_host = hooks_on_host(self.parts.task, self.parts.train.loaded)
        task, configured = self.parts.task, self.parts.configured
        plan, own = self.parts.train.plan, self.reducer.ranks
        self._after_step = hooks.after_step(
            task, self.view, configured, self.forward.compute,
            lambda step: self.parts.train_context.flush_together(plan.share(plan.size(step - 1)).count, own),
        )  # fmt: skip
        device, ranks = self.parts.accelerator.device, self.reducer.ranks
        read_dataset(self.parts.train, "train", self.settings, device, self.say, ranks)

    def make(self) -> Program:
        """The program; why it is not the fastest one, where it is not, is part of the decision."""
        if self.settings.train.recompute != "none":
            self._recompute(self.settings.train.recompute)
        if not getattr(self.parts.task, "automatic_optimization", True):
            self._decide("eager", "the task updates its weights itself (manual optimisation)")
            return self._manual()
        if len(self.optimizers) > 1 and self.parts.configured is not None:
            raise UserError("several optimizers need manual optimisation: set automatic_optimization = False")
        self.parts.step = self._step()
        why = self._cannot_capture()
        if "compiled" in self.decided.program:
            self.forward.compute = wrapped(self.forward.compute, compiled)
        ranks = self.reducer.ranks
        if self.decided.reduce == "overlap" and not ranks.alone:
            self.parts.step.overlap = Overlap(self.parts.task, self.forward.compute, ranks)
            self.parts.step.off = frozenset()  # it wants a gradient for every parameter, be it zero
            self.forward.compute = self.parts.step.overlap
        if self.decided.program not in ("auto", "graphed", "compiled+graphed"):
            return self._eager()
        if why is None:
            return self._graphed()
        if self.settings.train.program != "auto":
            raise UserError(f"train.program is {self.decided.program}, but {why}; use train.program=auto")
        self._decide("eager", why)
        return self._eager()

    def _recompute(self, wanted: str | list[str]) -> None:
        """Compute activations again in the backward pass."""
        if "compiled" in self.decided.program:
            raise UserError(
                f"train.recompute needs the modules of a task, and train.program={self.decided.program} compiles them "
                "away; use train.program=auto, or train.recompute=none: torch.compile decides what it computes again"
            )
        ranks = self.reducer.ranks
        # where ranks add up inside the forward pass, all must do so equally often: there each has a part of every batch
        together = self.decided.reduce != "tree" and self.parts.train.plan.smallest >= ranks.world_size

        def agree(names: list[str]) -> list[str]:
            return ranks.broadcast(names, "what is computed again") if together else names

        def wrap(method: Callable[..., Any]) -> Recompute:
            made = Recompute(self.parts.task, wanted, method, agree, self.say)
            self.parts.undo.callback(made.undo)
            return made

        self.forward.compute = wrapped(self.forward.compute, wrap)

    def _decide(self, program: str, why: str) -> None:
        self.decided.program, self.decided.why = program, why

    def _fall_back(self, why: str) -> None:
        """A capture was tried and refused."""
        self._decide("eager", why)
        self.say(f"program: eager, not graphed, because {why}")

    def _manual(self) -> ManualProgram:
        parts, plan = self.parts, self.parts.train.plan
        manual.check(plan, self.settings.train, parts.precision)
        rate = None if parts.configured else parts.rate
        recorder = parts.train_context.recorder
        shared = manual.SharedUpdates(self.reducer.ranks, plan, recorder, self.optimizers, parts.task)
        hooks.count_updates(parts.task, self.view, parts.configured, self.optimizers, shared.average)
        parts.extra.share = lambda: shared.weight
        parts.undo.callback(shared.close)
        return ManualProgram(
            self.forward, parts.random, self._reseed, parts.train.feed, plan,
            manual.before(rate, self.optimizers, self._before_fetch, shared),
            manual.after(recorder, plan, parts.ema, self._after_step, shared), self._skip_epoch,
        )  # fmt: skip

    def _eager(self) -> EagerProgram:
        assert self.parts.step is not None
        launch = self.settings.train.steps_per_launch
        fetched = self._before_fetch if self._reads else None
        train = self.parts.train
        count = 1 if launch == "auto" else launch
        is_compiled = "compiled" in self.decided.program
        time = torch.zeros((), dtype=torch.int64, device=self.parts.accelerator.device) if is_compiled else None
        return EagerProgram(
            self.parts.step, train.feed, train.plan, self._inputs, count, self._after_step, fetched, time,
            self._first_step, self._skip_epoch,
        )  # fmt: skip

    def _first_step(self, run: Callable[[], Any], look: Callable[[], Any]) -> None:
        parts, around = self.parts, self.forward.compute

        def look_quietly() -> None:
            with around.replayed() if isinstance(around, AroundBatch) else nullcontext():  # no hook hears of it
                look()

        parts.kernels.first_step(run, look_quietly, parts.registry, parts.train_context, self.reducer.ranks)

    def _graphed(self) -> GraphedProgram:
        launch, train = self.settings.train.steps_per_launch, self.parts.train
        return GraphedProgram(
            self._eager(), train.feed, train.plan, self._inputs, launch if isinstance(launch, int) else None,
            self.settings.observe.every, self.parts.registry, self.parts.accelerator, self._prove,
            self._fall_back if self.settings.train.program == "auto" else None, self.view,
            "compiled" in self.decided.program, self._after_step, self._reads, self.parts.precision.varying,
        )  # fmt: skip

    @property
    def _reads(self) -> bool:
        """Whether batches are read on the host, sample by sample or by a source that may draw random numbers."""
        return not is_vectorised(self.parts.train.source)

    def _prove(self, count: int) -> None:
        """The first replay had the bits of eager execution."""
        if self.decided.program == "auto":
            varying = self.parts.precision.varying
            match = "are as near to eager ones as these are to each other" if varying else "match eager ones to the bit"
            self._decide("graphed", f"replayed steps {match}")
            several = f"{count} step{'s' * (count > 1)} per launch"
            self.say(f"program: graphed, {several}, because replayed steps {match}")

    @property
    def _own_lr(self) -> bool:
        return self.parts.configured is not None

    @property
    def _inputs(self) -> Inputs:
        tensor_lr = self.decided.optimizer.tensor_lr and not self._own_lr
        weights, device = self.parts.weights, self.parts.accelerator.device
        return Inputs(self.parts.rate, weights, self.num_steps, device, tensor_lr, self._own_lr, self.own_update)

    def _cannot_capture(self) -> str | None:
        parts = self.parts
        assert parts.step is not None
        if not parts.accelerator.can_capture:
            return f"{parts.accelerator.kind} devices cannot capture steps"
        if self.hooks_on_host:
            return f"{self.hooks_on_host[0]} sees batches on the host: on_after_batch_transfer sees them on the device"
        if getattr(parts.train.plan, "is_stream", False):
            return "the shapes of batches of a stream are known only once they are read"
        ranks = self.reducer.ranks
        if not ranks.alone and (self.decided.reduce == "overlap" or ranks.backend == "gloo"):
            return "sums over ranks cannot be captured with parallel.reduce: overlap, or over Gloo"
        around = self.forward.compute
        if not ranks.alone and (self._reads or (isinstance(around, AroundBatch) and around.has_ends)):
            return "batches are read, or seen by hooks, on the host of each rank by itself"
        by_host = why_closure(parts.task, self.optimizers)
        if by_host is not None:
            return by_host
        seen = [(each, name) for each in self.view.callbacks for name in BETWEEN_PARTS if defines(each, name)]
        if seen:
            return f"{seen[0][1]} of the callback {type(seen[0][0]).__name__} is called on the host inside of a step"
        if self._own_lr and self.own_update is None:
            return "the run was begun by a version that did not capture optimizers which the task configures"
        if self.own_update is not None and self.own_update.constant and self._is_moved_in_steps:
            return f"a scheduler moves the task's own optimizer in every step, and {self.own_update.constant}"
        if not self._own_lr and not self.decided.optimizer.tensor_lr:
            return "the optimizer cannot be captured: its class takes no argument capturable"
        if parts.precision.needs_scaler and parts.step.clip is not None:
            return "fp16 with clipping decides on the host; bf16 does not"
        return None

    @property
    def _is_moved_in_steps(self) -> bool:
        configured = self.parts.configured
        return configured is not None and any(entry["interval"] == "step" for entry in configured.schedulers)

    def _step(self) -> Step:
        parts = self.parts
        scaler = None
        if parts.precision.needs_scaler:
            scaler = torch.amp.GradScaler(parts.accelerator.kind)
            parts.registry.register("scaler", ScalerState(scaler, parts.accelerator.device))
        plan = parts.train.plan
        hooks.check(parts.task, plan.num_micro * plan.num_shards, parts.precision.needs_scaler)
        driven = why_closure(parts.task, self.optimizers) is not None
        make = ClosureStep if driven else hooks.HookedStep if hooks.of_updates(parts.task) else Step
        step = make(
            self.forward, self.optimizers, self.reducer, parts.train_context.recorder, parts.random,
            self.settings.train.clip, parts.ema, scaler, self._reseed, not self._own_lr, plan.size,
            own_update=self.own_update,
        )  # fmt: skip
        step.off = frozenset(name for name, weight in parts.weights.items() if weight.constant == 0)
        parts.registry.register("latch", LatchState(step))
        policy = self.settings.train.nan
        if policy != "stop" and scaler is not None:
            raise UserError(f"train.nan is {policy}, but fp16 skips steps in its own way; use train.precision=bf16")
        step.nan_guard.choose(policy if policy != "rollback" else "stop")
        step.on_skip = self._tell_skipped
        if isinstance(step, ClosureStep):
            step.drive(self.view)
        for optimizer in filter(needs_closure, self.optimizers):
            most = optimizer.param_groups[0].get("max_eval")
            often = f"up to {most} times" if most else "several times"
            self.say(
                f"{type(optimizer).__name__} computes the loss {often} in a step, each time by a forward and a "
                "backward pass"
            )
        return step

    def _skip_epoch(self, step: int) -> int:
        """Skip the rest of an epoch; as under Lightning, schedulers that count steps count the one that was begun."""
        plan, ranks, task = self.parts.train.plan, self.reducer.ranks, self.parts.task
        if not ranks.alone:
            raise UserError(
                f"on_train_batch_start of {type(task).__name__} returned -1 on {ranks.name(ranks.rank)}, to skip the "
                "rest of an epoch: others would wait for its gradients. Use train.limit_train_batches, or one rank"
            )
        self.parts.train_context.flush(plan.size(step))
        if self.parts.configured is not None:
            self.parts.configured.after_step(step + 1)
        end = self.view.progress.skip_epoch(step, plan.steps_per_epoch)
        self.view.finish(end)
        return end

    def _tell_skipped(self, number: int) -> None:
        if self._skipped is None:
            self._skipped = number
            self.say(
                f"training_step returned None at step {number + 1}: no update is made there, as under Lightning; if "
                "this is not meant, let it return its loss"
            )

    def _before_fetch(self, step: int) -> None:
        """Seed by the step what a task may draw from on the host: torch, numpy, random; samples have their own."""
        self._reseed(step, 255)
        seed = int(torch.randint(2**31, ()))
        PYTHON.seed(seed)
        NUMPY.seed(seed)


def reseeder(seed: int, accelerator: Accelerator) -> Callable[[int, int], None]:
    """Seeds torch's generators by (seed, step, part), for whatever a task draws from them."""
    high, low = derive_key(seed, "generator")
    base = high << 31 | low
    set_seed = accelerator.seeder()

    def reseed(step: int, part: int) -> None:
        set_seed((base + (step << 8) + part) & 0x7FFFFFFFFFFFFFFF)

    return reseed


class LatchState:
    """Whether a gradient was not finite, and how often that was mended."""

    def __init__(self, step: Step) -> None:
        """The latch of `step`."""
        self._step = step

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The flag, and how many steps were skipped or mended."""
        return {"latch": self._step.nan_guard.latch, "count": self._step.nan_guard.count}, {}

    def load(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """Take over the flag; earlier versions counted nothing."""
        self._step.nan_guard.latch.copy_(tensors["latch"])
        if "count" in tensors:
            self._step.nan_guard.count.copy_(tensors["count"])


class ScalerState:
    """The loss scale of fp16, and how long it has been good."""

    def __init__(self, scaler: Any, device: torch.device) -> None:
        """Make the scaler create its tensors now, so that they are part of every state."""
        self._scaler = scaler
        scaler.scale(torch.zeros((), device=device))

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Scale and growth counter."""
        return {"scale": self._scaler._scale, "growth": self._scaler._growth_tracker}, {}

    def load(self, tensors: dict[str, Any], values: dict[str, Any]) -> None:
        """Take over a state."""
        self._scaler._scale.copy_(tensors["scale"])
        self._scaler._growth_tracker.copy_(tensors["growth"])
