"""Every line that code prints is overheard: by print, on standard error and by logging."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from isoscale.observe.ranks import streams
from isoscale.observe.ranks.streams import Overheard


@contextmanager
def overhearing() -> Iterator[list[str]]:
    """The lines that are heard."""
    lines: list[str] = []

    def take(line: str) -> bool:
        lines.append(line)
        return True

    overheard = Overheard(take)
    try:
        yield lines
    finally:
        overheard.release()


def test_lines_are_passed_on_when_they_are_complete() -> None:
    with overhearing() as heard:
        print("one", 1)
        print("two", end="")
        assert heard == ["one 1"]
        print(" and three\nfour", file=sys.stderr)
        print(" halves")
        sys.stdout.writelines(["five\n", "six\n"])
        assert heard == ["one 1", " and three", "four", "two halves", "five", "six"]


def test_loggers_are_heard_also_by_handlers_that_were_there_before() -> None:
    logger, handler = logging.getLogger("test_streams"), logging.StreamHandler()
    before = handler.stream
    logger.addHandler(handler)
    with overhearing() as lines:
        logger.warning("logged")
    logger.removeHandler(handler)
    assert lines == ["logged"]
    assert handler.stream is before


def test_a_bar_that_is_drawn_over_and_over_is_one_line() -> None:
    with overhearing() as heard:
        for percent in range(0, 101, 10):
            print(f"\r{percent} %", end="")
        print("\r\ndone\r\n", end="")
        assert heard == ["100 %", "done"]


def test_a_line_without_end_takes_little_memory_and_a_long_one_is_cut() -> None:
    with overhearing() as heard:
        for _ in range(100):
            sys.stdout.write("x" * 1000)
        assert len(sys.stdout._begun) <= 2 * streams.LONGEST  # type: ignore[union-attr]
        print()
        assert heard == ["x" * streams.LONGEST + "…"]


def test_after_the_release_everything_is_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    overheard = Overheard(lambda line: True)
    kept = sys.stdout
    print("begun", end="")
    overheard.release()
    assert sys.stdout is before
    print("printed")
    print("by one who has kept it", file=kept, flush=True)
    assert capsys.readouterr().out == "printed\nby one who has kept it\n"


def test_what_is_not_taken_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    overheard = Overheard(lambda line: False)
    print("nobody takes it")
    overheard.release()
    assert capsys.readouterr().out == "nobody takes it\n"


def test_a_forked_worker_prints_as_ever(capfd: pytest.CaptureFixture[str]) -> None:
    with overhearing() as heard:
        worker = os.fork()
        if not worker:
            print("from a worker")
            sys.stdout.original.flush()  # type: ignore[union-attr]
            os._exit(0)
        os.waitpid(worker, 0)
        assert heard == [] and "from a worker" in capfd.readouterr().out


def test_other_things_are_asked_of_the_stream_itself() -> None:
    with overhearing():
        original = sys.stdout.original  # type: ignore[union-attr]
        assert sys.stdout.encoding == original.encoding and not sys.stdout.isatty()
