"""Small disks of their own in memory, to be filled up and to be made read-only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PAGE = 4096


class Disk:
    """A small disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast, self._many = path / "ballast", path / "many"
        self._taken: list[Path] = []

    def leave(self, num_bytes: int) -> None:
        """Fill the disk up to some bytes, rounded up to whole pages."""
        found = os.statvfs(self.path)
        with self._ballast.open("wb") as file:
            file.write(bytes(found.f_bavail * found.f_frsize - -(-num_bytes // PAGE) * PAGE))

    def leave_files(self, num_files: int) -> None:
        """Make files until there is room for so many more only; for a disk with a small number of them."""
        self._many.mkdir()
        for number in range(os.statvfs(self.path).f_favail - num_files):
            (self._many / str(number)).touch()

    def make_room(self) -> None:
        """Take away what fills the disk."""
        self._ballast.unlink(missing_ok=True)
        shutil.rmtree(self._many, ignore_errors=True)

    def remount(self, mode: str) -> None:
        """Allow writing (rw) or not (ro)."""
        subprocess.run(["mount", "-o", f"remount,{mode}", self.path], check=True)

    def take(self, path: Path) -> None:
        """Bring a file or folder of a run here; it is seen where it was, and is no link."""
        subprocess.run(["mv", path, self.path], check=True)
        taken = self.path / path.name
        path.mkdir() if taken.is_dir() else path.touch()
        subprocess.run(["mount", "--bind", taken, path], check=True)
        self._taken.append(path)

    def give_back(self) -> None:
        """Whatever was taken."""
        for path in self._taken:
            subprocess.run(["umount", "--lazy", path], check=True)


@contextmanager
def mounted(path: Path, options: str = "size=16m") -> Iterator[Disk]:
    """A disk at a new folder; a test that may not mount one skips."""
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs to mount a disk, as root: {done.stderr.strip()}")
    disk = Disk(path)
    try:
        yield disk
    finally:
        disk.give_back()
        subprocess.run(["umount", "--lazy", path], check=True)
