"""The U-Net of cosmology on one CUDA device: samples a second, trained for real, beside a loop written by hand.

    python benchmarks/cosmology_device.py [NAME …] [--cells 256] [--hashes] [--out FILE]

isoscale trains the presets on a box that it simulates first: resident crops, symmetries, logging, deterministic
kernels, captured steps. The loops by hand have synthetic batches and cudnn.benchmark. Every side has a process of its
own. With --hashes, ten processes train at once, and one more is stopped and continued: the weights are compared.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

BATCH, CROP = 64, 64
STEPS = 160
PRESETS = {
    "tf32": ["cosmology/base"],
    "bf16": ["cosmology/bs64-opt"],
    "bf16, no rewrite": ["cosmology/bs64-opt", "task.model.rewrite=none"],
    "bf16, all rewritten": ["cosmology/bs64-opt", "task.model.rewrite=all"],
    "bf16, any kernels": ["cosmology/bs64-opt", "train.deterministic=false"],
    "bf16, no symmetries": ["cosmology/bs64-opt", "data.transforms=[]"],
}
BY_HAND = {"by hand, tf32": "32", "by hand, bf16": "bf16", "by hand, bf16 channels last": "last"}


def by_hand(precision: str) -> None:
    """Print the samples a second of a loop with one synthetic batch."""
    import torch

    from isoscale.science.cosmology import UNet3d

    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    model = UNet3d(rewrite="none").cuda()
    inputs, targets = (torch.randn(BATCH, fields, *[CROP] * 3, device="cuda") for fields in (4, 5))
    if precision == "last":
        model, inputs = (each.to(memory_format=torch.channels_last_3d) for each in (model, inputs))
    optimizer = torch.optim.Adam(model.parameters(), 2e-4, fused=True)
    for step in range(60):
        if step == 20:
            torch.cuda.synchronize()
            began = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision != "32"):
            loss = torch.nn.functional.l1_loss(model(inputs).float(), targets)
        loss.backward()
        optimizer.step()
    torch.cuda.synchronize()
    print(json.dumps({"rate": 40 * BATCH / (time.perf_counter() - began)}))


def trained(words: list[str], box: Path, run: Path, steps: int) -> "subprocess.Popen[str]":
    """A training that has begun."""
    keys = [f"data.train={box}", "~data.val", f"train.steps={steps}", "train.epochs=null", "observe.every=20",
            "observe.tensorboard=0", "checkpoint.every=never"]  # fmt: skip
    command = [sys.executable, "-m", "isoscale", "train", *words, *keys, "--run", str(run)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rate(run: Path, steps: int) -> dict[str, float | str]:
    """The best rate of 20 steps in the second half of a training, and when the first one was done."""
    import isoscale

    found = isoscale.Run.load(run)
    clock = dict(found.history("time/seconds"))
    half = [step for step in sorted(clock) if step > steps // 2]
    step_time = min((clock[b] - clock[a]) / (b - a) for a, b in pairwise(half))
    decided = found.record["decided"]
    return {
        "rate": BATCH / step_time, "ms": 1e3 * step_time, "ready": clock[min(clock)] - min(clock) * step_time,
        "sha": found.summary()["weights_sha256"][:8], "program": decided["program"],
        "products": len(decided.get("products") or []),
    }  # fmt: skip


def main() -> None:
    """Print a row for each side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["by hand", "tf32", "bf16"])
    parser.add_argument("--cells", type=int, default=256)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--hashes", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--by-hand", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.by_hand:
        by_hand(given.by_hand)
        return
    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)
        if given.out:
            given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        make = ["data", "make", "cosmology/box", f"cells={given.cells}", "--out", folder]
        subprocess.run([sys.executable, "-m", "isoscale", *make], check=True)
        say(f"a box of {given.cells}³ cells was made in {time.perf_counter() - began:.1f} s\n")
        box = Path(folder) / "box0.h5"
        say("| side | samples/s | ms a step | ready in, s | weights | program | products |")
        say("|---|---|---|---|---|---|---|")
        for name, precision in BY_HAND.items():
            if any(each in name for each in given.names):
                hand = [sys.executable, __file__, "--by-hand", precision]
                ended = subprocess.run(hand, capture_output=True, text=True)
                if ended.returncode:
                    say(f"| {name} | {ended.stderr[-300:]} |")
                    continue
                found = json.loads(ended.stdout)["rate"]
                say(f"| {name} | {found:,.0f} | {1e3 * BATCH / found:.2f} | | | | |")
        for name, words in PRESETS.items():
            if any(each == name for each in given.names) or "all" in given.names:
                run = Path(folder) / name.replace(" ", "-")
                process = trained(words, box, run, given.steps)
                out, _ = process.communicate()
                if process.returncode:
                    say(f"| {name} | {out[-300:]} |")
                    continue
                row = rate(run, given.steps)
                say(f"| {name} | {row['rate']:,.0f} | {row['ms']:.2f} | {row['ready']:.1f} | {row['sha']} | "
                    f"{row['program']} | {row['products']} |")  # fmt: skip
        if given.hashes:
            words, runs = PRESETS["bf16"], [Path(folder) / f"process{number}" for number in range(10)]
            small = [*words, "data.batch_size=8", "data.samples_per_epoch=512"]
            processes = [trained(small, box, run, 30) for run in runs]
            stopped = Path(folder) / "stopped"
            trained(small, box, stopped, 17).communicate()
            trained(small, box, stopped, 30).communicate()
            for process in processes:
                process.communicate()
            shas = sorted({rate(run, 30)["sha"] for run in runs})
            say(f"\nten processes: {', '.join(map(str, shas))}; stopped and continued: {rate(stopped, 30)['sha']}")


if __name__ == "__main__":
    main()
