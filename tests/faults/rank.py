"""A small training as one of several ranks, in which one of them does something bad: `rank.py WHAT RANK [TIMEOUT]`."""

import ctypes
import os
import signal
import sys
import time

import torch

from isoscale.cli.main import describe
from isoscale.errors import exit_code
from isoscale.parallel import world

STEPS = 20


def misbehave(what: str) -> None:
    print("bad", time.time(), flush=True)
    if what == "raise":
        raise ValueError("boom")
    if what == "sleep":
        time.sleep(1000)
    if what.endswith("and kill"):
        worker = os.fork() if what == "fork and kill" else ctypes.PyDLL(None).fork()
        if worker == 0:
            time.sleep(1000)
        print("left", worker, flush=True)
    os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)


def train(what: str, who: int) -> None:
    for step in range(STEPS):
        total = torch.ones(4)
        ranks.all_reduce(total, f"step {step}")
        assert total.tolist() == [ranks.world_size] * 4
        if step == 7 and ranks.rank == who:
            misbehave(what)


if __name__ == "__main__":
    what, who = sys.argv[1], int(sys.argv[2])
    timeout = float((sys.argv[3:] or ["600"])[0])
    ranks = world.join("cpu")
    print("process", os.getpid(), flush=True)
    try:
        with world.guarded(on_abort=lambda why: print("abort:", why, flush=True), timeout=timeout):
            train(what, who)
    except Exception as error:
        if world.speaks():
            print(describe(error), file=sys.stderr)
        world.end(exit_code(error))
    print("done", flush=True)
