"""A disk that is full or may not be written: a clear error, nothing lost, and the same command goes on afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from isoscale.engine.state.checkpoint import Checkpoints
from tests.disks import PAGE, Disk, mounted
from tests.helpers import QUIET, cli, first_step, newest_step, sha, timeless

FIRST = ["train.epochs=1", "data.subset=300", "observe.every=2", *(f"{key}={value}" for key, value in QUIET.items())]
LONGER = ["train.epochs=6", *FIRST[1:]]

pytestmark = pytest.mark.slow


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(tmp_path / "disk") as found:
        yield found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = cli("train", "--run", "run", *FIRST, cwd=folder)
    assert done.returncode == 0, done.stderr
    done = cli("train", "--run", "run", *LONGER, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def begin(folder: Path) -> Path:
    """A run with one good checkpoint."""
    done = cli("train", "--run", "run", *FIRST, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def checkpoint_bytes(run: Path) -> int:
    return sum(file.stat().st_size for file in (run / "checkpoints" / "last").iterdir())


def assert_refused(folder: Path, *words: str) -> str:
    """The longer training ends with a clear error, exit code 2, and the good checkpoint as it was."""
    before = {path: path.read_bytes() for path in (folder / "run/checkpoints").glob("step_00000005/*")}
    done = cli("train", "--run", "run", *LONGER, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr
    assert before == {path: path.read_bytes() for path in before}
    checkpoints = Checkpoints(folder / "run" / "checkpoints")
    found = checkpoints.newest(lambda text: pytest.fail(text))
    assert found is not None and found[1][1]["progress"]["step"] >= 5
    assert not list(checkpoints.folder.glob(".*"))
    return done.stderr


def assert_continued(folder: Path, uninterrupted: Path) -> None:
    newest = newest_step(folder / "run")
    done = cli("train", "--run", "run", *LONGER, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert first_step(folder / "run") == newest > 0
    assert sha(folder / "run") == sha(uninterrupted)
    assert timeless(folder / "run") == timeless(uninterrupted)


@pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.nightly), 0.5, 0.98])
def test_a_disk_that_fills_up_during_a_save_costs_nothing(
    share: float, disk: Disk, uninterrupted: Path, tmp_path: Path
) -> None:
    run = begin(tmp_path)
    disk.take(run / "checkpoints")
    disk.leave(round(share * checkpoint_bytes(run)))
    assert_refused(tmp_path, "cannot save the checkpoint of step 10", "No space left", "start the same command again")
    disk.make_room()
    assert_continued(tmp_path, uninterrupted)


def test_a_disk_that_may_only_be_read_costs_nothing(disk: Disk, uninterrupted: Path, tmp_path: Path) -> None:
    run = begin(tmp_path)
    disk.take(run / "checkpoints")
    disk.remount("ro")
    assert_refused(tmp_path, "cannot save the checkpoint of step 10", "Read-only file system")
    disk.remount("rw")
    assert_continued(tmp_path, uninterrupted)


def test_a_run_on_a_disk_that_may_only_be_read_is_refused(disk: Disk, uninterrupted: Path) -> None:
    begin(disk.path)
    disk.remount("ro")
    assert_refused(disk.path, "Read-only file system")
    disk.remount("rw")
    assert_continued(disk.path, uninterrupted)


@pytest.mark.parametrize(
    "num_bytes",
    [0, 5 * PAGE, *(pytest.param(count * PAGE, marks=pytest.mark.nightly) for count in (1, 2, 100))],
)
def test_a_full_disk_ends_a_run_cleanly_whatever_file_it_hits_first(
    num_bytes: int, disk: Disk, uninterrupted: Path
) -> None:
    begin(disk.path)
    disk.leave(num_bytes)
    assert_refused(disk.path, "No space left")
    disk.make_room()
    assert_continued(disk.path, uninterrupted)
    assert not list((disk.path / "run").glob(".run.json-*"))


def test_a_metric_log_on_a_full_disk_is_a_clear_error(disk: Disk, uninterrupted: Path, tmp_path: Path) -> None:
    run = begin(tmp_path)
    disk.take(run / "metrics.jsonl")
    disk.leave(0)  # some values still fit in the last page of the file
    assert_refused(tmp_path, "metrics.jsonl: No space left")
    disk.make_room()
    assert_continued(tmp_path, uninterrupted)


def test_a_text_log_on_a_full_disk_is_switched_off_and_training_goes_on(
    disk: Disk, uninterrupted: Path, tmp_path: Path
) -> None:
    run = begin(tmp_path)
    disk.take(run / "log.txt")
    with (disk.path / "log.txt").open("ab") as file:
        file.write(b"\n" * (-file.tell() % PAGE))
    disk.leave(0)
    done = cli("train", "--run", "run", *LONGER, "observe.level=warning", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "TextLog failed and is switched off, training goes on: No space left" in done.stdout
    assert sha(run) == sha(uninterrupted) and timeless(run) == timeless(uninterrupted)
