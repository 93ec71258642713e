"""Ranks of one machine divide its cores: made-up machines, as the system describes them in files."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isoscale.parallel import pinning
from isoscale.parallel.pinning import divide, in_words, node_of_device, own_share, read_nodes


@dataclass(frozen=True)
class Rank:
    rank: int
    cores: tuple[int, ...]
    node: int | None = None


def machine(root: Path, nodes: Sequence[Sequence[Sequence[int]]], devices: dict[str, int] | None = None) -> Path:
    """Nodes of cores of hardware threads, written as Linux does."""
    for number, cores in enumerate(nodes):
        write(root / f"devices/system/node/node{number}/cpulist", in_words([*chain.from_iterable(cores)]))
        for core in cores:
            for thread in core:
                write(root / f"devices/system/cpu/cpu{thread}/topology/core_cpus_list", in_words(core))
    for address, node in (devices or {}).items():
        write(root / f"bus/pci/devices/{address}/numa_node", str(node))
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(f"{text}\n")


TWO_SOCKETS = [[(0, 8), (1, 9), (2, 10), (3, 11)], [(4, 12), (5, 13), (6, 14), (7, 15)]]
"""Two hardware threads a core, numbered as most machines do."""
ALL = tuple(range(16))


def shares(root: Path, ranks: Sequence[Rank], threads: int | None = None, by_device: bool = False) -> list[str | None]:
    found = [own_share(each.rank, ranks, threads, by_device, root) for each in ranks]
    return [in_words(share) if share else None for share in found]


def test_hardware_threads_of_a_core_and_cores_of_a_node_stay_together(tmp_path: Path):
    machine(tmp_path, TWO_SOCKETS)
    assert shares(tmp_path, [Rank(rank, ALL) for rank in range(2)]) == ["0-3,8-11", "4-7,12-15"]
    assert shares(tmp_path, [Rank(rank, ALL) for rank in range(4)]) == [
        "0-1,8-9",
        "2-3,10-11",
        "4-5,12-13",
        "6-7,14-15",
    ]
    assert shares(tmp_path, [Rank(rank, ALL) for rank in range(3)]) == ["0-1,8-9", "2-3,10-11", "4-7,12-15"]


def test_more_ranks_than_cores_get_hardware_threads_and_more_than_these_are_left_alone(tmp_path: Path):
    machine(tmp_path, [[(0, 2), (1, 3)]])
    assert shares(tmp_path, [Rank(rank, (0, 1, 2, 3)) for rank in range(4)]) == ["0", "2", "1", "3"]
    assert shares(tmp_path, [Rank(rank, (0, 1, 2, 3)) for rank in range(5)]) == [None] * 5


def test_only_cores_that_ranks_may_use_are_divided(tmp_path: Path):
    machine(tmp_path, TWO_SOCKETS)
    assert shares(tmp_path, [Rank(rank, (2, 3, 4, 10)) for rank in range(2)]) == ["2-3,10", "4"]
    assert shares(tmp_path, [Rank(rank, (2, 3, 10)) for rank in range(2)]) == ["2,10", "3"]


def test_ranks_go_to_the_node_of_their_device(tmp_path: Path):
    machine(tmp_path, TWO_SOCKETS, {"0000:3b:00.0": 1, "0000:af:00.0": 0, "0000:01:00.0": -1})
    nodes = [node_of_device(address, tmp_path) for address in ("0000:3b:00.0", "0000:af:00.0")]
    ranks = [Rank(rank, ALL, node) for rank, node in enumerate(nodes)]
    assert shares(tmp_path, ranks, by_device=True) == ["4-7,12-15", "0-3,8-11"]
    assert shares(tmp_path, ranks) == ["0-3,8-11", "4-7,12-15"], "on the CPU, devices do not matter"
    both_on_one = [Rank(0, ALL, 1), Rank(1, ALL, 1)]
    assert shares(tmp_path, both_on_one, by_device=True) == ["4-5,12-13", "6-7,14-15"]
    assert node_of_device("0000:01:00.0", tmp_path) is None and node_of_device("0000:02:00.0", tmp_path) is None


def test_where_not_all_fit_beside_their_device_none_does(tmp_path: Path):
    machine(tmp_path, [[(0,), (1,), (2,)], [(3,)]])
    crowded = [Rank(rank, (0, 1, 2, 3), 1) for rank in range(2)]
    assert shares(tmp_path, crowded, by_device=True) == ["0-1", "2-3"]
    one_unknown = [Rank(0, (0, 1, 2, 3), 1), Rank(1, (0, 1, 2, 3), None)]
    assert shares(tmp_path, one_unknown, by_device=True) == ["0-1", "2-3"]


def test_ranks_that_somebody_has_pinned_are_left_alone(tmp_path: Path):
    machine(tmp_path, TWO_SOCKETS)
    assert shares(tmp_path, [Rank(0, (0, 8)), Rank(1, (1, 9))]) == [None, None]
    assert shares(tmp_path, [Rank(0, ALL)]) == [None]
    overlapping = [Rank(0, ALL), Rank(1, ALL), Rank(2, (0,))]
    assert shares(tmp_path, overlapping) == [None] * 3


def test_ranks_that_share_a_socket_divide_that(tmp_path: Path):
    machine(tmp_path, TWO_SOCKETS)
    sockets = [tuple(sorted(chain.from_iterable(cores))) for cores in TWO_SOCKETS]
    ranks = [Rank(rank, sockets[rank // 2]) for rank in range(4)]
    assert shares(tmp_path, ranks) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]


def test_ranks_with_more_threads_than_cores_are_left_alone(tmp_path: Path):
    machine(tmp_path, TWO_SOCKETS)
    ranks = [Rank(rank, ALL) for rank in range(4)]
    assert shares(tmp_path, ranks, threads=5) == [None] * 4
    assert None not in shares(tmp_path, ranks, threads=4)


def test_without_a_word_of_the_system_every_number_is_a_core_of_one_node(tmp_path: Path):
    assert read_nodes([3, 1, 2], tmp_path) == {0: [(1,), (2,), (3,)]}


@st.composite
def machines(draw: st.DrawFn) -> tuple[dict[int, pinning.Cores], list[int | None]]:
    """Nodes of different size, and ranks with or without devices."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=5))
    per_core = draw(st.integers(1, 3))
    num_cores, nodes, first = sum(sizes), {}, 0
    for number, size in enumerate(sizes):
        numbers = range(first, first + size)
        nodes[number] = [tuple(core + thread * num_cores for thread in range(per_core)) for core in numbers]
        first += size
    anywhere = st.one_of(st.none(), st.sampled_from(range(len(sizes))))
    return nodes, draw(st.lists(anywhere, min_size=1, max_size=16))


