"""The data of a potential: systems for training, validation and test."""

from collections.abc import Sequence
from typing import Literal

from isoscale.data.mixture import Mixture
from isoscale.data.sources import SPLITS, Sources
from isoscale.engine.task import TaskRanks
from isoscale.errors import UserError
from isoscale.science.atoms.cache import Say
from isoscale.science.potentials.frames import FrameSource, MixedFrames, SortedSystem
from isoscale.science.potentials.neighbour_cache import neighbour_tables
from isoscale.science.potentials.systems import System, find_systems

Paths = str | list[str]


class AtomicSystems(Sources):
    """Frames of atoms, with their energies and forces, as DeePMD-kit stores them."""

    def __init__(
        self,
        train: Paths | None = None,
        val: Paths | None = None,
        test: Paths | None = None,
        probabilities: str | list[float] = "uniform",
        batches: Literal["system", "mixed"] = "system",
    ) -> None:
        """Folders, HDF5 files, or groups of them (`file.hdf5#/group`); one without type.raw is searched for systems.

        `probabilities` says how often each system is drawn: uniform, size (by its batches), blocks of systems such as
        `size;0:2:0.3;2:4:0.7`, or a number for each. With `batches: system` every batch comes from one system; `mixed`
        puts frames of all systems into one batch, with room for the largest.
        """
        given = {split: paths for split, paths in zip(SPLITS, (train, val, test), strict=True) if paths}
        if not given:
            raise UserError("data names no system: set data.train to a list of folders with type.raw and set.*")
        self.systems = {split: _found(paths, split) for split, paths in given.items()}
        """The systems of each split, in the order given."""
        self.probabilities, self.batches = probabilities, batches
        super().__init__(**{split: Mixture(systems, probabilities) for split, systems in self.systems.items()})
        self.predict = self.test

    @classmethod
    def from_paths(cls, paths: list[str]) -> "AtomicSystems":
        """Systems to be tested or predicted, at paths."""
        return cls(test=paths)

    def with_neighbours(self, types: Sequence[str], cutoff: float, ranks: TaskRanks, say: Say) -> Sources:
        """The same frames as a model of these types reads them, with all neighbours within `cutoff`.

        Always a mixture, also of one: batch sizes such as `auto`, or a list, then mean the same for any number of
        systems.
        """
        listed = [SortedSystem(system, types) for systems in self.systems.values() for system in systems]
        tables = neighbour_tables(listed, cutoff, ranks, say)
        sources = iter([FrameSource(*pair) for pair in zip(listed, tables, strict=True)])
        by_split = {split: [next(sources) for _ in systems] for split, systems in self.systems.items()}
        mixtures = {split: self._mixture(frames) for split, frames in by_split.items()}
        return Sources(**mixtures, predict=mixtures.get("test"))

    def _mixture(self, frames: list[FrameSource]) -> Mixture:
        if self.batches == "mixed":
            return Mixture([MixedFrames(frames)])
        alike = len({(each.layout.atoms, frozenset(each.labels)) for each in frames}) == 1
        return Mixture(frames, self.probabilities, MixedFrames(frames) if alike else None)


def _found(paths: Paths, split: str) -> list[System]:
    listed = [paths] if isinstance(paths, str) else paths
    # those of a test may have been named by a command, where a key of the recipe says nothing
    advice = f'name yours: "data.{split}=[FOLDER, …]"' if split != "test" else ""
    return [system for path in listed for system in find_systems(path, advice)]
