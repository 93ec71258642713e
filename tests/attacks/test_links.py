"""A run that comes from somebody else holds links to files of the user: what they point to stays as it is."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from isoscale.cli.train.apply import _draw
from isoscale.errors import UserError
from isoscale.observe.figures import Pictures
from isoscale.runs import lock
from isoscale.system.files import open_own, write_aside
from tests.cli.conftest import isoscale
from tests.helpers import cli, train
from tests.study.test_scale import measured, study

__all__ = ["isoscale"]

RICH = {"observe.tensorboard": 1, "observe.curve": "lcurve.out", "observe.level": "error", "data.subset": 300}
WORDS = [f"{key}={value}" for key, value in RICH.items()]
MORE = [".lock", "STOP", "log-rank1.txt", "loggers.json", "profile", "profile/trace.json", "not_finite", "report.html",
        "predictions.npz", "slurm"]  # fmt: skip
"""What a run may get besides what a plain training writes."""


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with about everything that a training writes."""
    folder = tmp_path_factory.mktemp("rich") / "run"
    train(folder, train__epochs=1, **{key.replace(".", "__"): value for key, value in RICH.items()})
    assert {"metrics.jsonl", "log.txt", "run.json", "recipe.yaml", "lcurve.out", "tensorboard", "checkpoints"} <= {
        path.name for path in folder.iterdir()
    }
    return folder


def written(run: Path) -> Iterator[str]:
    """The names of all that a run holds, as far as a continued one could write there again."""
    for path in sorted(run.rglob("*")):
        is_old = path.is_symlink() or path.parent.name.startswith("step_")  # last, best and finished checkpoints
        if not is_old:
            yield str(path.relative_to(run))


def content(path: Path) -> dict[str, bytes | None]:
    """All below a folder, or a file."""
    return {str(each): each.read_bytes() if each.is_file() else None for each in (path, *path.rglob("*"))}


def steal(run: Path, name: str, precious: Path) -> Path:
    """Let a name in a run be a link to something of the user's, which looks the same; a folder has what killed left."""
    link = run / name
    if link.is_dir():
        shutil.move(link, precious)
        (precious / ".writing-step_00000001-1").mkdir()
        link.symlink_to(precious)
        return precious
    precious.mkdir()
    if link.exists():
        shutil.move(link, precious / "file")
    else:
        link.parent.mkdir(exist_ok=True)
        (precious / "file").write_text("the work of a year\n" * 1000)
    link.symlink_to(precious / "file")
    return precious


@pytest.mark.full
def test_nothing_in_a_run_that_is_continued_is_written_through_a_link(rich: Path, tmp_path: Path, isoscale: Callable):
    refused = []
    for number, name in enumerate([*written(rich), *MORE]):
        run = Path(shutil.copytree(rich, tmp_path / f"run{number}", symlinks=True))
        precious = steal(run, name, tmp_path / f"precious{number}")
        before = content(precious)
        done = isoscale("train", "--run", str(run), "train.epochs=2", "--profile", *WORDS)
        assert content(precious) == before, name
        if done.code not in (0, 75):  # it may be done, or stopped by a file STOP
            assert done.code == 2 and f"{run / name} is a link to {precious}" in done.err, (name, done.err)
            refused.append(name)
    wanted = {".lock", "metrics.jsonl", "log.txt", "lcurve.out", "run.json", "recipe.yaml", "checkpoints",
              "tensorboard", "tensorboard/train", "tensorboard/val", "profile", "profile/trace.json"}  # fmt: skip
    assert wanted <= set(refused), wanted - set(refused)
    assert not {"report.html", "slurm"} & set(refused)  # which a training does not write


@pytest.mark.slow
def test_a_link_to_nothing_makes_nothing(rich: Path, tmp_path: Path, isoscale: Callable):
    names = [".lock", "metrics.jsonl", "log.txt", "lcurve.out", "tensorboard", "profile"]
    for number, name in enumerate(names):
        run = Path(shutil.copytree(rich, tmp_path / f"run{number}", symlinks=True))
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(tmp_path / "new")
        done = isoscale("train", "--run", str(run), "train.epochs=2", "--profile", *WORDS)
        assert done.code == 2 and f"{run / name} is a link to {tmp_path / 'new'}" in done.err, (name, done.err)
        assert not os.path.lexists(tmp_path / "new"), name


@pytest.mark.parametrize(
    ("name", "words"),
    [("report.html", ["report"]), ("predictions.npz", ["predict"]), ("model.pt", ["export", "--out", "run/model.pt"])],
)  # fmt: skip
def test_no_result_is_written_through_a_link(
    rich: Path, tmp_path: Path, isoscale: Callable, name: str, words: list[str]
):
    run = Path(shutil.copytree(rich, tmp_path / "run", symlinks=True))
    precious = steal(run, name, tmp_path / "precious")
    before = content(precious)
    done = isoscale(words[0], "run", *words[1:])
    assert content(precious) == before
    assert done.code == 2 and f"run/{name} is a link to {precious}" in done.err


