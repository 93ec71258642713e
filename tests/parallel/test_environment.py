"""Who a process is, from the variables of each launcher."""

import pytest

from isoscale.errors import UserError
from isoscale.parallel.environment import Environment, find

PLAIN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"}
LOCAL = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {**PLAIN, **LOCAL, "GROUP_RANK": "1", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2"}


def test_without_variables_a_process_is_alone():
    assert find({}) == Environment()
    assert (find({}).rank, find({}).world) == (0, 1)


def test_plain_variables_say_who_and_where():
    found = find(PLAIN)
    assert (found.rank, found.world, found.address, found.port) == (3, 8, "n1", 29500)
    assert (found.local_rank, found.local_world, found.store_runs) == (None, None, False)
    assert (find({**PLAIN, **LOCAL}).local_rank, find({**PLAIN, **LOCAL}).local_world) == (1, 2)


def test_a_world_of_one_needs_no_address():
    assert find({"RANK": "0", "WORLD_SIZE": "1"}).world == 1


def test_torchrun_may_host_the_store_and_counts_its_attempts():
    found = find({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert (found.launcher, found.rank, found.store_runs, found.attempt) == ("torchrun", 3, True, "2")
    assert not find({**TORCHRUN, "TORCHELASTIC_USE_AGENT_STORE": "False"}).store_runs


def test_ranks_of_our_own_launcher_know_whose_end_is_theirs():
    assert find({**PLAIN, **LOCAL, "ISOSCALE_LAUNCHER": "77"}).parent == 77
    assert find(PLAIN).parent is None
    assert find({"ISOSCALE_LAUNCHER": "77"}) == Environment(), "what a rank starts without ranks is alone"


def test_the_machine_of_a_rank_is_known_where_ranks_are_counted_through():
    assert [find({**PLAIN, **LOCAL}).node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert find(PLAIN).node_of(0) is None
    assert find({**PLAIN, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}).node_of(0) is None, "dealt out in turns"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, "RANK is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not"),
        ({**PLAIN, "RANK": "8"}, "RANK is 8, but WORLD_SIZE is 8: ranks are counted from 0 to 7"),
        ({**PLAIN, "RANK": "one"}, "RANK is 'one', but must be a whole number of at least 0"),
        ({**PLAIN, "RANK": "-1"}, "RANK is '-1'"),
        ({**PLAIN, "WORLD_SIZE": "0"}, "WORLD_SIZE is '0', but must be a whole number of at least 1"),
        ({**PLAIN, "MASTER_ADDR": ""}, "WORLD_SIZE is 8, but MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set: set them to the host of rank 0"),
        ({**PLAIN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({**PLAIN, "MASTER_PORT": "70000"}, "ports end at 65535"),
        ({**PLAIN, "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK is 2, but LOCAL_WORLD_SIZE is 2"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(variables: dict[str, str], words: str):
    with pytest.raises(UserError) as refused:
        find(variables)
    assert words in str(refused.value) and "\n" not in str(refused.value)
