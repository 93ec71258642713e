"""The recipe section that says which samples are trained on, and in what order."""

from typing import Annotated, Any, Literal

from pydantic import Field

from isoscale.config import OpenConfig


class Data(OpenConfig):
    """The data: a component by class, its own arguments, and how batches are made of it."""

    class_: Annotated[str, Field(alias="class")] = "digits"
    """Class path or short name of the data component; its arguments stand beside it (`path`, `split`, …)."""
    batch_size: Annotated[int, Field(ge=1)] = 128
    """The *global* batch: samples of one optimizer update, over all ranks and micro-batches together."""
    eval_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Samples of one evaluation batch; by default `batch_size`. Never changes a metric beyond rounding."""
    residency: Literal["auto", "device", "host"] = "auto"
    """Where the data lives during training: device (in the accelerator's memory) or host (copied ahead of each step).
    auto decides by size. Never changes the result."""
    shuffle: bool = True
    """Visit the samples of each epoch in a new order; false keeps the order of the source."""
    drop_last: bool = False
    """Leave out the last batch of an epoch when it is smaller than `batch_size`."""
    transforms: list[Any] = []
    """Callables on a batch, by class path or short name, applied in the step, on the device, in this order."""
    subset: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] | None = None
    """Train on a part of the training data: a number of samples or a fraction; the same rows every time."""
