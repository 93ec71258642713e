"""Particle-mesh operations: cloud-in-cell deposits and interpolation, and gradients by Fourier transform.

Positions are in cells of a periodic mesh of n³ points, (3, particles) in float32. The weights of a particle are
integers, products of three fractions of 14 bits: their sums do not depend on the order of the particles, the number of
threads or atomic operations of a GPU, and the mass on the mesh is that of the particles, exactly.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

BITS = 14
"""Of a position inside a cell: a float32 position in a mesh of 512 has no more."""
ONE = 1 << BITS
WHOLE = 1 << 3 * BITS
"""The weight of one particle: a cell holds 2²¹ of them before 64 bits overflow."""
CPU_CHUNK, CHUNK = 1 << 14, 1 << 20
"""Particles at a time, which does not change bits: what fits the caches of a processor, and what fills a GPU."""
MOST_THREADS = 8


def in_parts(positions: Tensor, work: Callable[[list[slice]], Any]) -> list[Any]:
    """Call `work` with the chunks of all particles, as one part or, on a processor, on a thread for each part.

    Threads of torch would share every operation, and wait for each other at its end: on a busy machine a hundred times
    as long as they work.
    """
    num_particles, on_cpu = positions.shape[1], positions.device.type == "cpu"
    size = CPU_CHUNK if on_cpu else CHUNK
    chunks = [slice(start, min(start + size, num_particles)) for start in range(0, num_particles, size)]
    if not on_cpu:
        return [work(chunks)]
    before = torch.get_num_threads()
    count = min(before, MOST_THREADS)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(torch.no_grad()(work), [chunks[number::count] for number in range(count)]))
    finally:
        torch.set_num_threads(before)  # which new threads would have one of


def corners(positions: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The points around particles and their weights, which sum to `WHOLE`: both (8, particles) in int64."""
    lower = positions.floor()
    offset = ((positions - lower) * ONE).round_().long()
    first = lower.long().remainder_(n)
    points = torch.stack([first, (first + 1).remainder_(n)], 1)  # (3, 2, particles)
    weights = torch.stack([ONE - offset, offset], 1)
    x, y, z = points[0, :, None, None] * (n * n), points[1, None, :, None] * n, points[2, None, None, :]
    weight = weights[0, :, None, None] * weights[1, None, :, None] * weights[2, None, None, :]
    return (x + y + z).flatten(0, 2), weight.flatten(0, 2)


def deposit(positions: Tensor, n: int, values: Tensor | None = None) -> Tensor:
    """Cloud-in-cell sums (n, n, n) in float64 of the particles, or of a value (particles) of each, over the mesh."""
    # A power of two changes no digits of the values.
    unit = 1.0 if values is None else float(2.0 ** values.abs().max().clamp(min=1e-30).log2().ceil())

    def add(chunks: list[slice]) -> Tensor:
        mesh = torch.zeros(n**3, dtype=torch.int64, device=positions.device)
        for chunk in chunks:
            points, weights = corners(positions[:, chunk], n)
            if values is not None:
                weights = (weights * (values[chunk].double() / unit)).round_().long()
            mesh.index_add_(0, points.flatten(), weights.flatten())
        return mesh

    mesh, *others = in_parts(positions, add)
    for other in others:
        mesh += other
    return (mesh.double() * (unit / WHOLE)).view(n, n, n)


def interpolate(mesh: Tensor, positions: Tensor) -> Tensor:
    """Values (components, particles) at positions in a mesh (n, n, n, components), with the weights of `deposit`."""
    points, weights = corners(positions, mesh.shape[0])
    weights = weights.T.to(mesh.dtype) * (1 / WHOLE)
    rows = mesh.flatten(0, 2)
    found = torch.nn.functional.embedding_bag(
        points.T.contiguous(), rows, per_sample_weights=weights.contiguous(), mode="sum"
    )
    return found.T


def wave_numbers(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Integer wave numbers along each axis of a real Fourier transform, shaped to broadcast: float32."""
    full = torch.fft.fftfreq(n, 1 / n, device=device)
    half = torch.fft.rfftfreq(n, 1 / n, device=device)
    return full[:, None, None], full[None, :, None], half[None, None, :]


def inverse_laplacian(spectrum: Tensor) -> Tensor:
    """The spectrum of the potential whose Laplacian is given, with lengths in mesh spacings and mean 0."""
    n = spectrum.shape[0]
    x, y, z = (k.square() for k in wave_numbers(n, spectrum.device))
    square = (x + y + z).mul_(-((2 * torch.pi / n) ** 2))
    square[0, 0, 0] = torch.inf
    return spectrum / square


def derivative(spectrum: Tensor, *axes: int) -> Tensor:
    """The derivative along axes of a field (n, n, n) given by its spectrum, with lengths in mesh spacings.

    The highest wave of an even mesh has no derivative along its axis.
    """
    n = spectrum.shape[0]
    numbers = wave_numbers(n, spectrum.device)
    for axis in axes:
        factor = (2j * torch.pi / n) * torch.where(numbers[axis].abs() * 2 == n, 0, numbers[axis])
        spectrum = spectrum * factor
    return torch.fft.irfftn(spectrum, s=(n, n, n))


def smooth(field: Tensor, width: float) -> Tensor:
    """A field convolved with a Gaussian of a width in mesh spacings."""
    n = field.shape[0]
    spectrum = torch.fft.rfftn(field)
    for k in wave_numbers(n, field.device):
        spectrum *= torch.exp(-0.5 * (2 * torch.pi / n * width * k) ** 2)
    return torch.fft.irfftn(spectrum, s=(n, n, n))
