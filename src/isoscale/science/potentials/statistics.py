"""What a potential measures before it learns: statistics of what its descriptor sees, and the energies of lone atoms.

Ranks share the frames out in blocks, and all add up all blocks in the same order: the bits do not tell how many ranks
there were.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import h5py
import numpy as np
import torch
from torch import Tensor

from isoscale.data.mixture import Mixture
from isoscale.data.sources import Source
from isoscale.engine.task import TaskRanks, Training
from isoscale.errors import UserError
from isoscale.science.potentials.geometry import Edges
from isoscale.science.potentials.model import DeepPotential, real_atoms

BLOCK = 8
"""Frames that are looked at together."""
KEY = "isoscale"
"""The attribute of a file of statistics that says what they are of."""

Batch = dict[str, Tensor]
Found = TypeVar("Found")


class Block(NamedTuple):
    """Some frames of a system."""

    system: Source
    frames: Tensor


class Sums(NamedTuple):
    """What statistics are made of, of one block."""

    seen: Tensor
    """The descriptor's own sums."""
    atoms: Tensor
    """Atoms of each type in every frame."""
    energies: Tensor | None


def fit_statistics(model: DeepPotential, training: Training, num_frames: int, path: Path | None) -> None:
    """Set the statistics of a model, from the first `num_frames` frames of each system, or from a file of these."""
    blocks = list(_blocks(systems_of(training.source), num_frames))
    device = model.energy_bias.device
    key = ""
    if path is not None:
        key = _key(model, _shared(blocks, training.ranks, _digest))
        if _take_from_file(model, path, key, training):
            return
    found = _shared(blocks, training.ranks, lambda block: _sums(model, _fetched(block, device))._asdict())
    sums = [Sums(**each) for each in found]
    model.descriptor.take_sums(torch.stack([each.seen for each in sums]).sum(0).to(device))
    model.energy_bias.copy_(_energy_bias(sums, training.ranks))
    if path is not None and training.ranks.rank == 0:
        _write(model, path, key, training.say)


def systems_of(source: Source) -> list[Any]:
    """The systems that a source is made of, also those that share their batches."""
    parts = source.systems if isinstance(source, Mixture) else [source]
    return [system for part in parts for system in getattr(part, "sources", [part])]


def _blocks(systems: Sequence[Source], num_frames: int) -> Iterator[Block]:
    for system in systems:
        for frames in torch.arange(min(num_frames, len(system))).split(BLOCK):
            yield Block(system, frames)


def _fetched(block: Block, device: torch.device) -> Batch:
    return {key: tensor.to(device) for key, tensor in block.system.fetch(block.frames).items()}


def _shared(blocks: Sequence[Block], ranks: TaskRanks, look: Callable[[Block], Found]) -> list[Found]:
    """What is found in each block, on every rank, though each looks at some of them only."""
    mine = {number: look(block) for number, block in enumerate(blocks) if number % ranks.world_size == ranks.rank}
    every = ranks.all_gather(mine, "the statistics of all ranks")
    found: dict[int, Found] = {number: value for each in every for number, value in each.items()}
    return [found[number] for number in range(len(blocks))]


def _sums(model: DeepPotential, batch: Batch) -> Sums:
    edges = Edges.of(batch, len(model.types), model.cutoff)
    is_atom = real_atoms(batch, edges.layout)
    atoms = torch.stack([is_atom[:, places].sum(1) for places in edges.layout.of_atoms], 1)
    seen = model.descriptor.sums(edges, is_atom)
    energy = batch.get("energy")
    return Sums(seen.cpu(), atoms.cpu(), None if energy is None else energy.double().cpu())


def _energy_bias(sums: Sequence[Sums], ranks: TaskRanks) -> Tensor:
    """The energies of lone atoms that explain most of the frames' energies: the smallest ones that do."""
    labelled = [each for each in sums if each.energies is not None]
    found = np.zeros(sums[0].atoms.shape[1])
    if labelled:
        atoms = torch.cat([each.atoms for each in labelled]).double().numpy()
        energies = torch.cat([each.energies for each in labelled if each.energies is not None]).numpy()
        found = np.linalg.lstsq(atoms, energies, rcond=None)[0]
    # of the first rank, because the last bits depend on the processor
    return torch.from_numpy(np.asarray(ranks.all_gather(found, "the energies of lone atoms")[0]))


def _digest(block: Block) -> str:
    batch, digest = block.system.fetch(block.frames), hashlib.sha256()
    for key in sorted(batch):
        if key in ("coord", "box", "energy", "places") or key.startswith("atoms_"):
            digest.update(key.encode() + batch[key].contiguous().numpy().tobytes())
    return digest.hexdigest()


def _key(model: DeepPotential, digests: Sequence[str]) -> str:
    said = {"types": model.types, **model.descriptor.statistics(), "frames": digests}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _measured(model: DeepPotential) -> dict[str, Tensor]:
    """The buffers that hold statistics, by name."""
    return dict(model.named_buffers())


def _take_from_file(model: DeepPotential, path: Path, key: str, training: Training) -> bool:
    """Set the statistics from a file, if it holds these; the first rank reads it for all."""
    found = _read(path, key, training.say) if training.ranks.rank == 0 else None
    found = training.ranks.all_gather(found, "the file of statistics")[0]
    if found is None:
        return False
    for name, buffer in _measured(model).items():
        buffer.copy_(torch.from_numpy(found[name]))
    return True


def _read(path: Path, key: str, say: Callable[[str], None]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        known = _is_ours(path)
        if known:
            with h5py.File(path, "r") as file:
                if file.attrs[KEY] == key:
                    return {name: np.asarray(file[name]) for name in file}
    except OSError as error:
        raise UserError(f"cannot read {path} as a file of statistics: {error}; remove it or name another") from None
    words = "of other frames or another descriptor" if known else "by another program"
    say(f"{path} holds statistics {words}: they are measured anew" + ("" if known else ", and the file is left alone"))
    return None


def _write(model: DeepPotential, path: Path, key: str, say: Callable[[str], None]) -> None:
    if path.exists() and not _is_ours(path):
        return
    aside = path.with_name(f".{path.name}.{uuid4().hex}")  # several runs may write the same at the same time
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(aside, "w") as file:
            file.attrs[KEY] = key
            for name, buffer in _measured(model).items():
                file[name] = buffer.cpu().numpy()
        aside.replace(path)
    except OSError as error:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        say(f"cannot keep the statistics in {path}: {error.strerror or error}")


def _is_ours(path: Path) -> bool:
    if path.is_dir():  # where DeePMD-kit keeps statistics unless the name ends in .hdf5
        return False
    with h5py.File(path, "r") as file:
        return KEY in file.attrs
