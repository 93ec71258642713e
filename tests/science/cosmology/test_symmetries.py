"""The symmetries of the cube are a group, act on fields as one, and turn vectors with the axes."""

from itertools import permutations, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isoscale.data import rng
from isoscale.data.rng import StepRandom
from isoscale.errors import UserError
from isoscale.science.cosmology.symmetries import CubeSymmetry, draw, matrices, rotation, turn

ALL = torch.arange(48)
MATRICES = matrices(ALL)
NUMBER_OF = {tuple(matrix.flatten().tolist()): number for number, matrix in enumerate(MATRICES)}
numbers = st.integers(0, 47)


def turned_by_axes(fields: Tensor, number: int, vectors: Any = ()) -> Tensor:
    """One sample (channels, n, n, n), turned with permute and flip as its matrix says."""
    matrix = MATRICES[number]
    axes = matrix.abs().argmax(1).tolist()
    mirrored = [1 + axis for axis in range(3) if matrix[axis].sum() < 0]
    moved = fields.permute(0, *[1 + axis for axis in axes]).flip(mirrored)
    result = moved.clone()
    for vector in vectors:
        result[vector] = torch.einsum("ij,jxyz->ixyz", matrix.to(fields.dtype), moved[vector])
    return result


def test_the_numbers_are_all_signed_permutations() -> None:
    expected = set()
    for axes, signs in product(permutations(range(3)), product((1, -1), repeat=3)):
        matrix = torch.zeros(3, 3, dtype=torch.int64)
        for row in range(3):
            matrix[row, axes[row]] = signs[row]
        expected.add(tuple(matrix.flatten().tolist()))
    assert set(NUMBER_OF) == expected and len(NUMBER_OF) == 48


def test_they_are_a_group_of_which_half_are_rotations() -> None:
    products = MATRICES[:, None] @ MATRICES[None]  # (48, 48, 3, 3)
    table = torch.tensor([[NUMBER_OF[tuple(each.flatten().tolist())] for each in row] for row in products])
    assert torch.equal(MATRICES[0], torch.eye(3, dtype=torch.int64))
    assert torch.equal(table.sort(1).values, ALL.expand(48, 48)), "every row has all: closure and inverses"
    assert torch.equal(table.sort(0).values, ALL[:, None].expand(48, 48))
    assert torch.equal(MATRICES @ MATRICES.mT, torch.eye(3, dtype=torch.int64).expand(48, 3, 3))
    determinants = torch.linalg.det(MATRICES.double()).round().long()
    assert (determinants == 1).sum() == 24 and (determinants == -1).sum() == 24
    rotations = rotation(torch.arange(24))
    assert torch.equal(rotations.sort().values, ALL[determinants == 1])
    assert torch.isin(table[rotations][:, rotations], rotations).all(), "a subgroup"


@settings(max_examples=50, deadline=None)
@given(first=numbers, second=numbers, size=st.integers(1, 5))
def test_fields_turned_twice_are_turned_by_the_product(first: int, second: int, size: int) -> None:
    fields = torch.randn(1, 5, size, size, size)
    both = NUMBER_OF[tuple((MATRICES[second] @ MATRICES[first]).flatten().tolist())]
    once = turn(fields, torch.tensor([first]), [[1, 2, 3]])
    twice = turn(once, torch.tensor([second]), [[1, 2, 3]])
    assert torch.equal(twice, turn(fields, torch.tensor([both]), [[1, 2, 3]]))


@pytest.mark.parametrize("vectors", [[], [[1, 2, 3]], [[4, 0, 6], [1, 5, 3]]])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_sample_is_turned_as_its_matrix_says_to_the_bit(vectors: Any, format: Any, dtype: Any) -> None:
    fields = torch.randn(48, 7, 4, 4, 4).to(dtype).contiguous(memory_format=format)
    order = torch.randperm(48)
    found = turn(fields, order, vectors)
    expected = [turned_by_axes(one, int(number), vectors) for one, number in zip(fields, order, strict=True)]
    assert found.dtype == dtype and torch.equal(found, torch.stack(expected))


def test_a_quarter_turn_is_what_one_draws_on_paper() -> None:
    """About z, from x to y: what lay on the x axis lies on the y axis, and points along it."""
    quarter = NUMBER_OF[(0, -1, 0, 1, 0, 0, 0, 0, 1)]
    fields = torch.zeros(1, 4, 3, 3, 3)
    fields[0, :, 2, 1, 1] = torch.tensor([5.0, 1.0, 0.0, 0.0])  # a scalar, and a vector along x
    found = turn(fields, torch.tensor([quarter]), [[1, 2, 3]])
    assert found[0, :, 1, 2, 1].tolist() == [5, 0, 1, 0] and found.count_nonzero() == 2


def gradient(field: Tensor) -> Tensor:
    """Of a periodic field (batch, 1, n, n, n) by central differences: (batch, 3, n, n, n)."""
    return torch.cat([(field.roll(-1, axis) - field.roll(1, axis)) / 2 for axis in (2, 3, 4)], 1)


def divergence(field: Tensor) -> Tensor:
    return sum((field[:, i : i + 1].roll(-1, i + 2) - field[:, i : i + 1].roll(1, i + 2)) / 2 for i in range(3))


