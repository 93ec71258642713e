from concurrent.futures import ThreadPoolExecutor

import pytest

from isoscale.errors import UserError
from isoscale.parallel.environments.find import Environment
from isoscale.parallel.health import checkup
from isoscale.parallel.health.checkup import HealthCheck, RankSilent, why_alone
from isoscale.parallel.health.rendezvous import free_port


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> list[HealthCheck]:
    """Two ranks that have met, in threads of this process."""
    monkeypatch.setattr(checkup, "STAY", 0.0)
    port = free_port()
    ranks = [Environment("a test", rank, 2, address="127.0.0.1", port=port) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(HealthCheck, ranks))


def test_what_every_rank_tells_is_heard_by_all(both: list[HealthCheck]):
    with ThreadPoolExecutor(2) as pool:
        heard = list(pool.map(lambda each: each.share("number", 10 + each.rank), both))
        list(pool.map(lambda each: each.close(), both))
    assert heard == [[10, 11], [10, 11]]


def test_the_first_rank_of_a_host_speaks_for_it(both: list[HealthCheck]):
    assert [(each.is_first_here, each.local_rank) for each in both] == [(True, 0), (False, 1)]


def test_a_rank_that_no_longer_answers_is_named_once(both: list[HealthCheck]):
    first, second = both
    first.tell("word", 1)
    with pytest.raises(RankSilent, match=r"rank 1 on \S+ did not answer for 0.2 s") as found:
        first.hear("word", 0.2)
    assert found.value.speaks
    first.call_off()
    with pytest.raises(RankSilent) as quiet:
        second.word("another", 60)
    assert not quiet.value.speaks


def test_why_a_rank_is_alone_is_said_in_words():
    port = free_port()
    text, advice = why_alone(Environment("a test", 3, 4, address="127.0.0.1", port=port)) or ("", "")
    assert f"cannot reach rank 0 at 127.0.0.1 port {port}: Connection refused" in text and "did not start" in advice
    text, advice = why_alone(Environment("a test", 3, 4, address="no.such.host.invalid", port=port)) or ("", "")
    assert "rank 3 on" in text and "does not know no.such.host.invalid" in text and "MASTER_ADDR" in advice


@pytest.mark.parametrize(
    ("address", "words"), [("192.0.2.7", "rank 0 is on"), ("no.such.host.invalid", "does not know")]
)
def test_rank_0_sees_that_the_others_look_for_it_elsewhere(monkeypatch: pytest.MonkeyPatch, address: str, words: str):
    monkeypatch.setattr(checkup, "PROBE", 0.2)
    with pytest.raises(UserError, match=words):
        HealthCheck(Environment("a test", 0, 2, address=address, port=free_port()))
