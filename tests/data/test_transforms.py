"""Transforms give a new batch and leave the one they are given alone."""

import pytest
import torch

from isoscale.data import rng
from isoscale.data.transforms import Divide, Flatten, Noise, Normalize
from isoscale.errors import UserError


@pytest.fixture
def images():
    """Stored pixels (batch, channels, height, width) and labels."""
    pixels = torch.arange(2 * 3 * 2 * 2, dtype=torch.uint8).view(2, 3, 2, 2)
    return {"input": pixels, "target": torch.tensor([0, 1])}


@pytest.mark.parametrize("transform", [Divide(2.0), Normalize(1.0, 2.0), Normalize([1, 2, 3], [4, 5, 6]), Flatten()])
def test_a_transform_changes_its_key_only_and_nothing_in_place(images, transform):
    images["input"] = images["input"].float()
    before = images["input"].clone()
    transformed = transform(images)
    assert transformed is not images and transformed["target"] is images["target"]
    assert set(images) == {"input", "target"} and torch.equal(images["input"], before)
    assert not torch.equal(transformed["input"].flatten(), before.flatten()) or isinstance(transform, Flatten)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (Divide(2.0, key="x"), lambda x: x / 2),
        (Normalize(1.0, 2.0, key="x"), lambda x: (x - 1) / 2),
        (Flatten(key="x"), lambda x: x.reshape(2, 12)),
    ],
)
def test_a_transform_can_be_told_its_key(transform, expected):
    input, x = torch.ones(2, 3, 4), torch.arange(24.0).view(2, 3, 4)
    transformed = transform({"input": input, "x": x})
    assert transformed["input"] is input and torch.equal(input, torch.ones(2, 3, 4))
    assert torch.equal(transformed["x"], expected(x))


def test_divide_turns_integers_into_floating_point_numbers(images):
    divided = Divide(255.0)(images)["input"]
    assert divided.dtype == torch.float32
    assert torch.equal(divided, images["input"].float() / 255)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_divide_keeps_the_dtype_of_floating_point_numbers(dtype):
    divided = Divide(4)({"input": torch.tensor([2.0], dtype=dtype)})["input"]
    assert divided.dtype == dtype and divided.item() == 0.5


def test_divide_by_zero_is_refused_at_once():
    with pytest.raises(ValueError, match="other than 0 in `by`"):
        Divide(0)


def test_normalize_by_numbers():
    normal = Normalize(mean=3, std=2.0)({"input": torch.tensor([[1, 3, 7]])})["input"]
    assert normal.tolist() == [[-1, 0, 2]]


def test_normalize_by_channel(images):
    normal = Normalize(mean=[0.0, 10.0, 20.0], std=[1.0, 2.0, 4.0])(images)["input"]
    for channel, (mean, std) in enumerate([(0.0, 1.0), (10.0, 2.0), (20.0, 4.0)]):
        assert torch.equal(normal[:, channel], (images["input"][:, channel].float() - mean) / std)


@pytest.mark.parametrize("shape", [(4, 2), (4, 2, 5), (4, 2, 3, 3, 3)])
def test_the_channels_are_the_second_dimension_of_any_shape(shape):
    normal = Normalize(mean=[1.0, 2.0], std=1)({"input": torch.zeros(shape, dtype=torch.float64)})["input"]
    assert normal.dtype == torch.float64 and normal.shape == shape
    assert (normal[:, 0] == -1).all() and (normal[:, 1] == -2).all()


@pytest.mark.parametrize("std", [0, 0.0, [1.0, 0.0]])
def test_normalize_by_zero_is_refused_at_once(std):
    with pytest.raises(ValueError, match="other than 0 in `std`"):
        Normalize(0.0, std)


def test_flatten_makes_a_row_of_every_sample(images):
    flat = Flatten()(images)["input"]
    assert flat.shape == (2, 12) and flat.dtype == torch.uint8
    assert torch.equal(flat[1], images["input"][1].flatten())


def test_another_number_of_channels_is_refused_rather_than_broadcast():
    with pytest.raises(UserError, match=r"has 3 numbers, one per channel, but 'input' has 1 channels"):
        Normalize([0.1, 0.2, 0.3], [1.0, 1.0, 1.0])({"input": torch.zeros(2, 1, 4, 4)})


def noise_of(samples, step=0, seed=0):
    random = rng.StepRandom(seed)
    random.step, random.samples = step, torch.tensor(samples)
    with rng.use(random):
        return Noise(0.5)({"input": torch.zeros(len(samples), 400)})["input"]


def test_noise_is_there_in_training_only():
    batch = {"input": torch.zeros(2, 3)}
    assert Noise(0.5)(batch) is batch
    assert noise_of([3]).std().item() == pytest.approx(0.5, rel=0.15)
    assert noise_of([3]).mean().item() == pytest.approx(0, abs=0.1)


def test_noise_belongs_to_a_sample_and_a_step():
    assert torch.equal(noise_of([1, 2, 3])[2], noise_of([3])[0])
    for other in (noise_of([2]), noise_of([3], step=1), noise_of([3], seed=1)):
        assert not torch.equal(other, noise_of([3]))


def test_noise_without_a_size_is_refused_at_once():
    with pytest.raises(ValueError, match="a deviation above 0, not 0"):
        Noise(0)
