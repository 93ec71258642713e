"""One training step: forward and backward of every part, reduce, clip, update, record. Never waits for the device."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from isoscale.data.batches import Batch, map_tensors
from isoscale.data.feeds.feed import Part
from isoscale.data.rng import StepRandom
from isoscale.engine.metrics.accumulators import Recorded, Recorder
from isoscale.engine.metrics.losses import as_weighted_sum
from isoscale.engine.metrics.weighted_sum import WeightedSum, as_total
from isoscale.engine.optim.ema import EMA
from isoscale.engine.optim.optimizers import is_of_torch, listeners, plain_step, set_lr
from isoscale.engine.optim.own_update import OwnUpdate
from isoscale.engine.optim.spread import Spread
from isoscale.engine.precision import Precision
from isoscale.engine.state.registry import in_format_of
from isoscale.engine.step.context import StepContext
from isoscale.engine.step.ddp import Overlap, missing_gradients_in_words
from isoscale.engine.step.nan_guard import NanGuard
from isoscale.engine.step.untrained import optimised
from isoscale.engine.target_units import TargetUnits
from isoscale.errors import UserError, nearest
from isoscale.parallel.collectives import Ranks
from isoscale.parallel.reduction import Reducer

UPDATE_PART = 254
"""In the place of a part of the batch, where an optimizer may draw random numbers."""
NUM_VOTES = 3
"""What ranks vote on: to stop, to save, to end."""
Terms = dict[str, WeightedSum]
Shards = Sequence[Sequence[Part]]


@dataclass
class Forward:
    """From a part of a batch to the terms of its loss; `compute` is what `compiled` swaps."""

    task: Any
    context: StepContext
    transforms: Sequence[Callable[[Batch], Batch]]
    precision: Precision
    loss_weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of named loss terms in an evaluation; a training step gets its own."""
    compute: Callable[[Batch, int], Any] = field(init=False)
    mark: Callable[[str], None] | None = None
    """Told when a phase of the step is over, where somebody wants to know."""

    def __post_init__(self) -> None:
        """The task's own step method, eagerly."""
        self.compute = self.context.method
        self.context.units = TargetUnits(self.task, self.transforms)
        self._as_stored: frozenset[str] = getattr(self.task, "as_stored", frozenset())

    def __call__(self, part: Part, batch_idx: int) -> Any:
        """Transform, cast and run the task's step; what it logs is recorded."""
        batch = self.prepared(part)
        if self.mark is not None:
            self.mark("data")
        if self.precision.mixed:
            with self.precision.autocast():
                output = self.compute(batch, batch_idx)
        else:
            output = self.compute(batch, batch_idx)
        self.context.flush(part.samples.shape[0])
        if self.mark is not None:
            self.mark("forward")
        return output

    def prepared(self, part: Part) -> Batch:
        """A part as the task's step gets it: transformed, and cast."""
        batch = part.batch
        for transform in self.transforms:
            batch = transform(batch)
        return cast(batch, self.precision.dtype, self._as_stored)


def cast(batch: Batch, dtype: torch.dtype, as_stored: frozenset[str] = frozenset()) -> Batch:
    """Floating point and complex tensors in the precision of the weights, but for those that are wanted as stored."""
    kinds = {True: dtype, False: torch.complex128 if dtype == torch.float64 else torch.complex64}

    def in_precision(tensor: Tensor) -> Tensor:
        is_floating = tensor.is_floating_point()
        return tensor.to(kinds[is_floating]) if is_floating or tensor.is_complex() else tensor

    if isinstance(batch, dict):
        for key, value in batch.items():
            if isinstance(value, Tensor) and value.dtype != dtype and key not in as_stored:
                batch = {**batch, key: in_precision(value)}
            elif isinstance(value, dict | list | tuple) and key not in as_stored:  # the batch of one of several loaders
                batch = {**batch, key: map_tensors(value, in_precision)}
        return batch
    return map_tensors(batch, in_precision)


