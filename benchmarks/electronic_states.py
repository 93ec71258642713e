"""Fermi level, band energy and entropy from a local density of states: isoscale and MALA, side by side on a CPU.

    python benchmarks/electronic_states.py --data DIR --peer PYTHON [--out FILE.md] [--repeats 5]

DIR holds a snapshot of beryllium (Be_snapshot0.out.npy and .info.json), whose states are drawn on 250 energies. Each
side gets the density of states of the snapshot, and the local one at its 8,748 points, and gives all three numbers; one
thread each, the median of the repeats. MALA is run by the Python that --peer names, with its analytical integrals.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

NUM_ENERGIES, OFFSET = 250, -5.0
SPACING = 25.0 / (NUM_ENERGIES - 1)
Numbers = dict[str, Any]
"""Seconds of each repeat under `dos` and `ldos`, and the three numbers under `values`."""


def draw(ldos: Any) -> Any:
    """The same states on more energies."""
    places = np.linspace(0, ldos.shape[-1] - 1, NUM_ENERGIES)
    low = np.minimum(places.astype(int), ldos.shape[-1] - 2)
    return ldos[..., low] * (1 - (places - low)) + ldos[..., low + 1] * (places - low)


def seconds(work: Any, repeats: int) -> tuple[list[float], Any]:
    """Of every repeat but the first, and what came out."""
    times, found = [], None
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        found = work()
        times.append(time.perf_counter() - begin)
    return times[1:], found


def ours(ldos: Any, info: Path, repeats: int) -> Numbers:
    """All three from one filling."""
    import torch

    from isoscale.science.electronic.calculation import read_calculation
    from isoscale.science.electronic.integrals import EnergyGrid, Quadrature
    from isoscale.science.electronic.states import fill_with

    torch.set_num_threads(1)
    known = read_calculation(info)
    points = torch.as_tensor(ldos).flatten(0, 2)
    voxel = known.volume / len(points)
    electrons = torch.tensor([known.num_electrons], dtype=torch.float64)

    def fill(dos: Any) -> list[float]:
        quadrature = Quadrature(EnergyGrid(NUM_ENERGIES, SPACING, OFFSET), [known.temperature])
        filling = fill_with(dos[None], electrons, quadrature)
        return [filling.fermi.item(), filling.band_energy.item(), filling.entropy.item()]

    dos = points.sum(0) * voxel
    of_dos, values = seconds(lambda: fill(dos), repeats)
    of_ldos, _ = seconds(lambda: fill(points.sum(0) * voxel), repeats)
    return {"dos": of_dos, "ldos": of_ldos, "values": values}


def peer(ldos: Any, info: Path, repeats: int) -> Numbers:
    """Its calculators, with a Fermi level that is found once."""
    import mala

    parameters = mala.Parameters()
    parameters.verbosity = 0
    parameters.targets.target_type = "LDOS"
    parameters.targets.ldos_gridsize = NUM_ENERGIES
    parameters.targets.ldos_gridspacing_ev, parameters.targets.ldos_gridoffset_ev = SPACING, OFFSET
    calculator = mala.LDOS(parameters)
    calculator.read_additional_calculation_data(str(info))
    dos = calculator.get_density_of_states(ldos)
    on_dos = mala.DOS(parameters)
    on_dos.read_additional_calculation_data(str(info))

    def fill(calculator: Any, states: Any) -> list[float]:
        fermi = calculator.get_self_consistent_fermi_energy(states)
        band = calculator.get_band_energy(states, fermi_energy=fermi)
        return [float(fermi), float(band), float(calculator.get_entropy_contribution(states, fermi_energy=fermi))]

    of_dos, values = seconds(lambda: fill(on_dos, dos), repeats)
    of_ldos, _ = seconds(lambda: fill(calculator, ldos), repeats)
    return {"dos": of_dos, "ldos": of_ldos, "values": values}


def run_side(python: str, name: str, ldos: Path, info: Path, repeats: int) -> Numbers:
    """A side in a process of its own."""
    words = [python, __file__, "--side", name, str(ldos), str(info), str(repeats)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, cwd=ldos.parent)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, Numbers]) -> list[str]:
    lines = ["| | MALA | isoscale | isoscale is faster by |", "|---|---|---|---|"]
    for key, words in (("dos", "density of states → all three"), ("ldos", "local density of states → all three")):
        times = {name: statistics.median(numbers[key]) for name, numbers in found.items()}
        ratio = times["MALA"] / times["isoscale"]
        lines.append(f"| {words} | {times['MALA']:.2f} s | {1000 * times['isoscale']:.1f} ms | {ratio:,.0f}× |")
    for place, words in enumerate(("Fermi level, eV", "band energy, eV", "−TS, eV")):
        values = {name: numbers["values"][place] for name, numbers in found.items()}
        apart = abs(values["MALA"] - values["isoscale"])
        lines.append(f"| {words} | {values['MALA']:.10g} | {values['isoscale']:.10g} | {apart:.0e} apart |")
    return lines


def main() -> None:
    """Measure both and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer", metavar="PYTHON", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    info = options.data.absolute() / "Be_snapshot0.info.json"
    with tempfile.TemporaryDirectory() as folder:
        ldos = Path(folder) / "ldos.npy"
        np.save(ldos, draw(np.load(options.data / "Be_snapshot0.out.npy").astype(np.float64)))
        pythons = {"MALA": options.peer, "isoscale": sys.executable}
        found = {name: run_side(python, name, ldos, info, options.repeats) for name, python in pythons.items()}
    text = [
        f"# Energies from states, {time.strftime('%Y-%m-%d')}", "",
        f"`python benchmarks/electronic_states.py --repeats {options.repeats}`; {platform.machine()}, one thread, "
        f"Python {platform.python_version()}, numpy {np.__version__}, MALA 1.4.0; {NUM_ENERGIES} energies, 8,748 "
        f"points, float64, median of {options.repeats}.", "",
        *table(found), "",
    ]  # fmt: skip
    print("\n".join(text))
    out = options.out or Path(__file__).parent / "results" / f"{time.strftime('%Y-%m-%d')}-electronic-states.md"
    out.write_text("\n".join(text))


if __name__ == "__main__":
    if "--side" in sys.argv:
        name, path, info, repeats = sys.argv[sys.argv.index("--side") + 1 :]
        side = ours if name == "isoscale" else peer
        print(json.dumps(side(np.load(path), Path(info), int(repeats))))
    else:
        main()
