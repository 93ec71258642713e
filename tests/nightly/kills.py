"""Kills at random moments, many of them: every work that is killed and started again must end with the same bytes.

    python tests/nightly/kills.py --kills 1000 --seed 1 --log kills.txt

A work (a training on 1, 2 or 4 ranks with data workers or tiles, a shuffle, a sweep, an export, a prediction of a whole
box) is started, one of its processes gets a signal after a random while, and it is started again, on another number of
ranks, until it is done. Then it is compared with one that nothing disturbed. The log has a line for each signal; the
seed repeats the choices, though not the moments, which depend on the machine. A difference, a hang, a process that
stays behind or a traceback is a failure, and its folder stays.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TextIO

import numpy as np
import yaml

from tests import warm
from tests.helpers import command, sha, timeless
from tests.parallel.processes import children, is_alive
from tests.science.cosmology import made_boxes

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGSTOP)
TARGETS = ("launcher", "rank", "worker", "writer")
MOST_STARTS = 40
"""After so many starts, a work is left in peace."""
PATIENCE = 180.0
"""Seconds in which whatever got a signal must have ended."""

WAVES = """
import random, time
import torch
import isoscale

class Waves(torch.utils.data.Dataset):
    def __len__(self):
        return 192

    def __getitem__(self, index):
        time.sleep(0.001)
        start = 0.1 * index + random.random()
        return {"input": torch.sin(start + torch.linspace(0, 3, 16)) + 0.1 * torch.randn(16),
                "target": torch.tensor([start % 1])}

def load():
    return isoscale.Sources(train=Waves(), val=Waves())
"""
WAVES_RECIPE = """
task:
  class: supervised
  model: {class: torch.nn.Linear, in_features: 16, out_features: 1}
  loss: mse
