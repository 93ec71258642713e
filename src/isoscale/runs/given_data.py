"""Data that is handed to a finished run: whatever people have, as the part that is asked for, with the task's names."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from isoscale.data import rng
from isoscale.data.batches import Batch, map_tensors, tensors_of
from isoscale.data.file_sources import Files
from isoscale.data.files import find_files
from isoscale.data.formats.opening import SUFFIXES, dataset_names, format_of
from isoscale.data.generators import seeded
from isoscale.data.sources import Source, Sources, has_splits, own_copy
from isoscale.engine.lightning.loaders import LoadedData, is_data_module, is_loader
from isoscale.engine.settings import Settings
from isoscale.engine.target_units import TargetUnits, key_of, target_key
from isoscale.errors import UserError


def in_split(data: Any, split: str, task: Any) -> Any:
    """Data for one split: as it is where it has splits; a plain loader, dataset, tensors or file for the one asked."""
    if is_loader(data):
        return LoadedData(data, split=split)
    if is_data_module(data) or has_splits(data):
        return data
    if isinstance(data, str | Path):
        return _opened(str(data), split, task)
    if isinstance(data, IterableDataset):
        raise UserError(
            f"{type(data).__name__} is an IterableDataset, which has no places to address, so that rows could not be "
            "told apart; give a map-style dataset, or the samples themselves: torch.stack(list(dataset))"
        )
    if isinstance(data, list) and len(data) > 2 and _are_alike(data) and _input_key(task) is not None:
        raise UserError(
            f"{len(data)} arrays of one shape in a list: is each a sample? Then make one array of them, one row per "
            "sample: numpy.stack(rows). Input and target are a tuple (x, y)"
        )
    return Sources(**{split: data})


def for_other_data(settings: Settings) -> Settings:
    """Settings for data that a run was not trained on: limits, and where its own data lives, are not meant for it."""
    train = settings.train.model_copy(update={"overfit_batches": None, "limit_test_batches": None})
    size = settings.data.batch_size
    one_size = max(size) if isinstance(size, list) else size
    data = settings.data.model_copy(update={"residency": "auto", "batch_size": one_size})
    return replace(settings, train=train, data=data)


def check_rows(task: Any, found: Any, num_samples: int) -> None:
    """Refuse predictions of a network that are not one row per sample: it has taken the samples for something else."""
    if _input_key(task) is None:
        return
    for values in found.values() if isinstance(found, dict) else [found]:
        if len(values) != num_samples:
            raise UserError(
                f"the network made {len(values)} rows of {num_samples} samples: the first dimension of the data counts "
                "samples; is it one sample? Then give x[None]"
            )


def _are_alike(values: list[Any]) -> bool:
    return all(isinstance(each, Tensor | np.ndarray) and each.shape == values[0].shape for each in values)


def _input_key(task: Any) -> str | None:
    return getattr(task, "input_key", None)


def _opened(path: str, split: str, task: Any) -> Sources:
    """A file: its arrays by their names, or one without a name as the input."""
    try:
        files = find_files(path, tuple(SUFFIXES))
        is_whole = format_of(files[0]) == "lmdb" or dataset_names(files[0]) is not None
        columns: Any = path if is_whole else {_input_key(task) or "input": path}
        return Sources(**{split: Files(test=columns, on_nan="keep").test})
    except UserError as error:
        raise UserError(f"data={path!r} is taken for a file of samples: {error}") from None


def sample_of(source: Source, device: torch.device) -> Batch:
    """The first sample, as a batch of one."""
    with seeded(0):
        batch = own_copy(source, source.fetch(torch.zeros(1, dtype=torch.int64)))
        return map_tensors(batch, lambda tensor: tensor.to(device))


class Named:
    """Gives the parts of a batch the names that a task reads them by, where they have none."""

    def __init__(self, input_key: str, target_key: str) -> None:
        """A tensor is the input; of a tuple the first is, and the second is the target."""
        self._keys = input_key, target_key

    def __call__(self, batch: Batch) -> Batch:
        """The batch as a dict."""
        if isinstance(batch, dict):
            return batch
        return dict(zip(self._keys, [batch] if isinstance(batch, Tensor) else batch, strict=False))


def fitting(task: Any, transforms: Sequence[Any], sample: Batch) -> list[Any]:
    """The transforms for data like a sample: after names where they ask for them, without those of a missing target."""
    input_key, target = _input_key(task), target_key(task)
    found: list[Any] = list(transforms)
    keys = {key_of(each) for each in transforms} - {None}
    if input_key is not None and (keys or (transforms and isinstance(sample, Tensor))):
        named = Named(input_key, target)
        sample, found = named(sample), [named, *transforms]
        if input_key in keys and input_key not in sample:
            task.input_of(sample)  # says what is missing
    if isinstance(sample, dict) and target in sample:
        return found
    if isinstance(sample, dict) or input_key is not None:
        return [each for each in found if key_of(each) != target]
    return found


class Stored:
    """Predictions in the units of the stored target, and what the user should know where they are not."""

    def __init__(self, task: Any, transforms: Sequence[Any], sample: Batch) -> None:
        """For data like a sample, which may have a target."""
        self._units = TargetUnits(task, transforms)
        self._target = target_key(task)
        self._changes, self._like = _looked_at(self._target, fitting(task, transforms, sample), sample)
        unsaid = [each for each in transforms if key_of(each) is None and not getattr(each, "keeps_units", False)]
        self._unseen = unsaid if self._like is None else []

    def __call__(self, prediction: Tensor) -> Tensor:
        """A prediction that has the shape of the target, in its units; another one as it is."""
        return self._units.stored(prediction) if self._is_alike(prediction) else prediction

    def _is_alike(self, prediction: Tensor) -> bool:
        return self._like is None or prediction.shape[1:].numel() == self._like.shape[1:].numel()

    def remark(self, prediction: Tensor) -> str | None:
        """What the user should know; None where there is nothing to say."""
        target, remedy = (
            repr(self._target),
            f"to have it undone, give it `key = {self._target!r}` and `inverse(values)`",
        )
        if self._units.changes and self._like is not None and not self._is_alike(prediction):
            found, expected = tuple(prediction.shape[1:]), tuple(self._like.shape[1:])
            return (
                f"predictions {found} have another shape than {target} {expected}, so that they are as the network "
                "made them, in the units that it learns"
            )
        kept = self._units.kept or self._changes
        if kept is not None:
            name = type(kept).__name__
            return f"predictions are in the units that {name} leaves {target} in, not in the stored ones; {remedy}"
        if self._unseen:
            names = " and ".join(type(each).__name__ for each in self._unseen)
            return f"if {names} changes {target}, predictions are in the units that it leaves; {remedy}"
        return None


def _looked_at(target: str, transforms: Sequence[Any], sample: Batch) -> tuple[Any, Tensor | None]:
    """The last transform that changes the target without saying so, and the target as it is after all of them."""
    found = None
    with rng.use(None):
        for transform in transforms:
            before = _entry(sample, target)
            version = None if before is None else before._version
            sample = transform(sample)
            after = _entry(sample, target)
            is_changed = before is not None and (after is not before or after._version != version)
            if is_changed and key_of(transform) is None and not isinstance(transform, Named):
                found = transform
    return found, _entry(sample, target)


def _entry(batch: Batch, target: str) -> Tensor | None:
    """The target of a batch: by key of a dict, by place of a tuple."""
    if isinstance(batch, dict):
        value = batch.get(target)
    else:
        value = batch[1] if isinstance(batch, list | tuple) and len(batch) > 1 else None
    return value if isinstance(value, Tensor) else None


@contextmanager
def explained(task: Any, sample: Callable[[], Batch]) -> Iterator[None]:
    """Failures of a step on data that was handed over, with what the data is like."""
    try:
        yield
    except (RuntimeError, TypeError, KeyError, IndexError, ValueError, AttributeError) as error:
        if isinstance(error, UserError | torch.OutOfMemoryError) or sample() is None:
            raise
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        raise UserError(
            f"{type(task).__name__} cannot take this data ({reason}): {described(sample())}. Give samples of the "
            "names, shapes and types that it was trained on"
        ) from error


def described(sample: Batch) -> str:
    """What a sample is made of, for people."""

    def words(tensor: Tensor) -> str:
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"{' × '.join(map(str, tensor.shape[1:]))} {kind}" if tensor.dim() > 1 else f"one number, {kind}"

    if isinstance(sample, Tensor):
        return f"a sample is {words(sample)}"
    if isinstance(sample, dict):
        parts = [f"{key!r} {words(value)}" for key, value in sample.items() if isinstance(value, Tensor)]
        return f"a sample has {', '.join(parts)}"
    return f"a sample is a {type(sample).__name__} of {', '.join(words(each) for each in tensors_of(sample))}"
