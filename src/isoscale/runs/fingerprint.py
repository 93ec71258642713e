"""What identifies the data of a run: sizes, time stamps, every value where that is cheap, and some samples."""

import hashlib
import json
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from isoscale.data.batches import tensors_of
from isoscale.data.combined import CombinedSource
from isoscale.data.contents import Piece, Stamps, contents, relative
from isoscale.data.generators import seeded
from isoscale.data.mixture import Mixture
from isoscale.data.sources import Source
from isoscale.data.streams import StreamSource
from isoscale.engine.diagnose.memory import size
from isoscale.errors import UserError
from isoscale.system.files import write_aside

CHEAP_BYTES = 128 << 20
CHEAP_SECONDS = 0.3
"""What a start may spend on reading values that nobody has asked for yet."""
TOUCHED_BYTES = 1 << 30
"""Up to so many bytes are read again where a time stamp has changed and it is known what was there."""
RECORD = "data.json"
"""The file of a run that says what its data was."""

Entry = dict[str, Any]
"""Of one piece: `bytes`, `files` (sizes and times by name) and `hash` of all values, or None."""
Entries = dict[str, Entry]


def samples_hash(source: Source, num_probes: int = 64) -> str:
    """A hash of a source's size, dtypes, shapes and some of its samples, cheap at any size."""
    if isinstance(source, StreamSource):  # which may give something else each time
        return hashlib.sha256(type(source.loader).__name__.encode()).hexdigest()[:16]
    if isinstance(source, Mixture | CombinedSource):
        parts = "".join(samples_hash(system, num_probes) for system in source.systems)
        return hashlib.sha256(parts.encode()).hexdigest()[:16]
    probes = torch.linspace(0, len(source) - 1, min(num_probes, len(source)), dtype=torch.float64).long()
    digest = hashlib.sha256(str(len(source)).encode())
    with seeded(0):  # a dataset may augment at random
        samples = source.fetch(probes)
    for tensor in tensors_of(samples):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


@dataclass
class Comparison:
    """The data of a run now, beside what it was."""

    entries: Entries
    """To be written down."""
    changed: dict[str, str] = field(default_factory=dict)
    """What is not as it was, and how that was seen."""
    doubtful: dict[str, str] = field(default_factory=dict)
    """What may have changed."""
    read: list[str] = field(default_factory=list)
    """Pieces of which every value was compared."""
    unread: list[str] = field(default_factory=list)
    """Pieces of which only sizes and times were."""

    @property
    def said(self) -> str:
        """What was compared."""
        total = sum(self.entries[name]["bytes"] for name in self.read)
        parts = [f"every value of {_arrays(len(self.read))} ({size(total)})"] if self.read else []
        files = sum(len(self.entries[name]["files"]) for name in self.unread)
        if files:
            parts.append(f"sizes and times of {files:,} {'file' if files == 1 else 'files'}")
        return " and ".join([*parts, "some samples of each split"] if self.unread or not parts else parts)


def compare(before: Entries | None, sources: Mapping[str, Source], cheap: bool = True) -> Comparison:
    """Look at data, and compare it with what it was; without `cheap` every value is read, however many there are."""
    pieces = contents(sources)
    found = Comparison({})
    budget = _Budget(CHEAP_BYTES, CHEAP_SECONDS) if cheap else _Budget(math.inf, math.inf)
    for name, piece in sorted(pieces.items(), key=lambda item: item[1].nbytes):
        old = (before or {}).get(name)
        stamps = relative(piece.stamps(), pieces.values())
        entry: Entry = {"bytes": piece.nbytes, "files": stamps, "hash": None}
        moved = _moved(old, entry)
        touched = bool(moved and old and old["hash"] and piece.nbytes <= TOUCHED_BYTES)
        entry["hash"] = budget.hash(piece, even_if_not_cheap=touched)
        found.entries[name] = entry
        if before is None:
            continue
        if old is None:
            _differ(found, name, piece.is_certain, "it was not there")
        elif entry["hash"] and old["hash"]:
            found.read.append(name)
            if entry["hash"] != old["hash"]:
                _differ(found, name, piece.is_certain, "; ".join(["its values differ", *moved]))
        elif entry["bytes"] != old["bytes"]:
            _differ(found, name, piece.is_certain, "; ".join(moved))
        elif moved:
            found.entries[name] = old  # until somebody has looked
            found.doubtful[name] = "; ".join([*moved, "its values were not compared"])
        else:
            found.unread.append(name)
            entry["hash"] = entry["hash"] or old["hash"]
    for name in (before or {}).keys() - pieces.keys():
        _differ(found, name, " dataset" not in name, "it is gone")
    return found


