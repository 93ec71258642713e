"""Structures with labels but without physics, and a model that says what it is told to."""

import json
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from isoscale.data.ragged import Level, RaggedSource
from isoscale.engine.metrics.accumulators import Recorder, means
from isoscale.engine.metrics.losses import as_weighted_sum
from isoscale.engine.step.context import StepContext
from isoscale.science.crystals.model import CrystalModel

Structures = list[dict[str, Any]]
COUNTS = (3, 1, 7, 2, 12, 5)
"""Atoms of structures, where a test does not say otherwise."""
PER_ATOM = ("z", "pos", "forces", "charges", "site")
IN_BATCH = ("z", "pos", "cell", "edge_source", "edge_target", "edge_shift", "by_source")


def structures(
    counts: Sequence[int] = COUNTS, elements: Sequence[int] = (3, 15, 16), seed: int = 0,
    without: Mapping[str, Any] = {},
) -> Structures:  # fmt: skip
    """Atoms at random with random labels; `without` says which structures lack which."""
    random = np.random.default_rng(seed)
    found = []
    for number, count in enumerate(counts):
        one: dict[str, Any] = {
            "z": random.choice(elements, count).astype(np.int64), "pos": random.normal(size=(count, 3)),
            "cell": np.diag(random.uniform(3, 6, 3)), "energy": random.normal() * count, "gap": random.normal(2, 3),
            "forces": random.normal(size=(count, 3)), "charges": random.normal(1, 0.3, count),
            "stress": random.normal(size=(3, 3)) * 0.01, "system": random.integers(0, 3), "site": None,
        }  # fmt: skip
        one["site"] = random.integers(0, 2, count)
        one.update({f"given_{name}": np.asarray(one[name]) + 0.3 * random.normal(size=np.shape(one[name]))
                    for name in ("energy", "gap", "forces", "charges", "stress")})  # fmt: skip
        one["given_system"], one["given_site"] = random.normal(size=3), random.normal(size=(count, 2))
        for name, lacking in without.items():
            one[f"has_{name}"] = np.uint8(number not in lacking)
            if number in lacking:
                one[name] = np.zeros_like(one[name])
        found.append(one)
    return found


def source(listed: Structures, leave_out: Sequence[str] = (), names: Sequence[str] = ()) -> RaggedSource:
    """Structures as a source whose only edge is of an atom with itself."""
    keys = [key for key in listed[0] if key not in leave_out]
    of_atoms = [key for key in keys if key.removeprefix("given_") in PER_ATOM]
    rows = {key: np.stack([np.asarray(one[key]) for one in listed]) for key in keys if key not in of_atoms}
    atoms = {key: np.concatenate([one[key] for one in listed]) for key in of_atoms}
    edge = np.zeros(len(listed), np.int64)
    shift = np.zeros((len(edge), 3), np.int8)
    edges = {"edge_source": edge, "edge_target": edge, "by_source": edge, "edge_shift": shift}
    found = RaggedSource(
        rows, {"atoms": Level([len(one["z"]) for one in listed], atoms), "edges": Level(np.ones_like(edge), edges)},
        {"edge_source": "atoms", "edge_target": "atoms", "by_source": "edges"}, {"atoms": "batch"},
        lambda index: f"made.xyz, frame {index}",
    )  # fmt: skip
    if names:
        found.names = list(names)  # type: ignore[attr-defined]
    return found


def batch(listed: Structures, padding: int = 0) -> dict[str, Tensor]:
    """A batch of all structures, with some atoms of padding."""
    made = source(listed)
    atoms = int(made.sizes[:, 0].sum())
    return made.pack(torch.arange(len(listed)), (atoms + padding, len(listed) + padding))


class _Blind(nn.Module):
    """A network that sees nothing."""

    width, cutoff = 1, 3.0

    def forward(self, graph: Any) -> Tensor:
        return torch.zeros(len(graph.z), 1)


class Told(CrystalModel):
    """Predicts what a batch holds as `given_…`, times a weight that is learned."""

    def __init__(self) -> None:
        super().__init__(_Blind())
        self.factor = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(
        self, batch: Mapping[str, Tensor], create_graph: bool | None = None, wanted: Sequence[str] | None = None
    ) -> dict[str, Tensor]:
        names = wanted or [key.removeprefix("given_") for key in batch if key.startswith("given_")]
        return {name: self.factor * batch[f"given_{name}"] for name in names}


class Alone:
    """One rank, which hands on plain data alone."""

    rank, world_size = 0, 1

    def all_gather(self, value: Any, what: str) -> list[Any]:
        return [json.loads(json.dumps(value))]


def training(made: Any, said: list[str] | None = None) -> Any:
    """Training data as a task measures it."""
    lines: list[str] = [] if said is None else said
    return SimpleNamespace(source=made, ranks=Alone(), say=lines.append)


def evaluated(task: Any, batch: dict[str, Tensor], stage: str = "train") -> tuple[dict[str, Any], dict[str, float]]:
    """The terms of the loss as pairs, and what is logged, as people see it."""
    recorder = Recorder(torch.device("cpu"))
    context = StepContext(stage, task, recorder)
    context.enter()
    terms = context.method(batch, 0)
    context.flush(len(batch["cell"]))
    context.leave()
    pairs = {name: as_weighted_sum(value, len(batch["cell"])) for name, value in terms.items()}
    return pairs, recorder.shown(means(recorder.read().pairs()))
