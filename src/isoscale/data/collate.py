"""Collate samples into a batch as torch's `default_collate` does, to the bit, but stack arrays of numpy at once."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data._utils import collate as of_torch

from isoscale.data.batches import Batch


def collate(samples: list[Any]) -> Batch:
    """A batch of samples: torch makes a tensor of every array first, which takes longer than all the rest."""
    functions: dict[Any, Any] = of_torch.default_collate_fn_map  # people may add their own
    if functions.get(np.ndarray) is of_torch.collate_numpy_array_fn:
        functions = {**functions, np.ndarray: _stacked}
    return of_torch.collate(samples, collate_fn_map=functions)


def _stacked(arrays: Sequence[NDArray[Any]], *, collate_fn_map: Any = None) -> Any:
    first = arrays[0]
    alike = all(type(each) is np.ndarray and each.dtype == first.dtype and each.shape == first.shape for each in arrays)
    if not alike or first.dtype.kind not in "biufc" or not first.dtype.isnative:
        return of_torch.collate_numpy_array_fn(arrays, collate_fn_map=collate_fn_map)
    stacked: Tensor = torch.empty(len(arrays), *first.shape, dtype=torch.as_tensor(first).dtype)
    np.stack(arrays, out=stacked.numpy())
    return stacked
