from dataclasses import replace

from isoscale.parallel.health import probe as network
from isoscale.parallel.health.probe import Speed


def test_a_door_is_reached_and_another_machine_is_not_taken_for_it():
    with network._listening("n1", "lo", "127.0.0.1") as door:
        assert network._try(door) == ""
        assert network._try(replace(door, token="0" * 16)) == "another machine answers there"
    assert network._try(door) == "Connection refused"


def test_what_is_blocked_is_named_from_where_to_where():
    with network._listening("n1", "lo", "127.0.0.1") as mine, network._listening("n2", "lo", "127.0.0.1") as other:
        shut = replace(other, host="n3", token="0" * 16)
        (blocked,) = network._try_all(mine, [mine, other, shut])
    assert (blocked.origin, blocked.target, blocked.port) == ("n1", "n3", other.port)


def test_an_interface_that_is_not_here_is_noticed():
    for names, is_here in (("lo", True), ("", True), ("lo,eth77", False), ("eth77", False)):
        with network._listening("host", names, "127.0.0.1") as door:
            assert door.has_interface == is_here


def test_the_bandwidth_is_that_of_the_tensor():
    assert Speed(1e-6, 0.5, 10**9).bandwidth == 2e9
