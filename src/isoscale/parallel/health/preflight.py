"""What is made sure before ranks train together: the same versions, the same words, and tensors that arrive."""

import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isoscale.errors import UserError
from isoscale.parallel.collectives import Ranks
from isoscale.parallel.health.checkup import HealthCheck
from isoscale.parallel.health.probe import Ways, ways
from isoscale.parallel.health.rendezvous import LOOK_EVERY, STAY, Arrival
from isoscale.parallel.health.signed_store import SignedStore
from isoscale.parallel.rank_info import FILES, Facts

ANSWER = 60.0
"""Seconds for a word of a rank that has come; one that cannot reach rank 0 knows it after half of that."""
SHORTEST = 0.005
"""Seconds between two looks at first: most ranks say their word at once."""
MOST_NAMED = 8
"""Ranks in one message; the others are counted."""
LONGEST = 100
"""Characters of a key with its value in a message."""
OWN = ("observe.", "~observe")
"""How words begin that a rank may have for itself, since they do not change what is trained."""
NAMES = {"gloo": "Gloo", "nccl": "NCCL", "xccl": "XCCL"}
OPEN = "let the hosts of a job reach each other on all TCP ports, since the system picks them (a firewall?)"
LOOK = "isoscale doctor, started as the training is, shows which ways are open"
_SOURCE = re.compile(r"\[[^\]]*/[^\]]*\] ?")
"""Where in the source of a library an error was raised."""


def exchange_facts(board: SignedStore, mine: Facts, ranks: Ranks) -> tuple[Facts, ...]:
    """Tell the others who this is; the facts of all ranks on rank 0, of those on the same host elsewhere.

    Where ranks differ that must be equal, all raise the same error.
    """
    board.set(_key(mine.rank), asdict(mine))
    if ranks.is_main:
        board.set("verdict", _judge_all(board, ranks))
    words = hear_verdict(board)
    if words is None:
        words = f"{ranks.name(0)} came, but did not say a word for {2 * ANSWER:g} s: look at what it says itself"
    if words:
        if ranks.is_main:
            _stay(lambda: board.count("heard", 0) < ranks.world_size)
        raise UserError(words)
    known = [rank for rank, host in enumerate(ranks.hosts) if ranks.is_main or host == mine.host]
    return tuple(Facts.read(each) for each in board.get_all([_key(rank) for rank in known]))


def cut_off(board: SignedStore, rank: int, words: str) -> str | None:
    """Say on the board that this rank cannot go on; what rank 0 makes of it, or None where it does not answer."""
    board.set(_key(rank), {"cut off": words})
    return hear_verdict(board)


def hear_verdict(board: SignedStore) -> str | None:
    """Why ranks cannot train together, as rank 0 found; empty where they can, None where it does not answer."""
    if not _wait(board, ["verdict"], 2 * ANSWER):
        return None
    words = str(board.get("verdict"))
    board.count("heard")
    return words


def _stay(while_: Callable[[], bool]) -> None:
    """Rank 0, which may host the store, does not end while others read in it."""
    until = time.monotonic() + STAY
    while while_() and time.monotonic() < until:
        time.sleep(LOOK_EVERY)


def _key(rank: int) -> str:
    return f"facts/{rank}"


def _wait(board: SignedStore, keys: list[str], seconds: float) -> bool:
    """Whether all have come."""
    until, pause = time.monotonic() + seconds, SHORTEST
    while not board.has(*keys):
        if time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, LOOK_EVERY)
    return True


def _judge_all(board: SignedStore, ranks: Ranks) -> str:
    keys = [_key(rank) for rank in range(ranks.world_size)]
    if not _wait(board, keys, ANSWER):
        silent = [rank for rank, key in enumerate(keys) if not board.has(key)]
        return f"{_named(ranks, silent)} came, but did not say a word for {ANSWER:g} s: look at what it says itself"
    told = board.get_all(keys)
    lost = [words for each in told if (words := each.get("cut off"))]
    if lost:
        return "\n  ".join([*_some(lost), OPEN, LOOK])
    return describe_versions([Facts.read(each) for each in told])


