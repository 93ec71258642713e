"""Boxes that a recipe reads in tiles: the laws hold for them, and what cannot be is said."""

from pathlib import Path
from typing import Any

import pytest

from isoscale.data.tiles import TiledCrops
from isoscale.data.volumes import Crops
from isoscale.errors import UserError
from isoscale.science.cosmology import Boxes
from tests.helpers import first_step, sha, timeless, train
from tests.laws.test_stop_is_invisible import continued_at
from tests.ranks import train_on
from tests.science.cosmology import made_boxes

TILES = {"tile": 10, "tiles_at_once": 2, "crops_per_tile": 4}


@pytest.mark.slow
def test_neither_place_nor_ranks_nor_a_stop_is_seen_in_what_was_learned_from_tiles(tmp_path: Path) -> None:
    recipe = made_boxes.recipe(tmp_path, **TILES)
    whole = train(tmp_path / "whole", recipe)
    assert whole.record["decided"]["residency"] == "device"
    again = train(continued_at(4, whole.path, tmp_path / "again"), recipe=None)
    assert first_step(again) == 4
    on_disk = train_on(2, tmp_path / "disk", recipe, data__residency="disk")
    on_host = train(tmp_path / "host", recipe, data__residency="host")
    for other in (again, on_disk, on_host):
        assert sha(other) == sha(whole) and timeless(other) == timeless(whole)
    with pytest.raises(UserError, match=r"data\.tile"):
        train(whole.path, recipe, data__tile=11)


def test_only_training_boxes_have_tiles_and_only_where_the_recipe_says_so(tmp_path: Path) -> None:
    data = made_boxes.recipe(tmp_path)["data"]
    arguments = {key: data[key] for key in ("train", "val", "crop", "wrap")}
    plain, tiled = Boxes(**arguments), Boxes(**arguments, **TILES)
    assert [type(crops) for crops in plain.crops.values()] == [Crops, Crops]
    assert [type(crops) for crops in tiled.crops.values()] == [TiledCrops, Crops]
    assert len(plain.crops["train"]) == len(tiled.crops["train"])
    assert Boxes(**arguments, tile=12).crops["train"].tiles_at_once == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"tiles_at_once": 3}, r"data\.tiles_at_once and data\.crops_per_tile are for tiles: set data\.tile"),
        ({"tile": 7}, r"a tile of 7³ cells is too small for a crop of 8³"),
        ({"tile": 13}, r"box0\.h5 has 12×12×12 cells, fewer than a tile of 13³; use data\.tile=8, or leave"),
    ],
)
def test_what_does_not_fit_is_refused(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words):
        train(tmp_path / "run", made_boxes.recipe(tmp_path, **keys))
