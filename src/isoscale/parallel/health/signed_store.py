"""Signed words in a store of torch.distributed, which itself lets everybody read and write who reaches its port."""

import json
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from isoscale.parallel.messages import Forged
from isoscale.parallel.secret import Key

Store = Any
"""A store of torch.distributed, whose type torch does not declare."""
_SIGNATURE = 64


def prefixed(prefix: str, store: Store) -> Store:
    """A store within a store, where names are its own."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


class SignedStore:
    """Words by name that only those believe who have the key, and only from those who have it.

    Who writes without the key can bring a meeting to its end, since words are then missing or not believed, and no
    more. The counters are not signed: nothing but waiting depends on them.
    """

    def __init__(self, store: Store, key: Key) -> None:
        """Over a store."""
        self.store = store
        self.key = key

    def within(self, prefix: str) -> "SignedStore":
        """A board on which names are its own."""
        return SignedStore(prefixed(prefix, self.store), self.key.derive(prefix.encode()))

    def set(self, name: str, value: Any) -> None:
        """Write something that JSON can hold."""
        self.store.set(name, self._signed(name, value))

    def propose(self, name: str, value: Any) -> Any:
        """Write something if nobody has; what stands there then."""
        return self._read(name, self.store.compare_set(name, "", self._signed(name, value)))

    def get(self, name: str) -> Any:
        """What stands there, once something does; Forged where nobody with the key wrote it."""
        return self._read(name, self.store.get(name))

    def get_all(self, names: Sequence[str]) -> list[Any]:
        """What stands under each name, once something does."""
        return [self._read(*pair) for pair in zip(names, self.store.multi_get(list(names)), strict=True)]

    def has(self, *names: str) -> bool:
        """Whether there is something under all names."""
        return bool(self.store.check(list(names)))

    def count(self, name: str, more: int = 1) -> int:
        """Add to a counter; its value."""
        return int(self.store.add(name, more))

    def _signed(self, name: str, value: Any) -> str:
        words = json.dumps(value)
        return self.key.sign(name.encode(), words.encode()).hex() + words

    def _read(self, name: str, text: bytes) -> Any:
        signature, words = text[:_SIGNATURE], text[_SIGNATURE:]
        try:
            is_ours = self.key.has_signed(bytes.fromhex(signature.decode("ascii")), name.encode(), words)
        except ValueError:
            is_ours = False
        if not is_ours:
            raise Forged(f"{name!r}, where ranks meet,")
        return json.loads(words)


def unsigned(text: bytes) -> Any:
    """What somebody without the key wrote, for words to the user; None where it is not what a rank would write."""
    try:
        return json.loads(text[_SIGNATURE:])
    except (ValueError, RecursionError):
        return None
