"""Snapshots as data: found by name, read from all formats, the same wherever they live, refused where wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import isoscale
from isoscale.cli.data.data import app
from isoscale.data.batches import BatchPlan
from isoscale.data.feeds.residency import make_feed
from isoscale.data.order import Order
from isoscale.errors import UserError
from isoscale.science.electronic import Snapshots
from isoscale.science.electronic.snapshot_source import SnapshotSource
from tests.helpers import cli, train
from tests.science.electronic.test_calculation import described

GRID = (2, 3, 4)


def save(path: Path, values: np.ndarray, dataset: str = "values") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, values)
        return
    packed = {"chunks": True, "compression": "gzip"} if path.suffix == ".hdf5" else {}
    with h5py.File(path, "a") as file:
        file.create_dataset(dataset, data=values, **packed)


def snapshot(folder: Path, number: int, kind: str = ".npy", dtype: Any = np.float32, shape: Any = GRID) -> np.ndarray:
    """Write a snapshot with 3 + 5 descriptors and 2 energies, and return its descriptors."""
    rng = np.random.default_rng(number)
    inputs = rng.random((*shape, 8)).astype(dtype)
    save(folder / f"s{number}.in{kind}", inputs)
    save(folder / f"s{number}.out{kind}", inputs[..., 3:5] * 2)
    return inputs.reshape(-1, 8)[:, 3:]


def everything(source: Any) -> dict[str, torch.Tensor]:
    return source.fetch(torch.arange(len(source)))


def names(source: Any) -> list[str]:
    assert isinstance(source, SnapshotSource)
    return [each.name for each in source.snapshots]


@pytest.mark.parametrize("kind", [".npy", ".h5", ".hdf5"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", [GRID, (24,)])
def test_every_format_type_and_shape_gives_the_rows(kind: str, dtype: Any, shape: Any, tmp_path: Path):
    expected = snapshot(tmp_path, 0, kind, dtype, shape)
    found = everything(Snapshots(["s0"], path=str(tmp_path)).train)
    assert found["input"].dtype == torch.from_numpy(expected).dtype
    assert torch.equal(found["input"], torch.from_numpy(expected))
    assert torch.equal(found["target"], torch.from_numpy(expected[:, :2] * 2))


def test_formats_types_and_numbers_of_points_may_differ_among_snapshots(tmp_path: Path):
    parts = [snapshot(tmp_path, 0), snapshot(tmp_path, 1, ".h5", np.float64, (5, 1, 2)), snapshot(tmp_path, 2)]
    source = Snapshots(["s*"], path=str(tmp_path)).train
    assert [each.num_rows for each in source.snapshots] == [24, 10, 24]
    assert torch.equal(everything(source)["input"], torch.from_numpy(np.concatenate(parts).astype(np.float64)))
    assert source.snapshot_of(torch.tensor([0, 23, 24, 33, 34])).tolist() == [0, 0, 1, 1, 2]


def test_patterns_are_in_the_order_of_numbers_and_roles_are_apart(tmp_path: Path):
    for number in (10, 2, 9, 1):
        snapshot(tmp_path, number)
    data = Snapshots(["s*"], val=["s10"], test=["s[12]"], path=str(tmp_path))
    assert names(data.train) == ["s1", "s2", "s9", "s10"]
    assert names(data.val) == ["s10"] and names(data.test) == ["s1", "s2"]
    assert names(data.predict) == ["s1", "s2"], "of the test ones, where nothing else is said"


def test_snapshots_of_several_folders_are_told_apart(tmp_path: Path):
    first, second = snapshot(tmp_path / "cold", 1), snapshot(tmp_path / "hot", 1, dtype=np.float64)
    source = Snapshots(["cold/s1", str(tmp_path / "hot/s*")], path=str(tmp_path)).train
    assert names(source) == ["cold/s1", "hot/s1"]
    assert torch.equal(everything(source)["input"], torch.from_numpy(np.concatenate([first, second])))
    snapshot(tmp_path / "more/hot", 1)
    assert names(Snapshots(["hot/s1", "more/hot/s1"], path=str(tmp_path)).train)[1] == f"{tmp_path}/more/hot/s1"
    with pytest.raises(UserError, match=r"data\.train names the snapshot .*/hot/s1 twice"):
        Snapshots(["hot/s1", "*/s1"], path=str(tmp_path))


@pytest.mark.parametrize(("columns", "expected"), [("3:", range(3, 8)), ([7, 3], [7, 3]), (None, range(8))])
def test_descriptors_are_picked(columns: Any, expected: Any, tmp_path: Path):
    snapshot(tmp_path, 0)
    whole = np.load(tmp_path / "s0.in.npy").reshape(-1, 8)
    found = everything(Snapshots(["s0"], path=str(tmp_path), columns=columns).train)["input"]
    assert torch.equal(found, torch.from_numpy(whole[:, list(expected)]))


def test_an_array_of_a_file_with_several_is_named(tmp_path: Path):
    both = tmp_path / "both.h5"
    rows = np.arange(48.0).reshape(6, 8)
    save(both, rows, "raw/descriptors")
    save(both, rows[:, :2], "ldos")
    spec = {"input": "both.h5:/raw/descriptors", "target": "both.h5:/ldos"}
    source = Snapshots([spec], path=str(tmp_path)).train
    assert names(source) == ["both"]
    assert torch.equal(everything(source)["target"], torch.from_numpy(rows[:, :2]))
    with pytest.raises(UserError, match=r"which dataset\?; there is ldos, raw/descriptors"):
        Snapshots([{**spec, "input": "both.h5"}], path=str(tmp_path))


def test_the_numbered_arrays_of_openpmd_are_columns(tmp_path: Path):
    rng = np.random.default_rng(0)
    inputs, targets = rng.random((*GRID, 12)), rng.random((*GRID, 2))
    for kind, name, values in (("in", "Bispectrum", inputs), ("out", "LDOS", targets)):
        for number in range(values.shape[-1]):  # 10 comes after 2
            save(tmp_path / f"s0.{kind}.h5", values[..., number], f"data/0/meshes/{name}/{number}")
    found = everything(Snapshots(["s0"], path=str(tmp_path)).train)
    assert torch.equal(found["input"], torch.from_numpy(inputs.reshape(-1, 12)[:, 3:]))
    assert torch.equal(found["target"], torch.from_numpy(targets.reshape(-1, 2)))
    named = {"input": "s0.in.h5:/data/0/meshes/Bispectrum", "target": "s0.out.h5"}
    picked = everything(Snapshots([named], path=str(tmp_path), columns=[11, 4]).train)["input"]
    assert torch.equal(picked, torch.from_numpy(inputs.reshape(-1, 12)[:, [11, 4]]))
    save(tmp_path / "s0.out.h5", np.zeros((2, 3, 5)), "data/0/meshes/LDOS/2")
    with pytest.raises(UserError, match=r"LDOS/2\) has 30 float64, but .*LDOS/0\) 24 float64"):
        Snapshots(["s0"], path=str(tmp_path))


@pytest.mark.parametrize("kind", [".npy", ".h5", ".hdf5"])
def test_rows_are_the_same_wherever_they_live(kind: str, tmp_path: Path):
    for number in range(3):
        snapshot(tmp_path, number, kind)
    batches = []
    for residency in ("device", "host", "disk"):
        source = Snapshots(["s*"], path=str(tmp_path)).train
        plan = BatchPlan(len(source), 10)
        feed = make_feed(residency, source, Order(len(source), 3), plan, torch.device("cpu"))
        parts = [part.batch for step in range(16) for shard in feed.parts(step) for part in shard]
        feed.close()
        batches.append({key: torch.cat([part[key] for part in parts]) for key in ("input", "target")})
    for other in batches[1:]:
        assert torch.equal(other["input"], batches[0]["input"]) and torch.equal(other["target"], batches[0]["target"])


def test_snapshots_without_targets_are_predicted(shared: Path, tmp_path: Path):
    folder = shared / "data/electronic/Be2"
    (tmp_path / "new.in.npy").symlink_to(folder / "Be_snapshot3.in.npy")
    keys = {"train__steps": 2, "task__physics": None, "data__predict": [str(tmp_path / "new")]}
    run = train(tmp_path / "run", "electronic/be2", data__path=str(folder), **keys)
    new, known = (isoscale.predict(run, split=split) for split in ("predict", "test"))
    assert torch.equal(new["new.ldos"], known["Be_snapshot3.ldos"])
    with pytest.raises(UserError, match=r"data\.train must say what one looks like"):
        Snapshots(predict=["new"], path=str(tmp_path))


def test_one_description_may_stand_for_all_snapshots(tmp_path: Path):
    for number in (0, 1):
        snapshot(tmp_path, number)
    (tmp_path / "all.json").write_text(json.dumps(described()))
    (tmp_path / "s1.info.json").write_text(json.dumps(described(temperature=1000)))
    source = Snapshots(["s*"], path=str(tmp_path), info="all.json").train
    assert [each.calculation.temperature for each in source.snapshots] == [300, 1000], "its own counts first"


def test_an_output_of_the_calculation_is_not_taken_for_targets(tmp_path: Path):
    snapshot(tmp_path, 0)
    (tmp_path / "s0.out.npy").rename(tmp_path / "s0.out.h5.npy")
    (tmp_path / "s0.out").write_text("the output of Quantum ESPRESSO")
    with pytest.raises(UserError, match=r"snapshot s0 has no file .*s0\.out\.npy"):
        Snapshots(["s0"], path=str(tmp_path))


def spoil(folder: Path, name: str, value: float, point: int) -> None:
    rows = np.load(folder / name)
    rows.reshape(-1, rows.shape[-1])[point, -1] = value
    np.save(folder / name, rows)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["in", "out"])
def test_points_that_are_not_finite_are_refused_left_out_or_kept(
    value: float, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for number in (0, 1):
        snapshot(tmp_path, number)
    spoil(tmp_path, f"s1.{kind}.npy", value, 7)
    with pytest.raises(UserError, match=rf"at 1 of 48 points, first in .*s1\.{kind}\.npy, point 7\. .*on_nan=drop"):
        Snapshots(["s*"], path=str(tmp_path))
    assert len(Snapshots(["s*"], path=str(tmp_path), on_nan="keep").train) == 48
    left = Snapshots(["s*"], path=str(tmp_path), on_nan="drop").train
    assert "note: left out 1 of 48 points" in capsys.readouterr().err
    assert [each.num_rows for each in left.snapshots] == [24, 23]
    assert all(values.isfinite().all() for values in everything(left).values())
    assert left.snapshots[0].calculation is None
    with pytest.raises(UserError, match=r"1 of 24 points of snapshot s1 are left out .* no energy of it can be known"):
        _ = left.snapshots[1].calculation


def test_grids_that_do_not_fit_are_refused(tmp_path: Path):
    snapshot(tmp_path, 0)
    save(tmp_path / "s0.out.npy", np.zeros((3, 2, 4, 2), np.float32))
    with pytest.raises(UserError, match=r"a grid of 2×3×4 points, but .* one of 3×2×4"):
        Snapshots(["s0"], path=str(tmp_path))
    save(tmp_path / "s0.out.npy", np.zeros((24, 2), np.float32))
    (tmp_path / "s0.info.json").write_text(json.dumps(described(grid_dimensions=[4, 3, 2])))
    with pytest.raises(UserError, match=r"is about a grid of 4×3×2 points, but .* has one of 2×3×4"):
        Snapshots(["s0"], path=str(tmp_path))
    (tmp_path / "s0.info.json").write_text(json.dumps(described()))
    assert len(Snapshots(["s0"], path=str(tmp_path)).train) == 24, "points one after the other are of any grid"


def test_other_numbers_of_values_are_refused(tmp_path: Path):
    for number in range(3):
        snapshot(tmp_path, number)
    save(tmp_path / "s2.out.npy", np.zeros((*GRID, 4), np.float32))
    with pytest.raises(UserError, match=r"s2\.out\.npy has rows of \(4,\) float32, but .*s0\.out\.npy .*\(2,\)"):
        Snapshots(["s*"], path=str(tmp_path))
    save(tmp_path / "s2.out.npy", np.zeros(24, np.float32))
    with pytest.raises(UserError, match=r"s2\.out\.npy has one value a point"):
        Snapshots(["s2"], path=str(tmp_path))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("s7", 'data.train: there is no snapshot "s7" in .*; there is s0'),
        ("t*", r'there is no snapshot "t\*"'),
        ({"input": "s0.in.npy"}, "a snapshot has input, target and perhaps info"),
        ({"input": "s0.in.npy", "target": "s0.out.npy", "temperature": "3"}, "a snapshot has input, target and perh"),
        ({"input": "s0.in.npy", "target": "s0.npy"}, "there is no file .*s0.npy; in .* there is s0.in.npy"),
    ],
)
def test_a_snapshot_that_is_not_there_is_named(spec: Any, words: str, tmp_path: Path):
    snapshot(tmp_path, 0)
    with pytest.raises(UserError, match=words):
        Snapshots([spec], path=str(tmp_path))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ISOSCALE_DATA", str(tmp_path))
    snapshot(tmp_path / "be", 0)
    assert len(Snapshots(["s0"], path="be").train) == 24
    with pytest.raises(UserError, match=r"there is no folder al or .*/al: set data.path"):
        Snapshots(["s0"], path="al")


@pytest.mark.parametrize("kind", [".npy", ".h5"])
def test_a_file_that_was_cut_short_is_refused(kind: str, tmp_path: Path):
    snapshot(tmp_path, 0, kind)
    path = tmp_path / f"s0.out{kind}"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"s0\.out.* is truncated"):
        Snapshots(["s0"], path=str(tmp_path))


def test_a_run_goes_on_only_with_the_data_that_it_began_with(shared: Path, tmp_path: Path):
    for kind in ("in.npy", "out.npy"):
        for number in (0, 1):
            source = shared / f"data/electronic/Be2/Be_snapshot{number}.{kind}"
            shutil.copyfile(source, tmp_path / f"Be_snapshot{number}.{kind}")
    keys = {"data__path": str(tmp_path), "data__test": None, "task__physics": None}
    train(tmp_path / "run", "electronic/be2", train__steps=3, **keys)
    rows = np.load(tmp_path / "Be_snapshot1.in.npy")
    np.save(tmp_path / "Be_snapshot1.in.npy", rows[::-1])
    with pytest.raises(UserError, match=r"the data \(val\) is not the data that this run was started with"):
        train(tmp_path / "run", "electronic/be2", train__steps=6, **keys)


def test_data_info_tells_about_every_snapshot(shared: Path, tmp_path: Path):
    words = ["info", "electronic/be2", f"data.path={shared / 'data/electronic/Be2'}"]
    printed = CliRunner().invoke(app, words, catch_exceptions=False).output
    assert "Be_snapshot3  8,748 points, 2 atoms, 4 electrons, 300 K, 15.79 Å³" in printed


def shuffled(shared: Path, folder: Path, *words: str) -> Path:
    """Shuffle three real snapshots, and give the fourth beside them."""
    for number in range(4):
        for kind in ("in.npy", "out.npy", "info.json"):
            file = f"Be_snapshot{number}.{kind}"
            (folder / file).symlink_to(shared / "data/electronic/Be2" / file)
    patterns = [f"Be_snapshot[0-2].{kind}.npy" for kind in ("in", "out")]
    found = cli("data", "shuffle", *patterns, "--out", "Be_shuffled*", *words, cwd=folder)
    assert found.returncode == 0, found.stderr
    return folder


@pytest.mark.slow
def test_shuffled_files_hold_every_point_once_and_can_be_trained_on(shared: Path, tmp_path: Path):
    folder = shuffled(shared, tmp_path, "--files", "5", "--seed", "3")
    source = Snapshots(["Be_shuffled*"], path=str(folder)).train
    assert [each.num_rows for each in source.snapshots] == [5248, 5249, 5249, 5249, 5249], "of three, not of four"
    before = everything(Snapshots(["Be_snapshot[0-2]"], path=str(folder)).train)
    pairs = [np.hstack([rows["input"].numpy(), rows["target"].numpy()]) for rows in (before, everything(source))]
    one, other = (rows[np.lexsort(rows.T)] for rows in pairs)
    assert np.array_equal(one, other) and not np.array_equal(*pairs)
    keys = {"data__path": str(folder), "data__test": None, "data__batch_size": 500, "train__epochs": 2}
    run = train(tmp_path / "run", "electronic/be2", data__train=["Be_shuffled*"], data__val=["Be_snapshot3"], **keys)
    assert np.isfinite(run.metrics["val/band_energy"]), "the validation snapshot is whole"
    with pytest.raises(UserError, match=r"points of Be_shuffled0 are shuffled .*take whole snapshots for data\.val"):
        train(tmp_path / "no", "electronic/be2", data__train=["Be_snapshot3"], data__val=["Be_shuffled0"], **keys)
    keys["task__physics"] = None
    train(tmp_path / "yes", "electronic/be2", data__train=["Be_snapshot3"], data__val=["Be_shuffled0"], **keys)
