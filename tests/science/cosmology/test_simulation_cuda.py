"""A simulation on a GPU: the same bits every time, without deterministic kernels, and the physics of the processor."""

import pytest
import torch

from isoscale.science.cosmology.simulation import Simulation, simulate
from isoscale.science.cosmology.statistics import finish_spectra, power_sums, spectra_sums

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIMULATION = Simulation(cells=64, particles_per_cell=8)


def test_two_boxes_of_a_seed_are_equal_to_the_bit():
    one, other = (simulate(SIMULATION, torch.device("cuda")) for _ in range(2))
    assert all(torch.equal(first, second) for first, second in zip(one, other, strict=True))
    sums = [power_sums(one[0][None])[0] for _ in range(2)]
    assert torch.equal(*sums)


def test_a_box_of_a_gpu_has_the_structure_of_one_of_the_processor():
    small = Simulation(cells=32, particles_per_cell=1)
    ours, theirs = (simulate(small, torch.device(kind))[0][None].cpu() for kind in ("cuda", "cpu"))
    spectra = finish_spectra(*spectra_sums(ours, theirs), small.box_size, 32)
    assert (spectra.ratio - 1).abs().max() < 0.01 and spectra.correlation.min() > 0.999
