"""Small ragged data for tests: graphs with atoms and edges at random."""

import numpy as np
import torch
from torch import Tensor, nn

import isoscale
from isoscale.data.ragged import Level, RaggedSource


def graphs(count: int, seed: int, most_atoms: int = 9, most_edges: int = 30) -> RaggedSource:
    """Graphs of 1 to `most_atoms` atoms and any number of edges, sorted by their targets."""
    random = np.random.default_rng(seed)
    atoms, edges = random.integers(1, most_atoms, count), random.integers(0, most_edges, count)
    ends = [np.sort(random.integers(0, n, e)) for n, e in zip(atoms, edges, strict=True)]
    begins = [random.integers(0, n, e) for n, e in zip(atoms, edges, strict=True)]
    by_source = [np.argsort(each, kind="stable") for each in begins]
    return RaggedSource(
        {"y": random.normal(size=count)},
        {
            "atoms": Level(atoms, {"x": random.normal(size=(atoms.sum(), 4))}),
            "edges": Level(
                edges,
                {
                    "source": np.concatenate(begins).astype(np.int32),
                    "target": np.concatenate(ends).astype(np.int32),
                    "by_source": np.concatenate(by_source).astype(np.int32),
                },
            ),
        },
        numbers={"source": "atoms", "target": "atoms", "by_source": "edges"},
        members={"atoms": "batch"},
    )


class Messages(isoscale.Task):
    """A network of messages between atoms: nothing of it is the same where padding, or the wrong edge, has a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 16), nn.Linear(16, 1)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """A number for each graph."""
        features, count = torch.tanh(self.inner(batch["x"])), len(batch["y"])
        # one row more, for padding: it has features too, and they must not be seen
        sums = torch.zeros_like(features).index_add(0, batch["target"], features.index_select(0, batch["source"]))
        of_atoms = self.outer(torch.tanh(features + sums)).squeeze(1)
        return of_atoms.new_zeros(count + 1).index_add(0, batch["batch"], of_atoms)[:count]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The error."""
        return (self(batch) - batch["y"]).square().mean()


def task_and_data() -> tuple[isoscale.Task, isoscale.Sources]:
    """Some graphs of very different sizes."""
    return Messages(), isoscale.Sources(train=graphs(70, 0), val=graphs(23, 1))