data: {class: waves.load, batch_size: 16}
"""
TRAINING = ["observe.level=error", "observe.every=5", "checkpoint.every=11 steps", "parallel.reduce=tree",
            "train.threads=1", "observe.tensorboard=1"]  # fmt: skip


@dataclass
class Work:
    """Something that takes a while, and may be killed and started again."""

    seconds: float
    """About how long it takes: signals come within this time."""
    words: Callable[[random.Random], list[str]]
    """One of the commands that begin it, or go on with it."""
    results: Callable[[Path], object]
    """What must be the same in the end."""
    leftovers: str
    """What of it to remove before it begins anew."""


def trained(folder: Path) -> object:
    assert not list(folder.glob("run/checkpoints/.*")), "something half written is left"
    return sha(folder / "run"), timeless(folder / "run")


def swept(folder: Path) -> object:
    runs = sorted(path.parent for path in folder.glob("sweep/**/metrics.jsonl"))
    return [(path.name, sha(path), timeless(path)) for path in runs]


def bytes_of(pattern: str) -> Callable[[Path], object]:
    def found(folder: Path) -> object:
        left = [path.name for path in folder.iterdir() if path.name.startswith((".", "tmp"))]
        assert not left, f"something half written is left: {left}"
        return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in sorted(folder.glob(pattern))]

    return found


def on_some_ranks(rng: random.Random) -> list[str]:
    return ["--devices", str(rng.choice((1, 2, 4)))]


WORKS = {
    "digits": Work(
        2.5,
        lambda rng: ["train", "--run", "run", "train.epochs=6", *TRAINING, *on_some_ranks(rng)],
        trained, "run",
    ),
    "waves": Work(
        2.5,
        lambda rng: ["train", "waves.yaml", "--run", "run", "train.epochs=6", f"data.workers={rng.randrange(3)}",
                     *TRAINING, *on_some_ranks(rng)],
        trained, "run",
    ),
    "boxes": Work(
        3.0,
        lambda rng: ["train", "boxes.yaml", "--run", "run", "train.epochs=6", "data.tile=10",
                     f"data.residency={rng.choice(('device', 'host', 'disk'))}", *TRAINING, *on_some_ranks(rng)],
        trained, "run",
    ),
    "whole box": Work(
        1.5,
        lambda rng: ["predict", "trained_boxes", "--data", "box.h5", "--out", "predicted",
                     "--devices", str(rng.choice((1, 2)))],
        bytes_of("predicted/*.h5"), "predicted",
    ),
    "shuffle": Work(
        0.8,
        lambda rng: ["data", "shuffle", "in*.npy", "--out", "out*", "--memory", f"{rng.choice((64, 512, 4096))}KB"],
        bytes_of("out*.npy"), "out*",
    ),
    "sweep": Work(
        5.0,
        lambda rng: ["sweep", "--run", "sweep", "train.epochs=2", "data.subset=400", "seed=0,1,2", *TRAINING,
                     "--workers", str(rng.choice((1, 2))), *on_some_ranks(rng)],
        swept, "sweep",
    ),
    "export": Work(
        0.8,
        lambda rng: ["export", "trained", "--out", "network.safetensors"],
        bytes_of("network*"), "network*",
    ),
    "export .pt": Work(
        0.8,
        lambda rng: ["export", "trained", "--out", "network.pt"],
        bytes_of("network*"), "network*",
    ),
}  # fmt: skip
SHARES = {"digits": 6, "waves": 6, "boxes": 4, "whole box": 2, "shuffle": 3, "sweep": 3, "export": 1, "export .pt": 1}
"""How often each is chosen."""


def prepare(folder: Path, trained_before: Path | None) -> None:
    """What the works begin with."""
    folder.mkdir()
    (folder / "waves.py").write_text(WAVES)
    (folder / "waves.yaml").write_text(WAVES_RECIPE)
    for number in range(3):
        rows = np.arange(40_000 * number, 40_000 * (number + 1), dtype=np.float64)
        np.save(folder / f"in{number}.npy", np.stack([rows] * 8, axis=1))
    made_boxes.write(folder / "box.h5", side=24)
    (folder / "boxes.yaml").write_text(yaml.safe_dump(made_boxes.recipe(folder)))
    for name, words in (("trained", []), ("trained_boxes", ["boxes.yaml"])):
        if trained_before is None:
            finish(folder, ["train", *words, "--run", name, "train.epochs=1", *TRAINING], folder / "output.txt")
        else:
            shutil.copytree(trained_before.with_name(name), folder / name, symlinks=True)


def start(folder: Path, words: list[str], output: Path) -> subprocess.Popen[bytes]:
    """Begin a work, in a group of its own, with what it says in a file."""
    with output.open("wb") as file:
        return warm.Popen(
            command(*words), cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0
        )


def finish(folder: Path, words: list[str], output: Path) -> None:
    """Let a work come to its end."""
    process = start(folder, words, output)
    code = process.wait(600)
    assert code == 0, f"{' '.join(words)} ended with {code}:\n{output.read_text()}"


def descendants(process: int) -> Iterator[tuple[int, int]]:
    """All processes below one, each with how far below."""
    for child in children(process):
        yield child, 1
        yield from ((each, depth + 1) for each, depth in descendants(child))


def aim(process: subprocess.Popen[bytes], target: str, folder: Path, rng: random.Random) -> tuple[int, str]:
    """The process to be hit, and what it is: the launcher where there is nothing else."""
    below = list(descendants(process.pid))
    if target == "rank":
        found = [each for each, depth in below if depth == 1]
        return (rng.choice(found), "rank") if found else (process.pid, "launcher")
    if target == "worker":
        deepest = max((depth for _, depth in below), default=0)
        found = [each for each, depth in below if depth == deepest]
        return (rng.choice(found), "worker") if found else (process.pid, "launcher")
    if target == "writer":  # a thread: its process is hit while a checkpoint or a file is half written
        until = time.monotonic() + 1
        while time.monotonic() < until and process.poll() is None:
            if any(folder.glob("**/checkpoints/.*")) or any(folder.glob(".*")):
                found = [each for each, depth in descendants(process.pid) if depth == 1]
                return (found[0], "writer") if found else (process.pid, "writer")
    return process.pid, "launcher"


def strike(process: subprocess.Popen[bytes], folder: Path, seconds: float, rng: random.Random) -> str | None:
    """Send a signal after a while, and wait for the end; None where that came before."""
    delay, kind, target = rng.uniform(0.02, seconds), rng.choice(SIGNALS), rng.choice(TARGETS)
    with suppress(subprocess.TimeoutExpired):
        process.wait(delay)
    if process.poll() is not None:
        return None
    hit, name = aim(process, target, folder, rng)
    known = {process.pid, *(each for each, _ in descendants(process.pid))}
    with suppress(ProcessLookupError):
        os.kill(hit, kind)
    if kind is signal.SIGSTOP:
        time.sleep(rng.uniform(0, 1))
        with suppress(ProcessLookupError):
            os.kill(hit, rng.choice((signal.SIGCONT, signal.SIGKILL)))
    known |= {each for each, _ in descendants(process.pid)}
    story = f"{kind.name:8} to {name:8} after {delay:.2f} s"
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        where = stacks(known)
        for each in known:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()
        raise AssertionError(f"{story}: still there after {PATIENCE} s\n{where}") from None
    until = time.monotonic() + PATIENCE
    while left := [each for each in known if is_alive(each)]:
        assert time.monotonic() < until, f"still alive {PATIENCE} s after the end: {left}"
        time.sleep(0.01)
    return story


def stacks(processes: set[int]) -> str:
    """Where processes are that should have ended, if py-spy is there to say it."""
    program = shutil.which("py-spy")
    if program is None:
        return "(pip install py-spy, and they are asked where they are)"
    dumps = [
        subprocess.run([program, "dump", "--pid", str(each)], capture_output=True, text=True) for each in processes
    ]
    return "\n".join(each.stdout + each.stderr for each in dumps)


def siege(num_kills: int, seed: int, log: TextIO, folder: Path, shares: Mapping[str, int] = SHARES) -> int:
    """Strike again and again, and compare whenever something has come to its end."""
    rng = random.Random(seed)
    whole = folder / "whole"
    prepare(whole, None)
    expected = {}
    for name, work in ((name, WORKS[name]) for name in shares):
        finish(whole, work.words(random.Random(0)), whole / "output.txt")
        expected[name] = work.results(whole)
        remove(whole, work.leftovers)
    struck = folder / "struck"
    prepare(struck, whole / "trained")
    num_signals = num_done = num_failed = 0
    began = time.monotonic()
    while num_signals < num_kills:
        name = rng.choices(list(shares), list(shares.values()))[0]
        try:
            for story in until_done(WORKS[name], struck, rng):
                num_signals += 1
                log.write(f"{num_signals:5} {name:10} {story}\n")
            assert WORKS[name].results(struck) == expected[name], "it differs"
            log.write(f"      {name} is equal\n")
        except AssertionError as error:
            num_failed += 1
            shutil.copytree(struck, folder / f"failed{num_failed}", symlinks=True)
            log.write(f"      FAILED: {name}: {error}\n      see {folder}/failed{num_failed}\n")
        log.flush()
        remove(struck, WORKS[name].leftovers)
        remove(struck, ".*")
        num_done += 1
    log.write(f"{num_signals} signals, {num_done} works, {num_failed} failures, {time.monotonic() - began:.0f} s\n")
    return num_failed


def until_done(work: Work, folder: Path, rng: random.Random) -> Iterator[str]:
    """Start a work again and again until it is done; what each signal did, in words."""
    for number in count():
        words = work.words(rng)
        process = start(folder, words, folder / "output.txt")
        story = strike(process, folder, work.seconds, rng) if number < MOST_STARTS else None
        code = process.wait(600)
        if story is not None:
            yield f"{' '.join(words[-2:]):14} {story}: code {code}"
        said = (folder / "output.txt").read_text(errors="replace")
        ours = "Traceback" in said and f"{os.sep}isoscale{os.sep}" in said  # before our first line, it is Python's
        assert not ours, f"{' '.join(words)}:\n{said}"
        assert story is not None or code in (0, 75), f"{' '.join(words)} failed by itself:\n{said}"
        if code == 0:
            return


def remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--log", type=Path, default=Path("kills.txt"))
    parser.add_argument("--only", nargs="*", choices=SHARES, default=list(SHARES), help="works to be killed")
    words = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="isoscale-kills-"))
    with words.log.open("w") as log:
        log.write(f"seed {words.seed}, torch ranks on {os.cpu_count()} cores\n")
        num_failed = siege(words.kills, words.seed, log, folder, {name: SHARES[name] for name in words.only})
    print(words.log.read_text().splitlines()[-1])
    if num_failed:
        sys.exit(f"see {words.log}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
