"""Disks that fill up at random places: every work says so, leaves nothing half, and ends as ever once there is room.

    python tests/nightly/full_disks.py --disks 200 --seed 1 --log full_disks.txt     (as root)

Each disk is a small file system in memory with a random number of bytes or of files left. A training, a shuffle, a
sweep, an export, a report or a prediction runs into its end; then the disk grows, the work is done again, and compared
with one that always had room.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import numpy as np

from tests import warm
from tests.helpers import command
from tests.nightly.kills import WORKS, Work, prepare, remove


def is_whole(name: str) -> Callable[[Path], object]:
    """Whether a file can be read to its end: its bytes hold the time at which it was written."""

    def found(folder: Path) -> object:
        if name.endswith(".npz"):
            with np.load(folder / name) as file:
                return {key: file[key].tobytes() for key in file}
        return (folder / name).read_text().rstrip().endswith("</html>")

    return found


ALL = {
    **{name: work for name, work in WORKS.items() if name != "waves"},
    "predict": Work(
        1.0,
        lambda rng: ["predict", "trained", "--out", "predicted.npz"],
        is_whole("predicted.npz"), "predicted*",
    ),
    "report": Work(
        1.0,
        lambda rng: ["report", "trained", "--out", "page.html"],
        is_whole("page.html"), "page*",
    ),
}  # fmt: skip
FINAL = ("network.safetensors", "network.pt", "predicted.npz", "page.html", "out*.npy")
"""What must be whole wherever it is."""
LARGE = "size=256m,nr_inodes=100k"
SHARES = {"digits": 4, "shuffle": 2, "sweep": 2, "export": 2, "export .pt": 2, "predict": 2, "report": 2}


def run(folder: Path, words: list[str], patience: float = 180) -> tuple[int, str]:
    done = warm.run(command(*words), cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience)
    return done.returncode, (done.stdout + done.stderr).decode(errors="replace")


def used(folder: Path) -> tuple[int, int]:
    """Bytes in whole pages, and files."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in files), len(list(folder.rglob("*")))


def fill(disk: Path, template: Path, name: str, needs: tuple[int, int], expected: object, rng: random.Random) -> str:
    """One work on one disk; what happened, in words."""
    work = ALL[name]
    by_files = rng.random() < 0.3
    room = rng.randrange(0, int(1.1 * needs[by_files]) + 2)
    subprocess.run(["mount", "-t", "tmpfs", "-o", LARGE, "tmpfs", disk], check=True)
    try:
        shutil.copytree(template, disk, symlinks=True, dirs_exist_ok=True)
        found = os.statvfs(disk)
        num_bytes, num_files = (found.f_blocks - found.f_bfree) * found.f_frsize, found.f_files - found.f_ffree
        left = f"nr_inodes={num_files + room}" if by_files else f"size={num_bytes + room}"
        subprocess.run(["mount", "-o", f"remount,{left}", disk], check=True)
        words = work.words(rng)
        code, said = run(disk, words)
        story = f"{name:10} room for {room} {'files' if by_files else 'bytes'}: code {code}"
        assert code >= 0, f"{story}, ended by a signal:\n{said}"
        assert "Traceback" not in said, f"{story}, with a traceback:\n{said}"
        assert code == 0 or "error" in said or "failed" in said, f"{story}, without a message:\n{said}"
        final = [path for pattern in FINAL for path in disk.glob(pattern)]
        assert code == 0 or name == "shuffle" or not final, f"{story}, and yet there is {final}"
        subprocess.run(["mount", "-o", f"remount,{LARGE}", disk], check=True)
        again, said = run(disk, words)
        assert again == 0, f"{story}; with room it ends with {again}:\n{said}"
        assert work.results(disk) == expected, f"{story}; with room it differs"
        return story
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


def siege(num_disks: int, seed: int, log: TextIO, folder: Path) -> int:
    rng = random.Random(seed)
    template, whole = folder / "template", folder / "whole"
    prepare(template, None)
    shutil.copytree(template, whole, symlinks=True)
    expected, needs = {}, {}
    for name, work in ALL.items():
        before = used(whole)
        code, said = run(whole, work.words(random.Random(0)))
        assert code == 0, said
        after = used(whole)
        needs[name] = (after[0] - before[0], after[1] - before[1])
        expected[name] = work.results(whole)
        remove(whole, work.leftovers)
    disk = folder / "disk"
    disk.mkdir()
    num_full = num_failed = 0
    for number in range(1, num_disks + 1):
        name = rng.choices(list(SHARES), list(SHARES.values()))[0]
        try:
            story = fill(disk, template, name, needs[name], expected[name], rng)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            story, num_failed = f"FAILED: {error}", num_failed + 1
        num_full += not story.endswith("code 0")
        log.write(f"{number:4} {story}\n")
        log.flush()
    log.write(f"{num_disks} disks, {num_full} of them full, {num_failed} failures, all others equal with room\n")
    return num_failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--disks", type=int, default=200)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--log", type=Path, default=Path("full_disks.txt"))
    words = parser.parse_args()
    if os.geteuid():
        sys.exit("only root may mount disks")
    folder = Path(tempfile.mkdtemp(prefix="isoscale-disks-"))
    with words.log.open("w") as log:
        log.write(f"seed {words.seed}\n")
        num_failed = siege(words.disks, words.seed, log, folder)
    shutil.rmtree(folder)
    print(words.log.read_text().splitlines()[-1])
    sys.exit(bool(num_failed))


if __name__ == "__main__":
    main()
