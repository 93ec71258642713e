import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from isoscale.observe.doctor import folders
from isoscale.observe.doctor.finding import Finding


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own in memory."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs to mount a disk, as root: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def runs(path: Path) -> Finding:
    return folders.folder("runs folder", path, must_be_writable=True)


def test_a_folder_that_is_not_there_yet_is_tried_where_it_will_be_and_nothing_is_left(tmp_path: Path):
    found = runs(tmp_path / "not" / "yet").complete()
    assert found.verdict == "ok" and " GiB free, " in found.text and found.text.endswith(" MB/s written")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_a_problem_where_runs_are_kept(disk: Path):
    found = runs(disk)
    assert found.verdict == "problem" and "(tmpfs): No space left on device" in found.text
    assert found.advice == f"1 MB are free: make room in {disk}, or work in another folder"
    assert not list(disk.iterdir())
    assert folders.folder("data folder", disk, must_be_writable=False).verdict == "warning"


def test_a_disk_that_may_only_be_read_is_a_problem_where_runs_are_kept(disk: Path):
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    found = runs(disk / "runs")
    assert found.verdict == "problem" and "Read-only file system" in found.text and "writable" in found.advice
    assert folders.folder("data folder", disk, must_be_writable=False).verdict == "warning"
    assert folders.leave_mark(disk) is None


def test_a_quota_that_is_used_up_is_said_to_be_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(handle: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(folders.os, "fsync", refuse)
    found = runs(tmp_path)
    assert found.verdict == "problem" and found.advice.startswith("the quota is used up: make room")


def test_a_folder_that_is_almost_full_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folders, "ENOUGH_DISK", 1e18)
    assert runs(tmp_path).advice.startswith("make room")


def no_locks(handle: object, operation: int) -> None:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("flock", [no_locks, lambda handle, operation: None], ids=["refused", "given to everybody"])
def test_a_file_system_without_locks_is_a_warning_that_says_what_follows(tmp_path: Path, monkeypatch, flock):
    monkeypatch.setattr(folders.fcntl, "flock", flock)
    found = runs(tmp_path)
    assert found.verdict == "warning" and "no file locks" in found.text and "a second training" in found.advice


def test_the_kind_of_a_file_system_is_that_of_the_innermost_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "root / ext4 rw 0 0\nhome:/vol /home nfs4 rw 0 0\nfast /home/my\\040data lustre rw 0 0\n"
        "first /mnt ext4 rw 0 0\nsecond /mnt xfs rw 0 0\n"
    )
    monkeypatch.setattr(folders, "MOUNTS", mounts)
    kinds = [folders.kind(Path(name)) for name in ("/home/me", "/home/my data/runs", "/homes", "/mnt")]
    assert kinds == ["nfs4", "lustre", "ext4", "xfs"]
    monkeypatch.setattr(folders, "MOUNTS", tmp_path / "gone")
    assert folders.kind(tmp_path) == "unknown"


def test_a_mark_is_seen_in_the_same_place_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folders, "APPEARS", 0.2)
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    mark = folders.leave_mark(here)
    assert mark and folders.sees_mark(here, mark) and not folders.sees_mark(there, mark)
    folders.remove_mark(here, mark)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_folder_that_is_not_shared_is_a_warning_with_the_hosts():
    path = Path("runs")
    same = folders.shared("runs folder", path, [("n1", True), ("n2", True)], "n1", "do this")
    assert same == Finding("runs folder", "ok", "runs is the same place on all 2 hosts")
    other = folders.shared("runs folder", path, [("n1", True), ("n2", False)], "n1", "do this")
    assert other == Finding("runs folder", "warning", "runs is another place on n2 than on n1", "do this")
    assert "not known" in folders.shared("data folder", path, [("n1", None), ("n2", None)], "n1", "").text
