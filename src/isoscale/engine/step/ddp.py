"""`overlap`: gradients travel while others are still computed, in the buckets of torch's DistributedDataParallel."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isoscale.engine.diagnose.profile import Profile, Travels
from isoscale.errors import UserError
from isoscale.parallel.collectives import Ranks
from isoscale.parallel.reduction import FlatReducer
from isoscale.system.devices import Moment


class Overlap:
    """A task's step method wrapped so that its backward pass adds up the gradients of all ranks."""

    def __init__(self, task: nn.Module, compute: Callable[..., Any], ranks: Ranks) -> None:
        """Wrap `compute`, which runs the task; weights are equal on all ranks already."""
        self.ranks = ranks
        self.reducer = FlatReducer(ranks, torch.float64)
        """For what is small: losses, counts, votes."""
        self._method = _Method(task, compute)
        self._parameters = dict(task.named_parameters())
        self._trainable = self._flags()
        self.module = self._wrapped()
        self.profile: Profile | None = None
        """Told when each bucket travelled, where somebody wants to know where time goes."""
        self._travels: Travels = []

    def _wrapped(self) -> DistributedDataParallel:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the new name for broadcast_buffers is not in all versions
            module = DistributedDataParallel(
                self._method, broadcast_buffers=False, gradient_as_bucket_view=True, init_sync=False
            )
        module.register_comm_hook(self, _add)
        return module

    def _flags(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._parameters.values()]

    def __call__(self, batch: Any, batch_idx: int) -> Any:
        """Run the step method."""
        return self.module(batch, batch_idx)

    def began(self) -> None:
        """A batch begins; where other parameters require gradients than before, they get buckets anew."""
        self._travels = []
        found = self._flags()
        if found != self._trainable:
            del self.module  # takes its hooks off the parameters
            self._trainable, self.module = found, self._wrapped()
        for name, parameter in self._parameters.items():
            if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
                raise UserError(
                    f"{name} has a hook on its gradient, which would see that of one rank in parallel.reduce: overlap; "
                    "use parallel.reduce=flat, where it sees that of the whole batch"
                )

    def travelled(self, begin: Moment) -> None:
        """A bucket that began to travel then has arrived."""
        assert self.profile is not None
        self._travels.append((begin, self.profile.moment()))

    def ended(self) -> None:
        """All buckets of a batch have arrived."""
        if self.profile is not None:
            self.profile.communicated(self._travels)

    def no_sync(self, wanted: bool) -> Any:
        """Keep the gradients of all but the last micro-batch to this rank."""
        return self.module.no_sync() if wanted else nullcontext()


class _Method(nn.Module):
    """A step method as a module, which is what DistributedDataParallel takes."""

    def __init__(self, task: nn.Module, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.task = task
        self._compute = compute

    def forward(self, batch: Any, batch_idx: int) -> Any:
        """Call the method."""
        return self._compute(batch, batch_idx)


def _add(overlap: Overlap, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """The sum over ranks; the step divides by the weight of the whole batch."""
    begin = overlap.profile.moment() if overlap.profile is not None else None
    work = dist.all_reduce(bucket.buffer(), async_op=True)

    def arrived(done: Any) -> Tensor:
        if begin is not None:
            overlap.travelled(begin)
        result: Tensor = done.value()[0]
        return result

    future: torch.futures.Future[Tensor] = work.get_future().then(arrived)
    return future


def missing_gradients_in_words(compute: Callable[..., Any], *arguments: Any) -> Any:
    """A forward pass; it is there that torch notices parameters without a gradient in the step before."""
    try:
        return compute(*arguments)
    except RuntimeError as error:
        if "finished reduction" not in str(error):
            raise
        raise UserError(
            "parallel.reduce: overlap needs a gradient for every parameter, and some got none; use "
            "parallel.reduce=flat, or freeze them (requires_grad_(False))"
        ) from error
