"""Which rows of a global batch a rank computes, and in which parts: pure functions of rank and world size.

In `tree` a batch has a fixed number of shards and a rank owns a contiguous range of them, so that every shard is
computed alike on any number of ranks. In the other reductions each rank takes one contiguous share of the batch, as
if there were a shard for each.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from isoscale.errors import UserError

Range = tuple[int, int]
"""From a row to the row before another."""


@dataclass(frozen=True)
class Share:
    """What a rank takes of a batch."""

    rows: list[Range]
    """The rows of the batch, as few ranges as they make."""
    parts: list[list[Range]]
    """[shard][micro-batch], counted among these rows alone; the shards of other ranks are empty."""

    @cached_property
    def count(self) -> int:
        """Number of rows."""
        return sum(stop - start for start, stop in self.rows)

    @cached_property
    def only(self) -> int | None:
        """The shard that is all of it, where it is computed at once."""
        owned = [shard for shard, parts in enumerate(self.parts) if parts]
        return owned[0] if len(owned) == 1 and len(self.parts[owned[0]]) == 1 else None


def cut(size: int, pieces: int) -> list[Range]:
    """`pieces` contiguous ranges of equal length, give or take one."""
    edges = [size * piece // pieces for piece in range(pieces + 1)]
    return list(pairwise(edges))


def check_world(world: int, num_shards: int) -> None:
    """Refuse a number of ranks that cannot share out the shards of a tree evenly, with those nearest to it that can."""
    valid = valid_worlds(num_shards)
    if world not in valid:
        below = [count for count in valid if count < world]
        above = [count for count in valid if count > world]
        nearest = " or ".join(str(count) for count in (*below[-1:], *above[:1]))
        raise UserError(
            f"parallel.reduce: tree with {num_shards} shards cannot run on {world} ranks: rank counts are powers of "
            f"two up to the shards; use {nearest}, or parallel.reduce=flat"
        )


def valid_worlds(num_shards: int) -> list[int]:
    """The numbers of ranks that can share out `num_shards` shards: powers of two that divide them."""
    return [1 << power for power in range(num_shards.bit_length()) if num_shards % (1 << power) == 0]


def owned_shards(rank: int, world: int, num_shards: int) -> range:
    """The shards of a rank: a contiguous range, as many for each rank."""
    check_world(world, num_shards)
    each = num_shards // world
    return range(rank * each, (rank + 1) * each)


def rank_parts(size: int, num_micro: int, num_shards: int, rank: int = 0, world: int = 1) -> list[list[Range]]:
    """The row ranges [shard][micro-batch] that a rank computes of a batch of `size`; empty ones are left out.

    Without shards (one), there are as many as ranks, cut out of each micro-batch, so that the micro-batches of all
    ranks together are those of one.
    """
    if num_shards > 1:
        owned, pieces = owned_shards(rank, world, num_shards), cut(size, num_micro * num_shards)
    else:
        owned, num_shards = range(rank, rank + 1), world
        pieces = [(first + start, first + stop) for first, last in cut(size, num_micro)
                  for start, stop in cut(last - first, world)]  # fmt: skip
    return [
        [(start, stop) for start, stop in pieces[shard::num_shards] if stop > start] if shard in owned else []
        for shard in range(num_shards)
    ]


def rank_share(size: int, num_micro: int, num_shards: int, rank: int = 0, world: int = 1) -> Share:
    """What a rank takes of a batch of `size`, and how that is cut once it is gathered."""
    parts = rank_parts(size, num_micro, num_shards, rank, world)
    ordered = sorted(rows for shard in parts for rows in shard)
    begins: dict[int, int] = {}
    merged: list[Range] = []
    count = 0
    for start, stop in ordered:
        begins[start] = count
        count += stop - start
        touches = bool(merged) and merged[-1][1] == start
        merged[-1:] = [(merged[-1][0], stop)] if touches else [*merged[-1:], (start, stop)]
    own = [[(begins[start], begins[start] + stop - start) for start, stop in shard] for shard in parts]
    return Share(merged, own)
