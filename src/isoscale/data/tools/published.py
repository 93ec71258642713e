"""Data sets and weights as they are published, and how their files are found on this machine."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isoscale.data.files import DATA_VARIABLE, data_folder, find_all
from isoscale.errors import UserError


@dataclass(frozen=True)
class Entry:
    """A data set, or weights, as they are published."""

    name: str
    title: str
    folder: str
    """Where the files lie, below the data folder."""
    files: dict[str, str]
    """SHA-256 of each file's uncompressed content, or how it begins where only that is published."""
    addresses: tuple[str, ...]
    """Folders on the web that hold all of it, the first one asked first."""
    usage: str
    """What to type once it is there; {folder} is where it was put."""
    suffix: str = ""
    """What the files at the addresses have behind their names."""
    archive: str | None = None
    """The one file at the addresses that holds all the files."""
    inside: str = ""
    """The folder in `folder` that the archive makes for its files."""
    other_version: tuple[str, tuple[str, ...]] | None = None
    """Another form of the same data that is read as well: the folder in `folder`, and the files."""
    elsewhere: tuple[Path, ...] = ()
    """Folders in which a system's packages put the files."""

    @property
    def home(self) -> Path:
        """The folder that the files are put into, below the data folder."""
        return Path(self.folder, self.inside)


def locate(entry: Entry, path: str | None = None) -> dict[str, Path]:
    """All files of an entry by name, in order, from `path` or where they usually lie; or what is missing, in words.

    `path` is the folder of the files or, where an archive makes a folder of its own, the one above.
    """
    bases = [data_folder() / entry.folder, *entry.elsewhere] if path is None else [Path(path).expanduser()]
    versions = [(entry.inside, tuple(entry.files)), *([entry.other_version] if entry.other_version else [])]
    places = []  # each folder in which the files may lie, with their names there
    for base in bases:
        places += [(place, names) for inside, names in versions for place in dict.fromkeys((base / inside, base))]
    found = [find_all(place, names) for place, names in places]
    for files, (_, names) in zip(found, places, strict=True):
        if len(files) == len(names):
            return files
    nearest = max(range(len(places)), key=lambda place: len(found[place]))
    missing = [name for name in places[nearest][1] if name not in found[nearest]]
    folder = places[nearest][0]
    looked = "".join(f" (looked in {base} as well)" for base in bases if not folder.is_relative_to(base))
    above = f", or {DATA_VARIABLE} to the one above" if path is None else ""
    raise UserError(
        f"{entry.name} is not in {folder}{looked}: {', '.join(missing)} missing\n"
        f"  to fetch it, type: isoscale data get {entry.name}\n"
        "  on a node without internet, type that on a login or data-mover node that shares the folder,\n"
        f"  or bring the files yourself and type: isoscale data get {entry.name} --from DIR\n"
        f"  if you have them elsewhere, set data.path in the recipe to their folder{above}"
    )


def presence(entry: Entry, path: str | None = None) -> dict[str, Any]:
    """Whether all files of an entry are there, where, and how large they are."""
    try:
        files = locate(entry, path)
    except UserError:
        return {"present": False, "path": None, "bytes": 0}
    folder = next(iter(files.values())).parent
    return {"present": True, "path": str(folder), "bytes": sum(file.stat().st_size for file in files.values())}