def loss_terms(output: Any, count: int) -> Terms:
    """The named terms of what a training step returned; a single loss has the name `loss`."""
    if isinstance(output, WeightedSum):
        return {"loss": output}
    if isinstance(output, Mapping):
        terms = {"loss": output["loss"]} if "loss" in output else output
        return {name: as_weighted_sum(value, count) for name, value in terms.items()}
    return {"loss": as_weighted_sum(output, count)}


class Samples(int):
    """A number of samples as the weight of a plain mean, which all such terms of a part share."""


def check_weights(terms: Terms, weights: Mapping[str, Tensor]) -> None:
    """Refuse weights of terms that the loss does not have."""
    for name in weights.keys() - terms.keys() if weights else ():
        meant = nearest(name, terms)
        hint = f"; did you mean {meant!r}?" if meant else ""
        raise UserError(f"train.loss_weights names {name!r}, but the terms of the loss are {', '.join(terms)}{hint}")


class Found(NamedTuple):
    """What a step of this rank was made of."""

    num_groups: int
    """Of loss terms that share a weight; none where this rank had no samples."""
    used: frozenset[int]
    """Places, among the parameters that require gradients, of those that got one."""
    sparse: frozenset[int]
    """Places of those whose gradient is sparse."""
    names: list[str]
    """The terms of the loss."""


def agreed(ranks: Ranks, mine: Found) -> Found:
    """What the ranks that had samples found; they must agree on the loss, and a parameter counts if one reaches it."""
    every = [Found(*each) for each in ranks.all_gather(tuple(mine), "what the loss is made of")]
    found = [each for each in every if each.num_groups]
    for rank, each in enumerate(every):
        if each.num_groups and (each.num_groups, each.names) != (found[0].num_groups, found[0].names):
            raise UserError(f"the loss of {ranks.name(rank)} has the terms {each.names}, others have {found[0].names}")
    return found[0]._replace(
        used=frozenset().union(*(each.used for each in found)),
        sparse=frozenset().union(*(each.sparse for each in found)),
    )


