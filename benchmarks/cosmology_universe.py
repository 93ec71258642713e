"""The power spectrum of simulated dark matter against that of particles of another N-body code.

    python benchmarks/cosmology_universe.py POSITIONS.npy --box 32 --sigma-8 0.808 …

POSITIONS.npy has the positions (particles, 3) of a periodic box in Mpc/h. Boxes of the same size, with as many
particles and the same cosmology, are simulated from several seeds; both are put on the same mesh. One box of tens of
Mpc/h has few long waves, so that the scatter between seeds says how far apart two boxes may be.
"""

import argparse
import math
import time
from itertools import pairwise

import numpy as np
import torch

from isoscale.science.cosmology.particle_mesh import deposit
from isoscale.science.cosmology.simulation import Simulation, evolve, initial_conditions, linear_spectrum
from isoscale.science.cosmology.statistics import finish_power, power_sums
from isoscale.science.cosmology.theory import Cosmology

EDGES = (1, 2, 4, 6, 8, 12, 16, 20, 26, 32)
"""Of bands, in waves per box of 64 cells."""


def main() -> None:
    """Print a table, one row for each band of wave numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("positions")
    parser.add_argument("--box", type=float, default=32.0)
    parser.add_argument("--redshift", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    for name, value in (("omega-m", 0.315192), ("omega-b", 0.0493), ("h", 0.6736), ("n-s", 0.9649), ("sigma-8", 0.808)):
        parser.add_argument(f"--{name}", type=float, default=value)
    given = parser.parse_args()
    cosmology = Cosmology(given.omega_m, given.omega_b, given.h, given.n_s, given.sigma_8)
    positions = torch.from_numpy(np.load(given.positions)).T.float().contiguous()
    cells = round(positions.shape[1] ** (1 / 3))
    k, other = spectrum((positions / given.box * cells).remainder(cells), cells, given.box)
    began, ours = time.perf_counter(), []
    for seed in range(given.seeds):
        simulation = Simulation(
            cells=cells, seed=seed, cell_size=given.box / cells, particles_per_cell=1, redshift=given.redshift,
            steps=given.steps, temperature=0.0, cosmology=cosmology,
        )  # fmt: skip
        start = initial_conditions(simulation, linear_spectrum(simulation, torch.device("cpu")))
        ours.append(spectrum(evolve(simulation, start)[0].positions, cells, given.box)[1])
    seconds = (time.perf_counter() - began) / given.seeds
    print(f"{cells}³ particles, {given.seeds} seeds, {seconds:.1f} s each on {torch.get_num_threads()} threads\n")
    linear = cosmology.power(k) * cosmology.growth(1 / (1 + given.redshift)) ** 2
    print("| k, h/Mpc | other / ours | scatter of one box | other / linear | ours / linear |\n|---|---|---|---|---|")
    for low, high in pairwise(EDGES):
        band = slice(low - 1, high - 1)
        theirs, line = banded(other, band), banded(linear, band)
        mine = torch.stack([banded(power, band) for power in ours])
        ratios = [math.exp(float(each)) for each in (theirs - mine.mean(), theirs - line, mine.mean() - line)]
        print(f"| {k[band][0]:.2f}–{k[band][-1]:.2f} | {ratios[0]:.2f} | ± {float(mine.std()):.2f} | "
              f"{ratios[1]:.2f} | {ratios[2]:.2f} |")  # fmt: skip


def spectrum(positions: torch.Tensor, cells: int, box: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Wave numbers and the power spectrum of the density contrast on a mesh."""
    density = deposit(positions, cells)
    sums, counts = power_sums((density / density.mean() - 1)[None, None])
    k, power = finish_power(sums, counts, box, cells)
    return k, power[0]


def banded(power: torch.Tensor, band: slice) -> torch.Tensor:
    """The mean logarithm in a band, weighed by the number of waves."""
    waves = torch.arange(1, len(power) + 1, dtype=torch.float64)[band] ** 2
    return (power[band].log() * waves).sum() / waves.sum()


if __name__ == "__main__":
    main()
