"""Commands that write results to a disk with too little room: a message, nothing half, and what was there stays."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from isoscale.errors import UserError
from isoscale.observe.figures import Pictures
from isoscale.system.files import write_aside
from tests.cli.conftest import finished, isoscale
from tests.disks import PAGE, Disk, mounted
from tests.helpers import first_of

__all__ = ["finished", "isoscale"]

FILES = {
    "weights.safetensors": ("export", "RUN", "--out"),
    "script.pt": ("export", "RUN", "--out"),
    "program.pt2": ("export", "RUN", "--out"),
    "page.html": ("report", "RUN", "--no-figures", "--out"),
    "values.npz": ("predict", "RUN", "--role", "val", "--out"),
    "values.safetensors": ("predict", "RUN", "--role", "val", "--out"),
    "chart.png": ("compare", "RUN", "RUN2", "--out"),
    "chart.svg": ("compare", "RUN", "RUN2", "--out"),
    "chart.pdf": ("compare", "RUN", "RUN2", "--out"),
}
"""The command that writes a file of that name."""
CASES = [(name, share) for name in FILES for share in (0.0, 0.5, 0.98)]
FIRST = ("script.pt", "page.html", "values.npz", "values.safetensors")
OLD = b"what was there before"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(tmp_path / "disk", "size=16m,nr_inodes=200") as found:
        yield found


@pytest.fixture
def written(finished: Path, tmp_path: Path, isoscale: Callable) -> Callable[[Path], object]:
    """Writes a file by the command for files of that name."""
    second = shutil.copytree(finished, tmp_path / "second", symlinks=True)

    def write(path: Path) -> object:
        words = (word.replace("RUN2", str(second)).replace("RUN", str(finished)) for word in FILES[path.name])
        return isoscale(*words, str(path))

    return write


def assert_refused(done: object, *words: str) -> None:
    code, err = done.code, done.err  # type: ignore[attr-defined]
    assert code == 2 and err.startswith("error: ") and "Traceback" not in err, err
    assert all(word in err for word in ("No space left", *words)), err


def listing(disk: Disk) -> dict[str, bytes]:
    """All files on a disk besides those that fill it."""
    files = (path for path in disk.path.rglob("*") if path.is_file())
    kept = (path for path in files if path.name != "ballast" and path.parent.name != "many")
    return {str(path.relative_to(disk.path)): path.read_bytes() for path in kept}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), first_of(CASES, *((name, 0.5) for name in FIRST)))
def test_a_result_is_whole_or_what_was_there_before(disk: Disk, written: Callable, name: str, share: float):
    target = disk.path / name
    assert written(target).code == 0
    size = target.stat().st_size
    target.write_bytes(OLD)
    disk.leave(round(share * size) // PAGE * PAGE)
    assert_refused(written(target), str(target), f"the disk at {disk.path} is full")
    assert listing(disk) == {name: OLD}
    target.unlink()
    disk.make_room()
    disk.leave(round(share * size) // PAGE * PAGE)
    assert_refused(written(target))
    assert listing(disk) == {}
    disk.make_room()
    assert written(target).code == 0 and abs(target.stat().st_size - size) < PAGE


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of(list(FILES), "script.pt", "page.html"))
def test_a_disk_that_can_hold_no_other_file_is_said_to_be_so(disk: Disk, written: Callable, name: str):
    disk.leave_files(0)
    assert_refused(written(disk.path / name), f"the disk at {disk.path} has as many files as it can hold (df -i)")
    assert listing(disk) == {}
    disk.make_room()
    assert written(disk.path / name).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("room", ["bytes", "files"])
def test_predictions_in_a_folder_are_all_there_or_none(disk: Disk, finished: Path, isoscale: Callable, room: str):
    folder = disk.path / "values"
    folder.mkdir()
    (folder / "class.npy").write_bytes(OLD)
    disk.leave(PAGE) if room == "bytes" else disk.leave_files(0)
    assert_refused(isoscale("predict", str(finished), "--role", "val", "--out", str(folder)), str(folder))
    assert listing(disk) == {"values/class.npy": OLD} and len(list(folder.iterdir())) == 1
    disk.make_room()
    assert isoscale("predict", str(finished), "--role", "val", "--out", str(folder)).code == 0
    assert {path.name for path in folder.iterdir()} == {"class.npy", "probability.npy"}
    assert len(np.load(folder / "class.npy")) == len(np.load(folder / "probability.npy"))


def test_a_picture_is_whole_or_not_there(disk: Disk):
    from isoscale.cli.train.apply import _draw

    disk.leave(PAGE)
    noise = np.random.default_rng(0).integers(0, 255, (4, 64, 64, 3), np.uint8)
    with pytest.raises(UserError, match="No space left"):
        _draw(disk.path / "test", {"pictures": Pictures(noise)})
    assert listing(disk) == {}


def test_a_recipe_that_is_imported_is_whole_or_not_there(disk: Disk, isoscale: Callable):
    from tests.science.potentials.deepmd.made_input import write

    source = write(disk.path.parent)
    disk.leave(0)
    assert_refused(isoscale("recipe", "import", str(source), "--out", str(disk.path / "recipe.yaml")))
    assert listing(disk) == {}


@pytest.mark.slow
@pytest.mark.parametrize("room", [0, 4 * PAGE])
def test_a_sweep_that_has_no_room_leaves_nothing(disk: Disk, isoscale: Callable, room: int):
    words = ["sweep", "images/digits", "seed=0,1", "train.epochs=1", "data.subset=100", "--run", str(disk.path / "s")]
    disk.leave(room)
    assert_refused(isoscale(*words))
    assert listing(disk) == {} and not (disk.path / "s").exists()


def test_data_that_is_made_is_whole_or_not_there(disk: Disk, isoscale: Callable, tmp_path: Path):
    np.savetxt(tmp_path / "a.csv", np.zeros((5000, 3)), delimiter=",", header="x,y,z", comments="")
    disk.leave(10 * PAGE)
    done = isoscale("data", "make", "text", str(tmp_path / "a.csv"), "--out", str(disk.path / "made"))
    assert_refused(done)
    assert listing(disk) == {}


def test_a_project_is_whole_or_not_there(disk: Disk, isoscale: Callable):
    disk.leave(2 * PAGE)
    assert_refused(isoscale("init", "my-study", "--path", str(disk.path)))
    assert listing(disk) == {}


def test_what_a_file_replaces_stays_when_there_is_no_room(disk: Disk):
    path = disk.path / "run.json"
    path.write_text(json.dumps({"status": "running"}))
    disk.leave(0)
    with pytest.raises(OSError, match=r"No space left on device: '.*/run\.json'"):
        write_aside(path, "x" * PAGE)
    assert listing(disk) == {"run.json": b'{"status": "running"}'}
