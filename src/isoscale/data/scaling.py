"""Scaling by statistics of the training data: measured once, kept with the run, applied in the step."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.errors import UserError

Kind = Literal["standard", "minmax"]
Per = Literal["feature", "channel", "whole"]


class Scale:
    """Bring a tensor to mean 0 and deviation 1, or into the range 0 to 1, as measured on the training data."""

    def __init__(self, kind: Kind = "standard", per: Per = "feature", key: str = "input") -> None:
        """`standard` or `minmax`, for each element of a sample, each channel (its first dimension), or all at once."""
        self.kind = kind
        self.per = per
        self.key = key
        self.shift: Tensor | None = None
        self.scale: Tensor | None = None
        self._made: dict[Any, tuple[Tensor, Tensor]] = {}

    def fit(self, batches: Iterable[Batch]) -> None:
        """Measure in one pass, in float64; what does not vary is shifted and left at its size."""
        statistics = _Moments() if self.kind == "standard" else _Range()
        for batch in batches:
            statistics.add(self._arranged(batch[self.key]))
        shift, scale = statistics.shift_and_scale()
        self.load({"shift": shift, "scale": torch.where(scale > 0, scale, torch.ones_like(scale))})

    def _arranged(self, values: Tensor) -> Tensor:
        """(observations, statistics) in float64."""
        if self.per == "channel" and values.dim() > 2:
            values = values.movedim(1, -1).reshape(-1, values.shape[1])
        rows = values.reshape(-1, 1) if self.per == "whole" else values.flatten(1)
        return rows.double()

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
        shift, scale = self._for(batch[self.key])
        return {**batch, self.key: (batch[self.key] - shift) / scale}

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
        if self.per == "whole":
            return statistic.view([1] * values.dim())
        if self.per == "channel":
            return statistic.view([1, -1] + [1] * (values.dim() - 2))
        if statistic.numel() != values[0].numel():
            raise UserError(
                f"the scale of {self.key!r} was measured on samples of {statistic.numel()} numbers, but these are of "
                f"shape {tuple(values.shape[1:])}"
            )
        return statistic.view(1, *values.shape[1:])


class _Moments:
    """Mean and squared deviation, merged block by block without losing digits."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = torch.zeros(1, dtype=torch.float64)
        self._square = torch.zeros(1, dtype=torch.float64)

    def add(self, rows: Tensor) -> None:
        count, mean = len(rows), rows.mean(0)
        square = (rows - mean).square().sum(0)
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
        low, high = rows.amin(0), rows.amax(0)
        self._low = low if self._low is None else torch.minimum(self._low, low)
        self._high = high if self._high is None else torch.maximum(self._high, high)

    def shift_and_scale(self) -> tuple[Tensor, Tensor]:
        assert self._low is not None and self._high is not None
        return self._low, self._high - self._low
