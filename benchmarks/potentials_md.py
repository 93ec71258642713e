"""Whether molecular dynamics with a trained potential conserve energy, and how fast they go.

    python benchmarks/potentials_md.py RUN [--system FOLDER] [--steps 4000] [--temperature 300] [--out FILE.md]

RUN is a run of water, a file that `isoscale export` wrote of it, or an .npz of its weights as the tests have one. The
first frame of the system (by default water/data_3 of the potentials data) starts with velocities of the temperature and
is integrated by ASE with velocity Verlet, 0.5 fs a step, without a thermostat. The drift is the slope of a straight
line through the total energy over the time after the first tenth, in which positions and velocities come together.
"""

import argparse
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ase
import numpy as np
import torch
from ase import Atoms, units
from ase.md.velocitydistribution import Stationary, thermalize_momenta
from ase.md.verlet import VelocityVerlet

import isoscale
from isoscale import calculator

TIMESTEP = 0.5
"""fs."""
WATER = Path(os.environ.get("ISOSCALE_SHARED", "shared")) / "data" / "potentials" / "water" / "data_3"
MEV = 1000.0


class Followed(NamedTuple):
    """What happened, step by step."""

    picoseconds: np.ndarray
    total: np.ndarray
    """eV/atom."""
    kelvin: np.ndarray
    seconds_per_step: float
    num_lists: int


def first_frame(folder: Path) -> Atoms:
    """The first frame of a system, as ASE has it."""
    names = (folder / "type_map.raw").read_text().split()
    symbols = [names[int(word)] for word in (folder / "type.raw").read_text().split()]
    stored = sorted(folder.glob("set.*"))[0]
    coord, box = (np.load(stored / f"{key}.npy")[0].astype(np.float64).reshape(-1, 3) for key in ("coord", "box"))
    return Atoms(symbols, positions=coord, cell=box, pbc=True)


def potential_of(where: str) -> Any:
    """A run or a file as it is; from weights in an .npz, the model that the tests make of them."""
    if not where.endswith(".npz"):
        return where
    from tests.science.potentials import parity

    return parity.model()


def follow(atoms: Atoms, num_steps: int, kelvin: float) -> Followed:
    """Integrate, and note energy and temperature at every step."""
    thermalize_momenta(atoms, temperature_K=kelvin, rng=np.random.default_rng(0))
    Stationary(atoms)
    dynamics = VelocityVerlet(atoms, TIMESTEP * units.fs)
    rows: list[tuple[float, float]] = []
    dynamics.attach(lambda: rows.append((atoms.get_total_energy() / len(atoms), atoms.get_temperature())))
    dynamics.run(1)
    began = time.perf_counter()
    dynamics.run(num_steps - 1)
    seconds = (time.perf_counter() - began) / max(1, num_steps - 1)
    total, found = np.array(rows).T
    return Followed(
        np.arange(len(rows)) * TIMESTEP / 1000, total, found, seconds, atoms.calc.num_lists
    )  # fmt: skip


def drift(followed: Followed) -> tuple[float, float]:
    """meV/atom/ps, and the root mean square of what is left beside the line, meV/atom."""
    start = len(followed.total) // 10
    when, energy = followed.picoseconds[start:], MEV * followed.total[start:]
    slope, offset = np.polyfit(when, energy, 1)
    return float(slope), float(np.sqrt(np.mean((energy - slope * when - offset) ** 2)))


def report(followed: Followed, atoms: Atoms, words: argparse.Namespace) -> str:
    """The result, for people."""
    slope, rest = drift(followed)
    half = len(followed.kelvin) // 2
    rows = {
        "length": f"{followed.picoseconds[-1]:.2f} ps, {len(followed.total) - 1} steps of {TIMESTEP} fs",
        "drift of the total energy": f"**{slope:+.4f} meV/atom/ps**",
        "scatter around the line": f"{rest:.4f} meV/atom",
        "temperature, second half": f"{followed.kelvin[half:].mean():.0f} ± {followed.kelvin[half:].std():.0f} K",
        "kinetic energy at 300 K, to compare": f"{MEV * 1.5 * units.kB * 300:.1f} meV/atom",
        "time of a step": f"{MEV * followed.seconds_per_step:.0f} ms",
        "lists of neighbours made": str(followed.num_lists),
    }
    head = (
        f"# Molecular dynamics of water, {time.strftime('%Y-%m-%d')}\n\n"
        f"`python benchmarks/potentials_md.py {Path(words.potential).name} --steps {words.steps}`; "
        f"{len(atoms)} atoms, velocity Verlet of ASE {ase.__version__} without a thermostat, from "
        f"{words.temperature:.0f} K; {platform.machine()}, "
        f"{torch.get_num_threads()} thread(s), load of the machine {os.getloadavg()[1]:.1f}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, isoscale {isoscale.__version__}; one trial."
        f"{' ' + words.about if words.about else ''}\n"
    )
    return "\n".join([head, "| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows.items()), ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("potential")
    parser.add_argument("--system", type=Path, default=WATER)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--temperature", type=float, default=300.0)
    parser.add_argument("--about", default="", help="what the potential is, for the result")
    parser.add_argument("--out", type=Path)
    words = parser.parse_args(arguments)
    atoms = first_frame(words.system)
    atoms.calc = calculator(potential_of(words.potential))
    text = report(follow(atoms, words.steps, words.temperature), atoms, words)
    print(text)
    if words.out is not None:
        words.out.write_text(text)


if __name__ == "__main__":
    main()
