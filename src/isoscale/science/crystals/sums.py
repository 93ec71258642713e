"""Sums over edges and atoms that are sorted: the same bits every time, and differentiable as often as one likes.

Messages of a graph network are gathered from atoms and added up at atoms. Adding with atomics (`index_add_`,
`scatter_add_`) gives other bits every time on a GPU. Here edges are sorted by their targets, and a permutation sorts
them by their sources, so that every sum runs over a list of rows in a fixed order: one thread adds one column of one
atom. The kernel is that of `torch.nn.functional.embedding_bag`, which gathers while it adds: on a CPU in float32 three
times as fast as `index_add_` and ten times as fast as `segment_reduce`; on CUDA it neither waits for the host nor uses
atomics, so that it can be captured. Each operation's derivatives are again operations of this file.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.jit._trace import is_tracing

_bag = torch.ops.aten._embedding_bag_forward_only
_SUM = 0


class Side(NamedTuple):
    """One end of all edges: which row each of them belongs to, and how to add up by rows."""

    row: Tensor
    """(E,) the row of each edge."""
    order: Tensor
    """(E,) a permutation that sorts edges by `row`, stable."""
    offsets: Tensor
    """(rows + 1,) where each row's edges begin in `order`; the last one is E."""

    @classmethod
    def of_sorted(cls, index: Tensor, num_rows: int) -> "Side":
        """Where `index` is sorted as it stands."""
        return cls(index, torch.arange(len(index), device=index.device), _offsets(index, num_rows))

    @classmethod
    def of_order(cls, index: Tensor, order: Tensor, num_rows: int) -> "Side":
        """Where `order` sorts `index`."""
        return cls(index, order, _offsets(index.index_select(0, order), num_rows))


def _offsets(ascending: Tensor, num_rows: int) -> Tensor:
    return torch.searchsorted(ascending, torch.arange(num_rows + 1, device=ascending.device))


def gather(rows: Tensor, side: Side) -> Tensor:
    """The row (…) of each edge: (rows, …) to (E, …)."""
    return rows.index_select(0, side.row) if is_tracing() else _Gather.apply(rows, side)


def total(values: Tensor, side: Side) -> Tensor:
    """Sums over the edges of each row: (E, …) to (rows, …)."""
    return _plain_total(values, side) if is_tracing() else _Total.apply(values, side)


def scaled(rows: Tensor, factors: Tensor, side: Side) -> Tensor:
    """`gather(rows, side) * factors`: (rows, F) and (E, F) to (E, F); derivatives need no more than these two."""
    rows, factors = _alike(rows, factors)
    return gather(rows, side) * factors if is_tracing() else _Scaled.apply(rows, factors, side)


def passed(rows: Tensor, factors: Tensor, start: Side, end: Side) -> Tensor:
    """What rows (rows, C, F) send along edges from `start` to `end`, each times its factors (E, F): (rows, C, F).

    The same as `total` of `gather` times factors, but nothing of the size of edges is kept besides the factors.
    """
    rows, factors = _alike(rows, factors)
    if is_tracing():
        return total(gather(rows, start) * factors.unsqueeze(1), end)
    return _Passed.apply(rows, factors, start, end)


def along(values: Tensor, directions: Tensor, side: Side) -> Tensor:
    """Sums of values (E, F) times each component of directions (E, C), over the edges of each row: (rows, C, F)."""
    values, directions = _alike(values, directions)
    if is_tracing():
        return total(values.unsqueeze(1) * directions.unsqueeze(2), side)
    return _Along.apply(values, directions, side)


def _alike(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the finer dtype of them: mixed precision gives this and that."""
    if first.dtype == second.dtype:
        return first, second
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.to(dtype), second.to(dtype)


def of_structures(values: Tensor, batch: Side, num_structures: int) -> Tensor:
    """Sums over the atoms of each structure, (A, …) to (B, …); padding atoms belong to none.

    `batch` has a row more than structures, for these: the kernel adds to the last row all that is left.
    """
    return total(values, batch)[:num_structures]


def _rows(rows: Tensor, side: Side) -> Tensor:
    """The row of each edge; rows that lie across memory are slow to gather, and few."""
    return rows.contiguous().index_select(0, side.row)


def _plain_total(values: Tensor, side: Side) -> Tensor:
    """For files that run without this package: torch's own sum, whose number of rows is not fixed by tracing."""
    zeros = values.new_zeros((side.offsets.shape[0] - 1, *values.shape[1:]))
    return zeros.index_add(0, side.row, values)


def _add(values: Tensor, side: Side, weights: Tensor | None = None) -> Tensor:
    """The sum itself, of values (E, …), each times its weight (E,), which are in the order of `side.order`."""
    num_rows = len(side.offsets) - 1
    flat = (values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)).contiguous()
    if flat.dtype not in (torch.float32, torch.float64):  # half precision adds up in float32
        return _add(values.float(), side, None if weights is None else weights.float()).to(values.dtype)
    if not flat.numel():
        return values.new_zeros(num_rows, *values.shape[1:])
    found = _bag(flat, side.order, side.offsets, False, _SUM, False, weights, True)[0]
    return found.view(num_rows, *values.shape[1:])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, side: Side) -> Tensor:
        ctx.side = side
        return _rows(rows, side)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return total(gradients[0], ctx.side), None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, side: Side) -> Tensor:
        ctx.side = side
        return _add(values, side)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gather(gradients[0], ctx.side), None