def describe_versions(told: Sequence[Facts]) -> str:
    """Which ranks differ from rank 0 in what must be equal, and what to do; empty where none does."""
    first = told[0]
    lines = []
    for facts in told:
        other = {name: value for name, value in facts.versions.items() if first.versions.get(name) != value}
        if other.keys() == {FILES}:
            lines.append(f"rank {facts.rank} on {facts.host} has other files of isoscale than rank 0")
        elif other:
            found = ", ".join(f"{name} {value}" for name, value in other.items() if name != FILES)
            expected = ", ".join(f"{name} {first.versions.get(name)}" for name in other if name != FILES)
            lines.append(f"rank {facts.rank} on {facts.host} has {found}, and rank 0 {expected}")
    if not lines:
        return ""
    return "\n  ".join([
        f"ranks must run the same program as rank 0 on {first.host}, but some do not:", *_some(lines),
        "start all of them in one environment that all hosts see, or install the same versions everywhere",
    ])  # fmt: skip


def check_words(ranks: Ranks, source: Any, overrides: Any, options: Sequence[str]) -> None:
    """Refuse ranks that were asked to train something else: what rank 0 was asked is what all would do."""
    told = ranks.all_gather(in_words(source, overrides, options), "what every rank is asked to train")
    words = describe_words(told, ranks)
    if words:
        raise UserError(words)


def in_words(source: Any, overrides: Any, options: Sequence[str]) -> dict[str, Any]:
    """What a rank was asked to train, so that it can be compared."""
    given = isinstance(source, Mapping)
    name = "a recipe made in Python" if given else "the default recipe" if source is None else str(source)
    words = [str(word) for word in overrides or ()] if not isinstance(overrides, Mapping) else _lines(overrides)
    asked = sorted(word for word in [*words, *(_lines(source) if given else ())] if not word.startswith(OWN))
    return {"recipe": name, "content": _content(source), "words": [*asked, *options]}


def _lines(values: Mapping[Any, Any], before: str = "") -> list[str]:
    """`key=value` for each, those of sections with points."""
    found: list[str] = []
    for key, value in values.items():
        nested = isinstance(value, Mapping) and bool(value)
        found += _lines(value, f"{before}{key}.") if nested else [f"{before}{key}={_plain(value)}"]
    return found


def _content(source: Any) -> str | None:
    """A digest of what is in the file of a recipe; None where it is none, or cannot be read here."""
    try:
        return hashlib.sha256(Path(source).read_bytes()).hexdigest() if isinstance(source, str | Path) else None
    except OSError:
        return None


