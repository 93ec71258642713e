"""Evaluations that are made again and again: their batches captured, and replayed as the steps of a training are.

The first evaluation runs eagerly. In the next ones the first batch of each shape is captured, the second proven: eager
execution and replay must record the same bits. The graphs share the memory of those of the training.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isoscale.data.feeds.feed import Slot
from isoscale.engine.lightning.trainer_view import TrainerView
from isoscale.engine.splits import Split
from isoscale.engine.state.registry import same_bits
from isoscale.engine.step.conditions import Conditions, WatchedIndex, in_words, noted_prints, noted_reads
from isoscale.engine.step.cuda_graph import end_broken_capture
from isoscale.engine.step.step import Forward
from isoscale.system.devices import Accelerator

Terms = set[str]


@dataclass
class CapturedBatch:
    """The graph of a batch."""

    graph: torch.cuda.CUDAGraph
    slot: Slot
    terms: Terms
    """Of the loss, by name."""
    counted: list[float]
    """What it adds to the weights that the recorder counts on the host."""
    proven: bool = False


class GraphedEvaluation:
    """The batches of a stage's data, evaluated one by one."""

    def __init__(
        self, forward: Forward, split: Split, accelerator: Accelerator, view: TrainerView, pool: Callable[[], Any],
        compute: Callable[[Any, int], Terms],
    ) -> None:  # fmt: skip
        """`compute` runs the step on parts of a batch and records its loss; `pool` is the memory of other graphs."""
        self.forward = forward
        self._split = split
        self._accelerator = accelerator
        self._view = view
        self._pool = pool
        self._compute = compute
        self._graphs: dict[Hashable, CapturedBatch] = {}
        self._conditions: Conditions | None = None
        self._num_begun = 0
        self.refused: str | None = None
        """Why batches are evaluated eagerly, if that is so."""

    def begin(self) -> None:
        """An evaluation begins: what has changed in the task since the last one asks for new graphs."""
        self._num_begun += 1
        self._offset = self._generator.get_offset()
        if self._conditions is not None:
            epoch = None if self._conditions.epoch is None else self._view.current_epoch
            if self._conditions.difference(Conditions(self.forward.task, epoch)) is not None:
                self._graphs.clear()
                self._conditions = None

    def end(self) -> None:
        """All batches are evaluated: the first time, see whether they can be replayed."""
        context = self.forward.context
        if context.metrics or context.tallies:
            self.refused = "it keeps torchmetrics or tallies"
        elif self._generator.get_offset() != self._offset:
            self.refused = "it draws random numbers"

    @property
    def _generator(self) -> torch.Generator:
        return torch.cuda.default_generators[self._accelerator.device.index or 0]

    def __call__(self, batch_idx: int) -> Terms:
        """Evaluate a batch; returns the terms of the loss that it has recorded."""
        if self.refused is not None or self._num_begun < 2:
            return self._eagerly(batch_idx)
        kind = self._split.plan.kind(batch_idx)
        captured = self._graphs.get(kind)
        if captured is None:
            terms = self._eagerly(batch_idx)
            self._try_capture(kind, batch_idx)
            return terms
        if not captured.proven:
            return self._prove(captured, batch_idx)
        self._replay(captured, batch_idx)
        return captured.terms

    def _eagerly(self, batch_idx: int) -> Terms:
        return self._compute(self._split.feed.parts(batch_idx), batch_idx)

    def _state(self) -> list[Tensor]:
        return [self.forward.context.recorder.buffer, *self.forward.task.buffers()]

    def _try_capture(self, kind: Hashable, batch_idx: int) -> None:
        """Capture a batch; nothing is computed by that."""
        task, recorder, read = self.forward.task, self.forward.context.recorder, self._view.read
        conditions, counted = Conditions(task, self._view.current_epoch), list(recorder.counted)
        read.clear()
        before = [tensor.clone() for tensor in self._state()]
        places = [tensor.data_ptr() for tensor in self._state()]
        graph = torch.cuda.CUDAGraph()
        try:
            slot = self._split.feed.slot(batch_idx, 1)
            slot.fill(batch_idx)
            torch.cuda.synchronize()
            stream = torch.cuda.current_stream()
            with (
                noted_prints(read), self._view.capturing(), noted_reads(task) as attributes,
                torch.cuda.graph(graph, self._pool(), stream, capture_error_mode="thread_local"),
            ):  # fmt: skip
                terms = self._compute(slot.parts(0), WatchedIndex(batch_idx, read))
            changed = conditions.difference(Conditions(task, conditions.epoch))
            frozen = sorted(read & {"global_step", "batch_idx", "callback_metrics", "logger", "print"})
            if changed is not None or frozen or places != [tensor.data_ptr() for tensor in self._state()]:
                self.refused = f"it depends on {changed or (frozen or ['tensors that it replaces'])[0]}"
            more = [after - earlier for after, earlier in zip(recorder.counted, counted, strict=True)]
            self._graphs[kind] = CapturedBatch(graph, slot, terms, more)
            conditions.read = attributes
        except Exception as error:  # whatever a user's step does that a capture does not allow
            self.refused = in_words(error)
            end_broken_capture(self._generator)
            torch.cuda.synchronize()
            for tensor, copy in zip(self._state(), before, strict=True):
                tensor.copy_(copy)
        conditions.put_back()
        self.forward.context.forget()
        recorder.counted = counted
        if "current_epoch" not in read:
            conditions.epoch = None
        if self._conditions is not None and self._conditions.read is not None and conditions.read is not None:
            self._conditions.read |= conditions.read
        self._conditions = self._conditions or conditions

    def _replay(self, captured: CapturedBatch, batch_idx: int) -> None:
        captured.slot.fill(batch_idx)
        captured.graph.replay()
        self.forward.context.recorder.count(captured.counted)

    def _prove(self, captured: CapturedBatch, batch_idx: int) -> Terms:
        """Evaluate a batch both ways; what remains is the eager result."""
        recorder = self.forward.context.recorder
        before, counted = [tensor.clone() for tensor in self._state()], list(recorder.counted)
        self._replay(captured, batch_idx)
        replayed, added = [tensor.clone() for tensor in self._state()], recorder.counted
        for tensor, copy in zip(self._state(), before, strict=True):
            tensor.copy_(copy)
        recorder.counted = counted
        terms = self._eagerly(batch_idx)
        is_same = all(same_bits(one, two) for one, two in zip(self._state(), replayed, strict=True))
        captured.proven = is_same and added == recorder.counted and terms == captured.terms
        if not captured.proven:
            self.refused = "replaying it does not give the bits of running it"
        return terms
