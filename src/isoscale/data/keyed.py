"""Randomness that is a function of (seed, purpose, step, sample, element), and of nothing else.

A step makes its randomness current with `use`; dropout, augmentation and noise then ask `current()` for numbers.
They come out the same on any number of ranks, in any batch, after any restart, and inside a captured step.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from isoscale.data.hashing import MASK, derive_key, fold

_GOLDEN = 0x9E3779B9
_TO_UNIT = 2.0**-24


class StepRandom:
    """The random numbers of the samples of one part of one step."""

    def __init__(self, seed: int) -> None:
        """Numbers for a seed; `step` and `samples` are set by whoever runs the step."""
        self.seed = seed
        self.step: int | Tensor = 0
        self.samples: Tensor | None = None
        self.used = False

    def bits(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        """Random 32-bit words (batch, *shape) in int64, one stream for each sample."""
        if self.samples is None:
            raise RuntimeError("keyed randomness needs the samples of the step that it is used in")
        self.used = True
        high, low = (self._sample_words(key) for key in derive_key(self.seed, purpose))
        count = math.prod(shape)
        element = torch.arange(count, device=self.samples.device) * _GOLDEN
        word = ((element + high[:, None]) & MASK) ^ low[:, None]
        return _finish(word).view(-1, *shape)

    def uniform(self, purpose: str, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform numbers in [0, 1) of shape (batch, *shape)."""
        return (self.bits(purpose, shape) >> 8).to(dtype) * _TO_UNIT

    def normal(self, purpose: str, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers of shape (batch, *shape)."""
        radius = torch.sqrt(-2 * torch.log1p(-self.uniform(purpose + "/radius", shape, dtype)))
        return radius * torch.cos(2 * math.pi * self.uniform(purpose + "/angle", shape, dtype))

    def _sample_words(self, key: int) -> Tensor:
        assert self.samples is not None
        return torch.as_tensor(fold(fold(key, self.step), self.samples))


def _finish(word: Tensor) -> Tensor:
    """The hash's mix, in place: this runs over as many elements as an activation has."""
    word ^= word >> 16
    word.mul_(0x7FEB352D).bitwise_and_(MASK)
    word ^= word >> 15
    word.mul_(0x846CA68B).bitwise_and_(MASK)
    word ^= word >> 16
    return word


_current: StepRandom | None = None


def current() -> StepRandom | None:
    """The randomness of the step that is running, or None outside of one."""
    return _current


@contextmanager
def use(random: StepRandom | None) -> Iterator[None]:
    """Make `random` the current randomness."""
    global _current
    before, _current = _current, random
    try:
        yield
    finally:
        _current = before


class KeyedDropout(nn.Module):
    """`nn.Dropout`, or its channel-wise variants, with a mask that is a function of the sample and the step."""

    def __init__(self, p: float, purpose: str, num_spatial: int = 0) -> None:
        """Drop with probability `p`; the last `num_spatial` dimensions share a decision."""
        super().__init__()
        self.p = p
        self.purpose = purpose
        self.num_spatial = num_spatial

    def forward(self, input: Tensor) -> Tensor:
        """Zero elements with probability p and scale up the rest, in training only."""
        if not self.training or self.p == 0:
            return input
        random = current()
        if random is None or random.samples is None:
            return nn.functional.dropout(input, self.p)
        if input.shape[0] != len(random.samples):
            raise ValueError(
                f"dropout {self.purpose!r} sees {input.shape[0]} rows of a batch of {len(random.samples)} samples: "
                "its mask cannot be keyed by sample: apply dropout to tensors whose first dimension is the batch"
            )
        shape = tuple(input.shape[1 : input.dim() - self.num_spatial])
        keep = self._keep(random.bits(self.purpose, shape))
        keep = keep.view(*keep.shape, *([1] * self.num_spatial))
        return input * keep.to(input.dtype).mul_(1 / (1 - self.p) if self.p < 1 else 0.0)

    def _keep(self, bits: Tensor) -> Tensor:
        return bits >= round(self.p * 2**32)


_SPATIAL = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


def key_dropout(module: nn.Module) -> list[str]:
    """Swap every dropout below `module` for a keyed one; names what draws on torch's generator and cannot be."""
    unkeyed = []
    for name, child in list(module.named_modules()):
        if type(child) in _SPATIAL:
            _replace(module, name, KeyedDropout(child.p, name, _SPATIAL[type(child)]).train(child.training))
        elif _draws(child):
            unkeyed.append(f"{name} ({type(child).__name__})")
    return unkeyed


def _replace(module: nn.Module, name: str, child: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(parent), attribute, child)


def _draws(module: nn.Module) -> bool:
    drawing = (nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU)
    dropout = getattr(module, "dropout", 0)
    return isinstance(module, drawing) or (isinstance(dropout, float) and dropout > 0)
