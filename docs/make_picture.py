"""Draw the README's picture of a run: what `isoscale train` prints in a terminal, as an SVG.

python docs/make_picture.py
"""

import io
import os
import pty
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS = 110
TARGET = Path(__file__).parent / "images" / "run.svg"
KEPT_EPOCHS = 6


def terminal_output(folder: str) -> str:
    """What a terminal shows of a short training of the default recipe, without the moving progress bar."""
    leader, follower = pty.openpty()
    environment = {
        **os.environ,
        "COLUMNS": str(COLUMNS),
        "LINES": "50",
        "TERM": "xterm-256color",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "isoscale", "train"]
    with subprocess.Popen(words, cwd=folder, stdout=follower, stderr=follower, env=environment):
        os.close(follower)
        chunks = []
        while chunk := _read(leader):
            chunks.append(chunk)
    return b"".join(chunks).decode()


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 65536)
    except OSError:  # the other side is gone
        return b""


def lines_of(output: str) -> list[str]:
    """The lines that stay on the screen, the middle of the epochs left out."""
    lines = [line.split("\r")[-1] for line in output.replace("\r\n", "\n").split("\n")]
    plain = [Text.from_ansi(line).plain.rstrip() for line in lines]
    kept = [line for line, text in zip(lines, plain, strict=True) if "━" not in text]
    epochs = [line for line in kept if Text.from_ansi(line).plain.startswith("epoch")]
    hidden = set(epochs[KEPT_EPOCHS // 2 : -KEPT_EPOCHS // 2])
    shown: list[str] = []
    for line in kept:
        shown_line = "…" if line in hidden else line if Text.from_ansi(line).plain.strip() else ""
        if not shown or shown_line != shown[-1]:
            shown.append(shown_line)
    return shown


def main() -> None:
    """Run, render and write."""
    with tempfile.TemporaryDirectory() as folder:
        shown = lines_of(terminal_output(folder))
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ isoscale train", style="bold"))
    for line in shown:
        console.print(Text.from_ansi(line), soft_wrap=True)
    console.save_svg(str(TARGET), title="isoscale")


if __name__ == "__main__":
    main()
