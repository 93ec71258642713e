"""The processes that train together, and the few things that they tell each other.

Everything above works with a `Ranks`, also when there is only one: `ALONE` answers without a process group. Tensors
travel through the backend of their device (NCCL, XCCL, Gloo), plain values through the host's.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isoscale.parallel.messages import pack, unpack
from isoscale.parallel.rank_info import Facts
from isoscale.parallel.secret import Key


def _nobody_watches(what: str) -> None:
    pass


@dataclass(frozen=True)
class Ranks:
    """Who this process is among those that train together."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Number of this process on its host."""
    hosts: tuple[str, ...] = ("localhost",)
    """The host of every rank."""
    backend: str = "gloo"
    """What carries tensors on the device: nccl, xccl or gloo."""
    tick: Callable[[str], None] = field(default=_nobody_watches, compare=False)
    """Told what this rank is about to wait for, so that one that hangs can be named."""
    key: Key = field(default=Key(b""), compare=False, repr=False)
    """Signs what this rank tells the others."""
    facts: tuple[Facts, ...] = field(default=(), compare=False)
    """Of all ranks on rank 0, of those on the same host elsewhere; of none that is alone."""

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all: it alone writes files and talks to the user."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is nobody to agree with."""
        return self.world_size == 1

    @property
    def num_here(self) -> int:
        """Ranks on this host, which share its cores."""
        return self.hosts.count(self.hosts[self.rank]) if self.rank < len(self.hosts) else 1

    def on_cpu(self) -> "Ranks":
        """The same ranks, without their devices."""
        return replace(self, backend="gloo", facts=tuple(replace(each, device="cpu") for each in self.facts))

    def facts_of(self, rank: int) -> Facts:
        """What a rank told, if it told it to this one."""
        return next(each for each in self.facts if each.rank == rank)

    @property
    def fewest_cores(self) -> int | None:
        """Cores that the rank with the fewest has for itself; None where that is not known."""
        sharing = Counter((each.host, each.cores) for each in self.facts)
        return min((len(cores) // count for (_, cores), count in sharing.items()), default=0) or None

    def all_reduce(self, tensor: Tensor, what: str = "a sum over ranks") -> None:
        """Add the tensors of all ranks, in place."""
        if not self.alone:
            self.tick(what)
            dist.all_reduce(tensor)

    def exchange(self, mine: Tensor, theirs: Tensor, partner: int) -> None:
        """Send `mine` to another rank and receive what it sends into `theirs`; it does the same."""
        through_host = self.backend == "gloo" and mine.device.type != "cpu"
        sent, received = (mine.cpu(), torch.empty_like(theirs, device="cpu")) if through_host else (mine, theirs)
        operations = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        if through_host:
            theirs.copy_(received)

    def broadcast(self, value: Any, what: str = "a word of rank 0") -> Any:
        """The value of rank 0, plain data and tensors, on every rank; only rank 0 needs to give one."""
        if self.alone:
            return value
        self.tick(what)
        packed = pack(value, what, self.key) if self.is_main else torch.empty(0, dtype=torch.uint8)
        size = torch.tensor([len(packed)])
        dist.broadcast(size, 0)
        if not self.is_main:
            packed = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(packed, 0)
        return value if self.is_main else unpack(packed, what, self.key)

    def broadcast_tensor(self, tensor: Tensor) -> None:
        """Fill a tensor on the host with that of rank 0."""
        if not self.alone:
            self.tick("a tensor of rank 0")
            dist.broadcast(tensor, 0)

    def all_gather(self, value: Any, what: str = "a word of every rank") -> list[Any]:
        """The values of all ranks, plain data and tensors, on every rank."""
        if self.alone:
            return [value]
        self.tick(what)
        packed = pack(value, what, self.key)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        dist.all_gather(list(sizes.split(1)), torch.tensor([len(packed)]))
        heard = torch.empty(self.world_size, int(sizes.max()), dtype=torch.uint8)
        dist.all_gather(list(heard.unbind()), torch.nn.functional.pad(packed, (0, heard.shape[1] - len(packed))))
        return [unpack(each[:size], what, self.key) for each, size in zip(heard, sizes.tolist(), strict=True)]

    def any(self, wanted: bool, what: str = "a vote") -> bool:
        """Whether at least one rank wants something; all get the same answer."""
        if self.alone:
            return wanted
        votes = torch.tensor([float(wanted)])
        self.all_reduce(votes, what)
        return bool(votes[0] > 0)

    def name(self, rank: int) -> str:
        """A rank in words, with its host."""
        return f"rank {rank} on {self.hosts[rank]}" if rank < len(self.hosts) else f"rank {rank}"

    def names(self, ranks: Sequence[int]) -> str:
        """Several ranks in words."""
        return ", ".join(self.name(rank) for rank in ranks)


ALONE = Ranks()
