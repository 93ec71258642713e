"""Graph networks of crystals: isoscale beside SchNet of PyTorch Geometric in a plain loop (`pyg_side.py`).

    python benchmarks/crystals.py speed --data DIR [--batches 8 32 128] [--steps 60] [--networks schnet pyg painn]
    python benchmarks/crystals.py accuracy --data DIR [--batches 4] [--steps 2000] [--repeats 3]

DIR holds mptrj_random_1k.extxyz and lips_devset.npz. `speed` trains energies and forces on the first (1,000 crystals of
2 to 192 atoms, edges up to 5 Å found beforehand) and counts structures per second, by the clock, after a tenth of the
steps. `accuracy` trains on 160 frames of the second for the same number of steps on each side, and compares errors on
the other 40. Sides take turns in one process, on a GPU where there is one, with TF32 products on both.

isoscale runs with all that it does by default; `pyg` is PyG's own SchNet inside isoscale, by class path, and `schnet`
is ours of the same size; `preset`, for errors alone, is `crystals/lips` with its own network and settings.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pyg_side
import torch
import torch_geometric
from pyg_side import CUTOFF, Settings

import isoscale

NUM_TRAINING = 160
PRECISION = "tf32" if torch.cuda.is_available() else "32"
NETWORKS: dict[str, dict[str, Any]] = {
    "schnet": {"class": "schnet", "width": 128, "layers": 6, "gaussians": 50, "cutoff": CUTOFF},
    "pyg": {
        "class": "pyg_network",
        "network": {
            "class": "torch_geometric.nn.models.SchNet", "hidden_channels": 128, "num_filters": 128,
            "num_interactions": 6, "num_gaussians": 50, "cutoff": CUTOFF,
        },
    },
    "painn": {"class": "painn", "width": 128, "layers": 3, "cutoff": CUTOFF},
}  # fmt: skip
"""isoscale's networks, as recipes have them."""
PRESET = "preset"
PEERS: dict[str, dict[str, Any]] = {"loop": {}, "loop, 8 workers": {"workers": 8}, "loop, collated": {"resident": True}}
"""Ways to feed the plain loop: batches made by the way, by other processes, or all beforehand on the device."""


