"""Augmentation is a function of seed, epoch or step, and sample; it leaves evaluations alone."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from isoscale.data import rng
from isoscale.data.rng import StepRandom
from isoscale.errors import UserError
from isoscale.science.images import Crop, Cutout, Flip, Rotate

ALL = [
    Flip(),
    Flip("alternate"),
    Crop(2),
    Crop(2, "reflect"),
    Crop(2, "edge"),
    Cutout(4, fill=7),
    Rotate(30),
]
IMAGES = torch.randint(1, 255, (40, 3, 12, 10), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def augmented(change: Any, samples: list[int], step: int = 0, seed: int = 0, images: Tensor = IMAGES) -> Tensor:
    random = StepRandom(seed)
    random.steps_per_epoch = 5
    random.step, random.samples = step, torch.tensor(samples)
    with rng.use(random):
        return change({"input": images[samples]})["input"]


@pytest.mark.parametrize("change", ALL, ids=lambda change: f"{type(change).__name__}-{getattr(change, 'mode', '')}")
class TestAll:
    def test_it_does_not_depend_on_the_batch(self, change: Any) -> None:
        whole = augmented(change, list(range(40)))
        pieces = [augmented(change, list(range(start, start + 8))) for start in range(0, 40, 8)]
        assert torch.equal(whole, torch.cat(pieces))
        assert torch.equal(whole.flip(0), augmented(change, list(range(39, -1, -1))))

    def test_it_changes_with_the_seed_and_from_epoch_to_epoch(self, change: Any) -> None:
        first = augmented(change, list(range(40)))
        assert not torch.equal(first, augmented(change, list(range(40)), seed=1))
        assert not torch.equal(first, augmented(change, list(range(40)), step=5))

    def test_an_evaluation_sees_the_images_as_they_are(self, change: Any) -> None:
        with rng.use(None):
            assert change({"input": IMAGES, "target": 3})["input"] is IMAGES

    def test_it_keeps_shape_and_dtype_and_its_input(self, change: Any) -> None:
        before = IMAGES.clone()
        found = augmented(change, list(range(40)))
        assert found.shape == IMAGES.shape and found.dtype == IMAGES.dtype
        assert torch.equal(before, IMAGES)

    def test_flattened_images_are_refused_with_the_remedy(self, change: Any) -> None:
        with pytest.raises(UserError, match="before flatten"):
            augmented(change, [0, 1], images=IMAGES.flatten(1))


def test_flip_mirrors_about_half_of_the_images() -> None:
    images = torch.rand(2000, 1, 4, 4)
    found = augmented(Flip(), list(range(2000)), images=images)
    mirrored = (found == images.flip(3)).flatten(1).all(1)
    same = (found == images).flatten(1).all(1)
    assert (mirrored ^ same).all()
    assert 0.45 < mirrored.float().mean() < 0.55
    assert torch.equal(augmented(Flip(p=1.0), list(range(40))), IMAGES.flip(3))


def test_alternate_flip_shows_both_sides_in_two_epochs() -> None:
    even, odd, next_even = (augmented(Flip("alternate"), list(range(40)), step) for step in (0, 5, 10))
    mirrored = (even == IMAGES.flip(3)).flatten(1).all(1)
    assert 8 < mirrored.sum() < 32
    assert torch.equal(odd, even.flip(3)) and torch.equal(even, next_even)
    assert torch.equal(even, augmented(Flip("alternate"), list(range(40)), step=4)), "the same all through an epoch"


@pytest.mark.parametrize(("mode", "numpy_mode"), [("zero", "constant"), ("reflect", "reflect"), ("edge", "edge")])
def test_a_crop_is_a_window_of_the_padded_image(mode: Any, numpy_mode: Any) -> None:
    found = augmented(Crop(3, mode), list(range(40)))
    padded = np.pad(IMAGES.numpy(), ((0, 0), (0, 0), (3, 3), (3, 3)), mode=numpy_mode)
    places = set()
    for image, wide in zip(found.numpy(), padded, strict=True):
        windows = [(y, x) for y in range(7) for x in range(7) if np.array_equal(image, wide[:, y : y + 12, x : x + 10])]
        assert len(windows) == 1
        places.add(windows[0])
    assert len(places) > 20
    assert {y for y, _ in places} == set(range(7)) == {x for _, x in places}, "every shift occurs"


def test_cutout_blanks_one_square() -> None:
    found = augmented(Cutout(4, fill=0), list(range(40)))
    hole = (found == 0).all(1)
    assert torch.equal(found * ~hole[:, None], IMAGES * ~hole[:, None])
    sizes = hole.sum((1, 2))
    assert sizes.max() == 16 and sizes.min() >= 4
    assert len({tuple(torch.nonzero(each)[0].tolist()) for each in hole}) > 20


def test_a_rotation_by_no_angle_is_none_and_by_any_keeps_the_centre() -> None:
    images = torch.rand(40, 2, 9, 9)
    torch.testing.assert_close(augmented(Rotate(0), list(range(40)), images=images), images, atol=1e-5, rtol=0)
    turned = augmented(Rotate(180), list(range(40)), images=images)
    torch.testing.assert_close(turned[:, :, 4, 4], images[:, :, 4, 4], atol=1e-5, rtol=0)
    assert not torch.allclose(turned, images)


def test_a_rotation_of_a_wide_image_does_not_stretch_it() -> None:
    images = torch.zeros(40, 1, 9, 33)
    images[:, :, :, 12:21] = 1  # a square in the middle
    turned = augmented(Rotate(45), list(range(40)), images=images)
    inside = turned[:, 0, :, 12:21].sum((1, 2))
    assert (inside > 60).all(), "the square stays where it was, but for its corners"


def test_two_of_a_kind_draw_for_themselves() -> None:
    random = StepRandom(0)
    random.samples = torch.arange(40)
    with rng.use(random):
        once = Cutout(3)({"input": IMAGES})
        twice = Cutout(3)(once)
    assert (twice["input"] == 0).sum() > (once["input"] == 0).sum()


@pytest.mark.parametrize("wrong", [lambda: Crop(0), lambda: Cutout(0)])
def test_sizes_that_make_no_sense_are_refused(wrong: Any) -> None:
    with pytest.raises(UserError, match="at least 1"):
        wrong()


def test_a_crop_larger_than_the_image_is_refused() -> None:
    with pytest.raises(UserError, match="too much"):
        augmented(Crop(10), [0, 1])
