"""Transforms of a batch that run in the step, on the device; those that scale are measured before, on training data."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.data.rng import current
from isoscale.errors import UserError

Kind = Literal["standard", "minmax"]
Per = Literal["feature", "channel", "whole"]
NOTHING = 1e-13
"""A relative deviation that is rounding in float64."""
ROUNDING = torch.finfo(torch.float32).eps
MOST_LISTED = 12
PIECE = 1 << 16
"""Numbers that are measured at a time: as many as stay in a core's cache."""


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


class Scale:
    """Bring a tensor to mean 0 and deviation 1, or into the range 0 to 1, as measured on the training data."""

    rowwise = True

    def __init__(self, kind: Kind = "standard", per: Per = "feature", key: str = "input") -> None:
        """`standard` or `minmax`, for each element of a sample, each channel (its first dimension), or all at once."""
        self.kind = kind
        self.per = per
        self.key = key
        self.shift: Tensor | None = None
        self.scale: Tensor | None = None
        self.remarks: list[str] = []
        """What the user should know of the data that was measured."""
        self._made: dict[Any, tuple[Tensor, Tensor]] = {}

    def fit(self, batches: Iterable[Batch]) -> None:
        """Measure in one pass, in float64; what does not vary is shifted and left at its size."""
        statistics = _Moments() if self.kind == "standard" else _Range()
        for batch in batches:
            values = entry(batch, self.key, self)
            if self.per == "channel" and values.dim() > 2:
                values = values.movedim(1, -1).reshape(-1, values.shape[1])
            rows = values.reshape(-1, 1) if self.per == "whole" else values.reshape(len(values), -1)
            statistics.add(rows)  # (observations, statistics)
        shift, scale = statistics.shift_and_scale()
        still = scale <= NOTHING * shift.abs()  # the mean of equal numbers need not be that number to the last bit
        hardly = (scale <= ROUNDING * shift.abs()) & ~still  # float32 cannot tell it from its rounding
        self.remarks = [
            f"{self.key}: {int(which.sum())} of {len(scale)} numbers of a sample {words} ({_listed(which)})"
            for which, words in ((still, "do not vary in the training data and are shifted only"),
                                 (hardly, "vary by less than float32 resolves, which is scaled up all the same"))
            if which.any()
        ]  # fmt: skip
        self.load({"shift": shift, "scale": torch.where(still, torch.ones_like(scale), scale)})

    def state(self) -> dict[str, Tensor]:
        """What was measured."""
        if self.shift is None or self.scale is None:
            raise UserError(f"the scale of {self.key!r} was not measured: it is in the training")
        return {"shift": self.shift, "scale": self.scale}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over what was measured."""
        self.shift, self.scale = (tensors[name].to("cpu", torch.float64) for name in ("shift", "scale"))
        self._made.clear()

    def __call__(self, batch: Batch) -> Batch:
        """The batch with `key` scaled; the tensor that came in stays as it is."""
        values = entry(batch, self.key, self)
        shift, scale = self._for(values)
        return {**batch, self.key: (values - shift).div_(scale)}

    def inverse(self, values: Tensor) -> Tensor:
        """Values in the units that they are stored in."""
        shift, scale = self._for(values)
        return values * scale + shift

    def _for(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Shift and scale where the values are, in a shape that fits them."""
        dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
        kind = dtype, values.device, tuple(values.shape[1:])
        if kind not in self._made:  # once, in the first step: inside a captured one they are just read
            state = self.state()
            made = [self._shaped(state[name], values).to(values.device, dtype) for name in ("shift", "scale")]
            self._made[kind] = made[0], made[1]
        return self._made[kind]

    def _shaped(self, statistic: Tensor, values: Tensor) -> Tensor:
        if self.per == "whole" or (values.dim() == 1 and statistic.numel() == 1):
            return statistic.view([1] * values.dim())
        if self.per == "channel" and (values.dim() == 1 or values.shape[1] != statistic.numel()):
            raise UserError(
                f"the scale of {self.key!r} was measured on samples of {statistic.numel()} channels, but these are of "
                f"shape {tuple(values.shape[1:])}"
            )
        if self.per == "channel":
            return statistic.view([1, -1] + [1] * (values.dim() - 2))
        if statistic.numel() != values.shape[1:].numel():
            raise UserError(
                f"the scale of {self.key!r} was measured on samples of {statistic.numel()} numbers, but these are of "
                f"shape {tuple(values.shape[1:])}"
            )
        return statistic.view(1, *values.shape[1:])


def _listed(which: Tensor) -> str:
    """The numbers of those that are meant, the first ones where they are many."""
    numbers = [str(number) for number in which.nonzero().flatten().tolist()]
    more = [f"and {len(numbers) - MOST_LISTED} more"] if len(numbers) > MOST_LISTED else []
    return ", ".join([*numbers[:MOST_LISTED], *more])


class _Moments:
    """Mean and squared deviation, merged block by block without losing digits."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = torch.zeros(1, dtype=torch.float64)
        self._square = torch.zeros(1, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        for piece in rows.split(max(1, PIECE // rows.shape[1])):
            self._add(piece.double())

    def _add(self, rows: Tensor) -> None:
        count, mean = len(rows), rows.mean(0)
        square = (rows - mean).square_().sum(0)
        total = self._count + count
        apart = mean - self._mean
        self._square = self._square + square + apart.square() * (self._count * count / total)
        self._mean = self._mean + apart * (count / total)
        self._count = total

    def shift_and_scale(self) -> tuple[Tensor, Tensor]:
        return self._mean, (self._square / max(1, self._count)).sqrt()


class _Range:
    """Smallest and largest value."""

    def __init__(self) -> None:
        self._low: Tensor | None = None
        self._high: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        low, high = rows.amin(0).double(), rows.amax(0).double()
        self._low = low if self._low is None else torch.minimum(self._low, low)
        self._high = high if self._high is None else torch.maximum(self._high, high)

    def shift_and_scale(self) -> tuple[Tensor, Tensor]:
        assert self._low is not None and self._high is not None
        return self._low, self._high - self._low
