"""Run the code of a page or notebook in order, in the working folder: `python docs/run_blocks.py docs/tutorial.md`.

Python blocks share one interpreter, bash blocks stop at the first error, a block with a title is written to the file of
that name, and YAML without a title is checked as a part of a recipe. Text is what a person sees, and is not looked at.

A comment on the line before a block says what else there is to know: `<!-- not executed: why -->`, or
`<!-- exit code 2 -->` where a command is meant to fail; text right after such a block is the message that it gives.
"""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

_BLOCK = re.compile(
    r"^(?:<!-- (?:not executed: (?P<reason>[^\n]+)|exit code (?P<code>\d+)) -->\n)?"
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$'
    r"(?:\n\n```text\n(?P<message>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A piece of code on a page."""

    language: str
    text: str
    title: str | None = None
    reason: str | None = None
    """Why it is not executed, where it is not."""
    exit_code: int = 0
    message: str | None = None
    """What stands right after it as text."""

    @property
    def is_executed(self) -> bool:
        """Whether running the page does anything with it."""
        return self.reason is None and self.language != "text"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page, or the cells of a notebook."""
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        return [Block("python", "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    return [_block(found) for found in _BLOCK.finditer(text)]


def _block(found: re.Match[str]) -> Block:
    code = int(found["code"] or 0)
    return Block(found["language"], found["text"], found["title"], found["reason"], code, found["message"])


def run(block: Block, names: dict[str, Any]) -> None:
    """Run a block; `names` are those that the Python blocks of a page have in common."""
    if block.title is not None:
        Path(block.title).parent.mkdir(parents=True, exist_ok=True)
        Path(block.title).write_text(block.text, encoding="utf-8")
    elif block.language == "python":
        exec(compile(block.text, "<block>", "exec"), names)
    elif block.language == "yaml":
        _check(block.text)
    else:
        _run_bash(block)


def _check(text: str) -> None:
    from isoscale.recipe.load import load_recipe

    with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        load_recipe(file.name)


def _run_bash(block: Block) -> None:
    done = subprocess.run(["bash", "-eo", "pipefail", "-c", block.text], stderr=subprocess.PIPE, text=True)
    print(done.stderr, end="", file=sys.stderr)
    if done.returncode != block.exit_code:
        sys.exit(f"exit code {done.returncode}, expected {block.exit_code}:\n{block.text}")
    if block.exit_code and block.message and block.message not in done.stderr:
        sys.exit(f"the page shows another message:\n{block.message}")


if __name__ == "__main__":
    wanted = Path(sys.argv[1]).resolve()
    sys.path[0] = os.getcwd()  # as in an interpreter that is started here
    shared: dict[str, Any] = {"__name__": "__main__"}
    for each in blocks(wanted):
        if each.is_executed:
            run(each, shared)
