"""The recipe section that says how a batch is cut and its gradients are summed."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from isoscale.config import Config


class Parallel(Config):
    """How the batch is cut into shards and their gradients are added."""

    reduce: Literal["auto", "flat", "tree"] = "auto"
    """flat: each rank computes its part at once (fast). tree: fixed shards added in a fixed binary tree, so that the
    weights are the same to the bit on any number of ranks. auto is flat."""
    shards: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Number of shards of a batch in `tree`, a power of two; auto is 8. Never follows the number of ranks."""

    @model_validator(mode="after")
    def _shards_of_a_tree(self) -> "Parallel":
        if self.shards != "auto" and self.reduce != "tree":
            raise ValueError(f"shards: {self.shards} has a meaning only with reduce: tree")
        return self
