"""Scaling by statistics of the training data: measured once, kept with the run, applied in the step."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from isoscale.data.batches import Batch
from isoscale.data.transforms import entry
from isoscale.errors import UserError

Kind = Literal["standard", "minmax"]
Per = Literal["feature", "channel", "whole"]
NOTHING = 1e-13
"""A relative deviation that is rounding in float64."""
ROUNDING = torch.finfo(torch.float32).eps
MOST_LISTED = 12
PIECE = 1 << 16
"""Numbers that are measured at a time: as many as stay in a core's cache."""


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
            statistics.add(self._arranged(entry(batch, self.key, self)))
        shift, scale = statistics.shift_and_scale()
        still = scale <= NOTHING * shift.abs()  # the mean of equal numbers need not be that number to the last bit
        self._remark(shift, scale, still)
        self.load({"shift": shift, "scale": torch.where(still, torch.ones_like(scale), scale)})

    def _remark(self, shift: Tensor, scale: Tensor, still: Tensor) -> None:
        """Note what does not vary, or not enough for float32 to tell it from its rounding."""
        hardly = (scale <= ROUNDING * shift.abs()) & ~still
        self.remarks = [
            f"{self.key}: {int(which.sum())} of {len(scale)} numbers of a sample {words} ({_listed(which)})"
            for which, words in ((still, "do not vary in the training data and are shifted only"),
                                 (hardly, "vary by less than float32 resolves, which is scaled up all the same"))
            if which.any()
        ]  # fmt: skip

    def _arranged(self, values: Tensor) -> Tensor:
        """(observations, statistics)."""
        if self.per == "channel" and values.dim() > 2:
            values = values.movedim(1, -1).reshape(-1, values.shape[1])
        return values.reshape(-1, 1) if self.per == "whole" else values.reshape(len(values), -1)

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
