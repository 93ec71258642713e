"""The 48 symmetries of the cube, rotations and reflections, that act on fields on a grid exactly: cells only move.

A symmetry has a number from 0 to 47: 8 × the number of a permutation of the axes, in lexicographic order, plus a bit
for each axis that is mirrored. All is computed from the number with arithmetic on the device, so that nothing has to be
copied there and a step that turns fields can be captured.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.data.rng import StepRandom, current
from isoscale.errors import UserError
from isoscale.science.cosmology.fields import HYDRO, NBODY, vector_channels

NUM_SYMMETRIES = 48
NUM_ROTATIONS = 24
USUAL = {"input": NBODY, "target": HYDRO}
"""Density and velocity in; density, velocity and temperature out."""


def axes_and_mirrors(number: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetries (…,) as the old axis (…, 3) that becomes each new one, and whether that is mirrored, 0 or 1 (…, 3)."""
    order = number // 8
    first = order // 2
    low, high = (first == 0).long(), 2 - (first == 2).long()  # the axes that are left
    second = low + (high - low) * (order % 2)
    mirrors = [(number >> axis) % 2 for axis in range(3)]
    return torch.stack([first, second, 3 - first - second], -1), torch.stack(mirrors, -1)


def matrices(number: Tensor) -> Tensor:
    """Symmetries (…,) as signed permutation matrices (…, 3, 3) in int64, which turn column vectors."""
    axes, mirrors = axes_and_mirrors(number)
    return (axes[..., None] == torch.arange(3, device=number.device)) * (1 - 2 * mirrors[..., None])


def rotation(number: Tensor) -> Tensor:
    """Symmetries that are rotations (determinant +1), of numbers from 0 to 23."""
    order, mirrors = number // 4, number % 4
    is_odd = (order + 1) // 2 % 2  # of the permutations in lexicographic order: 0 1 1 0 0 1
    return 8 * order + mirrors + 4 * ((is_odd + mirrors + mirrors // 2) % 2)


def turn(fields: Tensor, number: Tensor, vectors: Sequence[Sequence[int]] = ()) -> Tensor:
    """Turn fields (batch, channels, n, n, n) about the centre of the box, each sample by its own symmetry (batch,).

    `vectors` names the channels of the x, y and z component of each vector field: these turn with the axes, as v'(x) =
    R v(R⁻¹ x) says; all other channels are scalars, and only move. Axis x is the first one of a field.
    """
    num_samples, num_channels, size = fields.shape[:3]
    axes, mirrors = axes_and_mirrors(number)
    place = torch.arange(size, device=fields.device)
    place = place + mirrors[:, :, None] * (size - 1 - 2 * place)  # (batch, 3, n), along the old axis of each new one
    x, y, z = (place * choose(axes, (size * size, size, 1))[:, :, None]).unbind(1)
    cells = (x[:, :, None, None] + y[:, None, :, None] + z[:, None, None, :]).view(num_samples, 1, -1)
    channels = torch.arange(num_channels, device=fields.device).repeat(num_samples, 1)
    signs = torch.ones_like(channels)
    for vector in vectors:
        old = choose(axes, vector)
        for axis, channel in enumerate(vector):
            channels[:, channel], signs[:, channel] = old[:, axis], 1 - 2 * mirrors[:, axis]
    samples = torch.arange(num_samples, device=fields.device)
    moved = fields.flatten(2)[samples[:, None, None], channels[:, :, None], cells].view(fields.shape)
    return moved.mul_(signs.view(num_samples, num_channels, 1, 1, 1).to(fields.dtype)) if vectors else moved


def choose(axes: Tensor, values: Sequence[int]) -> Tensor:
    """One of three numbers for each axis: `values[axes]`, where the numbers need not be on the device."""
    return values[0] * (axes == 0) + values[1] * (axes == 1) + values[2] * (axes == 2)


def draw(random: StepRandom, rotations_only: bool = False) -> Tensor:
    """A random symmetry (batch,) for each sample of the step."""
    word = random.bits(random.another("symmetry"), ())
    return rotation(word * NUM_ROTATIONS >> 32) if rotations_only else word * NUM_SYMMETRIES >> 32


class CubeSymmetry:
    """Turn and mirror the boxes of a training batch at random: all entries of a sample alike, vectors with the axes."""

    keeps_units = True

    def __init__(self, fields: Mapping[str, Sequence[str]] | None = None, rotations_only: bool = False) -> None:
        """`fields` names the entries that are turned, and the fields of each; names in _x, _y and _z are a vector.

        By default these are an `input` of density and velocity, and a `target` that has a temperature too.
        `rotations_only` leaves out the mirrored half, for physics that can tell left from right.
        """
        self.fields = {key: list(names) for key, names in (USUAL if fields is None else fields).items()}
        self.vectors = {key: vector_channels(names) for key, names in self.fields.items()}
        self.rotations_only = rotations_only

    def __call__(self, batch: Batch) -> Batch:
        """The batch with turned boxes in training, itself elsewhere."""
        random = current()
        if random is None:
            return batch
        for key, names in self.fields.items():
            self._check(batch, key, names)
        number = draw(random, self.rotations_only)
        return {**batch, **{key: turn(batch[key], number, vectors) for key, vectors in self.vectors.items()}}

    def _check(self, batch: Batch, key: str, names: list[str]) -> None:
        if not isinstance(batch, dict) or key not in batch:
            there = ", ".join(map(repr, batch)) if isinstance(batch, dict) else f"no names (a {type(batch).__name__})"
            raise UserError(
                f"CubeSymmetry turns {key!r} of a batch, but a batch has {there}: name in its `fields` what to turn, "
                "such as {input: [density], target: [density, temperature]}"
            )
        shape = batch[key].shape
        if len(shape) != 5 or len(set(shape[2:])) != 1:
            raise UserError(
                f"CubeSymmetry needs cubes (batch, channels, n, n, n), but {key!r} has the shape {tuple(shape)}: "
                "cut out cubes before it"
            )
        if shape[1] != len(names):
            raise UserError(
                f"{key!r} has {shape[1]} fields, but CubeSymmetry knows {len(names)} of them ({', '.join(names)}): "
                f"name all {shape[1]} in its `fields`, those of a vector with _x, _y and _z at the end"
            )
