"""Fused optimizers on all of a device.

Torch's fused kernels give a block of threads 65,536 numbers of one tensor: a small network keeps a few blocks busy and
a hundred idle. Cut into smaller pieces, the same numbers go through the same operations in a fraction of the time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GRAIN = 1024
"""Pieces are multiples of it, so that they stay aligned."""
MOST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}
"""That one launch takes, by the number of lists besides counters; more take another launch, which brings nothing."""
FUSED = frozenset({
    torch._fused_adam_, torch._fused_adamw_, torch._fused_sgd_, torch._fused_adagrad_,
    torch._amp_foreach_non_finite_check_and_unscale_,
})  # fmt: skip


class Spread(TorchFunctionMode):
    """Within it, fused kernels get their tensors in pieces. That costs the host time: it is meant for captures."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, with its lists of tensors cut if it is a fused kernel."""
        return function(*(_cut_all(args) if function in FUSED else args), **(kwargs or {}))


def _cut_all(args: Sequence[Any]) -> list[Any]:
    """Cut the lists among the arguments, which belong together tensor by tensor, alike."""
    lists = [arg for arg in args if isinstance(arg, list | tuple) and arg]
    pieces = iter(zip(*_cut(list(zip(*lists, strict=True))), strict=True))
    return [list(next(pieces)) if isinstance(arg, list | tuple) and arg else arg for arg in args]


def _cut(rows: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Rows of a parameter, its gradient and its state as rows of pieces of them."""
    num_lists = sum(tensor.dim() > 0 for tensor in max(rows, key=lambda row: row[0].numel()))
    num_free = MOST_TENSORS.get(num_lists, 30) - len(rows)
    if num_free <= 0:
        return rows
    total = sum(row[0].numel() for row in rows)
    size = -(-total // (num_free * GRAIN)) * GRAIN
    return [piece for row in rows for piece in _pieces(row, size)]


def _pieces(row: tuple[Tensor, ...], size: int) -> list[tuple[Tensor, ...]]:
    """Pieces of `size` numbers; counters of steps, which have no dimension, go with every piece."""
    length = row[0].numel()
    is_flat = all(tensor.dim() == 0 or (tensor.is_contiguous() and tensor.numel() == length) for tensor in row)
    if length <= size or not is_flat:
        return [row]
    columns = [
        [tensor] * -(-length // size) if tensor.dim() == 0 else list(tensor.detach().view(-1).split(size))
        for tensor in row
    ]
    return list(zip(*columns, strict=True))
