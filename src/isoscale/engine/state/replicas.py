"""Whether all ranks hold the same weights: silent divergence is an error that names rank and tensor."""

import torch

from isoscale.engine.state.registry import Registry, digest
from isoscale.errors import UserError
from isoscale.parallel.collectives import Ranks

_OWN = ("metrics/", "extra/")
"""What each rank counts or keeps for itself."""


class Diverged(UserError):
    """The ranks no longer hold the same weights."""


def verify(registry: Registry, ranks: Ranks, step: int) -> None:
    """Compare a hash of every tensor on all ranks; waits for the device once."""
    if ranks.alone:
        return
    tensors = {name: tensor for name, tensor in registry.tensors().items() if not name.startswith(_OWN)}
    hashes = torch.stack([digest(tensor).cpu() for tensor in tensors.values()])
    every = ranks.all_gather((list(tensors), hashes), "the hashes of the weights")
    for rank, (names, found) in enumerate(every):
        if names != every[0][0]:
            other = sorted(set(names) ^ set(every[0][0]))
            raise Diverged(f"step {step}: {ranks.name(rank)} has other tensors than rank 0: {', '.join(other[:4])}")
        different = (found != every[0][1]).nonzero().flatten().tolist()
        if different:
            raise Diverged(_words(ranks, rank, names[different[0]], len(different), step))


def _words(ranks: Ranks, rank: int, name: str, count: int, step: int) -> str:
    more = f" and {count - 1} more" if count > 1 else ""
    if step == 0:
        return (
            f"{ranks.name(rank)} starts with another {name}{more} than {ranks.name(0)}: the model draws on something "
            "that the seed does not reach, or the ranks run different code or versions"
        )
    return (
        f"step {step}: {name}{more} of {ranks.name(rank)} differs from that of {ranks.name(0)}: an update was not the "
        "same on all ranks (a hook that changes weights, a custom optimizer, failing memory). Checkpoints were "
        "compared up to the last verification; the same command goes on from the last one"
    )