def _differ(found: Comparison, name: str, is_certain: bool, how: str) -> None:
    (found.changed if is_certain else found.doubtful)[name] = how


def _arrays(count: int) -> str:
    return "1 array" if count == 1 else f"{count:,} arrays"


def _moved(old: Entry | None, new: Entry) -> list[str]:
    """Sizes and times that are not as they were, in words."""
    if old is None:
        return []
    before, now = old["files"], new["files"]
    words = [f"it had {old['bytes']:,} bytes and has {new['bytes']:,}"] if old["bytes"] != new["bytes"] else []
    for name in sorted({**before, **now}):
        if before.get(name) != now.get(name):
            words.append(_file_words(name, before.get(name), now.get(name)))
    return words if len(words) <= 3 else [*words[:3], f"and {len(words) - 3:,} more"]


def _file_words(name: str, before: list[int] | None, now: list[int] | None) -> str:
    if before is None or now is None:
        return f"{name} is {'new' if before is None else 'gone'}"
    if before[0] != now[0]:
        return f"{name} had {before[0]:,} bytes and has {now[0]:,}"
    return f"{name} was written at {_clock(now[1])}, before at {_clock(before[1])}"


def _clock(nanoseconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(nanoseconds / 1e9))


class _Budget:
    """What may be read."""

    def __init__(self, num_bytes: float, seconds: float) -> None:
        self._bytes, self._seconds = num_bytes, seconds

    def hash(self, piece: Piece, even_if_not_cheap: bool = False) -> str | None:
        """A hash of all of a piece; None where it would take too much."""
        if not even_if_not_cheap and (piece.nbytes > self._bytes or self._seconds <= 0):
            return None
        began, digest = time.monotonic(), hashlib.sha256()
        try:
            for block in piece.content():
                digest.update(block)
                if not even_if_not_cheap and time.monotonic() - began > self._seconds:
                    self._seconds = 0.0
                    return None
        except OSError:  # a file that a dataset names, and may never read
            return None
        self._bytes -= piece.nbytes
        self._seconds -= time.monotonic() - began
        return digest.hexdigest()[:32]


def fingerprints(sources: Mapping[str, Source]) -> dict[str, str]:
    """Short hashes of some samples of each split."""
    return {name: samples_hash(source) for name, source in sources.items()}


def check_unchanged(splits: Sequence[str], comparison: Comparison, where: Path | None) -> None:
    """Refuse data of which some samples, or other values, are not as they were."""
    if not splits and not comparison.changed:
        return
    found = [f"{name}: {how}" for name, how in sorted(comparison.changed.items())]
    found = found if len(found) <= 5 else [*found[:5], f"and {len(found) - 5} more"]
    words = f" ({', '.join(sorted(splits))})" if splits else ""
    raise UserError(
        "\n  ".join([f"the data{words} is not the data that this run was started with", *found])
        + "\nrestore it from a copy, or start a new run that begins with the weights of this one: "
        f"task.init_from={shlex.quote(str(where))}"
    )


def read_record(folder: Path) -> Entries | None:
    """What the data of a run was; None where nothing is written down that can be read."""
    try:
        found = json.loads((folder / RECORD).read_text())["pieces"]
        return {str(name): {"bytes": int(entry["bytes"]), "files": _stamps(entry["files"]), "hash": entry["hash"]}
                for name, entry in found.items()}  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _stamps(found: Mapping[str, Any]) -> Stamps:
    return {str(name): [int(number) for number in stamp] for name, stamp in found.items()}


def write_record(folder: Path, entries: Entries) -> None:
    """Write down what the data of a run is, where that is new."""
    if read_record(folder) != entries:
        write_aside(folder / RECORD, json.dumps({"pieces": entries}, indent=1))
