"""What ranks say reaches its place in order, a flood is bounded, and nobody waits."""

import threading
from collections.abc import Sequence

from isoscale.observe.events import Said
from isoscale.observe.ranks import sender as couriers
from isoscale.observe.ranks.sender import Courier, Dropped, merged


class Place:
    """Keeps what is delivered to it, as far as it takes any."""

    def __init__(self) -> None:
        self.words: list[Said] = []
        self.room: int | None = None

    def __call__(self, words: Sequence[Said]) -> int:
        taken = words[: self.room]
        self.words += taken
        return len(taken)

    def texts(self, rank: int = 0) -> list[str]:
        return [said.text for said in self.words if said.rank == rank]


def test_the_lines_of_each_rank_arrive_in_their_order() -> None:
    place = Place()
    courier = Courier(place)
    for number in range(100):
        courier.say(Said(str(number), rank=number % 2))
    assert courier.close() == []
    assert place.texts(0) == [str(number) for number in range(0, 100, 2)]
    assert place.texts(1) == [str(number) for number in range(1, 100, 2)]


def test_of_a_flood_the_last_lines_arrive_and_the_others_are_counted() -> None:
    place, courier = blocked()
    for number in range(100_000):
        courier.say(Said(str(number)))
    assert sum(len(held) for held in courier._held.values()) <= couriers.MOST_HELD
    place.room = None
    courier.close(5)
    assert place.texts()[-1] == "99999" and len(place.words) <= couriers.MOST_HELD + 1
    [dropped] = [said for said in place.words if isinstance(said, Dropped)]
    assert dropped.num_lines + len(place.words) - 1 == 100_000
    assert dropped.text.startswith(f"{dropped.num_lines:,} lines were dropped here")


def blocked() -> tuple[Place, Courier]:
    """Someone who takes nothing yet."""
    place = Place()
    place.room = 0
    return place, Courier(place)


def test_a_rank_that_floods_takes_no_room_from_others() -> None:
    place, courier = blocked()
    courier.say(Said("quiet", rank=1))
    for number in range(3 * couriers.MOST_HELD):
        courier.say(Said(str(number), rank=0))
    place.room = None
    courier.close(5)
    assert place.texts(1) == ["quiet"]


def test_a_count_that_is_dropped_on_the_way_is_still_counted() -> None:
    place, courier = blocked()
    courier.say(Dropped.count(500, rank=0))
    for number in range(couriers.MOST_HELD + 1):
        courier.say(Said(str(number)))
    place.room = None
    courier.close(5)
    [dropped] = [said for said in place.words if isinstance(said, Dropped)]
    assert dropped.num_lines + len(place.words) - 1 == 500 + couriers.MOST_HELD + 1


def test_what_cannot_be_delivered_keeps_its_place_and_comes_back_in_the_end() -> None:
    place = Place()
    place.room = 2
    courier = Courier(place)
    for number in range(7):
        courier.say(Said(str(number)))
    assert courier.flush(5)
    assert place.texts() == [str(number) for number in range(7)]
    place.room = 0
    courier.say(Said("left"))
    assert [said.text for said in courier.close()] == ["left"]
    assert not courier.say(Said("after the end"))


def test_words_of_the_one_who_delivers_are_not_taken() -> None:
    taken: list[bool] = []

    def deliver(words: Sequence[Said]) -> int:
        taken.append(courier.say(Said("about what was said")))
        return len(words)

    courier = Courier(deliver)
    courier.say(Said("one"))
    courier.flush()
    assert taken == [False]
    courier.close()


def test_who_says_something_does_not_wait_for_one_who_takes_long() -> None:
    entered, release = threading.Event(), threading.Event()

    def deliver(words: Sequence[Said]) -> int:
        entered.set()
        release.wait(20)
        return len(words)

    courier = Courier(deliver)
    courier.say(Said("one"))
    assert entered.wait(20)
    assert all([courier.say(Said("more")) for _ in range(10)])  # would hang here
    release.set()
    courier.close()


def test_what_one_rank_said_in_a_row_is_told_as_one() -> None:
    words = [Said("a"), Said("b"), Said("c", rank=1), Said("d", "warning", 1), Said("e")]
    assert [(said.text, said.rank) for said in merged(words)] == [("a\nb", 0), ("c", 1), ("d", 1), ("e", 0)]
