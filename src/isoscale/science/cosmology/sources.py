"""The data of cosmology: boxes with fields in files, whose crops are samples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from isoscale.data.files import data_folder, find_files, is_store
from isoscale.data.formats.opening import SUFFIXES, dataset_names, open_array
from isoscale.data.sources import SPLITS, Source, Sources
from isoscale.data.tiles import CROPS_PER_TILE, TiledCrops
from isoscale.data.volumes import Crops, Volume
from isoscale.errors import UserError
from isoscale.science.cosmology.boxes import ensure_box
from isoscale.science.cosmology.fields import FIELDS
from isoscale.science.cosmology.simulation import Simulation
from isoscale.science.cosmology.whole_box import Tiles
from isoscale.system.printing import echo

Paths = str | list[str]
Fields = Mapping[str, Sequence[str]]


class Boxes(Sources):
    """Crops of simulated boxes, at random places in training and at fixed ones in validation and test."""

    def __init__(
        self,
        train: Paths | None = None,
        val: Paths | None = None,
        test: Paths | None = None,
        predict: Paths | None = None,
        input: str = "Nbody",
        target: str = "Hydro",
        fields: dict[str, list[str]] | None = None,
        crop: int = 64,
        wrap: bool = False,
        dtype: Literal["float32", "bfloat16"] | None = None,
        eval_samples: int = 8192,
        overlap: int | None = None,
        tile: int | None = None,
        tiles_at_once: int | None = None,
        crops_per_tile: int | None = None,
    ) -> None:
        """Files with an array (fields, cells, cells, cells) for each of `input` and `target`: HDF5, Zarr or .npz.

        A folder with .npy files of these names is a box too. `fields` names the fields, {input: […], target: […]},
        where the files do not; of a vector, the names end in _x, _y and _z. `crop` is the number of cells along an edge
        of a crop, and with `wrap` crops go on at the other side of a periodic box. `dtype` is what boxes are kept in,
        by default what they are stored in. A validation or a test looks at `eval_samples` crops, always the same ones.
        Predictions are of whole boxes, by tiles of the size of a crop that share `overlap` cells, half of it by
        default; those of `predict` need no target.

        Training boxes that are larger than memory are read in tiles of up to `tile` cells a side: crops of
        `tiles_at_once` (4) are mixed, and `crops_per_tile` (4096) are taken of each before others follow.
        """
        named = {"train": train, "val": val, "test": test, "predict": predict}
        given = {split: paths for split, paths in named.items() if paths}
        if not given:
            raise UserError("data names no box: set data.train to HDF5 files, or make some: isoscale data make")
        if crop < 1 or eval_samples < 1:
            raise UserError(f"data.crop is {crop} and data.eval_samples {eval_samples}: both have to be at least 1")
        if tile is None and (tiles_at_once, crops_per_tile) != (None, None):
            raise UserError(
                "data.tiles_at_once and data.crops_per_tile are for tiles: set data.tile, or leave them out"
            )
        names = {"input": input, "target": target}
        volumes = {split: [open_box(path, names if split != "predict" else {"input": input}, fields)
                           for path in find(paths, split)]
                   for split, paths in given.items()}  # fmt: skip
        check_alike([volume for each in volumes.values() for volume in each])
        kept = None if dtype is None else getattr(torch, dtype)
        self.crops = {split: Crops(each, crop, wrap, kept, on_disk=True) for split, each in volumes.items()}
        """All crops of the boxes of each split."""
        if tile is not None and "train" in volumes:
            per_tile = CROPS_PER_TILE if crops_per_tile is None else crops_per_tile
            self.crops["train"] = TiledCrops(volumes["train"], crop, tile, tiles_at_once, per_tile, wrap, kept)
        self.tiles = {split: Tiles(Crops([_without_target(volume) for volume in each], crop, wrap, kept, on_disk=True),
                                   overlap, target, each[0].fields.get("target", (fields or {}).get("target")))
                      for split, each in volumes.items()}  # fmt: skip
        """Whole boxes of each split, as they are predicted."""
        drawn = {
            split: crops if split == "train" else crops.draw(min(eval_samples, len(crops)))
            for split, crops in self.crops.items() if split != "predict"
        }  # fmt: skip
        super().__init__(**drawn, predict=self.tiles.get("predict"))

    @classmethod
    def from_paths(
        cls, paths: list[str], input: str = "Nbody", target: str = "Hydro", fields: dict[str, list[str]] | None = None,
        crop: int = 64, wrap: bool = False, dtype: Literal["float32", "bfloat16"] | None = None,
        eval_samples: int = 8192, overlap: int | None = None,
    ) -> "Boxes":  # fmt: skip
        """Other boxes, read as those of a recipe with these arguments: to be tested where they all have targets."""
        has_targets = all(has_array(path, target) for path in find(paths, "predict"))
        return Boxes(
            test=paths if has_targets else None, predict=paths, input=input, target=target, fields=fields, crop=crop,
            wrap=wrap, dtype=dtype, eval_samples=eval_samples, overlap=overlap,
        )  # fmt: skip

    def for_prediction(self, split: str) -> Source | None:
        """The tiles of the boxes of a split, which cover all of them."""
        return self.tiles.get(split)


class SimulatedBoxes(Boxes):
    """Boxes that are simulated at the first start and kept: one for training, one for validation, one for test."""

    def __init__(
        self, cells: int = 64, seed: int = 0, simulation: dict[str, Any] | None = None, path: str = "cosmology",
        **boxes: Any,
    ) -> None:  # fmt: skip
        """Boxes of `cells`³ with the seeds `seed`, `seed + 1` and `seed + 2`, in the folder `path` of all data.

        `simulation` has further settings of the simulation, such as cell_size; all other arguments are those of boxes.
        """
        folder = data_folder() / path / f"simulated-{cells}"
        paths = []
        for number in range(len(SPLITS)):
            settings = Simulation.of(cells=cells, seed=seed + number, **(simulation or {}))
            known = ",".join(f"{key}={value}" for key, value in sorted((simulation or {}).items()))
            place = folder / known / f"seed{settings.seed}.h5"
            if not place.exists():
                echo(f"simulating a box of {cells}³ cells, once: {place}", err=True)
            ensure_box(place, settings, torch.device("cpu"))
            paths.append(str(place))
        train, val, test = paths
        super().__init__(train, val, test, **boxes)


def find(paths: Paths, split: str) -> list[Path]:
    """The boxes at paths and patterns, here or in the folder of all data; a folder of .npy files is one box."""
    found: list[Path] = []
    for path in [paths] if isinstance(paths, str) else paths:
        near, stored = Path(path).expanduser(), data_folder() / path
        place = stored if not near.exists() and stored.exists() else near
        is_box = place.is_dir() and any(place.glob("*.npy"))
        try:
            found += [place] if is_box else find_files(str(place), tuple(SUFFIXES))
        except UserError as error:
            raise UserError(f"data.{split}: {error}") from None
    return found


def open_box(path: Path, names: Mapping[str, str], fields: Fields | None) -> Volume:
    """A box in a file: its arrays by their name in a batch, and what is known of them."""
    arrays = {key: open_array(path, name) for key, name in names.items()}
    for key, array in arrays.items():
        if len(array.shape) != 4:
            raise UserError(
                f"{path}: {names[key]} has the shape {tuple(array.shape)}; expected (fields, cells, cells, cells), "
                "of a single field (1, cells, cells, cells)"
            )
    named = {key: _field_names(array, names[key], (fields or {}).get(key)) for key, array in arrays.items()}
    for key, array in arrays.items():
        if len(named[key]) != array.shape[0]:
            raise UserError(
                f"{path}: {names[key]} has {array.shape[0]} fields, but {len(named[key])} names "
                f"({', '.join(named[key])}): set data.fields.{key} to a name for each"
            )
    size = _attributes(next(iter(arrays.values()))).get("cell_size")
    return Volume(str(path), arrays, named, None if size is None else float(size))


def has_array(path: Path, name: str) -> bool:
    """Whether a box has an array of this name."""
    if path.is_dir() and not is_store(path):
        return (path / f"{name}.npy").exists()
    return name.strip("/") in (dataset_names(path) or [])


def _without_target(volume: Volume) -> Volume:
    return volume._replace(arrays={"input": volume.arrays["input"]}, fields={"input": volume.fields["input"]})


def _attributes(array: Any) -> Mapping[str, Any]:
    return getattr(array, "attributes", {})


def _field_names(array: Any, dataset: str, given: Sequence[str] | None) -> list[str]:
    """As the recipe names them, else as the file does, else as those of the layout do, else numbers."""
    count = array.shape[0]
    stored = _attributes(array).get("fields")
    if given is not None or stored is not None:
        return [name.decode() if isinstance(name, bytes) else str(name)
                for name in (given if given is not None else np.asarray(stored).tolist())]  # fmt: skip
    usual = FIELDS.get(dataset, ())
    return list(usual) if len(usual) == count else [str(number) for number in range(count)]


def check_alike(volumes: Sequence[Volume]) -> None:
    """Refuse boxes whose fields have other names, or whose cells are of another size: a network cannot tell."""
    first = volumes[0]
    for volume in volumes[1:]:
        if any(volume.fields[key] != first.fields[key] for key in volume.fields.keys() & first.fields.keys()):
            raise UserError(
                f"{volume.name} has the fields {_listed(volume.fields)}, but {first.name} has {_listed(first.fields)}; "
                "give boxes with the same fields, in the same order"
            )
        if volume.cell_size != first.cell_size and None not in (volume.cell_size, first.cell_size):
            raise UserError(
                f"{volume.name} has cells of {volume.cell_size:g}, but {first.name} of {first.cell_size:g}; give boxes "
                "of the same resolution"
            )


def _listed(fields: Fields) -> str:
    return "; ".join(f"{key}: {', '.join(names)}" for key, names in fields.items())
