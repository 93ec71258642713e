"""The recipe section that says how a batch is cut and its gradients are summed."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isoscale.config import Config


class Parallel(Config):
    """How the batch is cut into shards and their gradients are added."""

    reduce: Literal["auto", "overlap", "flat", "tree"] = "auto"
    """flat: each rank computes its part at once, and one sum of all gradients follows (fast). overlap: gradients are
    sent while others are still computed (for large models). tree: fixed shards added in a fixed binary tree, so that
    the weights are the same to the bit on any number of ranks. auto is overlap from 32 million parameters on, and flat
    below."""
    shards: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of shards of a batch in `tree`, a power of two; auto is 8. Never follows the number of ranks."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds without progress after which a rank is taken to hang, and all end with its name. A rank that does
    something long alone, while the others wait for it, looks the same: be generous."""
    verify: Annotated[int, Field(ge=0)] = 1000
    """Steps between two comparisons of the weights of all ranks, which must be equal; 0 compares them only at the
    start."""

    pin: Literal["auto", "off"] = "auto"
    """auto: ranks of one machine that may all use the same cores divide them, and each stays on its own, near its GPU.
    Ranks that already have cores of their own (srun, mpirun --bind-to) keep those. off: ranks go where the system puts
    them."""

    @model_validator(mode="after")
    def _shards_of_a_tree(self) -> "Parallel":
        if self.shards != "auto" and self.reduce != "tree":
            raise ValueError(f"shards: {self.shards} has a meaning only with reduce: tree")
        return self
