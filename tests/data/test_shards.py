"""Shards over ranks: whatever the number of ranks, together they compute the batch of one, each row once."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isoscale.data.shards import Range, cut, owned_shards, rank_parts, rank_share, valid_worlds
from isoscale.errors import UserError

WORLDS = [1, 2, 4, 8]


def flat(parts: list[list[Range]]) -> list[Range]:
    return [rows for shard in parts for rows in shard]


@given(st.integers(0, 200), st.sampled_from(WORLDS), st.integers(1, 4))
def test_a_tree_computes_the_same_parts_on_any_number_of_ranks(size: int, world: int, num_micro: int) -> None:
    of_one = flat(rank_parts(size, num_micro, 8))
    assert [rows for rank in range(world) for rows in flat(rank_parts(size, num_micro, 8, rank, world))] == of_one
    assert sorted(row for start, stop in of_one for row in range(start, stop)) == list(range(size))


@given(st.integers(0, 200), st.integers(1, 7), st.integers(1, 4))
def test_ranks_without_shards_share_out_every_row_once(size: int, world: int, num_micro: int) -> None:
    rows = [
        row
        for rank in range(world)
        for start, stop in flat(rank_parts(size, num_micro, 1, rank, world))
        for row in range(start, stop)
    ]
    assert sorted(rows) == list(range(size))


@given(st.integers(0, 200), st.integers(1, 7), st.integers(1, 4))
def test_micro_batches_of_all_ranks_are_those_of_one(size: int, world: int, num_micro: int) -> None:
    edges = [size * micro // num_micro for micro in range(num_micro + 1)]
    for rank in range(world):
        for start, stop in flat(rank_parts(size, num_micro, 1, rank, world)):
            assert any(first <= start and stop <= last for first, last in pairwise(edges))


def test_shares_differ_by_at_most_one_row() -> None:
    assert sorted(stop - start for start, stop in cut(10, 4)) == [2, 2, 3, 3]
    assert [flat(rank_parts(2, 1, 1, rank, 4)) for rank in range(4)] == [[], [(0, 1)], [], [(1, 2)]]


@given(st.integers(0, 200), st.sampled_from(WORLDS), st.integers(1, 4), st.sampled_from([1, 8]), st.data())
def test_a_share_gathered_and_cut_again_is_what_the_rank_computes(size, world, num_micro, num_shards, data) -> None:
    rank = data.draw(st.integers(0, world - 1))
    share = rank_share(size, num_micro, num_shards, rank, world)
    gathered = [row for start, stop in share.rows for row in range(start, stop)]
    parts = rank_parts(size, num_micro, num_shards, rank, world)
    cut_again = [[gathered[start:stop] for start, stop in shard] for shard in share.parts]
    assert cut_again == [[list(range(start, stop)) for start, stop in shard] for shard in parts]
    assert share.count == len(gathered)
    assert all(earlier[1] < later[0] for earlier, later in pairwise(share.rows))  # as few ranges as possible


def test_owned_shards_are_contiguous_and_complete() -> None:
    assert [list(owned_shards(rank, 4, 8)) for rank in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert valid_worlds(8) == [1, 2, 4, 8] and valid_worlds(12) == [1, 2, 4]


@pytest.mark.parametrize(("world", "nearest"), [(3, "2 or 4"), (6, "4 or 8"), (16, "8")])
def test_other_numbers_of_ranks_are_refused_with_the_nearest(world: int, nearest: str) -> None:
    with pytest.raises(UserError, match=f"on {world} ranks.*use {nearest}, or parallel.reduce=flat"):
        owned_shards(0, world, 8)
