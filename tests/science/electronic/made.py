"""Small snapshots of made-up crystals, and their physics by plain sums over a fine energy axis."""

import json
from pathlib import Path
from typing import Any

import numpy as np

SHAPE, VOLUME, NUM_ATOMS, NUM_ELECTRONS, KELVIN = (3, 4, 5), 120.0, 2, 3.0, 4000.0
SIZE, SPACING, OFFSET = 7, 2.0, -4.0
ENERGIES = OFFSET + SPACING * np.arange(SIZE)
KT = 8.617330337217213e-05 * KELVIN
RECIPE: dict[str, Any] = {
    "task": {
        "class": "ldos", "model": {"class": "mlp", "widths": [4, 16, SIZE]},
        "energies": {"size": SIZE, "spacing": SPACING, "offset": OFFSET},
        "physics": {"metrics": ["band_energy", "density"], "every": 5},
    },
    "data": {
        "class": "snapshots", "train": ["a"], "val": ["b", "c"], "test": ["b", "c"], "columns": None, "batch_size": 20,
        "eval_batch_size": 20,
        "transforms": [{"class": "scale"}, {"class": "scale", "kind": "minmax", "per": "whole", "key": "target"}],
    },
    "optimizer": {"lr": 1e-2},
    "train": {"epochs": 6},
}  # fmt: skip


def ldos(seed: int) -> np.ndarray:
    """At every point of the grid, in 1/(eV Å³)."""
    random = np.random.default_rng(seed)
    bump = np.exp(-((ENERGIES - 3 - 0.3 * random.normal(size=(*SHAPE, 1))) ** 2) / 30)
    return (0.004 * bump * (1 + 0.1 * random.normal(size=(*SHAPE, SIZE)))).astype(np.float32)


def write(folder: Path, names: str = "abc", **changed: dict[str, Any]) -> Path:
    """Snapshots under one-letter names; `changed` has other numbers of their calculations, None for none at all."""
    for seed, name in enumerate(names):
        target = ldos(seed)
        inputs = np.concatenate([target[..., :3], target.sum(-1, keepdims=True)], -1)
        np.save(folder / f"{name}.in.npy", inputs)
        np.save(folder / f"{name}.out.npy", target)
        if changed.get(name, {}) is not None:
            (folder / f"{name}.info.json").write_text(json.dumps({**_info(), **changed.get(name, {})}))
    return folder


def _info() -> dict[str, Any]:
    atoms = {"cell": [[3, 0, 0], [0, 4, 0], [0, 0, 10]], "numbers": [4] * NUM_ATOMS}
    return {"temperature": KELVIN, "number_of_electrons_exact": NUM_ELECTRONS, "atoms": atoms}


class Physics:
    """Of one local density of states; the density of states falls to 0 one spacing outside the grid."""

    def __init__(self, values: np.ndarray, fermi: float | None = None) -> None:
        points = values.astype(np.float64).reshape(-1, SIZE)
        self._axis = np.linspace(ENERGIES[0] - SPACING, ENERGIES[-1] + SPACING, 80_001)
        self._knots = np.concatenate([[ENERGIES[0] - SPACING], ENERGIES, [ENERGIES[-1] + SPACING]])
        self._points = np.pad(points, ((0, 0), (1, 1)))
        self.dos = points.sum(0) * VOLUME / len(points)
        self._fine = np.interp(self._axis, self._knots, np.pad(self.dos, 1))
        self.fermi = self._fermi() if fermi is None else fermi

    def _fermi(self) -> float:
        low, high = ENERGIES[0], ENERGIES[-1]
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.electrons(middle) < NUM_ELECTRONS else (low, middle)
        return low

    def _occupied(self, fermi: float) -> np.ndarray:
        return 1 / (1 + np.exp((self._axis - fermi) / KT))

    def electrons(self, fermi: float) -> float:
        return float(np.trapezoid(self._fine * self._occupied(fermi), self._axis))

    @property
    def band_energy(self) -> float:
        return float(np.trapezoid(self._fine * self._occupied(self.fermi) * self._axis, self._axis))

    @property
    def entropy(self) -> float:
        share = np.clip(self._occupied(self.fermi), 1e-300, 1 - 1e-16)
        mixed = share * np.log(share) + (1 - share) * np.log(1 - share)
        return float(KT * np.trapezoid(self._fine * mixed, self._axis))

    @property
    def density(self) -> np.ndarray:
        """At every point."""
        occupied = self._occupied(self.fermi)
        fine = (np.interp(self._axis, self._knots, row) for row in self._points)
        return np.array([np.trapezoid(row * occupied, self._axis) for row in fine])


def errors(predicted: np.ndarray, true: np.ndarray, scale: float = 1.0) -> dict[str, float]:
    """Every metric of a snapshot, from what was predicted and what is true; `scale` is that of the training."""
    wanted, clamped = Physics(true), np.maximum(predicted, 0)
    found, at_true = Physics(clamped), Physics(clamped, wanted.fermi)
    dos_apart, density_apart = np.abs(found.dos - wanted.dos), np.abs(found.density - wanted.density)
    apart = clamped.astype(np.float64) - true
    return {
        "band_energy": 1000 * (found.band_energy - wanted.band_energy) / NUM_ATOMS,
        "band_energy_true_fermi": 1000 * (at_true.band_energy - wanted.band_energy) / NUM_ATOMS,
        "fermi_energy": 1000 * (found.fermi - wanted.fermi),
        "entropy": 1000 * (found.entropy - wanted.entropy) / NUM_ATOMS,
        "electrons": at_true.electrons(wanted.fermi) - NUM_ELECTRONS,
        "dos": dos_apart.mean() / NUM_ATOMS,
        "dos_relative": 100 * dos_apart.sum() / wanted.dos.sum(),
        "density": density_apart.mean(),
        "density_relative": 100 * density_apart.mean() * VOLUME / NUM_ELECTRONS,
        "ldos": (apart**2).mean(),
        "ldos_mae": np.abs(apart).mean(),
        "ldos_scaled": (((predicted.astype(np.float64) - true) / scale) ** 2).mean(),
    }