class _Scaled(torch.autograd.Function):
    """rows[side] * factors."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factors: Tensor, side: Side) -> Tensor:
        ctx.save_for_backward(rows, factors)
        ctx.side = side
        return _rows(rows, side).mul_(factors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (rows, factors), (of_rows, of_factors, _) = gradients, ctx.saved_tensors, ctx.needs_input_grad
        return (
            _ScaledTotal.apply(gradient, factors, ctx.side) if of_rows else None,
            _Scaled.apply(rows, gradient, ctx.side) if of_factors else None,
            None,
        )


class _ScaledTotal(torch.autograd.Function):
    """The sum of values * factors by rows of a side."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, factors: Tensor, side: Side) -> Tensor:
        ctx.save_for_backward(values, factors)
        ctx.side = side
        return _add(values * factors, side)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (values, factors), (of_values, of_factors, _) = gradients, ctx.saved_tensors, ctx.needs_input_grad
        return (
            _Scaled.apply(gradient, factors, ctx.side) if of_values else None,
            _Scaled.apply(gradient, values, ctx.side) if of_factors else None,
            None,
        )


class _Passed(torch.autograd.Function):
    """Of the form Σ rows[i(e), c, f] factors[e, f] ends[j(e), c, f] over e, c, f: its slopes with ends.

    Its slopes with rows are the same with both sides swapped, and those with factors are `_Matched`.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factors: Tensor, start: Side, end: Side) -> Tensor:
        ctx.save_for_backward(rows, factors)
        ctx.sides = start, end
        if rows.is_cuda or rows.shape[1] == 1:
            return _add(_rows(rows, start).mul_(factors.unsqueeze(1)), end)
        # on a CPU, what is smaller is faster
        return torch.stack([_add(_rows(rows[:, c], start).mul_(factors), end) for c in range(rows.shape[1])], 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (ends,), (rows, factors), (start, end) = gradients, ctx.saved_tensors, ctx.sides
        of_rows, of_factors, _, _ = ctx.needs_input_grad
        return (
            _Passed.apply(ends, factors, end, start) if of_rows else None,
            _Matched.apply(rows, ends, start, end) if of_factors else None,
            None,
            None,
        )


class _Matched(torch.autograd.Function):
    """Products of the rows at both ends of each edge, summed over components: (rows, C, F) twice, to (E, F)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, start: Side, end: Side) -> Tensor:
        ctx.save_for_backward(rows, ends)
        ctx.sides = start, end
        if rows.is_cuda:
            return _rows(rows, start).mul_(_rows(ends, end)).sum(1)
        found = _rows(rows[:, 0], start).mul_(_rows(ends[:, 0], end))
        for c in range(1, rows.shape[1]):
            found.addcmul_(_rows(rows[:, c], start), _rows(ends[:, c], end))
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (factors,), (rows, ends), (start, end) = gradients, ctx.saved_tensors, ctx.sides
        of_rows, of_ends, _, _ = ctx.needs_input_grad
        return (
            _Passed.apply(ends, factors, end, start) if of_rows else None,
            _Passed.apply(rows, factors, start, end) if of_ends else None,
            None,
            None,
        )


class _Along(torch.autograd.Function):
    """Of the form Σ values[e, f] directions[e, c] rows[i(e), c, f] over e, c, f: its slopes with rows."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, directions: Tensor, side: Side) -> Tensor:
        ctx.save_for_backward(values, directions)
        ctx.side = side
        weights = directions.index_select(0, side.order).t().contiguous()
        found = [_add(values, side, weight) for weight in weights]
        return torch.stack(found, 1) if len(found) > 1 else found[0].unsqueeze(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (rows,), (values, directions), (of_values, of_directions, _) = (
            gradients,
            ctx.saved_tensors,
            ctx.needs_input_grad,
        )
        if of_values and of_directions:
            return *_Parts.apply(rows, values, directions, ctx.side), None
        rows = gather(rows, ctx.side)
        return (
            (rows * directions.unsqueeze(2)).sum(1) if of_values else None,
            (rows * values.unsqueeze(1)).sum(2) if of_directions else None,
            None,
        )


class _Parts(torch.autograd.Function):
    """The same form's slopes with values and with directions: both need the rows of edges, which are gathered once."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, values: Tensor, directions: Tensor, side: Side) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, values, directions)
        ctx.side = side
        return _parts(rows, values, directions, side)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (to_values, to_directions), (rows, values, directions) = gradients, ctx.saved_tensors
        of_rows, of_values, of_directions, _ = ctx.needs_input_grad
        found = along(to_values, directions, ctx.side) + along(values, to_directions, ctx.side) if of_rows else None
        if torch.is_grad_enabled():  # a third derivative: nobody trains with it, so it may be slow
            gathered = gather(rows, ctx.side)
            return (
                found,
                (gathered * to_directions.unsqueeze(2)).sum(1) if of_values else None,
                (gathered * to_values.unsqueeze(1)).sum(2) if of_directions else None,
                None,
            )
        return found, *_parts(rows, to_values, to_directions, ctx.side), None


def _parts(rows: Tensor, values: Tensor, directions: Tensor, side: Side) -> tuple[Tensor, Tensor]:
    """Of the rows (rows, C, F) of edges: Σ over c of rows * directions (E, F), and Σ over f of rows * values (E, C)."""
    if rows.is_cuda:
        gathered = _rows(rows, side)
        return (gathered * directions.unsqueeze(2)).sum(1), gathered.mul_(values.unsqueeze(1)).sum(2)
    found, products = None, []
    for c in range(rows.shape[1]):  # on a CPU, what is smaller is faster
        gathered, direction = _rows(rows[:, c], side), directions[:, c : c + 1]
        found = gathered * direction if found is None else found.addcmul_(gathered, direction)
        products.append(gathered.mul_(values).sum(1))
    assert found is not None
    return found, torch.stack(products, 1)
