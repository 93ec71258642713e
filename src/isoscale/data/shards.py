"""Which rows of a global batch a rank computes: pure functions of rank and world size.

In `tree` a batch has a fixed number of shards and a rank owns a contiguous range of them, so that every shard is
computed alike on any number of ranks. In the other reductions each rank takes one contiguous share of the batch.
"""

from isoscale.data.batches import BatchPlan, cut
from isoscale.errors import UserError


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


def rank_rows(size: int, rank: int, world: int) -> tuple[int, int]:
    """The rows of a batch of `size` that a rank takes where there are no shards; none where ranks outnumber rows."""
    return cut(size, world)[rank]


def rank_parts(plan: BatchPlan, size: int, rank: int, world: int) -> list[tuple[int, int]]:
    """The row ranges that a rank computes of a batch of `size`, in the order in which it computes them."""
    if plan.num_shards > 1:
        shards = plan.parts(size)
        return [rows for shard in owned_shards(rank, world, plan.num_shards) for rows in shards[shard]]
    return [(start, stop) for start, stop in _micro_batches(plan, size, rank, world) if stop > start]


def _micro_batches(plan: BatchPlan, size: int, rank: int, world: int) -> list[tuple[int, int]]:
    """A rank's share of each micro-batch, so that the micro-batches of all ranks together are those of one rank."""
    shares = []
    for first, last in cut(size, plan.num_micro):
        start, stop = rank_rows(last - first, rank, world)
        shares.append((first + start, first + stop))
    return shares