@given(machines())
def test_shares_are_disjoint_fair_and_within_the_machine(drawn: tuple[dict[int, pinning.Cores], list[int | None]]):
    nodes, near = drawn
    cores = [core for found in nodes.values() for core in found]
    allowed = {thread for core in cores for thread in core}
    found = divide(nodes, near)
    if found is None:
        assert len(near) > len(allowed)
        return
    flat = [*chain.from_iterable(found)]
    assert len(found) == len(near) and all(found) and len(set(flat)) == len(flat) and set(flat) <= allowed
    whole = len(cores) >= len(near)
    units = cores if whole else [(thread,) for thread in allowed]
    assert all(set(unit) <= set(share) or set(unit).isdisjoint(share) for unit in units for share in found)


@given(machines())
def test_without_devices_nobody_gets_less_than_an_even_part_and_one_node_where_that_is_possible(
    drawn: tuple[dict[int, pinning.Cores], list[int | None]],
):
    nodes, near = drawn
    cores = [core for found in nodes.values() for core in found]
    found = divide(nodes, [None] * len(near))
    if found is None or len(cores) < len(near):
        return
    per_core = len(cores[0])
    fewest = len(cores) // len(near)
    assert min(map(len, found)) >= fewest * per_core
    of_thread = {thread: node for node, each in nodes.items() for core in each for thread in core}
    if sum(len(each) // fewest for each in nodes.values()) >= len(near):
        assert all(len({of_thread[thread] for thread in share}) == 1 for share in found)
    else:
        assert max(map(len, found)) - min(map(len, found)) <= per_core


@given(machines())
def test_a_device_s_own_node_is_taken_where_that_is_possible_for_all(
    drawn: tuple[dict[int, pinning.Cores], list[int | None]],
):
    nodes, near = drawn
    known = [node for node in near if node is not None]
    if not known or any(known.count(node) > len(nodes[node]) for node in known):
        return
    found = divide(nodes, known)
    assert found is not None
    for node, share in zip(known, found, strict=True):
        assert set(share) <= {thread for core in nodes[node] for thread in core}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_all_threads_are_pinned_and_set_free_again():
    before = os.sched_getaffinity(0)
    go_on, seen = threading.Event(), []
    beside = threading.Thread(target=lambda: (go_on.wait(20), seen.append(os.sched_getaffinity(0))))
    beside.start()
    try:
        pinning.pin([min(before)])
        assert os.sched_getaffinity(0) == {min(before)}
        go_on.set()
        beside.join()
    finally:
        pinning.pin(before)
    assert seen == [{min(before)}] and os.sched_getaffinity(0) == before


def test_cores_are_written_as_the_system_does():
    assert [in_words(cores) for cores in ((0,), (0, 1, 2, 8), (3, 1), ())] == ["0", "0-2,8", "1,3", ""]
