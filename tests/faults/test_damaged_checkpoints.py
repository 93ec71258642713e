"""Damaged and strange checkpoints: never loaded as good, and one line says why."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import isoscale
from isoscale.engine.state import checkpoint
from isoscale.engine.state.checkpoint import CheckpointError, Checkpoints, read
from isoscale.errors import UserError
from tests.helpers import cli, first_step, sha, timeless, train

pytestmark = pytest.mark.slow

SMALL = {"data__subset": 300, "task__model__widths": [64, 16, 10], "checkpoint__keep": 3}
FILES = ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> isoscale.Run:
    """A run with the checkpoints of the steps 5, 10 and 15."""
    return train(tmp_path_factory.mktemp("whole") / "run", train__epochs=3, **SMALL)


@pytest.fixture
def run(whole: isoscale.Run, tmp_path: Path) -> Path:
    shutil.copytree(whole.path, tmp_path / "run", symlinks=True)
    return tmp_path / "run"


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step_00000015"


def assert_passed_over(run: Path) -> None:
    with pytest.raises(CheckpointError):
        read(newest(run))
    said: list[str] = []
    found = Checkpoints(run / "checkpoints").newest(said.append)
    assert found is not None and found[0].name == "step_00000010" and found[1][1]["progress"]["step"] == 10
    assert len(said) == 1 and "step_00000015 is damaged and passed over" in said[0] and "\n" not in said[0]


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_tenth_is_never_loaded_as_good(name: str, run: Path) -> None:
    content = (newest(run) / name).read_bytes()
    for tenth in range(10):
        (newest(run) / name).write_bytes(content[: len(content) * tenth // 10])
        assert_passed_over(run)


@pytest.mark.parametrize("name", FILES)
def test_a_file_with_one_flipped_bit_is_never_loaded_as_good(name: str, run: Path) -> None:
    content = (newest(run) / name).read_bytes()
    for part in range(20):
        damaged = bytearray(content)
        damaged[(len(content) - 1) * part // 19] ^= 1 << part % 8
        (newest(run) / name).write_bytes(damaged)
        assert_passed_over(run)


@pytest.mark.slow
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_says_so(
    run: Path, whole: isoscale.Run, tmp_path: Path
) -> None:
    os.truncate(newest(run) / "model.safetensors", 1000)
    done = cli("train", "--run", "run", "observe.level=info", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "checkpoint step_00000015 is damaged and passed over" in done.stdout
    assert first_step(run) == 10
    assert sha(run) == sha(whole) and timeless(run) == timeless(whole)
    read(newest(run))


def refused(run: Path) -> str:
    """What the user reads, which is one line."""
    with pytest.raises(UserError) as caught:
        train(run, recipe=None, train__epochs=4)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def sealed(path: Path, **changes: Any) -> None:
    """Write a manifest that fits the files, and some changes, as somebody would who knows how."""
    names = [file.name for file in path.iterdir() if file.name != "manifest.json"]
    files = {name: checkpoint._fingerprint(path / name) for name in names}
    manifest = {**json.loads((path / "manifest.json").read_text()), "files": files, **changes}
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": checkpoint._seal(manifest)}))


def test_a_checkpoint_of_a_newer_format_is_not_trained_over(run: Path) -> None:
    sealed(newest(run), format=checkpoint.FORMAT + 1)
    before = sorted(run.rglob("*"))
    said = refused(run)
    assert f"format {checkpoint.FORMAT + 1}" in said and "install a newer one, or move that folder away" in said
    assert sorted(run.rglob("*")) == before
    shutil.rmtree(newest(run))
    assert train(run, recipe=None).path == run


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"train__ema": 0.9}, "it also holds average"),
        ({"task__model__widths": [64, 17, 10]}, "model.layers.0.weight is (17, 64), expected (16, 64)"),
        ({"seed": 5}, "the checkpoint's seed is 5"),
        ({"data__subset": 200}, "number of samples per epoch is"),
    ],
)  # fmt: skip
def test_a_checkpoint_of_another_recipe_is_refused(options: dict[str, Any], reason: str, run: Path) -> None:
    other = train(run.parent / "other", train__epochs=1, **{**SMALL, **options})
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(other.path / "checkpoints", run / "checkpoints", symlinks=True)
    assert reason in refused(run)


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_a_checkpoint_with_an_unexpected_tensor_is_refused(part: str, run: Path) -> None:
    path = newest(run) / f"{part}.safetensors"
    name = {"model": "model.more", "optimizer": "0/exp_avg/model.more"}[part]
    save_file({**load_file(path), name: torch.ones(3)}, path)
    sealed(newest(run))
    assert "model.more" in refused(run)


def test_a_checkpoint_with_an_unexpected_part_is_refused(run: Path) -> None:
    values = json.loads((newest(run) / "state.json").read_text())
    (newest(run) / "state.json").write_text(json.dumps({**values, "more": {}}))
    sealed(newest(run))
    assert "it also holds more" in refused(run)


def out_of_the_folder(run: Path) -> None:
    (run / "elsewhere").write_bytes((newest(run) / "model.safetensors").read_bytes())
    (newest(run) / "model.safetensors").unlink()
    (newest(run) / "model.safetensors").symlink_to(run / "elsewhere")
    sealed(newest(run))


def a_pipe(run: Path) -> None:
    """Reading it would never end."""
    (newest(run) / "model.safetensors").unlink()
    os.mkfifo(newest(run) / "model.safetensors")


def without_state(run: Path) -> None:
    """Nothing would vouch for it."""
    sealed(newest(run), files={"model.safetensors": checkpoint._fingerprint(newest(run) / "model.safetensors")})


def naming(*files: Any) -> Callable[[Path], None]:
    def rewrite(run: Path) -> None:
        entry = checkpoint._fingerprint(newest(run) / "state.json")
        sealed(newest(run), files={name: entry for name in files})

    return rewrite


STRANGE: dict[str, Callable[[Path], None]] = {
    "an absolute path": naming("state.json", "/etc/hostname"),
    "a path upwards": naming("state.json", "../step_00000010/state.json"),
    "a path downwards": naming("state.json", "more/state.json"),
    "a link out of the folder": out_of_the_folder,
    "a pipe": a_pipe,
    "no state.json": without_state,
    "a list of files": lambda run: sealed(newest(run), files=["state.json"]),
    "files without sizes": lambda run: sealed(newest(run), files={"state.json": {}}),
    "a format that is no number": lambda run: sealed(newest(run), format="one"),
    "format zero": lambda run: sealed(newest(run), format=0),
    "nothing but brackets": lambda run: (newest(run) / "manifest.json").write_text("[" * 100_000) and None,
    "a list": lambda run: (newest(run) / "manifest.json").write_text("[1]") and None,
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_strange_manifest_is_refused_in_one_line(kind: str, run: Path) -> None:
    STRANGE[kind](run)
    assert_passed_over(run)
    for older in ("step_00000005", "step_00000010"):
        shutil.rmtree(run / "checkpoints" / older)
    assert "no checkpoint in" in refused(run)


def header(**entry: Any) -> bytes:
    text = json.dumps({"model.layers.0.weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **entry}})
    return len(text).to_bytes(8, "little") + text.encode()


LIES = {
    "a huge shape": header(shape=[1 << 40]) + bytes(16),
    "a shape beyond counting": header(shape=[1 << 62, 1 << 62]) + bytes(16),
    "a negative shape": header(shape=[-4]) + bytes(16),
    "a wider dtype": header(dtype="F64") + bytes(16),
    "an unknown dtype": header(dtype="OBJECT") + bytes(16),
    "a place beyond the file": header(data_offsets=[0, 1 << 40], shape=[1 << 38]) + bytes(16),
    "a place that ends before it begins": header(data_offsets=[16, 0]) + bytes(16),
    "less data": header() + bytes(15),
    "more data": header() + bytes(17),
    "a header longer than the file": (1 << 60).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": (4).to_bytes(8, "little") + b"\x80\x04K.",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", LIES)
def test_a_tensor_file_whose_header_lies_is_refused_before_anything_is_allocated(kind: str, run: Path) -> None:
    (newest(run) / "model.safetensors").write_bytes(LIES[kind])
    sealed(newest(run))
    assert_passed_over(run)


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, "\x00", '{"progress": '])
def test_a_state_that_is_no_state_is_refused(text: str, run: Path) -> None:
    (newest(run) / "state.json").write_text(text)
    sealed(newest(run))
    assert_passed_over(run)
