"""Randomness that is a function of (seed, purpose, step, sample, element), and of nothing else.

A step makes its randomness current with `use`; dropout, augmentation and noise then ask `current()` for numbers.
They come out the same on any number of ranks, in any batch, after any restart, and inside a captured step.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from isoscale.data.hashing import GOLDEN, MASK, MULTIPLIER_1, MULTIPLIER_2, derive_key, fold

_NUM_BITS = {torch.float16: 11, torch.bfloat16: 8}
"""Digits that a dtype holds, where those are fewer than 24: more would be rounded up to 1."""


class StepRandom:
    """The random numbers of the samples of one part of one step."""

    def __init__(self, seed: int) -> None:
        """Numbers for a seed; `step` and `samples` are set by whoever runs the step."""
        self.seed = seed
        self._step: int | Tensor = 0
        self.steps_per_epoch = 1
        self.used = False
        self._samples: Tensor | None = None
        self._uses: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._keys: Tensor | None = None
        self._words: Tensor | None = None
        self._is_repeated = False

    @property
    def step(self) -> int | Tensor:
        """The number of the step: a tensor inside a capture."""
        return self._step

    @step.setter
    def step(self, step: int | Tensor) -> None:
        self._step = step
        self._words = None

    @property
    def samples(self) -> Tensor | None:
        """Indices (batch,) of the samples of the part that is computed; to set them begins a part."""
        return self._samples

    @samples.setter
    def samples(self, samples: Tensor | None) -> None:
        self._samples = samples
        self._words = None
        self._uses.clear()

    @property
    def epoch(self) -> int | Tensor:
        """The epoch that the step belongs to."""
        self.used = True
        return self.step // self.steps_per_epoch

    def another(self, purpose: str) -> str:
        """A purpose for each use of `purpose` in a part: what a module draws when it is called again is new.

        A backward pass that computes the forward again (checkpointing) asks again for what the forward asked for.
        """
        count = self._uses.get(purpose, 0)
        in_backward = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if in_backward and count and not self._is_repeated:
            if count > 1:
                raise ValueError(
                    f"{purpose!r} draws {count} times in a step and is computed again in the backward pass, which "
                    "cannot tell the draws apart: give every use a dropout module of its own"
                )
            return purpose
        self._uses[purpose] = count + 1
        return f"{purpose}#{count}" if count else purpose

    def position(self) -> tuple[int | Tensor, Tensor | None, dict[str, int]]:
        """Where the draws are, for `repeated`."""
        return self._step, self._samples, dict(self._uses)

    @contextmanager
    def repeated(self, position: tuple[int | Tensor, Tensor | None, dict[str, int]]) -> Iterator[None]:
        """Draw once more what was drawn from a position on; afterwards, the draws are where they were."""
        before = self._step, self._samples, self._uses, self._words, self._is_repeated
        self._step, self._samples, self._uses, self._is_repeated = *position[:2], dict(position[2]), True
        if self._samples is not before[1] or self._step is not before[0]:
            self._words = None
        try:
            yield
        finally:
            self._step, self._samples, self._uses, self._words, self._is_repeated = before

    def bits(self, purpose: str, shape: tuple[int, ...]) -> Tensor:
        """Random 32-bit words (batch, *shape) in int64, one stream for each sample."""
        if self.samples is None:
            raise RuntimeError("keyed randomness needs the samples of the step that it is used in")
        self.used = True
        high, low = self._sample_words(purpose)
        count = math.prod(shape)
        element = torch.arange(count, device=self.samples.device) * GOLDEN
        word = ((element + high[:, None]) & MASK) ^ low[:, None]
        # The hash's mix, in place: this runs over as many elements as an activation has.
        word ^= word >> 16
        word.mul_(MULTIPLIER_1).bitwise_and_(MASK)
        word ^= word >> 15
        word.mul_(MULTIPLIER_2).bitwise_and_(MASK)
        word ^= word >> 16
        return word.view(len(self.samples), *shape)

    def once(self, purpose: str) -> Tensor:
        """One random 32-bit word (batch,) for each sample, the same in every step."""
        if self.samples is None:
            raise RuntimeError("keyed randomness needs the samples of the step that it is used in")
        high, low = _keys(self.seed, purpose)
        return torch.as_tensor(fold(fold(high, low), self.samples))

    def uniform(self, purpose: str, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform numbers in [0, 1) of shape (batch, *shape)."""
        num_bits = _NUM_BITS.get(dtype, 24)
        return (self.bits(purpose, shape) >> (32 - num_bits)).to(dtype) * 2.0**-num_bits

    def normal(self, purpose: str, shape: tuple[int, ...] = (), dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal numbers of shape (batch, *shape)."""
        exact = torch.float32 if dtype in _NUM_BITS else dtype
        radius = torch.sqrt(-2 * torch.log1p(-self.uniform(purpose + "/radius", shape, exact)))
        return (radius * torch.cos(2 * math.pi * self.uniform(purpose + "/angle", shape, exact))).to(dtype)

    def _sample_words(self, purpose: str) -> tuple[Tensor, Tensor]:
        """Two words (batch,) for each sample; those of all purposes are computed at once, in few operations."""
        if torch.compiler.is_compiling():  # which makes one operation of it anyway
            high, low = (cast(Tensor, fold(fold(key, self.step), self.samples)) for key in _keys(self.seed, purpose))
            return high, low
        row = self._rows.setdefault(purpose, len(self._rows))
        if self._words is None or row >= len(self._words):
            self._words = self._words_of_all()
        high, low = self._words[row]
        return high, low

    def _words_of_all(self) -> Tensor:
        """Words (purposes, 2, batch) of the purposes that were asked for so far."""
        assert self.samples is not None
        if isinstance(self.step, int) and self.samples.device.type == "cpu":
            pairs = [[fold(key, self.step) for key in _keys(self.seed, purpose)] for purpose in self._rows]
            folded = torch.tensor(pairs)
        else:
            if self._keys is None or len(self._keys) < len(self._rows):  # only when a step asks for something new
                keys = [_keys(self.seed, purpose) for purpose in self._rows]
                self._keys = torch.tensor(keys, device=self.samples.device)
            folded = torch.as_tensor(fold(self._keys, self.step))
        return torch.as_tensor(fold(folded[:, :, None], self.samples))


def _keys(seed: int, purpose: str) -> tuple[int, int]:
    """The key words of a purpose, which a compiler need not look into."""
    return derive_key(seed, purpose)


# what torch.compiler.assume_constant_result does, without importing the whole compiler, which takes seconds
_keys._dynamo_marked_constant = True  # type: ignore[attr-defined]

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

    def __init__(self, p: float, purpose: str, num_spatial: int = 0, inplace: bool = False) -> None:
        """Drop with probability `p`; with `num_spatial` dimensions after the channels, these share a decision."""
        super().__init__()
        self.p = p
        self.purpose = purpose
        self.num_spatial = num_spatial
        self.inplace = inplace

    def forward(self, input: Tensor) -> Tensor:
        """Zero elements with probability p and scale up the rest, in training only."""
        if not self.training or self.p == 0:
            return input
        random = current()
        if random is None or random.samples is None:
            return _FUNCTIONS[self.num_spatial](input, self.p, inplace=self.inplace)
        if input.shape[:1] != (len(random.samples),):
            raise ValueError(
                f"dropout {self.purpose!r} sees a tensor of shape {tuple(input.shape)} in a batch of "
                f"{len(random.samples)} samples, so that its mask cannot be keyed by sample: "
                "apply dropout to tensors whose first dimension is the batch"
            )
        deciding = self._num_deciding(input.dim())
        keep = random.bits(random.another(self.purpose), tuple(input.shape[1:deciding])) >= round(self.p * 2**32)
        keep = keep.view(*keep.shape, *([1] * (input.dim() - deciding)))
        factor = keep.to(input.dtype).mul_(1 / (1 - self.p) if self.p < 1 else 0.0)
        return input.mul_(factor) if self.inplace else input * factor

    def _num_deciding(self, num_dimensions: int) -> int:
        """Leading dimensions that decide one by one: all, or those that torch's channel-wise functions take."""
        if self.num_spatial == 0:
            return num_dimensions
        without_channels = self.num_spatial in (1, 3) and num_dimensions == self.num_spatial + 1
        return 1 if without_channels else 2


_SPATIAL = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
_FUNCTIONS: tuple[Callable[..., Tensor], ...] = (
    nn.functional.dropout,
    nn.functional.dropout1d,
    nn.functional.dropout2d,
    nn.functional.dropout3d,
)


def key_dropout(module: nn.Module) -> list[str]:
    """Swap every dropout below `module` for a keyed one; names what draws on torch's generator and cannot be.

    A dropout that stands in several places stays one module; each of its calls in a step draws a mask of its own.
    """
    swapped: dict[nn.Module, KeyedDropout] = {}
    unkeyed: dict[nn.Module, str] = {}
    for name, child in list(module.named_modules(remove_duplicate=False)):
        if type(child) in _SPATIAL and child is not module:
            if child not in swapped:
                keyed = KeyedDropout(child.p, name, _SPATIAL[type(child)], child.inplace)
                swapped[child] = keyed.train(child.training)
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, swapped[child])
            continue
        rate = child.p if isinstance(child, nn.modules.dropout._DropoutNd) else getattr(child, "dropout", 0)
        if isinstance(child, nn.RReLU) or (type(rate) in (int, float) and rate > 0):
            unkeyed.setdefault(child, f"{name or 'the task itself'} ({type(child).__name__})")
    return list(unkeyed.values())
