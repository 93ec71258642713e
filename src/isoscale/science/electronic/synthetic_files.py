"""Snapshots of the made-up material as files: any number of points, a few megabytes of memory."""

import json
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from isoscale.data.files import sweep, writing_into
from isoscale.errors import UserError
from isoscale.science.electronic.integrals import Quadrature
from isoscale.science.electronic.states import fill_with
from isoscale.science.electronic.synthetic import (
    ATOMIC_NUMBER,
    NUM_DESCRIPTORS,
    TEMPERATURE,
    VALENCE,
    Box,
    Fields,
    Tile,
    energy_grid,
    make_box,
    tiles,
)  # fmt: skip
from isoscale.system import devices

VERSION = 1
"""Of the material: another one, other files."""
ASIDE = ".making-"
TILE_ROWS = {devices.Accelerator.kind: 4_000, devices.Cuda.kind: 200_000}
"""What suits the caches of a processor, and fills a GPU. It decides the last bits, and so depends on nothing else."""
MOST_WORKERS = 8

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Made:
    """What decides the content of a snapshot, and is written down with it."""

    atoms: int
    grid: tuple[int, int, int]
    energies: int
    seed: int
    snapshot: int
    version: int = VERSION

    @property
    def num_rows(self) -> int:
        """One for each point."""
        return math.prod(self.grid)

    @property
    def widths(self) -> dict[str, int]:
        """Numbers in a row of each file, by what the name of the file ends in."""
        return {"in": 3 + NUM_DESCRIPTORS, "out": self.energies}

    @property
    def num_bytes(self) -> int:
        """Of both files."""
        return 4 * self.num_rows * sum(self.widths.values())

    def plain(self) -> dict[str, Any]:
        """For a JSON file."""
        return {**asdict(self), "grid": list(self.grid)}


def make_boxes(
    folder: Path,
    report: Report,
    atoms: int = 128,
    grid: str | int | list[int] = 100,
    snapshots: int = 4,
    energies: int = 11,
    seed: int = 0,
    device: str = "cpu",
) -> list[str]:
    """Write `snapshot0.in.npy`, `.out.npy` and `.info.json` and so on; returns what became of each, in words.

    The same seed gives the same files on one kind of device, however many processors work on them.
    """
    _check(atoms=(atoms, 1), snapshots=(snapshots, 1), energies=(energies, 3), seed=(seed, 0))
    points = _points(grid)
    place = _device(device)
    wanted = [Made(atoms, points, energies, seed, number) for number in range(snapshots)]
    with writing_into(folder):
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder, ASIDE)
    missing = [made for made in wanted if not _is_there(folder, made)]
    _check_space(folder, missing)
    for made in missing:
        _write(folder, made, place, report)
    return [_words(folder, made, made in missing) for made in wanted]


def _check(**given: tuple[int, int]) -> None:
    for name, (value, least) in given.items():
        if value < least:
            raise UserError(f"{name}={value}: at least {least} is needed")


def _points(grid: str | int | list[int]) -> tuple[int, int, int]:
    """Points in each direction, from `100`, `100,100,80` or a list."""
    words = str(grid).strip("[]").replace("x", ",").split(",")
    counts = [int(word) for word in words if word.strip().isdigit()]
    counts = counts * 3 if len(counts) == 1 else counts
    if len(counts) != 3 or len(words) not in (1, 3) or min(counts) < 1:
        raise UserError(f"grid={grid}: expected the points in each direction, such as grid=100 or grid=100,100,80")
    return counts[0], counts[1], counts[2]


def _device(name: str) -> torch.device:
    if name not in TILE_ROWS:
        raise UserError(f"device={name}: expected one of {', '.join(TILE_ROWS)}")
    if not devices.is_available(name):
        raise UserError("device=cuda: torch sees no GPU here; leave device out, or see what `isoscale doctor` says")
    return torch.device(name)


def _is_there(folder: Path, made: Made) -> bool:
    """Whether a snapshot was made already; something else of its name is refused."""
    name = f"snapshot{made.snapshot}"
    paths = [folder / f"{name}.{kind}" for kind in ("in.npy", "out.npy", "info.json")]
    there = [path for path in paths if path.exists()]
    if not there:
        return False
    try:
        known = json.loads((folder / f"{name}.info.json").read_text(encoding="utf-8"))["made_by"]
    except (OSError, ValueError, KeyError, TypeError):
        known = None
    if known == made.plain() and there == paths:
        return True
    others = [f"{key}={value}" for key, value in (known or {}).items() if value != made.plain().get(key)]
    words = f", made with {', '.join(others)}" if others else ""
    raise UserError(f"{there[0]} is there already{words}: choose another folder, or remove it")


def _check_space(folder: Path, missing: list[Made]) -> None:
    needed, free = sum(made.num_bytes for made in missing), shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{len(missing)} snapshots of {missing[0].num_rows:,} points take {needed / 1e9:.1f} GB, but {folder} has "
            f"{free / 1e9:.1f} GB left: fewer snapshots, a smaller grid, or another folder is needed"
        )


def _words(folder: Path, made: Made, is_new: bool) -> str:
    size = f"{made.num_rows:,} points, {made.num_bytes / 1e9:.2f} GB"
    return f"{folder / f'snapshot{made.snapshot}'}: {size}" + ("" if is_new else ", made already")


