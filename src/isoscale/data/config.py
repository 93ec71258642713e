"""The recipe section that says which samples are trained on, and in what order."""

from typing import Annotated, Any, Literal

from pydantic import Field

from isoscale.config import Config, OpenConfig


class WindowShuffle(Config):
    """A shuffle for slow file systems: few blocks are read at a time, each as a whole, and mixed with each other."""

    samples_per_block: Annotated[int, Field(ge=1)] = 1000
    """Samples that follow each other in the source and are read together."""
    blocks_per_window: Annotated[int, Field(ge=1)] = 64
    """Blocks, from anywhere in the source, whose samples are mixed completely. The more, the closer to a full
    shuffle; the start of a run says how close."""


Positive = Annotated[int, Field(ge=1)]


class Data(OpenConfig):
    """The data: a component by class, its own arguments, and how batches are made of it."""

    class_: Annotated[str, Field(alias="class")] = "digits"
    """Class path or short name of the data component; its arguments stand beside it (`path`, `split`, …)."""
    batch_size: Positive | list[Positive] | Annotated[str, Field(pattern=r"^auto(:[1-9]\d*(x[1-9]\d*)?)?$")] = 128
    """The *global* batch: samples of one optimizer update, over all ranks and micro-batches together. For a mixture of
    systems also a list, one for each, or auto:32, the smallest batch with at least 32 atoms (auto is auto:32), or
    auto:32x4, four times that."""
    eval_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Samples of one evaluation batch; by default `batch_size`, and 8192 points of snapshots. Never changes a metric
    beyond rounding."""
    loader_batches: Annotated[int, Field(ge=1)] = 1
    """How many batches of a DataLoader make one optimizer update, each of them computed by itself; other data has
    `batch_size` and `train.accumulate`. Lightning calls it accumulate_grad_batches."""
    init_args: dict[str, Any] = {}
    """Arguments of the class that have the name of a key of this section, such as {batch_size: 32} of a
    LightningDataModule."""
    residency: Literal["auto", "device", "host", "disk"] = "auto"
    """Where the data lives during training: device (in the accelerator's memory), host (copied ahead of each step) or
    disk (read from files ahead of each step, in bounded memory). auto decides by size. Never changes the result."""
    samples_per_epoch: Annotated[int, Field(ge=1)] | None = None
    """Samples that an epoch draws, fewer or more than there are; by default all, once. The next epoch goes on where
    this one stopped, so that every sample comes equally often."""
    shuffle: bool | WindowShuffle = True
    """Visit the samples of each epoch in a new order; false keeps the order of the source. Keys below it make it a
    window shuffle, for data that is read from a slow disk."""
    workers: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Processes that read a Dataset, sample by sample, ahead of the training; 0 reads in the training process. auto is
    what NUM_WORKERS says, else `num_workers` of a DataLoader that was given, else all cores of the job but one, at
    most 8. Never changes the result. Tensors and files that are read in whole batches need none."""
    drop_last: bool = False
    """Leave out the last batch of an epoch when it is smaller than `batch_size`."""
    transforms: list[Any] = []
    """Callables on a batch, by class path or short name, applied in the step, on the device, in this order."""
    subset: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, le=1)] | None = None
    """Train on a part of the training data: a number of samples or a fraction; the same rows every time."""
