"""A small counter-based hash that gives the same integers in Python, numpy and torch, on any device.

All values are 32-bit words held in signed 64-bit integers: the products below may wrap around, but their low 32 bits,
which is all that is kept, are right in two's complement everywhere.
"""

import hashlib
from typing import Any, TypeVar

Word = TypeVar("Word", bound=Any)
"""A Python int, a numpy int64 array or a torch int64 tensor."""

MASK = 0xFFFFFFFF
MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
GOLDEN = 0x9E3779B9


def derive_key(seed: int, *words: str | int) -> tuple[int, int]:
    """Two independent 32-bit key words for a seed and a purpose."""
    text = "\x1f".join(str(word) for word in (seed, *words))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def mix(word: Word) -> Word:
    """Scramble 32-bit words; a bijection in which every input bit moves about half of the output bits."""
    word = word ^ (word >> 16)
    word = (word * MULTIPLIER_1) & MASK
    word = word ^ (word >> 15)
    word = (word * MULTIPLIER_2) & MASK
    return word ^ (word >> 16)


def fold(word: Word, value: Word) -> Word:
    """Absorb a non-negative integer of up to 62 bits into a 32-bit word."""
    return mix(mix((word + GOLDEN) & MASK ^ (value & MASK)) ^ (value >> 32))
