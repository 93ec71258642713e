"""Transforms give a new batch and leave the one they are given alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from torch import Tensor, nn

import isoscale
from isoscale.data import rng
from isoscale.data.transforms import Divide, Flatten, Noise, Normalize, Scale
from isoscale.errors import UserError
from tests.helpers import QUIET, sha, timeless

ROWS = (
    torch.randn(200, 7, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 5, 7) + torch.arange(7) * 100
)


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


def fitted(rows: Tensor, block: int = 30, **options: Any) -> Scale:
    scale = Scale(**options)
    scale.fit({"input": part} for part in rows.split(block))
    return scale


@pytest.mark.parametrize(("kind", "theirs"), [("standard", StandardScaler), ("minmax", MinMaxScaler)])
def test_it_is_scikit_learns(kind: Any, theirs: Any) -> None:
    rows = ROWS.double()
    expected = theirs().fit_transform(rows.numpy())
    np.testing.assert_allclose(fitted(rows, kind=kind)({"input": rows})["input"], expected, rtol=1e-9, atol=1e-9)


@given(st.integers(1, 200), st.sampled_from(["standard", "minmax"]), st.sampled_from(["feature", "whole"]))
def test_it_does_not_depend_on_the_blocks_of_the_pass(block: int, kind: Any, per: Any) -> None:
    whole, pieces = (fitted(ROWS, size, kind=kind, per=per).state() for size in (200, block))
    for name in ("shift", "scale"):
        torch.testing.assert_close(whole[name], pieces[name], rtol=1e-12, atol=0)


def test_no_digits_are_lost_far_from_zero() -> None:
    rows = torch.randn(1000, 1, dtype=torch.float64) + 1e9
    assert float(fitted(rows, 7).state()["scale"]) == pytest.approx(float(rows.std(0, correction=0)), rel=1e-6)


def test_channels_of_images_share_their_statistics() -> None:
    images = torch.rand(50, 3, 4, 5) * torch.tensor([1.0, 10.0, 100.0]).view(3, 1, 1)
    found = fitted(images, per="channel")({"input": images})["input"]
    torch.testing.assert_close(found.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(found.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-5, rtol=0)


def test_what_does_not_vary_is_only_shifted() -> None:
    rows = torch.full((10, 2), 5.0)
    assert torch.equal(fitted(rows)({"input": rows})["input"], torch.zeros(10, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["standard", "minmax"])
def test_what_does_not_vary_is_listed_and_left_at_its_size(kind: Any, dtype: torch.dtype) -> None:
    rows = torch.rand(7001, 20, dtype=dtype)
    rows[:, 3], rows[:, 17] = 0.1, 1 / 3
    scale = fitted(rows, 999, kind=kind)
    assert scale.state()["scale"][[3, 17]].tolist() == [1, 1]
    assert scale.remarks == [
        "input: 2 of 20 numbers of a sample do not vary in the training data and are shifted only (3, 17)"
    ]


def test_what_varies_less_than_float32_resolves_is_listed() -> None:
    rows = torch.rand(500, 30, dtype=torch.float64)
    rows[:, 5] = 1000 + 1e-5 * rows[:, 5]
    rows[:, 6] = 1000 + rows[:, 6]
    assert fitted(rows).remarks == [
        "input: 1 of 30 numbers of a sample vary by less than float32 resolves, which is scaled up all the same (5)"
    ]
    many = fitted(rows[:, :1].expand(500, 1) * torch.zeros(20)).remarks
    assert many[0].endswith("(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, and 8 more)")
    assert fitted(rows[:, :5]).remarks == []


def test_the_inverse_gives_the_values_back_and_nothing_is_changed_in_place() -> None:
    before = ROWS.clone()
    scale = fitted(ROWS)
    torch.testing.assert_close(scale.inverse(scale({"input": ROWS})["input"]), ROWS, rtol=1e-4, atol=1e-3)
    assert torch.equal(before, ROWS)


def test_a_scale_that_measured_nothing_or_something_else_is_refused() -> None:
    with pytest.raises(UserError, match="was not measured"):
        Scale()({"input": ROWS})
    with pytest.raises(UserError, match="measured on samples of 7 numbers, but these are of shape"):
        fitted(ROWS)({"input": ROWS[:, :3]})


class TestInARun:
    GENERATOR = torch.Generator().manual_seed(0)
    INPUT = torch.randn(120, 3, generator=GENERATOR) * 50 + 10
    DATA = {"input": INPUT, "target": INPUT.sum(1, keepdim=True) * 1000 + 5e5}
    RECIPE: dict[str, Any] = {
        "data": {
            "batch_size": 20,
            "transforms": [
                {"class": "divide", "by": 2.0},
                {"class": "scale"},
                {"class": "scale", "kind": "minmax", "per": "whole", "key": "target"},
            ],
        },
        "optimizer": {"lr": 0.05},
    }

    def task(self) -> isoscale.Supervised:
        torch.manual_seed(0)
        return isoscale.Supervised(nn.Linear(3, 1))

    def fit(self, path: Path, epochs: int, data: Any = None) -> isoscale.Run:
        sources = isoscale.Sources(train=data or self.DATA, val=self.DATA, test=self.DATA)
        keys = {**QUIET, "train.epochs": epochs}
        return isoscale.Trainer(self.RECIPE, run=path, **keys).fit(self.task(), sources)

    @pytest.mark.slow
    def test_it_learns_and_predicts_in_the_units_of_the_target(self, tmp_path: Path) -> None:
        run = self.fit(tmp_path / "run", 40)
        assert run.metrics["val/loss"] < 1e-4
        found = isoscale.predict(run)["prediction"]
        assert float((found - self.DATA["target"]).abs().mean()) < 0.03 * float(self.DATA["target"].std())

    def test_a_run_keeps_what_it_measured(self, tmp_path: Path) -> None:
        run = self.fit(tmp_path / "run", 2)
        again = isoscale.test(isoscale.Run(run.path, self.task(), isoscale.Sources(test=self.DATA)), "last")
        assert again["test/loss"] == pytest.approx(run.metrics["val/loss"], rel=1e-6)
        far = isoscale.Sources(test={key: value * 7 for key, value in self.DATA.items()})
        assert isoscale.test(isoscale.Run(run.path, self.task(), far), "last")["test/loss"] > 1, "not measured anew"

    def test_a_stop_is_invisible(self, tmp_path: Path) -> None:
        whole = self.fit(tmp_path / "whole", 4)
        self.fit(tmp_path / "parts", 2)
        parts = self.fit(tmp_path / "parts", 4)
        assert sha(whole) == sha(parts) and timeless(whole) == timeless(parts)
