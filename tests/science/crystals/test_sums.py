"""Sums over sorted edges: right, differentiable twice, and the same however they are computed."""

import pytest
import torch

from isoscale.science.crystals import sums
from isoscale.science.crystals.networks.graph import Graph
from isoscale.science.crystals.sums import Side
from tests.science.crystals.graphs_made import crystal, one_sided, packed


@pytest.fixture
def sides() -> tuple[Side, Side]:
    """Sources and targets of edges that do not all go both ways, with padding, and an atom without edges."""
    source = torch.tensor([2, 1, 2, 0, 5, 5])
    target = torch.tensor([0, 0, 1, 3, 5, 5])
    return Side.of_order(source, torch.argsort(source, stable=True), 6), Side.of_sorted(target, 6)


def test_sums_by_source_and_target_are_those_of_index_add(sides: tuple[Side, Side]) -> None:
    values = torch.randn(6, 2, 3, dtype=torch.float64)
    for side in sides:
        expected = torch.zeros(6, 2, 3, dtype=torch.float64).index_add(0, side.row, values)
        assert torch.equal(sums.total(values, side), expected)


def test_sums_are_right_in_every_dtype(sides: tuple[Side, Side]) -> None:
    values = torch.randn(6, 4)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expected = torch.zeros(6, 4, dtype=torch.float64).index_add(0, sides[0].row, values.to(dtype).double())
        found = sums.total(values.to(dtype), sides[0])
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def test_scaled_and_along_are_what_they_say(sides: tuple[Side, Side]) -> None:
    source = sides[0]
    rows, factors = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    directions = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(sums.scaled(rows, factors, source), rows[source.row] * factors)
    for side in sides:
        zeros = torch.zeros(6, 4, dtype=torch.float64)
        expected = [zeros.index_add(0, side.row, factors * each[:, None]) for each in directions.t()]
        torch.testing.assert_close(sums.along(factors, directions, side), torch.stack(expected, 1))


def test_all_operations_are_differentiable_twice(sides: tuple[Side, Side]) -> None:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    for side in sides:
        cases = [
            (lambda x, s=side: sums.gather(x, s), (randn(6, 2),)),
            (lambda x, s=side: sums.total(x, s), (randn(6, 2),)),
            (lambda x, y, s=side: sums.scaled(x, y, s), (randn(6, 2), randn(6, 2))),
            (lambda x, y, s=side: sums.passed(x, y, s, sides[1]), (randn(6, 3, 2), randn(6, 2))),
            (lambda x, y, s=side: sums.along(x, y, s), (randn(6, 2), randn(6, 3))),
        ]
        for function, inputs in cases:
            assert torch.autograd.gradcheck(function, inputs)
            assert torch.autograd.gradgradcheck(function, inputs)


def test_a_third_derivative_is_right_too(sides: tuple[Side, Side]) -> None:
    def slopes_of_slopes(values: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        found = sums.along(values, directions, sides[1]).pow(3).sum()
        (once,) = torch.autograd.grad(found, directions, create_graph=True)
        (twice,) = torch.autograd.grad(once.square().sum(), values, create_graph=True)
        return twice

    inputs = [torch.randn(6, 2, dtype=torch.float64, requires_grad=True) for _ in range(1)]
    directions = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(slopes_of_slopes, (*inputs, directions))


def test_sums_are_the_same_on_one_and_two_threads() -> None:
    target = torch.randint(0, 50, (5000,)).sort()[0]
    side, values = Side.of_sorted(target, 50), torch.randn(5000, 33)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = sums.total(values, side)
        torch.set_num_threads(2)
        assert torch.equal(sums.total(values, side), alone)
    finally:
        torch.set_num_threads(threads)


def test_padding_atoms_are_in_no_structure() -> None:
    graph = Graph.of(packed([crystal(0, 2), crystal(1, 3)], 3.0, atoms=4, padding_edges=3, room=1), 3.0)
    assert graph.per_structure(torch.ones(9, 2)).tolist() == [[2, 2], [3, 3], [0, 0]]
    assert graph.num_atoms_of().tolist() == [2, 3, 0]


def test_nothing_to_add_gives_zeros() -> None:
    side = Side.of_sorted(torch.zeros(0, dtype=torch.long), 3)
    values = torch.zeros(0, 2, requires_grad=True)
    assert sums.total(values, side).tolist() == [[0, 0]] * 3
    assert sums.gather(torch.ones(3, 2), side).shape == (0, 2)


def test_vectors_of_a_graph_are_those_of_images_and_padding_has_the_length_of_the_cutoff() -> None:
    made = crystal(3, 2, 3.0)
    batch = one_sided(packed([made], 4.0))
    graph = Graph.of(batch, 4.0, torch.float32)
    for number, (source, target) in enumerate(zip(batch["edge_source"], batch["edge_target"], strict=True)):
        shift = batch["edge_shift"][number].double() @ batch["cell"][0]
        torch.testing.assert_close(graph.vectors[number].double(), batch["pos"][source] + shift - batch["pos"][target])
    padded = Graph.of(packed([made], 4.7, atoms=2, padding_edges=3), 4.7)
    assert padded.lengths[-3:].tolist() == [4.7] * 3
