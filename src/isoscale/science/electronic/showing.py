"""Pictures of the physics: densities of states beside the true ones, and predictions against the truth."""

import numpy as np

from isoscale.engine.dataset_metrics import EvaluatedDataset
from isoscale.observe.figures import Curves, Parity, ParityPoints
from isoscale.science.electronic.physics import Measurement
from isoscale.science.electronic.states import Filling

MOST_SNAPSHOTS = 4
"""Whose states are drawn during a training, where each figure costs time; afterwards all are."""
LDOS = "LDOS (1/(eV Å³))"


def show(measurement: Measurement, dataset: EvaluatedDataset) -> None:
    """Show all that there is, where somebody looks."""
    if not dataset.occasion.shows:
        return
    _show_parity(measurement, dataset)
    if measurement.systems is not None:
        _show_energies(measurement, dataset)
        _show_states(measurement, dataset)


def _show_parity(measurement: Measurement, dataset: EvaluatedDataset) -> None:
    found = measurement.histogram
    if found is not None and found.high > found.low:
        absolute, square = (dict(measurement.named(name))[name] for name in ("ldos_mae", "ldos"))
        words = [f"mean absolute error {absolute:.3g}", f"root mean square error {np.sqrt(square):.3g}"]
        dataset.show("ldos_parity", Parity(found.counts.cpu().numpy(), found.low, found.high, LDOS, words))


def _show_energies(measurement: Measurement, dataset: EvaluatedDataset) -> None:
    """The band energies of those snapshots that have them, where they are several."""
    systems, levels = measurement.systems, measurement.levels
    assert systems is not None
    true, predicted = (each.band_energy / systems.num_atoms for each in (levels.true, levels.predicted))
    whole = measurement.is_whole[systems.numbers] & ~true.isnan() & ~predicted.isnan()
    names = [name for name, is_there in zip(systems.names, whole.tolist(), strict=True) if is_there]
    if len(names) > 1:
        found = [each[whole].cpu().numpy() for each in (true, predicted)]
        dataset.show("band_energy_parity", ParityPoints(names, found[0], found[1], "band energy (eV/atom)"))


def _show_states(measurement: Measurement, dataset: EvaluatedDataset) -> None:
    systems, levels = measurement.systems, measurement.levels
    assert systems is not None
    energies = measurement.grid.energies().numpy()
    whole = measurement.is_whole[systems.numbers].tolist()
    shown = [number for number, is_there in enumerate(whole) if is_there]
    for number in shown if dataset.occasion.is_full else shown[:MOST_SNAPSHOTS]:
        fillings = {"true": levels.true, "predicted": levels.predicted}
        values = {name: filling.dos[number].cpu().numpy() for name, filling in fillings.items()}
        marks = {name: mark for name, filling in fillings.items() if (mark := _fermi_level(filling, number))}
        name = systems.names[number]
        dataset.show(f"dos/{name}", Curves(energies, values, "energy (eV)", "density of states (1/eV)", marks))


def _fermi_level(filling: Filling, number: int) -> tuple[str, float] | None:
    fermi = filling.fermi[number].item()
    return None if np.isnan(fermi) else (f"Fermi level {fermi:.3f} eV", fermi)
