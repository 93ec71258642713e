"""Files of simulated boxes in the layout of NERSC's N-body → hydro data, and the scales of their fields."""

import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import h5py
import torch
from torch import Tensor

from isoscale.data.files import writing_into
from isoscale.data.formats.opening import open_array
from isoscale.errors import UserError
from isoscale.science.cosmology.fields import FIELDS
from isoscale.science.cosmology.simulation import Simulation, simulate
from isoscale.system import devices
from isoscale.system.files import sync_file

CHUNK = 32
"""Voxels along an edge of a chunk of a dataset, which holds all of its fields."""


@dataclass(frozen=True)
class Scales:
    """How fields are scaled to about [-1, 1], the same for every box, so that boxes can be mixed."""

    density: float = 14.0
    """ln(ρ/ρ̄) is divided by it."""
    velocity: float = 500.0
    """km/s: velocities are divided by it."""
    temperature: float = 8.0
    """ln(T/T0) is divided by it."""
    temperature_unit: float = 1.2e4
    """T0 in K."""

    def normalize(self, fields: Tensor) -> Tensor:
        """Scaled fields, from density in mean ones, velocities in km/s and, if there is a fifth, temperature in K."""
        scaled = fields / self.velocity
        scaled[0] = fields[0].log() / self.density
        if len(fields) > 4:
            scaled[4] = (fields[4] / self.temperature_unit).log() / self.temperature
        return scaled

    def undo(self, scaled: Tensor) -> Tensor:
        """Fields in physical units, from scaled ones."""
        fields = scaled * self.velocity
        fields[0] = (scaled[0] * self.density).exp()
        if len(scaled) > 4:
            fields[4] = (scaled[4] * self.temperature).exp() * self.temperature_unit
        return fields


def make_box(
    simulation: Simulation, device: torch.device, report: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Tensor, Tensor, Scales]:
    """A simulated box: `Nbody` (4, n, n, n) and `Hydro` (5, n, n, n) scaled to about [-1, 1], and how to undo that."""
    scales = Scales()
    nbody, hydro = simulate(simulation, device, report)
    return scales.normalize(nbody), scales.normalize(hydro), scales


def make_files(
    folder: Path,
    report: Callable[[str, int, int], None],
    boxes: int = 1,
    cells: int = 64,
    seed: int = 0,
    cell_size: float = 0.04,
    redshift: float = 3.0,
    particles_per_cell: int = 8,
    steps: int = 20,
    temperature: float = 1.2e4,
    cosmology: dict[str, float] | None = None,
    device: str = "auto",
) -> list[str]:
    """Write `box0.h5`, `box1.h5` and so on, of as many seeds; returns what became of each, in words.

    See `Simulation` for what the settings are. The same ones give the same bits on one kind of device. What was made
    already is left alone.
    """
    if boxes < 1:
        raise UserError(f"boxes={boxes}: at least one is needed")
    if device not in ("auto", *devices.KINDS):
        raise UserError(f"device={device}: expected auto or one of {', '.join(devices.KINDS)}")
    if device != "auto" and not devices.is_available(device):
        raise UserError(f"device={device}: torch sees none here; leave device out, or see what `isoscale doctor` says")
    place = devices.find(device).device
    said = []
    for number in range(boxes):
        path = folder / f"box{number}.h5"
        simulation = Simulation.of(
            cells=cells, seed=seed + number, cell_size=cell_size, redshift=redshift, steps=steps,
            particles_per_cell=particles_per_cell, temperature=temperature, cosmology=cosmology or {},
        )  # fmt: skip
        began = time.monotonic()
        is_new = ensure_box(path, simulation, place, partial(_report_bytes, report, path.name, simulation))
        what = f"{path}: {simulation.cells}³ cells of {simulation.cell_size:g} Mpc/h, seed {simulation.seed}"
        said.append(f"{what}, {time.monotonic() - began:.0f} s" if is_new else f"{what}, made already")
    return said


def _report_bytes(
    report: Callable[[str, int, int], None], name: str, simulation: Simulation, done: int, total: int
) -> None:
    report(name, num_bytes(simulation) * done // total, num_bytes(simulation))


def ensure_box(
    path: Path,
    simulation: Simulation,
    device: torch.device,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> bool:
    """Write a box that is not there yet; returns whether it was written. One of other settings is refused."""
    if not path.exists():
        write_box(path, simulation, device, report)
        return True
    expected = attributes(simulation, Scales())
    found = open_array(path, "Nbody").attributes
    others = [name for name, value in expected.items() if name not in found or found[name] != value]
    if others:
        was = f"{others[0]}={found[others[0]]}" if others[0] in found else f"no {others[0]}"
        raise UserError(
            f"{path} is there already, with {was} and not {expected[others[0]]}: choose another folder, or remove it"
        )
    return False


def write_box(
    path: Path,
    simulation: Simulation,
    device: torch.device,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Simulate a box and write it to an HDF5 file, which gets its name when it is whole."""
    if path.exists():
        raise UserError(f"{path} is there already: choose another name, or remove it")
    aside = path.with_name(f".making-{path.name}.{uuid4().hex}")
    with writing_into(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_space(path.parent, simulation)
        try:
            with h5py.File(aside, "w") as file:  # before the work, which a folder that refuses files would waste
                nbody, hydro, scales = make_box(simulation, device, report)
                file.attrs.update(attributes(simulation, scales))
                for name, fields in (("Nbody", nbody), ("Hydro", hydro)):
                    _write_fields(file, name, fields)
            sync_file(aside)
            aside.rename(path)
        finally:
            aside.unlink(missing_ok=True)


def num_bytes(simulation: Simulation) -> int:
    """Of the fields of a box in a file."""
    return 4 * simulation.cells**3 * sum(len(fields) for fields in FIELDS.values())


def _check_space(folder: Path, simulation: Simulation) -> None:
    needed = num_bytes(simulation)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"a box of {simulation.cells}³ cells takes {needed / 1e9:.1f} GB, but {folder} has {free / 1e9:.1f} GB "
            "left: a smaller box, or another folder is needed"
        )


def _write_fields(file: "h5py.File", name: str, fields: Tensor) -> None:
    """Write a slab of chunks at a time: the host never holds more."""
    edge = min(CHUNK, fields.shape[1])
    stored = file.create_dataset(name, tuple(fields.shape), "f4", chunks=(len(fields), edge, edge, edge))
    stored.attrs["fields"] = list(FIELDS[name])
    for start in range(0, fields.shape[1], edge):
        stored[:, start : start + edge] = fields[:, start : start + edge].cpu().numpy()


def attributes(simulation: Simulation, scales: Scales) -> dict[str, Any]:
    """What a box is of: settings, cosmology, and scales with the rule to undo them."""
    known = asdict(simulation)
    cosmology = known.pop("cosmology")
    rules = "ln(density)/scale_density", "velocity/scale_velocity", "ln(T/scale_temperature_unit)/scale_temperature"
    return {
        **known,
        "box_size": simulation.box_size,
        "units": "comoving Mpc/h, km/s, K; densities in mean ones",
        "normalization": ", ".join(rules),
        **{f"cosmology_{name}": value for name, value in cosmology.items()},
        **{f"scale_{name}": value for name, value in asdict(scales).items()},
    }
