"""A trained potential of water, and what another program made of two frames with it."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isoscale.science.potentials.model import DeepPotential
from isoscale.science.potentials.se_e2_a import SeE2A

FILE = "data/potentials/parity_se_e2_a_fp64.npz"
TYPES, SEL, CUTOFF = ["O", "H"], [46, 92], 6.0


@cache
def stored() -> dict[str, np.ndarray]:
    """All arrays of the file; a test that has no such data skips."""
    if "ISOSCALE_SHARED" not in os.environ:
        pytest.skip("needs data: set ISOSCALE_SHARED to the folder that holds it")
    with np.load(Path(os.environ["ISOSCALE_SHARED"]) / FILE) as file:
        return {name: file[name] for name in file.files}


def model() -> DeepPotential:
    """The potential with the weights and statistics of the file, in double precision."""
    found = DeepPotential(TYPES, SeE2A(SEL, CUTOFF)).double()
    own: dict[str, Any] = found.state_dict()
    for name, values in weights().items():
        assert own[name].shape == values.shape, name
        own[name].copy_(values)
    return found.eval()


def weights() -> dict[str, torch.Tensor]:
    """By the names that they have here."""
    arrays = stored()
    found = {
        "descriptor.mean": arrays["mean"][:, 0, 0],
        "descriptor.scale": arrays["stddev"][:, 0, :2],
        "energy_bias": arrays["out_bias"][0, :, 0],
    }
    kinds = {"matrix": "weight", "bias": "bias", "idt": "dt"}
    for name, values in arrays.items():
        part, *rest = name.split(".")
        if part in ("emb", "fit"):
            network, layer, kind = rest
            where = f"descriptor.networks.{network}" if part == "emb" else f"fitting.{network}"
            is_last = part == "fit" and layer == "3"
            found[f"{where}.{kinds[kind]}" if is_last else f"{where}.layers.{layer}.{kinds[kind]}"] = values
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in found.items()}


def frames() -> list[dict[str, np.ndarray]]:
    """Coordinates, box and types of the two frames, with what the other program found."""
    arrays = stored()
    return [
        {
            "coord": arrays["coord"][number].reshape(-1, 3),
            "box": arrays["box"][number].reshape(3, 3),
            "types": arrays["type"],
            "energy": arrays["pred_energy"][number, 0],
            "force": arrays["pred_force"][number],
            "virial": arrays["pred_virial"][number].reshape(3, 3),
            "atom_energy": arrays["pred_atom_energy"][number, :, 0],
        }
        for number in range(len(arrays["coord"]))
    ]
