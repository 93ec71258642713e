"""Transforms of a batch that run in the step, on the device: callables from batch to batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.data.rng import current
from isoscale.errors import UserError


class Divide:
    """Turn stored integers into floating point numbers and divide them, such as pixels by 255."""

    rowwise = True

    def __init__(self, by: float, key: str = "input") -> None:
        """Divide `batch[key]` by a number."""
        if by == 0:
            raise ValueError("Divide needs a number other than 0 in `by`")
        self.by = by
        self.key = key

    def __call__(self, batch: Batch) -> Batch:
        """The batch with `key` divided."""
        return _with(batch, self.key, entry(batch, self.key, self) / self.by)  # integers become the default dtype

    def inverse(self, values: Tensor) -> Tensor:
        """Values in the units that they are stored in."""
        return values * self.by


class Normalize:
    """Subtract a mean and divide by a standard deviation, a number or one for each channel."""

    rowwise = True

    def __init__(self, mean: float | Sequence[float], std: float | Sequence[float], key: str = "input") -> None:
        """Normalise `batch[key]`; per-channel values belong to its second dimension."""
        if 0 in ([std] if isinstance(std, int | float) else std):
            raise ValueError("Normalize needs numbers other than 0 in `std`")
        self.mean = mean
        self.std = std
        self.key = key
        self._made: dict[Any, tuple[Any, Any]] = {}

    def __call__(self, batch: Batch) -> Batch:
        """The batch with `key` normalised."""
        values = _floating(entry(batch, self.key, self))
        mean, std = self._for(values)
        return _with(batch, self.key, (values - mean) / std)

    def inverse(self, values: Tensor) -> Tensor:
        """Values in the units that they are stored in."""
        mean, std = self._for(values)
        return values * std + mean

    def _for(self, values: Tensor) -> tuple[Any, Any]:
        """Mean and deviation where the values are, in a shape that fits them."""
        kind = values.dtype, values.device, values.dim()
        if kind not in self._made:  # once, in the first step: inside a captured one they are just read
            self._made[kind] = self._per_channel(self.mean, values), self._per_channel(self.std, values)
        return self._made[kind]

    def _per_channel(self, numbers: Any, values: Tensor) -> Any:
        if isinstance(numbers, int | float):
            return numbers
        if values.dim() < 2 or values.shape[1] != len(numbers):  # one channel would be broadcast to three
            raise UserError(
                f"Normalize has {len(numbers)} numbers, one per channel, but {self.key!r} has "
                f"{values.shape[1] if values.dim() > 1 else 'no'} channels (batch {tuple(values.shape)})"
            )
        shape = [1, -1] + [1] * (values.dim() - 2)
        # made of Python numbers, one fill a channel: a copy from the host could not be captured
        columns = [torch.full((1,), number, dtype=values.dtype, device=values.device) for number in numbers]
        return torch.cat(columns).view(shape)


class Noise:
    """Add normally distributed noise in training, so that the network does not learn what is finer than it."""

    keeps_units = True

    def __init__(self, deviation: float, key: str = "input") -> None:
        """Noise of this deviation on every number of `batch[key]`; put it after `scale` or `normalize`."""
        if not deviation > 0:
            raise ValueError(f"Noise needs a deviation above 0, not {deviation}")
        self.deviation = deviation
        self.key = key

    def __call__(self, batch: Batch) -> Batch:
        """The batch with noise on `key` in training, itself elsewhere."""
        random = current()
        if random is None:
            return batch
        values = _floating(entry(batch, self.key, self))
        noise = random.normal(random.another("noise"), tuple(values.shape[1:]), values.dtype)
        return _with(batch, self.key, values + self.deviation * noise)


class Flatten:
    """Make one row of every sample."""

    keeps_units = True

    def __init__(self, key: str = "input") -> None:
        """Flatten `batch[key]` to (batch, features)."""
        self.key = key

    def __call__(self, batch: Batch) -> Batch:
        """The batch with `key` flattened."""
        return _with(batch, self.key, entry(batch, self.key, self).flatten(1))


def entry(batch: Batch, key: str, transform: Any) -> Tensor:
    """The entry of a batch that a transform changes."""
    if isinstance(batch, dict) and key in batch:
        return batch[key]
    wanted = f"{type(transform).__name__} changes {key!r} of a batch"
    if isinstance(batch, dict):
        raise UserError(f"{wanted}, but a batch has {', '.join(map(repr, batch))}: set its `key` to one of them")
    kind = "one tensor" if isinstance(batch, Tensor) else f"a {type(batch).__name__}"
    raise UserError(
        f"{wanted}, but a batch is {kind}, whose parts have no names: give the data as a dict, such as "
        "{'input': x, 'target': y}"
    )


def _with(batch: Batch, key: str, value: Tensor) -> Batch:
    return {**batch, key: value}


def _floating(values: Tensor) -> Tensor:
    has_point = values.is_floating_point() or values.is_complex()
    return values if has_point else values.to(torch.get_default_dtype())
