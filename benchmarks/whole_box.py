"""A whole box by tiles: what overlap brings at the borders of tiles, what it costs, and how much memory it takes.

    python benchmarks/whole_box.py [--out FILE.md] [--cells 128] [--crop 32] [--repeat 1] [--folder whole-box]

A U-Net (zero padding, so that it does not know what is beyond a crop) learns from crops of a simulated box of 64³
cells, and predicts another box, periodic, by tiles of the size of a crop; `--repeat` puts a smaller one so many times
side by side, where a large one would take too long to simulate. Boxes and network are kept in the folder. For each
overlap, of all fields together, scaled as they are stored: the mean absolute error; the error in cells beside faces of
tiles against that in all others; the mean jump |f(x) - f(x - 1)| across faces against that two planes off (a network
that halves its fields has jumps of its own in every other plane). `elsewhere` has the least and the most of a ratio
when the same planes are moved by an even number of cells to where no face is: what there is without any seam, and how
many such places were looked at. Seconds of the processor and of the clock. `overlap` 0 is the plain way: tiles side
by side.

Then the memory: a process of its own predicts a box of random numbers from disk, by a network of one 1×1×1 convolution.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Set
from pathlib import Path

import h5py
import numpy as np
import torch
from torch import Tensor

import isoscale
from isoscale.science.cosmology.boxes import ensure_box
from isoscale.science.cosmology.simulation import Simulation
from isoscale.science.cosmology.sources import Boxes
from isoscale.science.cosmology.whole_box import starts

STEPS, TRAIN_CELLS = 320, 64
QUIET = {"observe.level": "error", "observe.tensorboard": 0}


def trained(folder: Path, train_box: Path, crop: int) -> isoscale.Run:
    run = folder / f"run-{crop}"
    if isoscale.Run.exists(run):
        return isoscale.Run.load(run)
    batch_size = max(1, round(8 * (32 / crop) ** 3))
    return isoscale.train(
        "cosmology/small", run=run,
        **{
            "data": {
                "class": "boxes", "train": str(train_box), "crop": crop, "wrap": True, "batch_size": batch_size,
                "samples_per_epoch": STEPS * batch_size, "transforms": ["cube_symmetry"],
            },
            "train.epochs": 1, **QUIET,
        },
    )  # fmt: skip


def repeat_box(path: Path, small: Path, times: int) -> None:
    """A periodic box so many times along each axis, which is periodic too."""
    if path.exists():
        return
    with h5py.File(small) as source, h5py.File(path, "w") as file:
        file.attrs.update(source.attrs)
        for name, stored in source.items():
            file[name] = np.tile(stored[:], (1, times, times, times))
            file[name].attrs.update(stored.attrs)


def memory(what: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def ratios(errors: Tensor, jumps: Tensor, faces: Set[int]) -> tuple[float, float]:
    """Error in cells beside planes against that in all others; jump across them against that two planes off."""
    size = len(jumps)
    beside = torch.tensor([cell in faces or (cell + 1) % size in faces for cell in range(size)])
    is_face = beside[:, None, None] | beside[:, None] | beside
    near = {(face + step) % size for face in faces for step in (-2, 2)} - faces  # as even or odd as they are
    across, other = (float(jumps[sorted(planes)].mean()) for planes in (faces, near))
    return float(errors[is_face].mean() / errors[~is_face].mean()), across / other


def at_faces_and_elsewhere(found: Tensor, true: Tensor, crop: int, overlap: int) -> str:
    """Both ratios at faces of tiles, and the least and most of the same planes moved to where no face is."""
    size = found.shape[1]
    errors = (found - true).abs().mean(0)
    along = [(found - found.roll(1, axis)).abs().movedim(axis, 0).flatten(1).mean(1) for axis in (1, 2, 3)]
    jumps = torch.stack(along).mean(0)
    faces = {place % size for start in starts(size, crop, overlap, True) for place in (start, start + crop)}
    moved = {frozenset((face + shift) % size for face in faces) for shift in range(4, crop - 2, 2)}
    clear = [each for each in moved if not {(plane + step) % size for plane in each for step in (-2, 0, 2)} & faces]
    words = []
    others = zip(*(ratios(errors, jumps, each) for each in clear), strict=True)
    for value, elsewhere in zip(ratios(errors, jumps, faces), others, strict=True):
        words.append(f"{value:.3f} | {min(elsewhere):.3f}–{max(elsewhere):.3f} ({len(elsewhere)})")
    return " | ".join(words)


def predict_in_little_memory(folder: Path, cells: int, crop: int) -> None:
    """In a process of its own: peak memory before and after, of a box that is read from disk."""
    box, learned = folder / f"random-{cells}.h5", folder / f"random-{crop}.h5"
    generator = np.random.default_rng(0)
    for path, size in ((box, cells), (learned, crop)):
        if not path.exists():
            with h5py.File(path, "w") as file:
                for name, count in (("Nbody", 4), ("Hydro", 5)):
                    stored = file.create_dataset(name, (count, size, size, size), "f4")
                    for plane in range(size if path == learned or name == "Nbody" else 0):
                        stored[:, plane] = generator.uniform(-1, 1, (count, size, size))
    network = {"class": "torch.nn.Conv3d", "in_channels": 4, "out_channels": 5, "kernel_size": 1}
    data = {
        "class": "boxes", "train": str(learned), "predict": str(box), "residency": "disk", "crop": crop,
        "batch_size": 1, "samples_per_epoch": 1,
    }  # fmt: skip
    recipe = {"task": {"class": "field_regression", "model": network}, "data": data}
    folder.joinpath("out").mkdir(exist_ok=True)
    run = isoscale.train(recipe, run=folder / f"run-{time.time_ns()}", **{"train.epochs": 1, **QUIET})
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, began = memory("VmRSS"), time.monotonic()
    isoscale.predict(run, split="predict", folder=folder / "out")
    print(json.dumps([before, memory("VmHWM"), time.monotonic() - began]))


def _processor() -> str:
    found = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{found[0].partition(': ')[2]} ({platform.machine()}, {len(found)} cores)" if found else platform.machine()


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cells", type=int, default=128)
    parser.add_argument("--crop", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("whole-box"))
    parser.add_argument("--memory-only", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder, cells, crop = options.folder, options.cells, options.crop
    folder.mkdir(exist_ok=True, parents=True)
    if options.memory_only:
        predict_in_little_memory(folder, options.memory_only, crop)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_box, small, box = (
        folder / f"{name}.h5"
        for name in (f"train-{TRAIN_CELLS}", f"test-{cells // options.repeat}", f"repeated-{cells}")
    )
    ensure_box(train_box, Simulation(cells=TRAIN_CELLS, seed=0), device)
    ensure_box(small, Simulation(cells=cells // options.repeat, seed=9), device)
    if options.repeat > 1:
        repeat_box(box, small, options.repeat)
    else:
        box = small
    run = trained(folder, train_box, crop)
    with h5py.File(box) as file:
        true = torch.from_numpy(file["Hydro"][:])
    name = torch.cuda.get_device_name() if device.type == "cuda" else _processor()
    text = [
        "# A whole box by tiles",
        "",
        f"{time.strftime('%Y-%m-%d')}, `python benchmarks/whole_box.py --cells {cells} --crop {crop} --repeat "
        f"{options.repeat}`; {name}, threads: {torch.get_num_threads()}, Python {platform.python_version()}, torch "
        f"{torch.__version__}, numpy {np.__version__}, h5py {h5py.__version__}, isoscale {isoscale.__version__}. A box "
        f"of {cells}³ cells from tiles of {crop}³, by a U-Net (width 12, depth 4) after {STEPS} steps with "
        f"{max(1, round(8 * (32 / crop) ** 3))} crops each of a box of {TRAIN_CELLS}³. One run each.",
        "",
        "| overlap | tiles | error | error ratio | elsewhere | jump ratio | elsewhere | processor s | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(text), flush=True)
    for overlap in (0, crop // 8, crop // 4, crop // 2):
        data = Boxes(predict=str(box), crop=crop, wrap=True, overlap=overlap)
        began, computed = time.monotonic(), time.process_time()
        (found,) = isoscale.predict(run, data=data, split="predict").values()
        seconds, computed = time.monotonic() - began, time.process_time() - computed
        text.append(
            f"| {overlap} | {len(data.tiles['predict']):,} | {float((found - true).abs().mean()):.5f} | "
            f"{at_faces_and_elsewhere(found, true, crop, overlap)} | {computed:.1f} | {seconds:.1f} |"
        )
        print(text[-1], flush=True)
    for size in (cells, 2 * cells):
        words = [sys.executable, __file__, "--folder", str(folder), "--crop", str(crop), "--memory-only", str(size)]
        answer = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        before, after, seconds = json.loads(answer.splitlines()[-1])
        text += [
            "" if size == cells else None,
            f"Memory, {size}³ cells read from disk (input {16 * size**3 / 1e6:,.0f} MB, output "
            f"{20 * size**3 / 1e6:,.0f} MB; {crop} planes of 5 fields {20 * crop * size**2 / 1e6:,.0f} MB): the "
            f"process has {before / 1e6:,.0f} MB before, and {(after - before) / 1e6:,.0f} MB more at most; "
            f"{seconds:.0f} s.",
        ]
        print(text[-1], flush=True)
    if options.out:
        options.out.write_text("\n".join([line for line in text if line is not None] + [""]))


if __name__ == "__main__":
    sys.exit(main())
