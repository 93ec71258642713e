"""The data of a recipe: structures of atoms in files, for training, validation and test."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np

from isoscale.data.sources import SPLITS, Sources, Subset, split_source
from isoscale.errors import UserError, nearest
from isoscale.science.crystals.reading.checks import Finding, examine
from isoscale.science.crystals.reading.elements import SYMBOLS
from isoscale.science.crystals.reading.loading import Loaded, load
from isoscale.science.crystals.reading.names import Renames
from isoscale.science.crystals.reading.opening import open_files
from isoscale.science.crystals.reading.ragged import source_of
from isoscale.science.crystals.reading.table import StructureTable
from isoscale.science.crystals.reading.units import EXAMPLES, declared

Paths = str | list[str]
USUAL_SPLIT = {"train": 0.8, "val": 0.1, "test": 0.1}


class Structures(Sources):
    """Structures of any size and any elements, with their energies, forces, stresses and properties."""

    def __init__(
        self,
        train: Paths | None = None,
        val: Paths | None = None,
        test: Paths | None = None,
        path: Paths | None = None,
        split: dict[str, float | int] | None = None,
        split_seed: int = 0,
        units: dict[str, str] | Literal["detect"] | None = None,
        targets: dict[str, str | None] | None = None,
    ) -> None:
        """Files, folders and patterns: extxyz, databases of ASE, LMDB, VASP's output, CIF, `.npz`, what ASE reads.

        A `path` is cut at random by `split` (train 0.8, val 0.1 and test 0.1); beside `train`, `split` says what part
        of it is for validation or test. `units` are those of the files where they are not eV, eV/Å, eV/Å^3 and Å, such
        as `{energy: eV/atom, stress: -kbar}`; `detect` takes what the numbers speak for. `targets` says what values of
        the files are called here, such as `{band_gap: gap}`, and leaves out those that are null.
        """
        given = {name: paths for name, paths in zip(SPLITS, (train, val, test), strict=True) if paths}
        if path and given:
            raise UserError(f"data names files in path and in {', '.join(given)}: leave out path, or the others")
        if not path and not given:
            raise UserError("data names no file: set data.train, data.val and data.test, or data.path and data.split")
        self._read({"path": path} if path else given, units, targets or {}, of_recipe=True)
        self._cut(split, split_seed)
        self._compare_splits()
        super().__init__(**{name: source_of(table) for name, table in self.tables.items()})
        self.predict = self.test

    @classmethod
    def from_paths(
        cls,
        paths: list[str],
        units: dict[str, str] | Literal["detect"] | None = None,
        targets: dict[str, str | None] | None = None,
    ) -> "Structures":
        """Structures to be tested or predicted, at paths; what files say of their units goes before `units`."""
        data = cls.__new__(cls)
        data._read({"test": paths}, units, targets or {}, of_recipe=False)
        Sources.__init__(data, test=source_of(data.tables["test"]))
        data.predict = data.test
        return data

    def _read(
        self,
        paths: Mapping[str, Paths],
        units: dict[str, str] | Literal["detect"] | None,
        targets: Renames,
        of_recipe: bool,
    ) -> None:
        """Read the files of each split, and look whether the units can be right."""
        is_detecting = units == "detect"
        if isinstance(units, str) and not is_detecting:
            meant = "detect" if nearest(units, ["detect"]) else '{energy: "eV/atom"} or the like'
            raise UserError(f'units is "{units}", expected {meant}')
        known = declared(units) if isinstance(units, dict) else {}
        self.tables: dict[str, StructureTable] = {}
        """The structures of each split."""
        self.loaded: dict[str, Loaded] = {}
        """How the units of each split are known, before a `path` is cut."""
        self.findings: dict[str, list[Finding]] = {}
        """What the numbers say of the units that the recipe does not declare."""
        self.remarks: list[str] = []
        """What the user should know."""
        for name, listed in paths.items():
            advice = f'name yours: "data.{name}=[FILE, …]"' if of_recipe else ""
            found = open_files(listed, advice)
            loaded = load(found, known, targets, of_recipe)
            findings = [each for each in examine(loaded.table) if each.target not in known]
            detected = {each.target: each.unit for each in findings if each.verdict == "wrong" and each.unit}
            if is_detecting and detected:
                loaded = load(found, declared(detected), targets, of_recipe)
                loaded.remarks.extend(
                    f"{each.target} is taken to be in {each.unit}: {each.evidence}"
                    for each in findings
                    if each.target in detected
                )
                loaded.sources.update(dict.fromkeys(detected, "detected"))
                findings = [each for each in findings if each.target not in detected]
            self._judge(name, loaded, findings, of_recipe)
            self.tables[name], self.loaded[name], self.findings[name] = loaded.table, loaded, findings
            self.remarks += [remark for remark in loaded.remarks if remark not in self.remarks]

    def _judge(self, name: str, loaded: Loaded, findings: Sequence[Finding], of_recipe: bool) -> None:
        """Refuse units that are wrong for sure, unless a file says them of itself; say what is odd."""
        wrong = [each for each in findings if each.verdict == "wrong" and loaded.sources.get(each.target) != "file"]
        if wrong and of_recipe:
            raise UserError(refusal(name, loaded, wrong))
        for each in findings:
            is_doubtful = each.verdict == "unknown" and loaded.sources.get(each.target) == "assumed"
            if each.verdict in ("wrong", "odd") or (is_doubtful and name in ("train", "path")):
                self.remarks.append(f"{_where(name)}: {each.target}: {each.evidence}")

    def _cut(self, split: dict[str, float | int] | None, seed: int) -> None:
        """Cut the structures of `path`, or of `train`, at random into splits."""
        if "path" in self.tables:
            self._cut_table(self.tables.pop("path"), split or USUAL_SPLIT, seed)
        elif split:
            if "train" not in self.tables or "train" in split or set(split) & set(self.tables):
                named = ", ".join(self.tables)
                raise UserError(
                    f"split is {dict(split)}, beside files for {named}: there it says what part of train is for val or "
                    "test, and only where no files are named for these"
                )
            rest = _rest(split, len(self.tables["train"]))
            self._cut_table(self.tables.pop("train"), {"train": rest, **split}, seed)

    def _cut_table(self, table: StructureTable, split: Mapping[str, float | int], seed: int) -> None:
        parts = split_source(source_of(table), split, seed)
        for name in SPLITS:
            part = getattr(parts, name)
            if isinstance(part, Subset):
                self.tables[name] = table.subset(part.indices.numpy())
        self.tables = {name: self.tables[name] for name in SPLITS if name in self.tables}

    def _compare_splits(self) -> None:
        """Say what other splits have that the training data has not, or has too."""
        train = self.tables.get("train")
        if train is None:
            return
        known = set(_hashes(train))
        for name, table in self.tables.items():
            if name == "train":
                continue
            new = sorted(set(table.elements.tolist()) - set(train.elements.tolist()))
            if new:
                listed = ", ".join(SYMBOLS[number] for number in new)
                self.remarks.append(f"{name} has {listed}, which the training data has not")
            same = sum(each in known for each in _hashes(table))
            if same:
                self.remarks.append(f"{same:,} of {len(table):,} structures of {name} are in the training data too")


def refusal(name: str, loaded: Loaded, wrong: Sequence[Finding]) -> str:
    """What is wrong, why, and what to type."""
    said = "\n  ".join(f"{each.target}: {each.evidence}" for each in wrong)
    speak = " ".join(f'"data.units.{each.target}={each.unit or "UNIT"}"' for each in wrong)
    stay = " ".join(f'"data.units.{each.target}={loaded.units[each.target]}"' for each in wrong)
    listed = [f"UNIT of {each.target} is {', '.join(EXAMPLES[each.target])}" for each in wrong if not each.unit]
    others = f" ({'; '.join(listed)})" if listed else ', or "data.units=detect"'
    first = loaded.table.places(0).rpartition(",")[0]
    return (
        f"the units of {first} ({_where(name)}) are not what they are taken for\n  {said}\n"
        f"declare what they are: {speak}{others}; to have them as they stand: {stay}"
    )


def _where(name: str) -> str:
    return "data" if name == "path" else f"data.{name}"


def _rest(split: Mapping[str, float | int], length: int) -> float | int:
    """What is left for training."""
    if all(isinstance(part, int) and not isinstance(part, bool) for part in split.values()):
        return length - int(sum(split.values()))
    taken = sum(part / length if isinstance(part, int) else part for part in split.values())
    if not taken < 1:
        raise UserError(f"split is {dict(split)}, which leaves nothing of train")
    return 1.0 - taken


def _hashes(table: StructureTable) -> list[int]:
    """Of each structure: the same atoms at the same places, to 0.0001 Å."""
    positions = np.round(table.positions, 4) + 0.0  # no −0
    cells = np.round(table.cells, 4) + 0.0
    starts = table.starts.tolist()
    return [
        hash((table.numbers[start:end].tobytes(), positions[start:end].tobytes(), cells[at].tobytes()))
        for at, (start, end) in enumerate(pairwise(starts))
    ]