def _write(folder: Path, made: Made, device: torch.device, report: Report) -> None:
    """Write aside, and give the files their names only when they are whole."""
    # Boxes of one set differ, and so do those of sets with neighbouring seeds.
    box = make_box(made.grid, made.atoms, (made.seed << 20) + made.snapshot)
    name = f"snapshot{made.snapshot}"
    with writing_into(folder), tempfile.TemporaryDirectory(prefix=ASIDE, dir=folder) as aside:
        dos = _write_rows(Path(aside), made, box, device, lambda done: report(name, done, made.num_bytes))
        info = Path(aside, f"{name}.info.json")
        info.write_text(json.dumps(_info(made, box, dos), indent=1), encoding="utf-8")
        for path in [*(Path(aside, f"{kind}.npy") for kind in made.widths), info]:
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.rename(folder / (path.name if path == info else f"{name}.{path.name}"))


def _write_rows(aside: Path, made: Made, box: Box, device: torch.device, report: Callable[[int], None]) -> Tensor:
    """Write all rows; returns the density of states, in float64."""
    sums: dict[Tile, Tensor] = {}
    num_done = 0
    with _files(aside, made) as files, _single_threaded(), _workers() as pool:
        writer = _Writer(Fields(box, energy_grid(made.energies), device), files, device)
        for tile, dos in _in_turn(pool, writer, tiles(made.grid, TILE_ROWS[device.type])):
            sums[tile] = dos
            num_done += tile.num_rows
            report(made.num_bytes * num_done // made.num_rows)
    ordered = [sums[tile] for tile in sorted(sums, key=lambda tile: tile.first_row)]
    return torch.stack(ordered).sum(0) * math.prod(box.cell) / made.num_rows


@contextmanager
def _files(aside: Path, made: Made) -> Iterator[list[tuple[BinaryIO, int]]]:
    """New files, and where their rows begin."""
    opened: list[tuple[BinaryIO, int]] = []
    try:
        for kind, width in made.widths.items():
            file = (aside / f"{kind}.npy").open("wb")
            header = {"descr": "<f4", "fortran_order": False, "shape": (*made.grid, width)}
            np.lib.format.write_array_header_1_0(file, header)
            file.flush()
            opened.append((file, file.tell()))
        yield opened
    finally:
        for each, _ in opened:
            each.close()


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Threads work on tiles of their own, because bits depend on how an operation is split."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _workers() -> ThreadPoolExecutor:
    count = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))


class _Writer:
    """Computes a tile and writes it where it belongs."""

    def __init__(self, fields: Fields, files: list[tuple[BinaryIO, int]], device: torch.device) -> None:
        self._fields, self._files, self._device = fields, files, device
        self._turn = threading.Lock()

    def __call__(self, tile: Tile) -> Tensor:
        """The sum of the states over the tile."""
        columns, dos = self._computed(tile)
        for values, (file, begin) in zip(columns, self._files, strict=True):
            _write_at(file, begin + 4 * tile.first_row * values.shape[1], values)
        return dos

    @torch.no_grad()
    def _computed(self, tile: Tile) -> tuple[list[Tensor], Tensor]:
        """Both columns and the sum of the states, on the host."""
        if self._device.type == "cpu":
            columns = self._fields.compute(tile)
            return list(columns), columns[1].sum(0, dtype=torch.float64)
        with self._turn:  # one stream: what a GPU computes at the same time may change its choice of kernels
            columns = self._fields.compute(tile)
            found = [*columns, columns[1].sum(0, dtype=torch.float64)]
            arrivals = [devices.of(self._device).fetched(each) for each in found]
        sent = [arrival.wait() for arrival in arrivals]
        return sent[:2], sent[2]


def _write_at(file: BinaryIO, place: int, values: Tensor) -> None:
    left = values.contiguous().numpy().reshape(-1).view(np.uint8).data
    while left:
        written = os.pwrite(file.fileno(), left, place)
        left, place = left[written:], place + written


def _in_turn(
    pool: ThreadPoolExecutor, work: Callable[[Tile], Tensor], given: Iterator[Tile]
) -> Iterator[tuple[Tile, Tensor]]:
    """Results as they come, with few tiles on their way at a time."""
    running: dict[Future[Tensor], Tile] = {}
    for tile in given:
        running[pool.submit(work, tile)] = tile
        if len(running) > 2 * MOST_WORKERS:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()
    for done in list(running):
        yield running[done], done.result()


def _info(made: Made, box: Box, dos: Tensor) -> dict[str, Any]:
    """What is known of a calculation, as it is known of real ones."""
    electrons = VALENCE * made.atoms
    quadrature = Quadrature(energy_grid(made.energies), [TEMPERATURE])
    filling = fill_with(dos[None], torch.tensor([electrons], dtype=torch.float64), quadrature)
    return {
        "fermi_energy_dft": filling.fermi.item(),
        "temperature": TEMPERATURE,
        "number_of_electrons_exact": electrons,
        "band_energy_dft_calculation": filling.band_energy.item(),
        "grid_dimensions": list(made.grid),
        "electrons_per_atom": VALENCE,
        "voxel": {"array": _diagonal([edge / count for edge, count in zip(box.cell, made.grid, strict=True)])},
        "atoms": {
            "numbers": [ATOMIC_NUMBER] * made.atoms,
            "positions": box.positions.tolist(),
            "cell": _diagonal(box.cell),
            "pbc": [True] * 3,
        },
        "made_by": made.plain(),
    }


def _diagonal(values: list[float]) -> list[list[float]]:
    return torch.diag(torch.tensor(values, dtype=torch.float64)).tolist()
