"""What several ranks say: together on rank 0, or each in its own file."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isoscale.observe.console import Console
from isoscale.observe.events import EpochEnded, Event, Logged, Note, Said, Started
from isoscale.observe.observers import Observers
from isoscale.observe.ranks.rank_log import MOST_SENT, Collector, RankFiles, Speaker, of_rank
from isoscale.observe.text_log import TextLog

STARTED = Started("images/digits", "runs/a", [("device", "cpu")], step=0, num_steps=690, steps_per_epoch=23)
EPOCH = EpochEnded(23, 0, {"val/loss": 0.4}, seconds=0.4)


class Kept:
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def notify(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass

    def lines(self) -> list[tuple[int | None, str]]:
        notes = [event for event in self.events if isinstance(event, Note)]
        return [
            (note.rank if isinstance(note, Said) else None, line) for note in notes for line in note.text.split("\n")
        ]


def collect(overhear: bool = True) -> tuple[Observers, Kept, Collector]:
    kept = Kept()
    observers = Observers([kept])
    return observers, kept, Collector(observers, 1, overhear)


def speaker(voice: Callable[[list[Any]], bool], files: RankFiles | None = None) -> Speaker:
    return Speaker(1, lambda: "peak memory 3 MiB", voice, files)


def test_what_a_rank_says_arrives_as_what_that_rank_said() -> None:
    observers, kept, collector = collect(overhear=False)
    other = speaker(lambda words: collector.hear(1, json.loads(json.dumps(words))) or True)  # type: ignore[func-returns-value]
    print("one")
    other.notify(Note("two", "warning"))
    print("three")
    other.close()
    observers.close()
    assert kept.lines() == [(1, "one"), (1, "two"), (1, "three")]
    assert [(said.level, said.source) for said in kept.events] == [  # type: ignore[union-attr]
        ("info", "print"), ("warning", "note"), ("info", "print"),
    ]  # fmt: skip


def test_what_rank_0_printed_before_an_event_comes_before_it() -> None:
    observers, kept, _ = collect()
    print("before")
    observers.note("an event")
    print("after")
    observers.note("the next")
    observers.close()
    assert [text for _, text in kept.lines()] == ["before", "an event", "after", "the next"]


def test_the_last_words_of_all_ranks_are_waited_for() -> None:
    observers, kept, collector = collect(overhear=False)
    other = speaker(lambda words: collector.hear(1, words) or True)  # type: ignore[func-returns-value]
    other.say("the last")
    other.finish()
    collector.finish()
    assert kept.lines() == [(1, "the last")]
    other.close()
    observers.close()


def test_a_large_backlog_travels_in_small_messages() -> None:
    messages: list[list[Any]] = []
    other = speaker(lambda words: messages.append(words) or True)  # type: ignore[func-returns-value]
    for _ in range(100):
        print("x" * 1000)
    other.close()
    assert len(messages) > 5
    assert all(sum(len(text) for text, _, _ in message) <= MOST_SENT for message in messages)


def test_where_rank_0_is_gone_the_words_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    monkeypatch.setattr("isoscale.observe.ranks.rank_log.PATIENCE", 0.1)
    before = sys.stdout
    other = speaker(lambda words: False)
    print("into the void")
    other.close()
    assert sys.stdout is before
    assert capsys.readouterr().err == "into the void\n"


def test_means_over_all_ranks_are_left_to_rank_0(tmp_path: Path) -> None:
    files = RankFiles("rank 1 on n2", lambda words: True)
    files.open(tmp_path / "log-rank1.txt")
    other = speaker(lambda words: True, files)
    other.notify(Logged(23, 0, {"train/loss": 0.5, "time/samples_per_second": 100.0}))
    other.notify(EPOCH)
    other.close()
    assert [line.split("  ", 1)[1] for line in (tmp_path / "log-rank1.txt").read_text().splitlines()] == [
        "step 23  epoch 1  time/samples_per_second 100", "epoch 1  step 23  0.4 s, peak memory 3 MiB",
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["no/such/log-rank1.txt", "/dev/full"])
def test_a_file_that_cannot_be_written_is_told_once_and_nothing_ends(
    tmp_path: Path, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[Any] = []
    files = RankFiles("rank 1 on n2", lambda words: told.extend(words) or True)  # type: ignore[func-returns-value]
    files.open(tmp_path / path)
    other = speaker(lambda words: True, files)
    for _ in range(3):
        other.say("something")
        other.finish()
    print("as ever")
    other.close()
    assert capsys.readouterr().out == "as ever\n"
    [[text, level, _]] = told
    assert text.startswith("rank 1 on n2 cannot write ") and path in text and "Training goes on" in text
    assert level == "warning"


def test_the_file_of_a_rank_is_named_after_it() -> None:
    assert of_rank(Path("a/log.txt"), 1, 2) == Path("a/log-rank1.txt")
    assert of_rank(Path("train.log"), 7, 128) == Path("train-rank007.log")
    assert of_rank(Path("train"), 7, 10) == Path("train-rank7")


def printed(events: list[Event], **settings: Any) -> str:
    stream = io.StringIO()
    console = Console(stream=stream, **settings)
    for event in events:
        console.notify(event)
    return stream.getvalue()


SAID: list[Event] = [
    STARTED,
    Said("one\ntwo", rank=1, source="print"),
    Said("for the log", rank=1, source="log"),
    EPOCH,
]


def test_every_line_names_its_rank(tmp_path: Path) -> None:
    assert printed(SAID, rank=0) == (
        "rank 0: images/digits\n"
        "rank 0:   run           runs/a\n"
        "rank 0:   device        cpu\n"
        "\n"
        "rank 1: one\n"
        "rank 1: two\n"
        "rank 0: epoch  1/30  step  23  val loss 0.4000     0.4 s\n"
    )
    log = TextLog(tmp_path / "log.txt", rank=0)
    for event in SAID:
        log.notify(event)
    log.close()
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert all(line[21:].startswith(("rank 0: ", "rank 1: ")) for line in lines)
    assert lines[-2].endswith("rank 1: for the log")


def test_one_rank_alone_needs_no_name() -> None:
    assert printed([Said("one", source="print")]) == "one\n"


def test_what_is_printed_is_shown_at_any_level() -> None:
    events: list[Event] = [Said("printed", rank=1, source="print"), Said("noted", rank=1), Said("bad", "error", 1)]
    assert printed(events, level="error", rank=0) == "rank 1: printed\nrank 1: error: bad\n"


def test_json_is_one_object_a_line_with_the_rank() -> None:
    rows = [json.loads(line) for line in printed(SAID, format="json", rank=0).splitlines()]
    assert [(row["event"], row["rank"]) for row in rows] == [
        ("started", 0), ("said", 1), ("said", 1), ("epoch_ended", 0),
    ]  # fmt: skip
    assert [row["text"] for row in rows[1:3]] == ["one", "two"]
    assert "rank" not in json.loads(printed([STARTED], format="json"))
