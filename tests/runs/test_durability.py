"""What a run relies on is brought to the disk in an order that a crash of the machine cannot spoil."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isoscale.system.files import write_aside
from tests.helpers import train


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Every sync with the path that is synced, and every new name, in order; all of them take place."""
    events: list[tuple[str, str]] = []

    def fsync(handle: int, sync=os.fsync) -> None:
        sync(handle)
        events.append(("synced", os.readlink(f"/proc/self/fd/{handle}")))

    def named(give):
        def wrapped(old: Path, new: Path, **others: object) -> None:
            give(old, new, **others)
            events.append((f"named {os.path.abspath(old)}", os.path.abspath(new)))

        return wrapped

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("replace", "rename"):
        monkeypatch.setattr(os, name, named(getattr(os, name)))
    return events


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_its_name_afterwards(tmp_path: Path, happened: list):
    write_aside(tmp_path / "run.json", "{}")
    (what, aside), (named, path), (then, folder) = happened
    assert (what, named, path) == ("synced", f"named {aside}", str(tmp_path / "run.json"))
    assert (then, folder) == ("synced", str(tmp_path))


def test_what_a_killed_process_has_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path):
    code = "from isoscale.system.files import written_aside; from pathlib import Path; import time\n"
    code += "with written_aside(Path('network.pt')): print('writes', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline()
        (tmp_path / ".network.pt-of-mine").touch()
        write_aside(tmp_path / "network.pt", "whole")
        assert len(list(tmp_path.glob(".network.pt-*"))) == 2
        writer.kill()
    write_aside(tmp_path / "network.pt", "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".network.pt-of-mine", "network.pt"]


def test_record_recipe_and_checkpoints_of_a_run_survive_a_crash_of_the_machine(tmp_path: Path, happened: list):
    run = train(tmp_path / "runs/a", train__epochs=1, data__subset=300).path
    synced = [path for what, path in happened if what == "synced"]
    for name in ("run.json", "recipe.yaml"):
        places = [place for place, (_, path) in enumerate(happened) if path == str(run / name)]
        assert places
        for place in places:
            assert happened[place - 1] == ("synced", happened[place][0].removeprefix("named "))
            assert happened[place + 1] == ("synced", str(run))
    (place,) = [place for place, (_, path) in enumerate(happened) if path == str(run / "checkpoints/step_00000005")]
    aside = happened[place][0].removeprefix("named ")
    before = {path for what, path in happened[:place] if what == "synced"}
    files = {f"{aside}/{path.name}" for path in (run / "checkpoints/step_00000005").iterdir()}
    assert {*files, aside, str(run / "metrics.jsonl"), str(run)} <= before
    assert happened[place + 1] == ("synced", str(run / "checkpoints"))
    for name in ("last", "best"):
        place = next(place for place, (_, path) in enumerate(happened) if path == str(run / "checkpoints" / name))
        assert happened[place + 1] == ("synced", str(run / "checkpoints"))
    assert str(run.parent) in synced  # where the name of the run directory is


def test_others_may_read_what_one_may_read_oneself(tmp_path: Path):
    run = train(tmp_path / "a", train__epochs=1, data__subset=300)
    modes = {path.stat().st_mode for path in run.checkpoint("last").iterdir()}
    assert modes == {(run.path / "run.json").stat().st_mode}
