"""The state of the user's code, asked of git; nothing that the repository names is run on the way.

A working folder may come from someone else: an archive, a shared disk. Its configuration and attributes can name
programs for git to run when it does no more than look: monitors of the file system, hooks, filters, drivers of
differences, transports for objects that are missing. All of them are switched off, so that changes of a file that has a
filter are those of the file itself.
"""

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

PATIENCE = 10.0
"""Seconds that git has for an answer."""
MOST_CHARACTERS = 1_000_000
"""Of the changes; the rest is cut off."""
MOST_NAMES = 5
"""Of changed files, in a sentence."""
_SWITCHED_OFF = {
    "core.fsmonitor": "", "core.hooksPath": os.devnull, "core.askPass": "", "safe.bareRepository": "explicit",
}  # fmt: skip
_VARIABLES = {
    "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none",
}  # fmt: skip
_KEPT = ("GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM", "GIT_EXEC_PATH", "GIT_CONFIG_")
"""Variables, by their beginnings, that say which repositories and settings are the user's; others lead elsewhere."""
_DIFF = (
    "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=dirty", "--submodule=short",
    "--src-prefix=a/", "--dst-prefix=b/", "HEAD", "--",
)  # fmt: skip


def code() -> Mapping[str, str] | None:
    """Commit and uncommitted changes of the git repository around the working directory, if there is one."""
    found = _ask("rev-parse", "--show-toplevel", "--absolute-git-dir", "HEAD")
    settings = _ask("config", "--list", "--name-only", "--null")
    if found is None or settings is None:
        return None
    folder, repository, commit = (os.fsdecode(found).rstrip("\n").split("\n") * 3)[:3]
    if not _belongs(Path(folder), Path(repository)):
        return None
    diff = _ask(*_DIFF, settings=_without_filters(os.fsdecode(settings).split("\0"))) or b""
    return {"folder": folder, "commit": commit, "diff": diff.decode(errors="replace").strip()[:MOST_CHARACTERS]}


def _without_filters(settings: Iterable[str]) -> dict[str, str]:
    """What takes the programs of all filters among the settings away; files then count as they are on the disk."""
    drivers = sorted({name.rpartition(".")[0] for name in settings if name.startswith("filter.")})
    nothing = {"clean": "", "process": "", "required": "false"}
    return {f"{driver}.{key}": value for driver in drivers for key, value in nothing.items()}


def changed_files(diff: str) -> list[str]:
    """The names of the files that uncommitted changes are in."""
    heads = [line for line in diff.split("\n") if line.startswith("diff --git ")]
    return [re.sub(r'.* "?b/', "", head, count=1).removesuffix('"') for head in heads]


def changes_in_words(diff: str) -> str:
    """`uncommitted changes of 2 files (model.py, data.py)`."""
    files = changed_files(diff)
    more = ", …" * (len(files) > MOST_NAMES)
    return f"uncommitted changes of {len(files)} file{'s' * (len(files) != 1)} ({', '.join(files[:MOST_NAMES])}{more})"


def _belongs(folder: Path, repository: Path) -> bool:
    """Whether a repository is that of the folder it lies in: settings can claim any other, and all that is in it."""
    link = folder / ".git"
    try:
        if link.is_file():
            link = folder / link.read_text(errors="surrogateescape").partition("gitdir: ")[2].rstrip("\n")
        return Path.cwd().resolve().is_relative_to(folder.resolve()) and link.samefile(repository)
    except OSError:
        return False


def _ask(*words: str, settings: Mapping[str, str] = {}) -> bytes | None:
    """What git answers; None where it is missing, fails, takes too long, or has a setting that none can replace."""
    program = _program()
    if program is None or any("=" in name for name in settings):
        return None
    replaced = [word for name, text in {**_SWITCHED_OFF, **settings}.items() for word in ("-c", f"{name}={text}")]
    kept = {name: text for name, text in os.environ.items() if not name.startswith("GIT_") or name.startswith(_KEPT)}
    try:
        process = subprocess.Popen(
            [program, "--no-pager", *replaced, *words], env={**kept, **_VARIABLES}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,  # no terminal to ask on
        )  # fmt: skip
    except OSError:
        return None
    with process:
        assert process.stdout is not None
        limit = threading.Timer(PATIENCE, process.kill)
        limit.start()
        answer = process.stdout.read(4 * MOST_CHARACTERS)
        is_cut = bool(process.stdout.read(1))
        if is_cut:
            process.kill()
        code = process.wait()
        limit.cancel()
    return answer if code == 0 or is_cut else None


def _program() -> str | None:
    """Where git is; a program of that name in the working folder is another one."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which("git", path=os.pathsep.join(filter(os.path.isabs, folders)))