def _plain(value: Any) -> str:
    """A value in words that are the same in every process."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(sorted(_lines(value)))}}}"
    return str(value) if value is None or isinstance(value, str | int | float | Path) else type(value).__qualname__


def describe_words(told: Sequence[dict[str, Any]], ranks: Ranks) -> str:
    """Which ranks were asked something else than rank 0; empty where none was."""
    lines = [
        f"{ranks.name(rank)}: {difference}"
        for rank, theirs in enumerate(told)
        if (difference := _difference(told[0], theirs))
    ]
    if not lines:
        return ""
    return "\n  ".join([
        "ranks were asked to train something else than rank 0:", *_some(lines),
        "start all ranks of a training with the same recipe and overrides",
    ])  # fmt: skip


def _difference(first: dict[str, Any], theirs: dict[str, Any]) -> str:
    both_read = None not in (first["content"], theirs["content"])
    what = "content" if both_read else "recipe"  # the same file may have another path there
    here, there = first["recipe"], theirs["recipe"]
    if first[what] != theirs[what]:
        return f"another {there}" if here == there else f"{there} instead of {here}"
    more = " ".join(_short(word) for word in theirs["words"] if word not in first["words"])
    less = " ".join(_short(word) for word in first["words"] if word not in theirs["words"])
    if more and less:
        return f"{more} instead of {less}"
    return f"{more}, which rank 0 was not asked" if more else f"not {less}" if less else ""


def _short(words: str) -> str:
    return words if len(words) <= LONGEST else f"{words[:LONGEST]}…"


def _some(lines: Sequence[str]) -> list[str]:
    more = len(lines) - MOST_NAMED
    return [*lines[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]


def _named(ranks: Ranks, numbers: Sequence[int]) -> str:
    return ", ".join(_some([ranks.name(rank) for rank in numbers]))


def first_sum(ranks: Ranks, device: torch.device) -> None:
    """Add a number of every rank, over what carries words and over what carries tensors; the sum proves it."""
    expected = ranks.world_size * (ranks.world_size + 1) / 2
    for place in ("cpu", device)[: 1 if ranks.backend == "gloo" else 2]:
        number = torch.tensor([float(ranks.rank + 1)], device=place)
        dist.all_reduce(number)
        if number.item() != expected:
            raise UserError(
                f"the first sum of all ranks over {NAMES[ranks.backend]} is {number.item():g} on "
                f"{ranks.name(ranks.rank)}, but must be {expected:g}; isoscale doctor, started as the training is, "
                "looks at the network"
            )


class Separated(HealthCheck):
    """Ranks that have met but cannot exchange tensors, and so find out which ways are not open."""

    def __init__(self, ranks: Ranks, arrivals: Sequence[Arrival], board: SignedStore) -> None:
        """Over a board that answers."""
        self.rank, self.world, self.local_rank = ranks.rank, ranks.world_size, ranks.local_rank
        self.hosts, self.arrivals, self.board = ranks.hosts, list(arrivals), board

    def explain(self, ranks: Ranks, seconds: float, look: Callable[[], None]) -> str:
        """Why tensors do not arrive, and what to do."""
        look()
        found = ways(self)
        self.tell("heard", True)
        if self.is_first:
            _stay(lambda: not self.board.has(*(f"heard/{rank}" for rank in range(self.world))))
        return describe_ways(found, ranks, seconds)


def describe_ways(found: Ways, ranks: Ranks, seconds: float) -> str:
    """Which hosts do not reach which, in words."""
    through = NAMES[ranks.backend]
    if not found.num_blocked:
        debug = "NCCL_DEBUG=INFO" if ranks.backend == "nccl" else "isoscale doctor, started as the training is,"
        return (
            f"all {ranks.world_size} ranks came, and their hosts reach each other, but their first sum over {through} "
            f"did not end within {seconds:g} s\n  {debug} says more"
        )
    lines = [
        f"{way.origin} does not reach {way.target} at {way.address}, port {way.port}: {way.reason}"
        for way in found.blocked
    ]
    interfaces = ", ".join(dict.fromkeys(filter(None, found.interfaces.values())))
    return "\n  ".join([
        f"all {ranks.world_size} ranks came, but within {seconds:g} s they could not connect to each other "
        f"over {through}"
        + (f" ({interfaces}):" if interfaces else ":"),
        *_some(lines), _advice(ranks, interfaces),
    ])  # fmt: skip


def refused(ranks: Ranks, error: Exception) -> UserError:
    """The words for a backend that could not be opened here."""
    reason = _SOURCE.sub("", str(error).partition("\n")[0]) or type(error).__name__
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    over = NAMES[ranks.backend] + (f" ({interface})" if interface else "")
    return UserError(
        f"no connection from {ranks.hosts[ranks.rank]} to the other ranks over {over}: {reason}\n  "
        + _advice(ranks, interface)
    )


def _advice(ranks: Ranks, interfaces: str) -> str:
    nccl = ", and NCCL_SOCKET_IFNAME for NCCL" if ranks.backend == "nccl" else ""
    taken = f" ({interfaces} was taken)" if interfaces else ""
    network = f"or name a network that joins them: export GLOO_SOCKET_IFNAME{nccl}, its interface{taken}"
    return f"{OPEN},\n  {network}\n  {LOOK}"
