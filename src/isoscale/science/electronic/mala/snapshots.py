"""The snapshots that a parameter file of MALA lists, in the words of a recipe."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from isoscale.errors import UserError
from isoscale.science.importing import Imported

PARAMETER = "data.snapshot_directories_list"
NOTHING_TO_TRAIN_ON = (
    'the file lists no snapshots to train on, so data.train is ["*"], all in data.path: name there which ones, and '
    "others in data.val and data.test"
)
READABLE = (".npy", ".h5", ".hdf5")
ROLES = {"tr": "train", "va": "val", "te": "test"}


class Listed(NamedTuple):
    """One snapshot of the list."""

    role: str
    input: Path
    target: Path
    info: Path | None

    @classmethod
    def of(cls, entry: Mapping[str, Any], folder: Path | None) -> "Listed":
        """Read an entry; `folder` is where its files are now."""
        said = entry.get("data", entry)
        files = [(said.get(f"{which}_npy_directory"), said[f"{which}_npy_file"]) for which in ("input", "output")]
        info = said.get("calculation_output")
        files += [(None, info)] if isinstance(info, str) and info else []
        paths = [Path(where or "", name) if folder is None else Path(folder, Path(name).name) for where, name in files]
        return cls(said.get("snapshot_function", "tr"), paths[0], paths[1], paths[2] if len(paths) > 2 else None)

    @property
    def name(self) -> str | None:
        """What it is called where its files have the usual names, beside each other."""
        kind = self.input.suffix
        name = self.input.name.removesuffix(f".in{kind}")
        usual = [self.input.with_name(f"{name}.{which}{kind}") for which in ("in", "out")] if kind in READABLE else []
        infos = (None, self.input.with_name(f"{name}.info.json"), self.input.with_name(f"{name}.out"))
        return name if [self.input, self.target] == usual and self.info in infos else None

    def spec(self, folder: Path | None) -> str | dict[str, str]:
        """As data.train takes it, with `folder` as data.path."""
        if folder is not None and self.name is not None:
            return str(_inside(self.input.parent, folder) / self.name)
        files = {"input": self.input, "target": self.target} | ({"info": self.info} if self.info else {})
        return {role: str(_inside(path, folder)) for role, path in files.items()}


def _common(folders: list[Path]) -> Path | None:
    """The folder that all of these are in, if there is one below the root."""
    if len({folder.is_absolute() for folder in folders}) > 1:
        return None
    found = Path(os.path.commonpath(folders))
    return found if found != Path(found.anchor) or len(set(folders)) == 1 else None


def _inside(path: Path, folder: Path | None) -> Path:
    return path.relative_to(folder) if folder is not None and path.is_relative_to(folder) else path


def put_snapshots(imported: Imported, entries: list[Any], folder: Path | None) -> None:
    """Set data.path and the snapshots of each role."""
    snapshots = [_read(entry, folder) for entry in entries]
    common = _common([snapshot.input.parent for snapshot in snapshots]) if snapshots else Path(folder or ".")
    if common is not None:
        imported.put("data.path", str(common), PARAMETER)
        if not common.is_dir():
            imported.remark_by_hand(PARAMETER, f"there is no folder {common} here: import again with --data FOLDER")
    by_role = {role: [each.spec(common) for each in snapshots if each.role == mark] for mark, role in ROLES.items()}
    if not by_role["train"]:
        by_role["train"] = ["*"]
        imported.remark_by_hand(PARAMETER, NOTHING_TO_TRAIN_ON)
    for role, found in by_role.items():
        if found:
            imported.put(f"data.{role}", found, PARAMETER)
    _remark_what_is_unusual(imported, snapshots)


def _read(entry: Any, folder: Path | None) -> Listed:
    try:
        return Listed.of(entry, folder)
    except (AttributeError, KeyError, TypeError):
        raise UserError(f"{PARAMETER} holds {entry!r}, which is not a snapshot as MALA saves it") from None


def _remark_what_is_unusual(imported: Imported, snapshots: list[Listed]) -> None:
    for snapshot in snapshots:
        if snapshot.role not in ROLES:
            words = f"its role {snapshot.role!r} is none of {', '.join(ROLES)}: name it in data.train, val or test"
            imported.remark_by_hand(PARAMETER, f"{snapshot.input.name}: {words}")
        if snapshot.input.suffix not in READABLE:
            words = f"files of this kind are not read here: save the snapshot as {READABLE[0]} or {READABLE[1]}"
            imported.remark_by_hand(PARAMETER, f"{snapshot.input.name}: {words}")