def preset(settings: Settings, seed: int, **data: Path) -> dict[str, Any]:
    """The preset `crystals/lips` as it is, on the same frames, for the same number of steps of the same batch."""
    files = {"path": None, "split": None, "val": None, **{split: str(path) for split, path in data.items()}}
    return {
        "extends": "crystals/lips",
        "seed": seed,
        "data": {**files, "batch_size": settings.batch},
        "train": {"steps": settings.steps, "epochs": None},
        "observe": {"every": max(1, settings.steps // 20), "tensorboard": 0, "level": "error"},
        "checkpoint": {"every": "never"},
    }


def recipe(name: str, settings: Settings, seed: int, **data: Path) -> dict[str, Any]:
    """What isoscale's side is asked for: the same as the loop."""
    if name == PRESET:
        return preset(settings, seed, **data)
    edges = {"class": "periodic_edges", "cutoff": CUTOFF, "allow_isolated": True}
    weights = {"energy": settings.energy_weight, "forces": settings.force_weight}
    return {
        "seed": seed,
        "task": {"class": "crystal", "model": NETWORKS[name], "targets": ["energy", "forces"]},
        "data": {"class": "structures", **{split: str(path) for split, path in data.items()},
                 "batch_size": settings.batch, "transforms": [edges]},
        "optimizer": {"name": "adam", "lr": settings.lr},
        "schedule": {"name": "cosine"},
        "train": {"steps": settings.steps, "epochs": None, "loss_weights": weights, "precision": PRECISION},
        "observe": {"every": max(1, settings.steps // 20), "tensorboard": 0, "level": "error"},
        "checkpoint": {"every": "never"},
    }  # fmt: skip


def ours(asked: dict[str, Any], settings: Settings, folder: Path) -> pyg_side.Trained:
    """A training by isoscale, timed after a tenth of its steps."""
    run = isoscale.train(asked, run=folder)
    clock = dict(run.history("time/seconds"))
    counted = [step for step in sorted(clock) if step >= max(3, settings.steps // 10)]
    seconds = sum(clock[b] - clock[a] for a, b in pairwise(counted))
    errors = {}
    if asked["data"].get("test"):
        tested = isoscale.test(run)
        errors = {name: float(tested[f"test/{name}"]) for name in ("energy_mae", "forces_mae")}
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    return pyg_side.Trained(seconds, counted[-1] - counted[0], errors, peak)


def speed(options: argparse.Namespace, device: str) -> list[str]:
    """Structures per second on crystals of all sizes."""
    path = options.data / "mptrj_random_1k.extxyz"
    structures = pyg_side.read(path)
    reference = pyg_side.references(structures)
    graphs = [pyg_side.graph(atoms, reference) for atoms in structures]
    edges = statistics.mean(graph.num_edges for graph in graphs)
    lines = [
        f"{len(structures):,} structures, {edges:,.0f} edges each on average. Structures per second, median of "
        f"{options.repeats} trials (min to max); peak of device memory.", "",
        "| batch | side | structures/s | min–max | ms a step | memory, GiB |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for batch in options.batches:
        settings = Settings(batch, options.steps)
        trials: dict[str, list[pyg_side.Trained]] = {}
        for repeat in range(options.repeats):
            for name in options.peers:
                asked = Settings(batch, options.steps, **PEERS[name])
                trials.setdefault(f"PyG, {name}", []).append(pyg_side.train(graphs, [], asked, device, repeat))
            for name in options.networks:
                with tempfile.TemporaryDirectory() as scratch:
                    asked = recipe(name, settings, repeat, train=path)
                    trials.setdefault(f"isoscale, {name}", []).append(ours(asked, settings, Path(scratch) / "run"))
        lines += [speed_row(batch, side, found) for side, found in trials.items()]
        print("\n".join(lines[-len(trials) :]), flush=True)
    return lines


def speed_row(batch: int, side: str, found: list[pyg_side.Trained]) -> str:
    """A line of the table."""
    rates = [batch / trial.step for trial in found]
    middle = statistics.median(rates)
    peak = max(trial.peak for trial in found) / 2**30
    return (
        f"| {batch} | {side} | {middle:,.4g} | {min(rates):,.4g}–{max(rates):,.4g} | {1e3 * batch / middle:,.4g} "
        f"| {f'{peak:.2f}' if peak else ''} |"
    )


def accuracy(options: argparse.Namespace, device: str) -> list[str]:
    """Errors on held-out frames of LiPS after equal steps."""
    frames = pyg_side.read(options.data / "lips_devset.npz")
    order = np.random.default_rng(0).permutation(len(frames))
    training, held_out = ([frames[place] for place in part] for part in np.split(order, [NUM_TRAINING]))
    reference = pyg_side.references(training)
    graphs, others = ([pyg_side.graph(atoms, reference) for atoms in part] for part in (training, held_out))
    lines = [
        f"{len(training)} frames of 83 atoms for training, {len(held_out)} others for the errors: mean absolute ones, "
        "of the energy per atom and of components of forces.", "",
        "| batch | side | seed | steps | energy, meV/atom | forces, meV/Å | s |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, part in (("train", training), ("test", held_out)):
            ase.io.write(folder / f"{name}.extxyz", part)
        for batch in options.batches:
            settings = Settings(batch, options.steps)
            for seed in range(options.repeats):
                trials = (
                    {"PyG, SchNet": pyg_side.train(graphs, others, settings, device, seed)} if options.peers else {}
                )
                for name in options.networks:
                    files = {part: folder / f"{part}.extxyz" for part in ("train", "test")}
                    asked = recipe(name, settings, seed, **files)
                    trials[f"isoscale, {name}"] = ours(asked, settings, folder / f"{name}-{batch}-{seed}")
                for side, found in trials.items():
                    energy, forces = (1e3 * found.errors[name] for name in ("energy_mae", "forces_mae"))
                    lines.append(
                        f"| {batch} | {side} | {seed} | {settings.steps:,} | {energy:.3g} | {forces:.4g} "
                        f"| {found.step * settings.steps:.4g} |"
                    )
                    print(lines[-1], flush=True)
    return lines


def machine(device: str) -> str:
    """What ran where."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    return (
        f"{name}, {torch.get_num_threads()} thread{'s' * (torch.get_num_threads() > 1)} of torch, load average "
        f"{os.getloadavg()[0]:.1f} at the start, Python {platform.python_version()}, torch {torch.__version__}, "
        f"torch_geometric {torch_geometric.__version__}, isoscale {isoscale.__version__}"
    )


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "accuracy"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", help="8 32 128 for speed, 4 for accuracy")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--networks", nargs="*", choices=[*NETWORKS, PRESET], default=["schnet", "pyg", "painn"])
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=["loop"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.batches = options.batches or {"speed": [8, 32, 128], "accuracy": [4]}[options.what]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    date, title = time.strftime("%Y-%m-%d"), {"speed": "Speed on mixed crystals", "accuracy": "Errors on LiPS"}
    where = "h200" if "H200" in machine(device) else device
    out = options.out or Path(__file__).parent / "results" / f"{date}-crystals-{options.what}-{where}.md"
    words = f"`python benchmarks/crystals.py {options.what} --steps {options.steps} --repeats {options.repeats}`"
    head = [f"# {title[options.what]}, {date}", "", f"{words}; {machine(device)}.", ""]
    found = speed(options, device) if options.what == "speed" else accuracy(options, device)
    out.write_text("\n".join([*head, *found, ""]), encoding="utf-8")
    print("\n".join([*head, *found]))


if __name__ == "__main__":
    main()
