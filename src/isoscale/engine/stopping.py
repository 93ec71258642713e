"""Requests to stop or to save: from signals, from files in the run directory, from the clock. They only set flags.

Where several ranks train together, they agree at which step to stop, without waiting for each other in between.
"""

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from isoscale.engine.step.step import Step
from isoscale.errors import RunGone
from isoscale.parallel.collectives import Ranks
from isoscale.parallel.environments.batch import batch_end
from isoscale.system import devices, signals
from isoscale.system.printing import shout

_LOOK_EVERY = 1.0
"""Seconds between two looks at files and clock."""
_MARGIN = 30.0
"""Seconds before a deadline that are left in any case: for the vote, the last launch, and the end of the process."""
STOP, SAVE = "STOP", "SAVE"


class StopRequest:
    """What someone asked for. The first request to stop finishes the launch and saves; a second Ctrl-C stops now."""

    def __init__(self) -> None:
        """Nobody has asked for anything yet, and there is nothing to look at."""
        self.reason: str | None = None
        """Why to stop, once somebody wants it."""
        self._signals = signals.Requests()
        self.saves = 0
        """How often a checkpoint was asked for."""
        self._folder: Path | None = None
        self._check: Callable[[], None] = lambda: None
        self._save_every: float | None = None
        self._deadline: float | None = None
        self._next_look = 0.0
        self._saved_at = time.monotonic()
        self._longest_save = 0.0

    def __call__(self) -> bool:
        """Whether somebody wants to stop."""
        if time.monotonic() >= self._next_look:
            self._look()
        return self.reason is not None

    def watch(
        self, folder: Path | None, save_every: float | None, deadline: float | None,
        check: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Look for the files STOP and SAVE in a folder, save every so many seconds, stop before a time of the clock.

        `check` raises where the folder is not this process's any more, and such files are meant for somebody else.
        """
        self._folder, self._save_every, self._deadline, self._check = folder, save_every, deadline, check

    def saved(self, seconds: float) -> None:
        """A checkpoint was written, which took so long."""
        self._saved_at = time.monotonic()
        self._longest_save = max(seconds, self._longest_save)

    def _look(self) -> None:
        now = time.monotonic()
        self._next_look = now + _LOOK_EVERY
        if self._folder is not None and self._taken(STOP):
            self._ask(f"the file {STOP}")
        if self._folder is not None and self._taken(SAVE):
            self.saves += 1
        if self._save_every is not None and now - self._saved_at >= self._save_every:
            self._saved_at = now
            self.saves += 1
        if self._deadline is not None and time.time() > self._deadline - _MARGIN - 2 * self._longest_save:
            at = time.strftime("%H:%M:%S", time.localtime(self._deadline))
            self._ask(f"the deadline at {at}")
            self._deadline = None

    def _taken(self, name: str) -> bool:
        """Whether a file is there; it asks once, so it is removed."""
        assert self._folder is not None
        if not (self._folder / name).exists():
            return False
        try:
            self._check()
            (self._folder / name).unlink()
        except (OSError, RunGone):
            return False
        return True

    def _ask(self, reason: str) -> None:
        self.reason = self.reason or reason

    def _handle(self, number: int, frame: FrameType | None) -> None:
        meaning, name = self._signals.meaning(number), signal.Signals(number).name
        if meaning == "now":
            shout("\nstopping now; the last checkpoint is the place to go on from\n")
            raise KeyboardInterrupt
        if meaning == "first":
            self._ask(name)
            self._told(name, "; Ctrl-C again stops now" if number == signal.SIGINT else "")

    _told: Callable[[str, str], Any] = staticmethod(
        lambda name, hint: shout(f"\n{name}: finishing the launch and saving{hint}\n")
    )

    @contextmanager
    def listening(self, aloud: bool = True) -> Iterator[None]:
        """Handle signals for a while, and say so; outside of the main thread there is nothing to handle.

        May be used inside itself.
        """
        if not aloud:
            self._told = lambda name, hint: None
        with signals.hearing(self._handle):
            yield


def deadline(stop_after: float | None, environment: Mapping[str, str] = os.environ) -> float | None:
    """When training must have stopped: after so many seconds, or when the scheduler ends the job; by the clock."""
    limits = [] if stop_after is None else [time.time() + stop_after]
    job_ends = batch_end(environment)
    limits += [] if job_ends is None else [job_ends]
    return min(limits, default=None)


EVALUATION_EVERY = 8
"""Batches of an evaluation between two votes."""


class Agreement:
    """Asked between launches, on every rank alike, whether there is something to do."""

    def __init__(
        self, ranks: Ranks, request: StopRequest, step: Step | None = None,
        wants_end: Callable[[], bool] = lambda: False, at_once: bool = False,
    ) -> None:  # fmt: skip
        """What this rank was asked for is in `request`; votes travel with the reductions of a step, if there is one.

        `wants_end` says whether a hook of this rank has asked the training to end. Votes arrive a step later; with
        `at_once`, because hooks see every step, ranks meet after each for that.
        """
        self._ranks = ranks
        self._request = request
        self._step = step
        self._wants_end = wants_end
        self._at_once = at_once
        self._cast = (0.0, 0.0, 0.0)
        self._outcomes: deque[devices.Arrival] = deque()
        self._saves = 0
        self._evaluated = 0
        self.stopped = False
        """Whether all have agreed to stop."""
        self.save_due = False
        """Whether all have agreed to save; whoever saves takes it back."""
        self.ending = False
        """Whether all have agreed that training ends here."""

    def __call__(self) -> bool:
        """Whether the launches must be interrupted, to stop, to save or to end."""
        wishes = (float(self._request()), float(self._request.saves), float(self._wants_end()))
        if self._ranks.alone:
            return self._act(*wishes)
        if self._step is None:
            votes = torch.tensor(wishes)
            self._ranks.all_reduce(votes, "a vote")
            return self._act(*votes.tolist())
        if self._at_once and self.agree_to_end():
            return True
        if wishes != self._cast:
            self._cast = wishes
            for place, wish in zip(self._step.ballot.unbind(), wishes, strict=True):
                place.fill_(wish)
        return self._act(*self._counted(self._step.votes))

    def _counted(self, votes: Tensor) -> list[float]:
        """The votes of the last step; from a CUDA device, those of the launch before, which have arrived already."""
        device = devices.of(votes.device)
        if not device.copies_beside:
            return votes.tolist()
        self._outcomes.append(device.fetched(votes))
        if len(self._outcomes) < 3:
            return [0.0] * len(votes)
        return self._outcomes.popleft().wait().tolist()

    def agree_to_end(self) -> bool:
        """Whether a hook of any rank has asked the training to end; all ranks must ask."""
        self.ending = self.ending or self._ranks.any(self._wants_end(), "whether training ends")
        return self.ending

    def _act(self, stops: float, saves: float, ends: float) -> bool:
        """Saves are counted up, so that one that was acted on is not acted on again when its vote is seen again."""
        self.stopped = self.stopped or stops > 0
        if saves > self._saves:
            self._saves, self.save_due = int(saves), True
        self.ending = self.ending or ends > 0
        return self.stopped or self.save_due or self.ending

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