@dataclass
class Step:
    """One optimizer update over the shards and micro-batches of a batch."""

    forward: Forward
    optimizers: list[Optimizer]
    reducer: Reducer
    recorder: Recorder
    random: StepRandom
    clip: float | None = None
    average: EMA | None = None
    scaler: Any = None
    """A torch.amp.GradScaler for fp16; it keeps its decisions on the device."""
    reseed: Callable[[int, int], None] | None = None
    """Seeds torch's generators for (step, part); None inside a capture."""
    plain: bool = False
    """Whether the optimizers are the engine's own, on whose steps nobody listens."""
    size_of: Callable[[int], int] = lambda number: 1
    """The number of samples in the batch of a step, on all ranks together."""
    overlap: Overlap | None = None
    """Adds up gradients while they are computed, instead of the reducer."""
    own_update: OwnUpdate | None = None
    """The update of an optimizer that the task configures itself, on a device that can capture it."""

    def __post_init__(self) -> None:
        """Find the parameters, and let a non-finite gradient stop every later update."""
        task = self.forward.task
        self.parameters = list(task.parameters())
        """All of them: which require gradients may change from step to step."""
        device = self.parameters[0].device
        self.nan_guard = NanGuard(self.optimizers, device, self.scaler is not None)
        self._apart = self.reducer.apart and self.reducer.num_shards > 1
        self.ballot = torch.zeros(NUM_VOTES, dtype=torch.float64, device=device)
        """What this rank wants all to do; it travels with the gradients."""
        self.votes = torch.zeros(NUM_VOTES, dtype=torch.float64, device=device)
        """How many ranks wanted it at the last step."""
        self._meeting = torch.zeros(1, device=device)
        self._agreed: dict[tuple[bool, ...], Found] = {}
        """What ranks have agreed on, by which parameters require gradients."""
        self.off: frozenset[str] = frozenset()
        """Terms of the loss that weigh nothing at all times."""
        self._one: Tensor | None = None
        self._size = 1
        self.reaches = False
        """Whether a loss so far had a gradient for one of the parameters that the optimizers have."""
        self.num_skipped = 0
        """Times that `training_step` returned None: there was nothing to train on."""
        self.on_skip: Callable[[int], None] = lambda number: None
        """Told the number of a step that was skipped."""
        self._steps: list[Callable[[], Any]] = [self.own_update] if self.own_update is not None else [
            plain_step(optimizer) if self.plain else optimizer.step for optimizer in self.optimizers
        ]  # fmt: skip
        self._may_draw = self.plain and not all(is_of_torch(type(optimizer)) for optimizer in self.optimizers)

    def __call__(
        self, shards: Shards, number: int, batch_idx: int, lr: Any, weights: Mapping[str, Tensor], time: Any
    ) -> None:
        """Train on a batch.

        `lr` is a number or a tensor. Where the task sets its own it is None, and inside a capture the row of numbers
        that its optimizer takes. `time` is the step number as randomness sees it: a tensor inside a capture.
        """
        self._begin(number, lr, time)
        for parameter in self.parameters:
            parameter.grad = None
        unguarded = self.nan_guard.policy == "stop"
        if not unguarded:
            floating = [buffer for buffer in self.forward.task.buffers() if buffer.is_floating_point()]
            self.nan_guard.begin(floating, self.average.tensors if self.average else ())
        self._compute(shards, number, batch_idx, weights)
        if self.reseed is None:  # inside a capture, where the host's time does not count
            with Spread():
                self._update()
        else:
            if self._may_draw:  # what it draws must not depend on how many parts of the batch this rank has seen
                self.reseed(number, UPDATE_PART)
            self._update()
        if not unguarded:
            self.nan_guard.end()
        self.mark("optimizer")

    def _begin(self, number: int, lr: Any, time: Any) -> None:
        """Take what changes from step to step."""
        if self.own_update is not None:
            self.own_update.row = lr
        elif lr is not None:
            for optimizer in self.optimizers:
                set_lr(optimizer, lr)
        self.random.step = time
        self._size = self.size_of(number)

    def _compute(self, shards: Shards, number: int, batch_idx: int, weights: Mapping[str, Tensor]) -> None:
        """Give the parameters the gradients of a batch."""
        if self.overlap is not None:
            self._overlapped(self.overlap, shards, number, batch_idx, weights)
        elif self._is_whole(shards):
            self._at_once(shards[0][0], number, batch_idx, weights)
        else:
            self._in_parts(shards, number, batch_idx, weights)
        if not self.reaches:
            self.reaches = any(each.grad is not None for each in optimised(self.optimizers))

    def _is_whole(self, shards: Shards) -> bool:
        """Whether the batch is computed at once, by one rank."""
        is_one = self.reducer.ranks.alone and len(shards) == 1 and len(shards[0]) == 1
        return is_one and self.nan_guard.policy == "stop" and self.overlap is None

    def look(self, shards: Shards, number: int, batch_idx: int, time: Any) -> None:
        """The forward pass of one part alone, to see what it does."""
        self.random.step = time
        part = next((part for shard in shards for part in shard), None)
        if part is not None:
            self.terms(part, number, 0, batch_idx, {}, may_skip=True)

    def notice_listeners(self) -> None:
        """Let hooks be called that somebody has put on an optimizer since the step was made."""
        for number, optimizer in enumerate(self.optimizers):
            if self.plain and listeners(optimizer):
                self._steps[number] = optimizer.step

    def mark(self, phase: str) -> None:
        """A phase of the step is over."""
        if self.forward.mark is not None:
            self.forward.mark(phase)

    def meet(self) -> None:
        """Where somebody measures, wait for the slowest rank here: that is no communication."""
        if self.forward.mark is not None and not self.reducer.ranks.alone:
            self.reducer.ranks.all_reduce(self._meeting, "the slowest rank")
            self.mark("waiting")

    def _at_once(self, part: Part, number: int, batch_idx: int, weights: Mapping[str, Tensor]) -> None:
        """The whole batch in one backward pass, which costs no more than a loop written by hand."""
        terms = self.terms(part, number, 0, batch_idx, weights, may_skip=True)
        if not terms:
            self.num_skipped += 1
            self.on_skip(number)
            return
        loss = self.weighted({name: terms[name].mean for name in self.counting(terms)}, weights)
        if "loss" not in terms:
            self.recorder.add("loss", WeightedSum.of_mean(loss, part.samples.shape[0]))
        if not loss.requires_grad:
            raise UserError(_UNTRAINABLE)
        self._differentiate(self._scaled(loss))
        self.mark("backward")

    def _overlapped(
        self, overlap: Overlap, shards: Shards, number: int, batch_idx: int, weights: Mapping[str, Tensor]
    ) -> None:
        """The gradients of a batch, added up while they are computed; everything else follows in one small sum.

        Where the terms of the loss have weights of their own, these are added up first: only then is the loss known.
        """
        ranks, parts = overlap.ranks, shards[overlap.ranks.rank]
        overlap.began()
        record = self.recorder.begin_shard()
        totals: list[Tensor] = []
        names: list[str] = []
        divided = False
        for micro, part in enumerate(parts):
            with overlap.no_sync(micro < len(parts) - 1):
                terms = missing_gradients_in_words(
                    self.terms, part, number, micro * ranks.world_size + ranks.rank, batch_idx, weights
                )
                groups = self.groups(terms, weights)
                names, divided = list(terms), len(groups) > 1
                if divided and len(parts) > 1:
                    raise UserError(
                        "parallel.reduce: overlap cannot accumulate terms of the loss that have weights of their own "
                        f"({', '.join(names)}); use parallel.reduce=flat or train.accumulate=1"
                    )
                amounts = [as_total(weight, record.device) for _, weight in groups]
                (_loss_of_all(groups, amounts, ranks) if divided else groups[0][0]).backward()
                totals = [one + other for one, other in zip(totals, amounts, strict=True)] if totals else amounts
                self.mark("backward")
        overlap.ended()
        self.meet()
        head = self.head(sum(part.samples.shape[0] for part in parts), True)
        overlap.reducer.add(ranks.rank, [head, record, *totals])
        total = overlap.reducer.total()
        if not divided:
            self.divide_gradients(total[2])
        self.take_record(total[0], total[1], names, weights)
        self.mark("communication")

    def _in_parts(self, shards: Shards, number: int, batch_idx: int, weights: Mapping[str, Tensor]) -> None:
        """Sums of gradients over parts, divided in the end by the weight of the whole batch.

        Terms that share a weight (samples, say) share a backward pass; a term with a weight of its own (atoms) takes
        one more, because its share of the batch is known only when all parts are done.
        """
        before = [buffer.clone() for buffer in self._buffers]
        names: list[str] = []
        used: set[int] = set()
        sparse: set[int] = set()
        trainable: list[nn.Parameter] = []
        num_groups = 0
        for shard in self.reducer.owned:
            if not shards[shard]:
                continue
            if before:
                self._reset_buffers(before)
            record = self.recorder.begin_shard()
            sums: list[list[Tensor]] = []
            totals: list[Tensor] = []
            count = 0
            for micro, part in enumerate(shards[shard]):
                terms = self.terms(part, number, micro * self.reducer.num_shards + shard, batch_idx, weights)
                count += part.samples.shape[0]
                trainable = self._trainable(trainable)
                with hooks_put_off(trainable):
                    _add_part(trainable, self.groups(terms, weights), sums, totals, used, sparse, self.gradients_of)
                self.mark("backward")
            first, num_groups, names = num_groups == 0, len(sums), list(terms)
            statistics = self._statistics()
            head = self.head(count, first)
            self.reducer.add(shard, [head, record, *totals, *(grad for group in sums for grad in group), *statistics])
        trainable = self._trainable(trainable)
        found = self._agree(Found(num_groups, frozenset(used), frozenset(sparse), names), number)
        self.meet()
        self._take(self.reducer.total(lambda: self._like(found, trainable)), found, trainable, weights)
        self.mark("reduce" if self.reducer.ranks.alone else "communication")

    def _trainable(self, before: list[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters that require gradients, which must be the same in all parts of a batch."""
        found = [parameter for parameter in self.parameters if parameter.requires_grad]
        if not found:
            raise UserError(_UNTRAINABLE)
        if before and [id(each) for each in found] != [id(each) for each in before]:
            raise UserError(
                "training_step changes requires_grad while a batch is computed in parts, which then do not fit "
                "together; change it in on_train_epoch_start or on_train_batch_start, or use train.accumulate=1"
            )
        return found

    @property
    def _buffers(self) -> list[Tensor]:
        """The buffers of which every shard has its own statistics; a forward pass may replace them."""
        return list(self.forward.task.buffers()) if self._apart else []

    def _reset_buffers(self, values: Sequence[Tensor]) -> None:
        """Let the next shard begin with the buffers that the one before it began with."""
        live = self._buffers
        if [buffer.shape for buffer in live] != [value.shape for value in values]:
            raise UserError(
                "the forward pass adds buffers or changes their shapes, which have no mean over shards: use "
                "parallel.reduce=flat"
            )
        torch._foreach_copy_(live, list(values))

    def _statistics(self) -> list[Tensor]:
        kinds = [torch.complex128 if buffer.is_complex() else torch.float64 for buffer in self._buffers]
        return [buffer.to(kind, copy=True) for buffer, kind in zip(self._buffers, kinds, strict=True)]

    def _like(self, found: Found, trainable: Sequence[Tensor]) -> list[Tensor]:
        """Tensors as ranks with samples send them."""
        gradients = [parameter.detach() for parameter in trainable] * found.num_groups
        statistics = self._statistics()
        totals = [self.votes.new_zeros(()) for _ in range(found.num_groups)]
        return [self.head(0, True), torch.zeros_like(self.recorder.buffer), *totals, *gradients, *statistics]

    def head(self, count: int, first: bool) -> Tensor:
        """Numbers of shards and of samples, and this rank's votes; on the device without a copy from the host."""
        head = torch.zeros(2 + NUM_VOTES, dtype=torch.float64, device=self.ballot.device)
        head[0].fill_(1)
        head[1].fill_(count)
        if first and not self.reducer.ranks.alone:
            head[2:].add_(self.ballot)
        return head

    def groups(self, terms: Terms, weights: Mapping[str, Tensor]) -> list[tuple[Tensor, Any]]:
        """(weighted sum, weight) of the terms that share a weight.

        Only what is the same weight in every part is shared: one tensor, or the number of samples. Numbers of other
        things, such as atoms and bonds, may be equal in one part and differ in the next.
        """
        groups: dict[Any, tuple[Tensor, Any]] = {}
        for name in self.counting(terms):
            pair = terms[name]
            total = pair.sum * weights[name] if name in weights else pair.sum
            shared = isinstance(pair.weight, Samples)
            key = "samples" if shared else id(pair.weight) if isinstance(pair.weight, Tensor) else name
            groups[key] = (groups[key][0] + total, pair.weight) if key in groups else (total, pair.weight)
        # Both sides of the fraction are divided by the size of the batch: gradients inside the network are then those
        # of its mean however it is split, as whoever clips them there expects, and half precision does not overflow.
        return [(self._scaled(total / self._size), weight / self._size) for total, weight in groups.values()]

    def _agree(self, mine: Found, number: int) -> Found:
        """What the loss is made of and which parameters it reaches must be the same on all ranks; found out once."""
        ranks = self.reducer.ranks
        if ranks.alone:
            return mine
        flags = tuple(parameter.requires_grad for parameter in self.parameters)
        if flags not in self._agreed:
            self._agreed[flags] = agreed(ranks, mine)
            every = ranks.all_gather(tuple(self.recorder.recorded), "what is logged")
            if not self.recorder.names:
                self.recorder.agree([Recorded(*each) for each in every])
        known = self._agreed[flags]
        same = (mine.num_groups, mine.names) == (known.num_groups, known.names) and mine.used <= known.used
        if mine.num_groups and not same:  # without samples, this rank has found nothing
            raise UserError(
                f"step {number}: the terms of the loss, or the parameters that they reach, are others than at the "
                "first step; with several ranks they must stay the same"
            )
        return known

    def _take(
        self, total: list[Tensor], found: Found, trainable: Sequence[nn.Parameter], weights: Mapping[str, Tensor]
    ) -> None:
        """Turn the reduced sums into gradients, accumulators, running statistics and votes."""
        count, num_groups = len(trainable), found.num_groups
        head, record, totals, rest = total[0], total[1], total[2 : 2 + num_groups], total[2 + num_groups :]
        groups = [rest[index * count : (index + 1) * count] for index in range(num_groups)]
        for group, weight in zip(groups, totals, strict=True):
            _divide(group, weight)
        for group in groups[1:]:
            torch._foreach_add_(groups[0], group)
        for index, (parameter, gradient) in enumerate(zip(trainable, groups[0], strict=True)):
            if index in found.used:  # others the optimizer passes over, as in a whole batch
                parameter.grad = gradient.to_sparse(1) if index in found.sparse else in_format_of(parameter, gradient)
        call_hooks(trainable)
        self.take_record(head, record, found.names, weights)
        for buffer, statistic in zip(self._buffers, rest[num_groups * count :], strict=True):
            buffer.copy_(statistic / head[0])

    def counting(self, names: Iterable[str]) -> list[str]:
        """The terms that something is learned from: to multiply by 0 what may be infinite would not leave it out."""
        found = [name for name in names if name not in self.off]
        if not found:
            raise UserError("train.loss_weights gives every term of the loss the weight 0, so that nothing is learned")
        return found

    def weighted(self, means: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Tensor:
        """The loss, given the means of its terms."""
        rated = [mean * weights[name] if name in weights else mean for name, mean in means.items()]
        return rated[0] if len(rated) == 1 else torch.stack(rated).sum()

    def take_record(self, head: Tensor, record: Tensor, names: list[str], weights: Mapping[str, Tensor]) -> None:
        """Turn the reduced sums of what was recorded into accumulators, and take the votes that came with them."""
        self.votes.copy_(head[2:])
        record = self.nan_guard.judge(self.gradients, record)
        self.recorder.end_shards(record)
        if "loss" not in names:
            loss = self.weighted(self.recorder.means(record, self.counting(names)), weights)
            if self.nan_guard.policy != "stop":
                loss = torch.nan_to_num(loss)  # of a step that does not count
            self.recorder.add("loss", WeightedSum.of_mean(loss, head[1] * self.nan_guard.weight))

    @property
    def gradients(self) -> list[Tensor]:
        """Those that there are."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def divide_gradients(self, weight: Tensor) -> None:
        """From sums to means."""
        _divide(self.gradients, weight)

    def terms(
        self, part: Part, number: int, index: int, batch_idx: int, weights: Mapping[str, Tensor], may_skip: bool = False
    ) -> Terms:
        """The terms of the loss of a part, recorded; `index` is its number among all parts of the batch.

        Where a whole batch is computed at once, `training_step` may skip it: it returns None, and there are no terms.
        """
        if self.reseed is not None:
            self.reseed(number, index)
        self.random.samples = part.samples
        output = self.forward(part, batch_idx)
        if output is None:
            if may_skip:
                return {}
            raise UserError(_SKIPPED_IN_PARTS)
        terms = loss_terms(output, Samples(part.samples.shape[0]))
        check_weights(terms, weights)
        for name, pair in terms.items():
            self.recorder.add(name, pair)
        return terms

    def _differentiate(self, loss: Tensor) -> None:
        """Give the parameters their gradients; the 1 that these begin with is not made anew every time."""
        if self._one is None or self._one.dtype != loss.dtype:
            self._one = torch.ones_like(loss)
        # what torch.autograd.backward calls in the end; its checks of shapes take a tenth of a small step
        Variable._execution_engine.run_backward(
            (loss,), (self._one,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def _update(self) -> None:
        """Check, clip and apply the gradients."""
        if self.scaler is not None and self.clip is not None and self.gradients:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        self._check_and_clip()
        if self.scaler is None:
            for step in self._steps:
                step()
        elif self.gradients:
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
        if self.average is not None:
            self.average.update()

    def _check_and_clip(self) -> None:
        gradients = self.gradients
        if self.scaler is None and gradients:
            self.nan_guard.check(gradients)
        if self.clip is not None:
            if any(gradient.is_sparse for gradient in gradients):
                raise UserError(
                    "train.clip needs dense gradients, and torch has no norm of sparse ones: use sparse=False"
                )
            nn.utils.clip_grad_norm_(self.parameters, self.clip, error_if_nonfinite=False, foreach=True)

    def gradients_of(
        self, total: Tensor, weight: Any, parameters: Sequence[Tensor], retain_graph: bool
    ) -> Sequence[Tensor | None]:
        """The gradients of a weighted sum; None where it does not depend on a parameter."""
        return torch.autograd.grad(total, parameters, retain_graph=retain_graph, allow_unused=True)


_SKIPPED_IN_PARTS = (
    "training_step returned None, by which a step is skipped; where a batch is shared by several ranks or computed in "
    "parts (train.accumulate, parallel.reduce=tree, train.nan), others would wait for its gradients. Return a loss "
    "that weighs nothing instead: 0.0 * self(inputs).sum(), say"
)
_UNTRAINABLE = (
    "nothing in the loss requires a gradient: all parameters are frozen, or training_step detaches its result or "
    "computes it under torch.no_grad()"
)
_AFTER_GRADIENT = "_post_accumulate_grad_hooks"


@contextmanager
def hooks_put_off(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Do not call hooks on the gradients of parameters for what are only parts of a sum."""
    found = [getattr(each, name, None) for each in parameters for name in ("_backward_hooks", _AFTER_GRADIENT)]
    kept = [(hooks, dict(hooks)) for hooks in found if hooks]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, entries in kept:
            hooks.update(entries)


@torch.no_grad()
def call_hooks(parameters: Sequence[nn.Parameter]) -> None:
    """Call the hooks that people have put on parameters, with the gradient of the whole batch."""
    for parameter in parameters:
        if parameter.grad is None:
            continue
        for hook in list((parameter._backward_hooks or {}).values()):
            changed = hook(parameter.grad)
            parameter.grad = parameter.grad if changed is None else in_format_of(parameter, changed)
        for hook in list((getattr(parameter, _AFTER_GRADIENT, None) or {}).values()):
            hook(parameter)


def _add_part(
    parameters: list[nn.Parameter], groups: list[tuple[Tensor, Any]], sums: list[list[Tensor]], totals: list[Tensor],
    used: set[int], sparse: set[int], gradients_of: Callable[..., Sequence[Tensor | None]],
) -> None:  # fmt: skip
    """Add the gradients and weights of a part to those of its shard; notes which parameters have what gradient."""
    for index, (total, weight) in enumerate(groups):
        if not total.requires_grad:
            raise UserError(_UNTRAINABLE)
        last = index == len(groups) - 1
        found = gradients_of(total, weight, parameters, not last)
        used |= {number for number, gradient in enumerate(found) if gradient is not None}
        sparse |= {number for number, gradient in enumerate(found) if gradient is not None and gradient.is_sparse}
        gradients = [
            torch.zeros_like(parameter) if gradient is None else gradient.to_dense() if gradient.is_sparse else gradient
            for parameter, gradient in zip(parameters, found, strict=True)
        ]
        amount = as_total(weight, total.device)
        if index == len(sums):
            sums.append(gradients)
            totals.append(amount)
        else:
            torch._foreach_add_(sums[index], gradients)
            totals[index] = totals[index] + amount


def _divide(tensors: list[Tensor], divisor: Tensor) -> None:
    """Divide in place, each tensor in its own dtype."""
    for dtype in {tensor.dtype: None for tensor in tensors}:
        torch._foreach_div_([tensor for tensor in tensors if tensor.dtype == dtype], divisor.to(dtype))


def _loss_of_all(groups: list[tuple[Tensor, Any]], amounts: list[Tensor], ranks: Ranks) -> Tensor:
    """This rank's part of the loss of the whole batch."""
    sums = torch.stack(amounts)
    ranks.all_reduce(sums, "the weights of a batch")
    return torch.stack([total / weight.to(total.dtype) for (total, _), weight in zip(groups, sums, strict=True)]).sum()