def test_the_gradient_of_a_turned_field_is_the_turned_gradient() -> None:
    potential = torch.randn(48, 1, 6, 6, 6)
    assert torch.equal(gradient(turn(potential, ALL)), turn(gradient(potential), ALL, [[0, 1, 2]]))
    wrong = turn(gradient(potential), ALL)  # velocities that only move
    assert not torch.equal(gradient(turn(potential, ALL))[1:], wrong[1:])


def test_the_divergence_of_turned_vectors_is_the_turned_divergence() -> None:
    velocity = torch.randn(48, 3, 6, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(divergence(turn(velocity, ALL, [[0, 1, 2]])), turn(divergence(velocity), ALL))


def augmented(change: CubeSymmetry, samples: list[int], step: int = 0, seed: int = 0) -> dict[str, Tensor]:
    random = StepRandom(seed)
    random.step, random.samples = step, torch.tensor(samples)
    with rng.use(random):
        return change({name: fields[samples] for name, fields in BATCH.items()})


BATCH = {"input": torch.randn(64, 4, 3, 3, 3), "target": torch.randn(64, 5, 3, 3, 3), "weight": torch.ones(64)}
EVERY = list(range(64))


def drawn(change: CubeSymmetry, samples: list[int], **key: int) -> list[int]:
    """The symmetry of each sample, found by its effect."""
    found = augmented(change, samples, **key)
    return [
        next(
            number
            for number in range(48)
            if torch.equal(found["input"][row], turned_by_axes(BATCH["input"][sample], number, [[1, 2, 3]]))
            and torch.equal(found["target"][row], turned_by_axes(BATCH["target"][sample], number, [[1, 2, 3]]))
        )
        for row, sample in enumerate(samples)
    ]


def test_input_and_target_of_a_sample_are_turned_alike_and_samples_each_in_their_way() -> None:
    symmetries = drawn(CubeSymmetry(), EVERY)
    assert len(set(symmetries)) > 24 and max(symmetries) > 40
    assert torch.equal(augmented(CubeSymmetry(), EVERY)["weight"], BATCH["weight"])


def test_rotations_only_draws_nothing_else() -> None:
    symmetries = drawn(CubeSymmetry(rotations_only=True), EVERY)
    assert len(set(symmetries)) > 16
    assert (torch.linalg.det(MATRICES[symmetries].double()) > 0).all()


def test_every_symmetry_is_drawn_about_as_often() -> None:
    random = StepRandom(0)
    random.samples = torch.arange(48_000)
    for rotations_only, count in ((False, 48), (True, 24)):
        occurrences = draw(random, rotations_only).bincount(minlength=48)
        expected = 48_000 / count
        assert (occurrences > 0).sum() == count
        assert (occurrences[occurrences > 0] - expected).abs().max() < 5 * expected**0.5


def test_it_is_a_function_of_seed_step_and_sample() -> None:
    change = CubeSymmetry()
    whole = augmented(change, EVERY)["input"]
    pieces = [augmented(change, EVERY[start : start + 16])["input"] for start in range(0, 64, 16)]
    assert torch.equal(whole, torch.cat(pieces))
    assert torch.equal(whole.flip(0), augmented(change, EVERY[::-1])["input"])
    assert not torch.equal(whole, augmented(change, EVERY, seed=1)["input"])
    assert not torch.equal(whole, augmented(change, EVERY, step=1)["input"])


def test_an_evaluation_sees_the_fields_as_they_are() -> None:
    with rng.use(None):
        assert CubeSymmetry()(BATCH) is BATCH


@pytest.mark.parametrize(("fields", "batch", "words"), [
    ({"input": ["ρ", "v_x", "v_z"]}, BATCH, "have no v_y: a vector turns with all three"),
    ({"input": ["ρ", "v_y"]}, BATCH, "have no v_x and no v_z"),
    ({"input": ["ρ", "v_x", "v_x"]}, BATCH, "the same name"),
    ({"input": ["v_x", "v_y", "v_z"]}, BATCH, "has 4 fields, but CubeSymmetry knows 3 of them .* name all 4"),
    ({"density": []}, BATCH, r"'density' of a batch, but a batch has 'input', 'target', 'weight'"),
    ({"input": ["ρ"]}, torch.zeros(64, 1, 2, 2, 2), r"no names \(a Tensor\)"),
    ({"input": ["ρ"]}, {"input": torch.zeros(64, 1, 2, 2, 4)}, "cut out cubes"),
])  # fmt: skip
def test_mistakes_are_named(fields: Any, batch: Any, words: str) -> None:
    random = StepRandom(0)
    random.samples = torch.arange(64)
    with rng.use(random), pytest.raises(UserError, match=words):
        CubeSymmetry(fields)(batch)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_turn_follows_its_numbers() -> None:
    fields, number = torch.randn(48, 5, 8, 8, 8, device="cuda"), ALL.cuda()
    turn(fields, number, [[1, 2, 3]])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        turned = turn(fields, number, [[1, 2, 3]])
    number.copy_(ALL.flip(0))
    graph.replay()
    assert torch.equal(turned.cpu(), turn(fields.cpu(), ALL.flip(0), [[1, 2, 3]]))
