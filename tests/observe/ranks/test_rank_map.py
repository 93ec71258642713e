"""The start-up summary says which rank is where, in few lines for any number of hosts."""

from isoscale.observe.ranks.rank_map import rank_map, rank_rows
from isoscale.parallel.rank_info import Facts


def on_cpu(rank: int, host: str, *cores: int) -> Facts:
    return Facts(rank, host, 1000 + rank, cores=cores)


def on_gpu(rank: int, host: str, index: int, *cores: int) -> Facts:
    return Facts(rank, host, 1, f"cuda:{index}", "NVIDIA H200", "CUDA_VISIBLE_DEVICES=0,1", 0, cores)


def test_a_few_ranks_are_named_one_by_one():
    facts = [on_cpu(0, "n1", 0, 1), on_cpu(1, "n1", 2, 3), on_cpu(2, "n2", 0)]
    assert rank_rows(facts, 2) == [
        ("n1", "rank 0: cpu, cores 0-1; rank 1: cpu, cores 2-3; 2 threads each"),
        ("n2", "rank 2: cpu, core 0, 2 threads"),
    ]


def test_ranks_that_share_their_cores_are_told_together():
    assert rank_rows([on_cpu(0, "n1", 0, 1), on_cpu(1, "n1", 0, 1)], 1) == [
        ("n1", "ranks 0-1: cpu, cores 0-1 for all, 1 thread each")
    ]


def test_gpus_have_names_and_no_threads():
    assert rank_rows([on_gpu(0, "n1", 0, 0, 1), on_gpu(1, "n1", 1, 2, 3)], 8) == [
        ("n1", "rank 0: cuda:0 (NVIDIA H200), cores 0-1; rank 1: cuda:1 (NVIDIA H200), cores 2-3")
    ]
    eight = [on_gpu(rank, "n1", rank, 2 * rank, 2 * rank + 1) for rank in range(8)]
    assert rank_rows(eight, 8) == [("n1", "ranks 0-7: cuda:0-7 (NVIDIA H200), 2 cores each")]


def test_many_hosts_that_are_alike_share_a_row():
    facts = [on_gpu(rank, f"n{rank // 4:02d}", rank % 4, rank % 4) for rank in range(64)]
    facts += [on_cpu(64, "login")]
    assert rank_rows(facts, 1) == [
        ("n00 … n15", "ranks 0-63, on each of 16 hosts: cuda:0-3 (NVIDIA H200), 1 core each"),
        ("login", "rank 64: cpu, 1 thread"),
    ]


def test_of_many_hosts_that_all_differ_the_others_are_counted():
    rows = rank_rows([on_cpu(rank, f"n{rank}", rank) for rank in range(20)], 1)
    assert len(rows) == 9 and rows[-1] == ("…", "12 more hosts")


def test_the_map_of_a_run_has_an_entry_for_every_rank():
    assert rank_map([on_gpu(3, "n1", 1, 4, 5)], 2) == [
        {"rank": 3, "host": "n1", "process": 1, "device": "cuda:1", "name": "NVIDIA H200", "cores": "4-5", "threads": 2,
         "visible": "CUDA_VISIBLE_DEVICES=0,1"}
    ]  # fmt: skip
