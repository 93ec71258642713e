"""Random number generators of the process (Python's, numpy's, torch's): seeding, keeping, and seeing who draws.

Asking Python and numpy for the states of their generators takes as long as reading a dozen samples, so their memory is
looked at instead. It is compared once with what they say themselves, and not relied on where that is something else.
"""

import _random
import ctypes
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

_WORDS = 624
"""Of the state of an MT19937, beside which there is its position."""
_BYTES = 4 * (_WORDS + 1)


class Generator(Protocol):
    """A global generator of random numbers."""

    tells: Sequence[tuple[ModuleType, str]]
    """The functions that show its state: whoever draws and puts it back calls one of them."""

    def seed(self, word: int) -> None:
        """Begin anew."""

    def seeds(self, low: Sequence[int], high: Sequence[int]) -> Sequence[int]:
        """What to seed it with for samples that have these 32-bit words."""

    def state(self) -> Any:
        """Where it is, to be compared and restored."""

    def restore(self, state: Any) -> None:
        """Go back to a state."""


class _Python:
    tells: Sequence[tuple[ModuleType, str]] = ((random, "getstate"),)

    def __init__(self) -> None:
        self._owner: Any = random._inst
        header = object.__basicsize__
        self._address = id(self._owner) + header
        self._in_memory = _random.Random.__basicsize__ - header >= _BYTES and self._numbers() == random.getstate()[1]

    def _numbers(self) -> tuple[int, ...]:
        return self._decoded(ctypes.string_at(self._address, _BYTES))

    @staticmethod
    def _decoded(memory: bytes) -> tuple[int, ...]:
        position, *words = np.frombuffer(memory, np.uint32).tolist()
        return (*words, position)

    def seed(self, word: int) -> None:
        random.seed(word)

    def seeds(self, low: Sequence[int], high: Sequence[int]) -> Sequence[int]:
        return [upper << 32 | lower for lower, upper in zip(low, high, strict=True)]

    def state(self) -> Any:
        if self._in_memory:
            return ctypes.string_at(self._address, _BYTES), self._owner.gauss_next
        return random.getstate()

    def restore(self, state: Any) -> None:
        random.setstate((random.Random.VERSION, self._decoded(state[0]), state[1]) if self._in_memory else state)


class _Numpy:
    tells: Sequence[tuple[ModuleType, str]] = ((np.random, "get_state"),)

    def __init__(self) -> None:
        self._owner: Any = np.random.mtrand._rand
        self._known: Any = self._owner._bit_generator
        self._address = self._known.ctypes.state_address
        self._plain = b""
        """Memory of a state without a normal number in store, which is kept elsewhere."""
        state: Any = np.random.get_state(legacy=False)
        is_mt = state["bit_generator"] == "MT19937"
        self._in_memory = is_mt and self._is_at_address(state["state"]["key"], state["state"]["pos"])

    def _is_at_address(self, key: NDArray[np.uint32], position: int) -> bool:
        words = np.frombuffer(ctypes.string_at(self._address, _BYTES), np.uint32)
        return bool((words[:_WORDS] == key).all() and words[_WORDS] == position)

    def seed(self, word: int) -> None:
        np.random.seed(word)
        if self._in_memory:
            self._plain = ctypes.string_at(self._address, _BYTES)

    def seeds(self, low: Sequence[int], high: Sequence[int]) -> Sequence[int]:
        return high  # not the words of torch, or both would give the same stream

    def state(self) -> Any:
        is_here = self._in_memory and self._owner._bit_generator is self._known
        memory = ctypes.string_at(self._address, _BYTES) if is_here else b""
        if is_here and memory == self._plain:
            return memory
        state: Any = np.random.get_state(legacy=False)
        if is_here and not state["has_gauss"]:
            self._plain = memory
            return memory
        return (pickle.dumps(state),)

    def restore(self, state: Any) -> None:
        if isinstance(state, tuple):
            np.random.set_state(pickle.loads(state[0]))
            self._plain = b""
            return
        words = np.frombuffer(state, np.uint32)
        np.random.set_state(("MT19937", words[:_WORDS], int(words[_WORDS]), 0, 0.0))
        self._plain = state


class _Torch:
    tells: Sequence[tuple[ModuleType, str]] = [
        (module, name) for module in (torch, torch.random) for name in ("get_rng_state", "initial_seed")
    ]

    def seed(self, word: int) -> None:
        torch.default_generator.manual_seed(word)

    def seeds(self, low: Sequence[int], high: Sequence[int]) -> Sequence[int]:
        return low

    def state(self) -> Any:
        state = torch.default_generator.get_state()
        return ctypes.string_at(state.data_ptr(), state.nbytes)

    def restore(self, state: Any) -> None:
        torch.default_generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


PYTHON, NUMPY, TORCH = _Python(), _Numpy(), _Torch()
GENERATORS: tuple[Generator, ...] = (PYTHON, NUMPY, TORCH)
_TELLING = [(each, vars(module), name) for each in GENERATORS for module, name in each.tells]


@contextmanager
def kept_generators() -> Iterator[None]:
    """Put Python's, numpy's and torch's generators back to where they were, whatever is drawn in between."""
    states = [each.state() for each in GENERATORS]
    try:
        yield
    finally:
        for each, state in zip(GENERATORS, states, strict=True):
            each.restore(state)


@contextmanager
def seeded(seed: int, generator: torch.Generator | None = None) -> Iterator[None]:
    """Seed every generator that a sampler or dataset may draw from, and put the global ones back afterwards."""
    with kept_generators():
        for each in (torch.default_generator, generator):
            if each is not None:
                each.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        yield


class Watch:
    """Sees which generators are drawn from, or asked for their states, while it lasts."""

    def __init__(self, undo: bool = False) -> None:
        """With `undo`, they are put back in the end."""
        self.drawn: set[Generator] = set()
        """Known in the end."""
        self._undo = undo
        self._before: list[Any] = []
        self._functions: list[Any] = []

    def __enter__(self) -> Self:
        self._before = [each.state() for each in GENERATORS]
        for generator, functions, name in _TELLING:
            self._functions.append(functions[name])
            functions[name] = partial(self._noted, generator, functions[name])
        return self

    def _noted(self, generator: Generator, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.drawn.add(generator)
        return function(*arguments, **options)

    def __exit__(self, *_: object) -> None:
        for (_generator, functions, name), function in zip(_TELLING, self._functions, strict=True):
            functions[name] = function
        for generator, before in zip(GENERATORS, self._before, strict=True):
            if generator.state() != before:
                self.drawn.add(generator)
                if self._undo:
                    generator.restore(before)
