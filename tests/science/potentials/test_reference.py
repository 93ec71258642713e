"""Small potentials of many architectures give what DeePMD-kit computed with the same weights: `reference` has both."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoscale.science.potentials.model import DeepPotential, Prediction
from isoscale.science.potentials.se_e2_a import SeE2A
from isoscale.science.potentials.task import Potential
from tests.science.potentials.one_frame import frame_batch
from tests.science.potentials.reference.formula import (
    CASES,
    CUTOFF,
    LEARNED,
    NUM_STEPS,
    RATE,
    SMOOTH,
    TYPES,
    WEIGHTS,
    Case,
    filled,
    frame,
    labels,
    statistics,
)

REFERENCE = Path(__file__).parent / "reference"


@cache
def reference() -> dict[str, Any]:
    """What the other program found."""
    found: dict[str, Any] = json.loads((REFERENCE / "reference.json").read_text())
    return found


def model_of(case: Case) -> DeepPotential:
    """The architecture of a case, with the weights of the formula."""
    descriptor = SeE2A(case.sel, CUTOFF, SMOOTH, case.widths, case.axis_width, case.dt, case.one_side)
    model = DeepPotential(TYPES, descriptor, case.fitting_widths, case.fitting_dt).double()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(torch.from_numpy(filled(their_name(name, case), tuple(parameter.shape))))
    mean, scale, bias = statistics()
    for buffer, values in ((descriptor.mean, mean), (descriptor.scale, scale), (model.energy_bias, bias)):
        buffer.copy_(torch.tensor(values, dtype=torch.float64))
    return model


def their_name(name: str, case: Case) -> str:
    """Networks for pairs of types are counted by the neighbour's type first there, and by the centre's here."""
    part, _, rest = name.partition("networks.")
    if not rest or case.one_side:
        return name
    network, _, rest = rest.partition(".")
    centre, neighbour = divmod(int(network), len(TYPES))
    return f"{part}networks.{neighbour * len(TYPES) + centre}.{rest}"


def frame_and_labels() -> dict[str, torch.Tensor]:
    """The frame with its neighbours, and what it is said to have, as a batch of one."""
    made = frame()
    batch = frame_batch(made["coord"], made["types"], made["box"], CUTOFF, len(TYPES))
    places = batch["places"][0].numpy()
    sorted_labels = {name: values[places] if len(values.shape) and len(values) == len(places) else values
                     for name, values in labels().items()}  # fmt: skip
    return batch | {name: torch.from_numpy(np.asarray(values)[None]) for name, values in sorted_labels.items()}


def check(found: Prediction, places: np.ndarray, wanted: dict[str, Any], within: float) -> None:
    """Compare a prediction; `places` says for each of its atoms which one of the frame it is."""
    assert found.energy.item() == pytest.approx(wanted["energy"], abs=within, rel=0)
    for label, rows in (("atom_energy", places), ("force", places), ("virial", slice(None))):
        np.testing.assert_allclose(getattr(found, label)[0], np.array(wanted[label])[rows], rtol=0, atol=within)


@pytest.mark.parametrize("name", CASES)
def test_another_program_has_the_same_parameters(name: str) -> None:
    assert sorted(key for key, _ in model_of(CASES[name]).named_parameters()) == reference()[name]["parameters"]


@pytest.mark.parametrize("name", CASES)
def test_another_program_finds_the_same_energies_and_forces(name: str) -> None:
    batch = frame_and_labels()
    with torch.no_grad():
        check(model_of(CASES[name])(batch), batch["places"][0].numpy(), reference()[name], within=1e-10)


def test_the_frame_is_one_that_tells_architectures_apart() -> None:
    """Its box is smaller than twice the cutoff, it has more neighbours than the small sel, and no two cases agree."""
    made = frame()
    heights = 1 / np.linalg.norm(np.linalg.inv(made["box"]), axis=0)
    assert heights.max() < 2 * CUTOFF
    batch = frame_batch(made["coord"], made["types"], made["box"], CUTOFF, len(TYPES))
    counts = [int((batch[f"neighbours_{kind}"] >= 0).sum(2).max()) for kind in range(len(TYPES))]
    assert any(count > most for count, most in zip(counts, CASES["small_sel"].sel, strict=True))
    assert all(count <= most for count, most in zip(counts, CASES["plain"].sel, strict=True))
    assert len({round(reference()[name]["energy"], 3) for name in CASES}) == len(CASES)


@pytest.mark.parametrize("name", LEARNED)
def test_another_program_learns_the_same(name: str) -> None:
    """All four terms of the loss, through their derivatives and the optimizer: the weights end at the same place."""
    model, batch = model_of(CASES[name]), frame_and_labels()
    task = Potential(model, list(WEIGHTS))
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        terms = task.training_step(batch, 0)
        torch.stack([weight * terms[label] for label, weight in WEIGHTS.items()]).sum().backward()
        optimizer.step()
    with torch.no_grad():
        check(model(batch), batch["places"][0].numpy(), reference()[name]["learned"], within=1e-7)
