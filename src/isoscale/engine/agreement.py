"""What all ranks do at the same step, because one of them was asked to: stop, or save.

A rank's wishes travel with its gradients and come back as votes, equal on all ranks. They are read from the device one
launch after they were counted, when the copy has long arrived: nobody waits for the device, and all act at one step.
"""

from collections import deque
from typing import Any

import torch
from torch import Tensor

from isoscale.engine.step.step import Step
from isoscale.engine.stopping import StopRequest
from isoscale.parallel.collectives import Ranks

EVALUATION_EVERY = 8
"""Batches of an evaluation between two votes."""


class Agreement:
    """Asked between launches, on every rank alike, whether there is something to do."""

    def __init__(self, ranks: Ranks, request: StopRequest, step: Step | None = None) -> None:
        """What this rank was asked for is in `request`; votes travel with the reductions of a step, if there is one."""
        self._ranks = ranks
        self._request = request
        self._step = step
        self._cast = (0.0, 0.0)
        self._outcomes: deque[tuple[Tensor, Any]] = deque()
        self._saves = 0
        self._evaluated = 0
        self.stopped = False
        """Whether all have agreed to stop."""
        self.save_due = False
        """Whether all have agreed to save; whoever saves takes it back."""

    def __call__(self) -> bool:
        """Whether the launches must be interrupted, to stop or to save."""
        wishes = (float(self._request()), float(self._request.saves))
        if self._ranks.alone:
            return self._act(*wishes)
        if self._step is None:
            votes = torch.tensor(wishes)
            self._ranks.all_reduce(votes, "a vote")
            return self._act(*votes.tolist())
        if wishes != self._cast:
            self._cast = wishes
            for place, wish in zip(self._step.ballot.unbind(), wishes, strict=True):
                place.fill_(wish)
        return self._act(*self._counted(self._step.votes))

    def _counted(self, votes: Tensor) -> list[float]:
        """The votes of the last step; from a CUDA device, those of the launch before, which have arrived already."""
        if votes.device.type != "cuda":
            return votes.tolist()
        copy = torch.empty(votes.shape, dtype=votes.dtype, pin_memory=True)
        copy.copy_(votes, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._outcomes.append((copy, event))
        if len(self._outcomes) < 3:
            return [0.0] * len(copy)
        earlier, arrived = self._outcomes.popleft()
        arrived.synchronize()
        return earlier.tolist()

    def _act(self, stops: float, saves: float) -> bool:
        """Saves are counted up, so that one that was acted on is not acted on again when its vote is seen again."""
        self.stopped = self.stopped or stops > 0
        if saves > self._saves:
            self._saves, self.save_due = int(saves), True
        return self.stopped or self.save_due

    def in_evaluation(self) -> bool:
        """Whether to break off an evaluation, asked before each of its batches."""
        if self._ranks.alone:
            self.stopped = self._request()
        elif self._evaluated % EVALUATION_EVERY == 0:
            self.stopped = self._ranks.any(self._request(), "a vote in an evaluation")
        self._evaluated += 1
        return self.stopped

    def begin_evaluation(self) -> None:
        """Count batches from here, on all ranks alike."""
        self._evaluated = 0

    @property
    def reason(self) -> str:
        """Why to stop, of whoever was asked; all ranks must ask for it."""
        reasons = self._ranks.all_gather(self._request.reason, "why to stop")
        return next((reason for reason in reasons if reason), "a request")
