"""What reaches people: texts that a terminal shows and does not obey, on streams that may be closed or full."""

import errno
import io
import os
import re
import sys
from contextlib import suppress
from typing import TextIO

# Control characters but tab and newline; what turns the direction of text around or breaks lines unseen; bytes of file
# names that are no text.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    """A text of anybody's, with `\\x1b` and the like written out: a terminal would take orders from them."""
    return _HIDDEN.sub(_written_out, text)


def one_line(text: str) -> str:
    """A name of anybody's, so that it stays in its place in a table."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _written_out(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # how Python keeps a byte that is no text
        return f"\\x{code - 0xDC00:02x}"
    return found[0].encode("unicode_escape").decode()


def echo(*texts: object, sep: str = " ", end: str = "\n", err: bool = False, file: TextIO | None = None) -> None:
    """Print at once, to standard output, to standard error with `err`, or to another stream; see `visible`."""
    stream = file or (sys.stderr if err else sys.stdout)
    if stream is None:  # closed before Python began
        return
    stream.write(visible(sep.join(map(str, texts)) + end))
    stream.flush()


def shout(text: str) -> None:
    """Write to standard error past Python, which may be in the middle of anything."""
    with suppress(OSError):
        os.write(2, visible(text).encode(errors="backslashreplace"))


class _Forgiving(io.FileIO):
    """A stream that loses what it cannot write, because its disk is full or nobody reads it any more."""

    failure: OSError | None = None
    """Why, where that has happened."""

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Write, or remember why not."""
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            return len(data)


_forgiving: list[_Forgiving] = []


def occupy() -> None:
    """Let standard streams that were closed lead nowhere.

    The next file that is opened would take their number, and what libraries say would be written into it.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, which is this one


def forgive() -> None:
    """Let no command end because its words cannot be written; `finish` tells whether they were."""
    occupy()
    _forgiving.clear()
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _forgiven(1, sys.stdout)
    sys.stderr = _forgiven(2, sys.stderr)


def _forgiven(number: int, stream: TextIO | None) -> TextIO:
    if stream is not None:
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != number:
            return stream  # someone catches what is printed
        stream.flush()
    raw = _Forgiving(number, "w", closefd=False)
    _forgiving.append(raw)
    is_buffered = stream is None or isinstance(stream.buffer, io.BufferedWriter)
    return io.TextIOWrapper(
        io.BufferedWriter(raw) if is_buffered else raw,  # type: ignore[type-var]
        encoding=stream.encoding if stream else None,
        errors="backslashreplace",
        line_buffering=number == 2 or raw.isatty(),
        write_through=not is_buffered,
    )


def finish() -> str | None:
    """Write what is left; why standard output could not be written, unless its reader had enough."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # full, closed by someone, or never there
            stream.flush()
    failures = [raw.failure for raw in _forgiving if raw.failure and raw.fileno() == 1]
    return next((str(error.strerror) for error in failures if error.errno != errno.EPIPE), None)
