"""Whoever waits at a terminal sees how far a look at data is; a file sees nothing."""

import io
import sys

import pytest

from isoscale.observe.waiting import Waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "is_seen"), [(Terminal(), True), (io.StringIO(), False)])
def test_a_bar_is_for_a_terminal_alone(stream: io.StringIO, is_seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream)
    with Waiting("batches") as waiting:
        for _ in range(2):
            for done in range(7):
                waiting.at(done, 7)
    assert ("6/7" in stream.getvalue()) == is_seen
