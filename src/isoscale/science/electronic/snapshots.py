"""Snapshots: descriptors and the local density of states on the points of a grid, one row per point."""

from pathlib import Path

from isoscale.data.file_sources import OnNan
from isoscale.data.files import data_folder
from isoscale.data.sources import Sources
from isoscale.errors import UserError
from isoscale.science.electronic.snapshot_files import SnapshotReader, Spec


class Snapshots(Sources):
    """Snapshots for training, validation and test, by name: `Be_snapshot0` is Be_snapshot0.in.npy and .out.npy."""

    def __init__(
        self,
        train: list[Spec] | None = None,
        val: list[Spec] | None = None,
        test: list[Spec] | None = None,
        predict: list[Spec] | None = None,
        path: str | None = None,
        info: str | None = None,
        columns: str | list[int] | None = "3:",
        on_nan: OnNan = "error",
        numbered: bool = False,
    ) -> None:
        """Names, patterns (`Be_snapshot*`, `1000K/Be_*`), or mappings with `input`, `target` and perhaps `info`.

        `path` is the folder that they are in, and `info` a calculation for all that have none of their own. Of an HDF5
        file with several arrays, one is `file.h5:/name`; the numbered arrays of openPMD are read as one. What `predict`
        names (by default the test snapshots) needs no target. `columns` picks descriptors; the first three are often
        grid indices.

        `on_nan` says what to do with points at which something is not a number or infinite: refuse the data (error),
        leave those points out (drop; then no energies can be known), or not look (keep). Looking reads all files once.

        With `numbered`, training points know which snapshot they belong to, which `task.physics.loss` needs.
        """
        reader = SnapshotReader(_folder(path), info, columns, on_nan)
        given = {"train": train, "val": val, "test": test}
        sources = {split: reader.source(specs, split) for split, specs in given.items() if specs}
        width = next((source.columns["target"].row_shape for source in sources.values()), None)
        if predict:
            sources["predict"] = reader.source(predict, "predict", width)
        if numbered and "train" in sources:
            sources["train"].number()
        super().__init__(**{"predict": sources.get("test"), **sources})


def _folder(path: str | None) -> Path:
    if path is None:
        return Path()
    places = [Path(path).expanduser(), data_folder() / path]
    found = next((folder for folder in places if folder.is_dir()), None)
    if found is None:
        there = " or ".join(dict.fromkeys(map(str, places)))
        raise UserError(f"there is no folder {there}: set data.path to the folder that the snapshots are in")
    return found
