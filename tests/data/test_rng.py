"""Random numbers are a function of seed, purpose, step, sample and element, and of nothing else."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from isoscale.data import rng
from isoscale.data.hashing import MASK, derive_key, fold, mix
from isoscale.data.rng import StepRandom

INDICES = st.integers(0, 2**46)


def at(samples: list[int] | Tensor, step: int | Tensor = 0, seed: int = 0) -> StepRandom:
    """The randomness of some samples at a step."""
    random = StepRandom(seed)
    random.step = step
    random.samples = torch.as_tensor(samples)
    return random


def test_the_random_words_never_change():
    words = at([0, 17, 10**12], step=3).bits("noise", (3,))
    assert words.tolist() == [
        [1214917408, 2080251886, 509381056],
        [2619633715, 3082906207, 1131093231],
        [3233447965, 939664897, 93011041],
    ]
    assert at([5], step=2**33).bits("x", (2, 2)).tolist() == [[[1541640256, 3071164135], [3367907915, 372152824]]]


def test_the_random_numbers_never_change():
    random = at([0, 17, 10**12], step=3)
    uniform = [[4745771, 8125983], [10232944, 12042602], [12630656, 3670566]]
    assert (random.uniform("noise", (2,)) * 2**24).tolist() == uniform
    normal = [[1.39612676, -1.26276818], [-1.91699610, 0.39762705], [-1.27757785, -1.26383737]]
    torch.testing.assert_close(random.normal("noise", (2,), torch.float64), torch.tensor(normal, dtype=torch.float64))


@given(seed=st.integers(0, 2**64), step=st.integers(0, 2**40), sample=INDICES, element=st.integers(0, 200))
def test_a_word_is_the_hash_of_its_coordinates(seed, step, sample, element):
    high, low = (fold(fold(key, step), sample) for key in derive_key(seed, "noise"))
    expected = mix((element * 0x9E3779B9 + high) & MASK ^ low)
    assert at([sample], step, seed).bits("noise", (201,))[0, element] == expected


@settings(max_examples=50)
@given(st.lists(INDICES, min_size=1, max_size=20), st.lists(INDICES, max_size=20), st.data())
def test_the_numbers_of_a_sample_do_not_depend_on_its_batch_or_its_place_in_it(batch, others, data):
    place = data.draw(st.integers(0, len(others)))
    mixed = others[:place] + batch + others[place:]
    for draw in (StepRandom.bits, StepRandom.uniform, StepRandom.normal):
        expected = draw(at(batch, step=9), "noise", (3, 2))
        assert torch.equal(draw(at(mixed, step=9), "noise", (3, 2))[place : place + len(batch)], expected)


def test_the_first_elements_do_not_depend_on_how_many_are_asked_for_nor_on_their_shape():
    random = at([3, 4])
    long = random.bits("noise", (24,))
    assert torch.equal(random.bits("noise", (5,)), long[:, :5])
    assert torch.equal(random.bits("noise", (2, 3, 4)), long.view(2, 2, 3, 4))
    assert torch.equal(random.bits("noise", ()), long[:, 0])


def test_numbers_change_with_the_step_the_purpose_the_seed_and_the_sample():
    base = at([17], 5).bits("noise", (100,))
    for other in (
        at([17], 6).bits("noise", (100,)),
        at([17], 5).bits("crop", (100,)),
        at([17], 5, seed=1).bits("noise", (100,)),
        at([18], 5).bits("noise", (100,)),
        at([5], 17).bits("noise", (100,)),
    ):
        assert (base != other).all()


def test_asking_again_gives_the_same_numbers():
    random = at([1, 2])
    assert torch.equal(random.uniform("noise", (4,)), random.uniform("noise", (4,)))


@pytest.mark.parametrize("step", [0, 7, 2**31, 2**33 + 5])
def test_a_step_as_a_tensor_gives_the_numbers_of_a_step_as_an_integer(step):
    assert torch.equal(at([1, 2], torch.tensor(step)).bits("noise", (50,)), at([1, 2], step).bits("noise", (50,)))


def test_torchs_generator_is_neither_consulted_nor_moved():
    before = torch.get_rng_state()
    first = at([1]).normal("noise", (10,))
    torch.manual_seed(123)
    assert torch.equal(at([1]).normal("noise", (10,)), first)
    torch.set_rng_state(before)
    at([1]).uniform("noise", (10,))
    assert torch.equal(torch.get_rng_state(), before)


def test_uniform_numbers_are_uniform_over_elements_samples_and_steps():
    over = {
        "elements": at([0]).uniform("noise", (50_000,), torch.float64),
        "samples": at(torch.arange(50_000)).uniform("noise", (), torch.float64),
        "steps": torch.stack([at([3], step).uniform("noise", (20,), torch.float64) for step in range(2500)]),
    }
    for name, numbers in over.items():
        assert stats.kstest(numbers.flatten().numpy(), "uniform").pvalue > 1e-4, name
        assert abs(numbers.mean() - 0.5) < 5 / math.sqrt(12 * numbers.numel()), name
        assert abs(numbers.var() - 1 / 12) < 0.002, name


def test_neighbouring_elements_samples_and_steps_are_not_correlated():
    numbers = torch.stack([at(torch.arange(100), step).uniform("noise", (50,), torch.float64) for step in range(10)])
    for dimension in range(3):
        one = numbers.narrow(dimension, 0, numbers.shape[dimension] - 1).flatten()
        next_one = numbers.narrow(dimension, 1, numbers.shape[dimension] - 1).flatten()
        assert abs(torch.corrcoef(torch.stack([one, next_one]))[0, 1]) < 5 / math.sqrt(len(one))


def test_normal_numbers_have_the_moments_and_the_distribution_of_a_normal():
    numbers = at(torch.arange(1000)).normal("noise", (100,), torch.float64).flatten()
    root = math.sqrt(len(numbers))
    assert abs(numbers.mean()) < 5 / root
    assert abs(numbers.var() - 1) < 5 * math.sqrt(2) / root
    assert abs((numbers**3).mean()) < 5 * math.sqrt(15) / root
    assert abs((numbers**4).mean() - 3) < 5 * math.sqrt(96) / root
    assert stats.kstest(numbers.numpy(), "norm").pvalue > 1e-4
    assert numbers.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_of_every_dtype_are_finite_and_below_one(dtype):
    random = at(torch.arange(200))
    uniform, normal = random.uniform("noise", (1000,), dtype), random.normal("noise", (1000,), dtype)
    assert uniform.dtype == normal.dtype == dtype
    assert uniform.min() >= 0 and uniform.max() < 1
    assert abs(uniform.double().mean() - 0.5) < 0.005
    assert normal.isfinite().all() and abs(normal.double().std() - 1) < 0.01


def test_double_precision_gives_the_numbers_of_single_precision():
    random = at([1, 2, 3])
    assert torch.equal(random.uniform("noise", (50,)).double(), random.uniform("noise", (50,), torch.float64))


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_a_shape_without_elements_is_possible(shape):
    assert at([1, 2]).uniform("noise", shape).shape == (2, *shape)


def test_numbers_without_samples_are_refused():
    with pytest.raises(RuntimeError, match="needs the samples of the step"):
        StepRandom(0).uniform("noise")


def test_it_is_known_whether_numbers_were_drawn():
    random = at([1])
    assert not random.used
    random.normal("noise")
    assert random.used


def test_the_current_randomness_ends_with_its_block_even_after_an_error():
    outer, inner = at([1]), at([2])
    assert rng.current() is None
    with rng.use(outer):
        with pytest.raises(KeyError), rng.use(inner):
            assert rng.current() is inner
            raise KeyError
        assert rng.current() is outer
        with rng.use(None):
            assert rng.current() is None
    assert rng.current() is None


class TestManyPurposes:
    """The words of all purposes are computed at once; nobody must notice."""

    def alone(self, purpose: str, step: int, samples: Tensor) -> Tensor:
        random = StepRandom(3)
        random.step, random.samples = step, samples
        return random.bits(purpose, (5,))

    @pytest.mark.parametrize("as_tensor", [False, True])
    def test_numbers_do_not_depend_on_what_else_was_asked_for(self, as_tensor: bool) -> None:
        random = StepRandom(3)
        for step, count in ((0, 4), (1, 7), (7, 7)):
            samples = torch.arange(count) * 11
            random.step, random.samples = torch.tensor(step) if as_tensor else step, samples
            for purpose in ("crop", "flip", f"only in {step}", "crop"):
                assert torch.equal(random.bits(purpose, (5,)), self.alone(purpose, step, samples))

    def test_a_new_step_has_new_numbers_for_the_same_samples(self) -> None:
        random = StepRandom(3)
        random.samples = torch.arange(4)
        before = random.bits("crop", (5,))
        random.step = 1
        assert torch.equal(random.bits("crop", (5,)), self.alone("crop", 1, torch.arange(4)))
        assert not torch.equal(before, random.bits("crop", (5,)))

    def test_what_is_drawn_once_is_the_same_in_every_step(self) -> None:
        random = StepRandom(3)
        random.samples = torch.arange(1000)
        first = random.once("side")
        random.step = 5
        assert torch.equal(first, random.once("side")) and not torch.equal(first, random.once("other"))
        assert 400 < (first % 2).sum() < 600