@pytest.mark.parametrize("name", ["test", "test/pictures.png"])
def test_no_picture_is_written_through_a_link(tmp_path: Path, name: str):
    (tmp_path / "test").mkdir()
    precious = steal(tmp_path, name, tmp_path / "precious")
    before = content(precious)
    with pytest.raises(UserError, match=f"{name} is a link to {precious}"):
        _draw(tmp_path / "test", {"pictures": Pictures(np.zeros((1, 8, 8, 3), np.uint8))})
    assert content(precious) == before


@pytest.mark.parametrize("name", ["scale.md", "scale.csv", "scale.png"])
def test_no_scaling_study_is_written_through_a_link(tmp_path: Path, isoscale: Callable, name: str):
    (tmp_path / "study").mkdir()
    study(measured(1, 1.0), measured(2, 0.6, 0.6), path=tmp_path / "study").write()
    precious = steal(tmp_path / "study", name, tmp_path / "precious")
    before = content(precious)
    done = isoscale("scale", "--run", "study")
    assert done.code == 2 and f"study/{name} is a link to {precious}" in done.err
    assert content(precious) == before


@pytest.mark.slow
def test_no_sweep_is_written_through_a_link(tmp_path: Path, isoscale: Callable):
    from isoscale.study.sweep.plan import plan

    words = ["seed=0,1", "train.epochs=1", "data.subset=300", "observe.tensorboard=0"]
    for number, name in enumerate(["recipe.yaml", "sweep.json", "logs", "logs/seed=0.txt", "seed=0"]):
        sweep = tmp_path / f"sweep{number}"
        plan("images/digits", words, ["isoscale", "sweep"]).write(sweep)
        precious = steal(sweep, name, tmp_path / f"precious{number}")
        before = content(precious)
        done = isoscale("sweep", "--run", str(sweep), "train.epochs=2")
        assert content(precious) == before, name
        assert done.code == 2 and f"{sweep / name} is a link to {precious}" in done.err, (name, done.err)


@pytest.mark.full
def test_the_log_of_another_rank_is_not_written_through_a_link(rich: Path, tmp_path: Path):
    run = Path(shutil.copytree(rich, tmp_path / "run", symlinks=True))
    precious = steal(run, "log-rank1.txt", tmp_path / "precious")
    before = content(precious)
    done = cli("train", "--run", "run", "train.epochs=2", "observe.log=workers", "--devices", "2", *WORDS[:2],
               "data.subset=300", cwd=tmp_path)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert content(precious) == before
    assert "log-rank1.txt is a link to" in (run / "log.txt").read_text()


def test_a_request_to_stop_makes_no_file_elsewhere(rich: Path, tmp_path: Path, isoscale: Callable):
    run = Path(shutil.copytree(rich, tmp_path / "run", symlinks=True))
    (run / "STOP").symlink_to(tmp_path / "new")
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({**record, "status": "running"}))
    with lock.RunLock(run):
        done = isoscale("cancel", "run")
    assert done.code == 2 and "STOP is a link to" in done.err and not (tmp_path / "new").exists()


def test_a_run_directory_may_itself_be_a_link(tmp_path: Path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "scratch")
    for epochs in (1, 2):
        run = train(tmp_path / "runs/a", train__epochs=epochs, data__subset=300)
    assert run.status == "done" and (tmp_path / "scratch/a/metrics.jsonl").is_file()
    (tmp_path / "b").symlink_to(tmp_path / "scratch/a")
    assert train(tmp_path / "b", train__epochs=3, data__subset=300).status == "done"


def test_a_file_with_another_name_elsewhere_becomes_one_of_its_own(rich: Path, tmp_path: Path):
    """As `cp -al` leaves it: the copy that is continued shares no file with the first."""
    shutil.copytree(rich, tmp_path / "first", symlinks=True)
    shutil.copytree(tmp_path / "first", tmp_path / "copy", symlinks=True, copy_function=os.link)
    before = content(tmp_path / "first")
    keys = {key.replace(".", "__"): value for key, value in RICH.items()}
    assert train(tmp_path / "copy", train__epochs=2, **keys).status == "done"
    assert content(tmp_path / "first") == before
    assert (tmp_path / "copy/metrics.jsonl").read_bytes().startswith((rich / "metrics.jsonl").read_bytes())


def test_a_snapshot_by_hard_links_does_not_stop_the_heart_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    path, end = tmp_path / "run" / lock.NAME, time.monotonic() + 20
    with lock.RunLock(tmp_path / "run"):
        os.link(path, tmp_path / "snapshot")
        before = json.loads(path.read_text())["beats"]
        while json.loads(path.read_text())["beats"] < before + 2:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_pipe_in_a_run_is_refused_and_nobody_waits_for_its_other_end(tmp_path: Path):
    os.mkfifo(tmp_path / "log.txt")
    reader = os.open(tmp_path / "log.txt", os.O_RDONLY | os.O_NONBLOCK)  # or a writer that waits would never come back
    try:
        with pytest.raises(UserError, match=r"log\.txt is not a plain file"):
            open_own(tmp_path / "log.txt", "a")
    finally:
        os.close(reader)


def test_a_link_in_the_place_of_a_file_that_is_replaced_is_refused(tmp_path: Path):
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "run.json").symlink_to("precious")
    with pytest.raises(UserError, match=r"run\.json is a link to precious"):
        write_aside(tmp_path / "run.json", "{}")
    assert (tmp_path / "precious").read_text() == "keep" and len(list(tmp_path.iterdir())) == 2
