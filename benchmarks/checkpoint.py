"""What a checkpoint costs the training loop: a state is staged in its way and written beside it.

    python benchmarks/checkpoint.py [--out FILE.md] [--gigabytes 1] [--trials 7] [--folder DIR]

On the device if there is one, else on a CPU. In every trial, one after the other: plain copies of the state, isoscale's
staging, steps of a small network while the writer works, torch.save in the loop as many write it (without making sure
that it is on the disk), and steps alone. What counts is until the training's own stream could go on; the first save,
which also takes memory, is told apart.
"""

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import isoscale
from isoscale.engine.state.checkpoint import Checkpoints, State, read
from isoscale.engine.state.writer import Saver

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTH = 2048
"""A tensor of the state is a square of this width: 16 MiB."""


def make_state(gigabytes: float) -> State:
    """Weights and the two moments of Adam."""
    count = max(1, round(gigabytes * 1e9 / (3 * 4 * WIDTH * WIDTH)))
    parts = {"model": "weight", "optimizer": "0/exp_avg/weight", "second": "0/exp_avg_sq/weight"}
    tensors = {
        part: {f"{name}{number}": torch.rand(WIDTH, WIDTH, device=DEVICE) for number in range(count)}
        for part, name in parts.items()
    }
    return tensors, {part: {} for part in tensors}


def all_tensors(state: State) -> list[Tensor]:
    return [tensor for group in state[0].values() for tensor in group.values()]


def settle() -> None:
    """Wait for the training's stream, and for nothing beside it."""
    if DEVICE.type == "cuda":
        torch.cuda.current_stream().synchronize()


def seconds(action: Callable[[], object]) -> float:
    settle()
    begin = time.perf_counter()
    kept = action()
    settle()
    passed = time.perf_counter() - begin
    del kept
    return passed


class Steps:
    """Training steps of a small network, timed one by one."""

    def __init__(self) -> None:
        width = 4096 if DEVICE.type == "cuda" else 256
        self._model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)).to(DEVICE)
        self._optimizer = torch.optim.Adam(self._model.parameters(), fused=True)
        self._input = torch.rand(width, width, device=DEVICE)

    def step(self) -> None:
        self._optimizer.zero_grad()
        self._model(self._input).square().mean().backward()
        self._optimizer.step()

    def while_(self, go_on: Callable[[int], bool]) -> list[float]:
        times: list[float] = []
        while go_on(len(times)):
            times.append(seconds(self.step))
        return times


def trial(
    state: State, copies: list[Tensor], saver: Saver, steps: Steps, number: int, folder: Path
) -> dict[str, float]:
    """One measurement of everything."""
    found = {
        "plain copy (`clone`)": seconds(lambda: [tensor.clone() for tensor in all_tensors(state)]),
        "plain copy into memory at hand (`copy_`)": seconds(lambda: torch._foreach_copy_(copies, all_tensors(state))),
        "staging": seconds(lambda: saver.save(number, state)),
    }
    if DEVICE.type == "cuda":
        found["plain copy to the host (`cpu`)"] = seconds(lambda: [tensor.cpu() for tensor in all_tensors(state)])
    assert saver._thread is not None
    thread, begin = saver._thread, time.perf_counter()
    busy = steps.while_(lambda _: thread.is_alive())
    found["writing, beside the training"] = time.perf_counter() - begin
    saver.wait()
    found["torch.save in the loop"] = seconds(lambda: torch.save(state, folder / "state.pt"))
    alone = steps.while_(lambda count: count < max(50, len(busy)))
    found |= {"step, alone": statistics.mean(alone), "step, while writing": statistics.mean(busy)}
    found |= {"median step, alone": statistics.median(alone), "median step, while writing": statistics.median(busy)}
    return found


def measure(gigabytes: float, trials: int, folder: Path) -> tuple[float, list[dict[str, float]], float]:
    state = make_state(gigabytes)
    saver, steps = Saver(Checkpoints(folder)), Steps()
    steps.while_(lambda count: count < 20)
    first = seconds(lambda: saver.save(0, state))
    saver.wait()
    copies = [tensor.clone() for tensor in all_tensors(state)]
    found = [trial(state, copies, saver, steps, number, folder) for number in range(1, trials + 1)]
    saved = read(folder / f"step_{trials:08d}")[0]
    for part, group in state[0].items():
        assert all(torch.equal(tensor.cpu(), saved[part][name]) for name, tensor in group.items())
    return first, found, sum(tensor.nbytes for tensor in all_tensors(state)) / 1e9


def report(first: float, found: list[dict[str, float]], gigabytes: float) -> str:
    """The result as a page."""
    where = torch.cuda.get_device_name() if DEVICE.type == "cuda" else f"{platform.machine()}, one thread"
    unit = "median of trials"
    lines = [
        f"# What a checkpoint costs the loop, {time.strftime('%Y-%m-%d')}",
        "",
        f"{where}; Python {platform.python_version()}, torch {torch.__version__}, isoscale {isoscale.__version__}; "
        f"a state of {gigabytes:.2f} GB in {WIDTH}×{WIDTH} tensors, {len(found)} trials.",
        "",
        f"| what | ms ({unit}) | min–max | against a plain copy ({unit}) |",
        "|---|---|---|---|",
    ]
    for name in found[0]:
        values = [1e3 * each[name] for each in found]
        ratio = statistics.median(each[name] / each["plain copy (`clone`)"] for each in found)
        against = "" if "step" in name else f"{ratio:.2f}×"
        lines.append(f"| {name} | {statistics.median(values):.2f} | {min(values):.2f}–{max(values):.2f} | {against} |")
    slower = statistics.median(each["step, while writing"] / each["step, alone"] for each in found)
    saves = statistics.median(each["torch.save in the loop"] / each["staging"] for each in found)
    lines += [
        "",
        f"Steps take {slower:.2f}× as long while the writer works (means of a trial, median of trials). "
        f"torch.save in the loop costs {saves:.0f}× what staging does. "
        f"The first save, which takes the memory for the copies, costs {1e3 * first:.0f} ms.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--trials", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    options = parser.parse_args()
    torch.set_num_threads(1)  # a core is left to the writer
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        text = report(*measure(options.gigabytes, options.trials, Path(folder)))
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
