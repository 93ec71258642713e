"""Checkpoints: whole or not at all, verified when read, and never lost to a failing disk."""

import errno
import hashlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from isoscale.engine.state import checkpoint
from isoscale.engine.state.checkpoint import CheckpointError, Checkpoints, State, read, read_manifest, read_weights
from isoscale.engine.state.host_snapshot import HostSnapshot
from isoscale.engine.state.registry import weights_sha256
from isoscale.engine.state.writer import Saver
from isoscale.errors import RunLost, Stopped, UserError
from isoscale.observe.metric_log import history
from tests import warm
from tests.helpers import train

STORED = Path(__file__).parent / "checkpoints"


def state(step: int = 1) -> State:
    """A small state with several dtypes, whose values follow the step."""
    weights = {
        "layer.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) * step,
        "layer.scale": torch.tensor(1.5, dtype=torch.float64),
        "norm.count": torch.tensor(step),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "mask": torch.tensor([True, False]),
    }
    tensors = {"model": weights, "optimizer": {"0/step/layer.weight": torch.tensor(float(step))}, "schedule": {}}
    values = {"model": {}, "optimizer": {}, "schedule": {"best": 0.1 + 0.2, "words": "é→"}, "progress": {"step": step}}
    return tensors, values


def equal(one: State, two: State) -> bool:
    kept = {part: group for part, group in one[0].items() if group}
    same = kept.keys() == two[0].keys() and all(
        group.keys() == two[0][part].keys()
        and all(torch.equal(tensor, two[0][part][name]) for name, tensor in group.items())
        and all(tensor.dtype == two[0][part][name].dtype for name, tensor in group.items())
        for part, group in kept.items()
    )
    return same and one[1] == two[1]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_read_back_to_the_bit(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    path = checkpoints.save(7, state(7))
    assert equal(state(7), read(path))
    found = checkpoints.newest()
    assert found is not None and found[0] == path and equal(state(7), found[1])


def test_the_layout_is_what_the_documentation_says(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(400, state(400), best=True)
    assert path == tmp_path / "step_00000400"
    assert names(path) == ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]
    assert names(tmp_path) == ["best", "last", "step_00000400"]
    assert os.readlink(tmp_path / "last") == os.readlink(tmp_path / "best") == "step_00000400"
    assert json.loads((path / "state.json").read_text()) == state(400)[1]
    assert torch.equal(load_file(path / "model.safetensors")["layer.weight"], state(400)[0]["model"]["layer.weight"])


def test_the_manifest_holds_format_step_sizes_and_hashes(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(3, state(3))
    manifest = read_manifest(path)
    assert manifest["format"] == checkpoint.FORMAT and manifest["step"] == 3
    assert manifest["weights_sha256"] == weights_sha256(state(3)[0]["model"])
    assert sorted(manifest["files"]) == ["model.safetensors", "optimizer.safetensors", "state.json"]
    for name, entry in manifest["files"].items():
        content = (path / name).read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_values_that_are_not_finite_and_tensors_that_share_memory_are_kept(tmp_path: Path) -> None:
    whole = torch.arange(6.0)
    tensors = {"model": {"whole": whole, "part": whole[:2], "view": whole.view(2, 3), "wide": whole[:1].expand(4)}}
    values = {"model": {}, "progress": {"values": {"val/odd": float("nan"), "val/far": float("inf")}}}
    found = read(Checkpoints(tmp_path).save(1, (tensors, values)))
    assert all(torch.equal(found[0]["model"][name], tensor) for name, tensor in tensors["model"].items())
    assert str(found[1]["progress"]["values"]) == "{'val/odd': nan, 'val/far': inf}"


def test_averages_take_the_place_of_weights_unless_asked_otherwise(tmp_path: Path) -> None:
    tensors, values = state(1)
    tensors["average"] = {"layer.weight": torch.full((2, 3), 9.0)}
    path = Checkpoints(tmp_path).save(1, (tensors, {**values, "average": {}}))
    assert torch.equal(read_weights(path)["layer.weight"], torch.full((2, 3), 9.0))
    assert torch.equal(read_weights(path, average=False)["layer.weight"], tensors["model"]["layer.weight"])
    assert read_manifest(path)["weights_sha256"] == weights_sha256(read_weights(path))


FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def two(folder: Path) -> tuple[Checkpoints, Path]:
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state(1))
    return checkpoints, checkpoints.save(2, state(2))


def assert_passed_over(checkpoints: Checkpoints, damaged: Path) -> None:
    """The damaged one is not loaded, the one before it is, and the user is told."""
    with pytest.raises(CheckpointError):
        read(damaged)
    said: list[str] = []
    found = checkpoints.newest(said.append)
    assert found is not None and found[0].name == "step_00000001" and equal(state(1), found[1])
    assert len(said) == 1 and damaged.name in said[0] and "passed over" in said[0]


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_never_loaded_as_good(name: str, tmp_path: Path) -> None:
    checkpoints, path = two(tmp_path)
    whole = (path / name).read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        (path / name).write_bytes(whole[:length])
        assert_passed_over(checkpoints, path)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_never_overlooked(name: str, tmp_path: Path) -> None:
    checkpoints, path = two(tmp_path)
    (path / name).unlink()
    assert_passed_over(checkpoints, path)


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_anywhere_is_never_loaded_as_good(name: str, tmp_path: Path) -> None:
    checkpoints, path = two(tmp_path)
    whole = (path / name).read_bytes()
    stride = 1 if name == "manifest.json" else 41
    for place in range(0, len(whole), stride):
        flipped = whole[place] ^ (1 << place % 8)
        (path / name).write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
        with pytest.raises(CheckpointError):
            read(path)
    assert_passed_over(checkpoints, path)


def rewritten(path: Path, **changes: Any) -> None:
    """A manifest with other entries and a hash that fits them."""
    manifest = {**json.loads((path / "manifest.json").read_text()), **changes}
    (path / "manifest.json").write_text(json.dumps({**manifest, "sha256": checkpoint._seal(manifest)}))


@pytest.mark.parametrize("name", ["../x", "../step_00000001/state.json", "/etc/hostname", "sub/file"])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(name: str, tmp_path: Path) -> None:
    checkpoints, path = two(tmp_path)
    rewritten(path, files={name: {"bytes": 1, "sha256": ""}})
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        read(path)
    assert_passed_over(checkpoints, path)


def test_a_newer_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    checkpoints, path = two(tmp_path)
    rewritten(path, format=checkpoint.FORMAT + 1)
    for reading in (lambda: read(path), lambda: checkpoints.newest(lambda text: pytest.fail(text))):
        with pytest.raises(
            CheckpointError, match=rf"format {checkpoint.FORMAT + 1}.*install a newer one, or move that folder away"
        ):
            reading()


def test_when_none_is_good_there_is_none(tmp_path: Path) -> None:
    checkpoints, path = two(tmp_path)
    for each in (path, tmp_path / "step_00000001"):
        (each / "state.json").unlink()
    said: list[str] = []
    assert checkpoints.newest(said.append) is None
    assert len(said) == 2
    assert Checkpoints(tmp_path / "nowhere").newest() is None


@settings(max_examples=20)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(2, 4))
def test_the_newest_are_kept_and_the_best_besides(best: list[bool], keep: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder), keep)
        for step, is_best in enumerate(best, start=1):
            checkpoints.save(step, ({"model": {"w": torch.tensor(step)}}, {}), is_best)
        steps = range(1, len(best) + 1)
        bests = [step for step in steps if best[step - 1]]
        expected = {*list(steps)[-keep:], *bests[-1:]}
        kept = {int(path.name.removeprefix("step_")) for path in Path(folder).glob("step_*")}
        assert kept == expected
        last, pointed = checkpoints.pointed("last"), checkpoints.pointed("best")
        assert last is not None and last.name == f"step_{len(best):08d}"
        assert (pointed.name if pointed else None) == (f"step_{bests[-1]:08d}" if bests else None)


def test_a_damaged_newer_one_does_not_push_out_the_good_ones(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 9):
        checkpoints.save(step, state(step))
    (tmp_path / "step_00000009" / "state.json").unlink()
    assert checkpoints.newest() is not None  # as every start does
    for step in (3, 4):
        checkpoints.save(step, state(step))
    (tmp_path / "step_00000004" / "state.json").write_text("")
    found = checkpoints.newest()
    assert found is not None and found[0].name == "step_00000003"


def test_a_training_that_another_has_overtaken_moves_no_pointer_back(tmp_path: Path) -> None:
    checkpoints, overtaken = Checkpoints(tmp_path), Checkpoints(tmp_path)
    checkpoints.save(2, state(2), best=True)
    with pytest.raises(RunLost, match="has a checkpoint of step 2, and this training is at step 1"):
        overtaken.save(1, state(1), best=True)
    assert names(tmp_path) == ["best", "last", "step_00000002"]
    assert checkpoints.find("last") == checkpoints.find("best") == (tmp_path / "step_00000002").resolve()


def test_a_run_that_is_lost_while_a_checkpoint_is_written_gets_no_checkpoint(tmp_path: Path) -> None:
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) > 1:
            raise RunLost("another process has it")

    Checkpoints(tmp_path).save(1, state(1))
    others = tmp_path / ".writing-step_00000009-abc"
    with pytest.raises(RunLost):
        Checkpoints(tmp_path, check=check).write(
            2, HostSnapshot().take(*state(2)), sync_log=lambda: others.mkdir() or (others / "part").touch()
        )
    assert names(tmp_path) == [others.name, "last", "step_00000001"], "what the other one writes is left alone"


def test_a_checkpoint_is_found_by_pointer_name_and_step(tmp_path: Path) -> None:
    checkpoints, path = two(tmp_path)
    for name in ("last", "step_00000002", "2"):
        assert checkpoints.find(name) == path.resolve()
    with pytest.raises(UserError, match=r"no checkpoint 'best'.*step_00000002, step_00000001"):
        checkpoints.find("best")


def test_saving_a_step_again_replaces_a_damaged_copy(tmp_path: Path) -> None:
    checkpoints, path = two(tmp_path)
    (path / "state.json").unlink()
    assert equal(state(2), read(checkpoints.save(2, state(2))))
    assert names(tmp_path) == ["last", "step_00000001", "step_00000002"]


def test_leftovers_of_killed_writers_are_swept_and_never_taken_for_checkpoints(tmp_path: Path) -> None:
    checkpoints, path = two(tmp_path)
    for name in (".writing-step_00000003-11", ".dropped-step_00000001-11", ".replaced-step_00000002-11"):
        shutil.copytree(path, tmp_path / name)
    for name in (".last-11", ".best-11"):
        (tmp_path / name).symlink_to("step_00000001")
    found = checkpoints.newest()
    assert found is not None and found[0] == path
    checkpoints.save(3, state(3))
    assert names(tmp_path) == ["last", "step_00000002", "step_00000003"]


def test_pointers_that_a_killed_writer_did_not_move_are_moved_by_the_next_start(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, state(step), best=step < 3)
    for name in ("last", "best"):
        (tmp_path / name).unlink()
        (tmp_path / name).symlink_to("step_00000001")
    (tmp_path / "step_00000003" / "state.json").unlink()
    found = Checkpoints(tmp_path).newest()
    assert found is not None and found[0].name == "step_00000002"
    assert os.readlink(tmp_path / "last") == os.readlink(tmp_path / "best") == "step_00000002"
    assert names(tmp_path) == ["best", "last", "step_00000001", "step_00000002", "step_00000003"]


def test_the_only_checkpoint_survives_a_writer_killed_while_replacing_it(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path).save(1, state(1))
    path.rename(tmp_path / ".replaced-step_00000001-11")
    shutil.copytree(tmp_path / ".replaced-step_00000001-11", tmp_path / ".writing-step_00000001-11")
    found = Checkpoints(tmp_path).newest(lambda text: pytest.fail(text))
    assert found is not None and found[0] == path and equal(state(1), found[1])
    assert names(tmp_path) == ["last", "step_00000001"]


def failing(name: str, number: int) -> Callable[..., Any]:
    """A function of `os` that fails at the call of a number, as a disk with a fault does."""
    plain, calls = getattr(os, name), iter(range(10_000))

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise OSError(errno.EIO, "Input/output error")
        return plain(*arguments, **options)

    return call


@pytest.mark.parametrize("name", ["fsync", "rename", "replace", "symlink"])
def test_a_disk_that_fails_at_any_call_leaves_the_last_good_one_and_no_litter(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, failed = 0, True
    while failed:
        folder = tmp_path / str(number)
        two(folder)
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing(name, number))
            try:
                Checkpoints(folder).save(2, state(2), best=True)  # once more, over the good one
                failed = False
            except UserError as error:
                assert "cannot save the checkpoint of step 2" in str(error) and "Input/output error" in str(error)
        assert not [path for path in names(folder) if path.startswith(".")], number
        found = Checkpoints(folder).newest(lambda text: pytest.fail(text))
        assert found is not None and equal(state(2), found[1])
        number += 1
    assert number > 1


@contextmanager
def writer_held() -> Iterator[Event]:
    """Writers wait where they begin to write tensors, until the event is set."""
    plain, go = checkpoint._write_tensors, Event()

    def write(path: Path, tensors: dict[str, Tensor]) -> None:
        assert go.wait(30)
        plain(path, tensors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "_write_tensors", write)
        yield go


def test_training_goes_on_while_a_state_is_written_as_it_was(tmp_path: Path) -> None:
    live, values = state(3)
    saver = Saver(Checkpoints(tmp_path))
    with writer_held() as go:
        saver.save(3, (live, values))
        for group in live.values():
            for tensor in group.values():
                tensor.zero_()
        values["progress"]["step"] = 4
        assert not list(tmp_path.glob("step_*"))
        go.set()
        saver.wait()
    assert equal(state(3), read(tmp_path / "step_00000003"))


def test_a_save_waits_for_the_one_before_it_and_uses_its_memory_again(tmp_path: Path) -> None:
    saver = Saver(Checkpoints(tmp_path, keep=9))
    with writer_held() as go:
        saver.save(1, state(1))
        Timer(0.2, go.set).start()
        saver.save(2, state(2))
        assert equal(state(1), read(tmp_path / "step_00000001"))
        saver.wait()
    grown = state(3)
    grown[0]["model"]["layer.weight"] = torch.ones(50, 3)
    grown[0]["more"], grown[1]["more"] = {"empty": torch.empty(0, 2), "strided": torch.arange(6).view(2, 3).t()}, {}
    saver.save(3, grown)
    saver.wait()
    assert equal(state(2), read(tmp_path / "step_00000002")) and equal(grown, read(tmp_path / "step_00000003"))


def test_what_the_writer_ran_into_is_raised_once_at_the_next_look_the_next_save_or_the_end(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    saver = Saver(Checkpoints(tmp_path / "checkpoints"))

    def ended() -> Saver:
        saver.save(1, state(1))
        assert saver._thread is not None
        saver._thread.join()
        return saver

    for act in (Saver.check, Saver.wait, lambda saver: saver.save(2, state(2))):
        with pytest.raises(UserError, match="cannot save the checkpoint of step 1"):
            act(ended())
        saver.check()
    with pytest.raises(UserError, match="cannot save the checkpoint of step 1"), saver:
        ended()
    with pytest.raises(UserError, match="cannot save the checkpoint of step 1"), saver:
        ended()
        raise Stopped("on request")
    with pytest.raises(RuntimeError, match="something else") as caught, saver:
        ended()
        raise RuntimeError("something else")
    assert "cannot save the checkpoint of step 1" in caught.value.__notes__[0]


def test_the_log_is_on_the_disk_before_a_checkpoint_gets_its_name(tmp_path: Path) -> None:
    named: list[list[str]] = []
    with Saver(Checkpoints(tmp_path), lambda: named.append(names(tmp_path))) as saver:
        saver.save(1, state(1))
    assert [name.startswith(".writing-step_00000001") for name in named[0]] == [True]
    full = UserError("cannot write metrics.jsonl: No space left on device")

    def fail() -> None:
        raise full

    with pytest.raises(UserError, match=r"metrics\.jsonl"), Saver(Checkpoints(tmp_path), fail) as saver:
        saver.save(2, state(2))
    assert names(tmp_path) == ["last", "step_00000001"]


def test_what_saving_costs_is_told_with_the_next_window_only(tmp_path: Path) -> None:
    options = {"train__steps": 22, "train__evaluate": "never", "observe__every": 5, "checkpoint__every": "10 steps"}
    run = train(tmp_path / "run", **options)
    told = dict(history(run.path / "metrics.jsonl", "time/saving_seconds"))
    assert set(told) == {15, 22}  # what the saves at 10 and 20 cost; nothing follows the last one
    assert all(0 < seconds < 60 for seconds in told.values())


@pytest.mark.slow
def test_a_training_whose_checkpoint_could_not_be_written_ends_at_the_next_boundary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tensors: dict[str, Tensor]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write_tensors", full)
    options = {"train__steps": 999, "train__epochs": None, "train__evaluate": "never", "observe__every": 5}
    with pytest.raises(UserError, match="cannot save the checkpoint of step 500"):
        train(tmp_path / "run", checkpoint__every="500 steps", **options)
    assert 500 <= history(tmp_path / "run" / "metrics.jsonl", "train/loss")[-1][0] < 999


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("free", [None, 0], ids=["cloned on the device", "no room for a clone"])
def test_a_state_on_a_device_is_staged_as_it_was_when_the_stream_came_there(
    free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if free is not None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 0))
    saver = Saver(Checkpoints(tmp_path, keep=9))
    live, values = state(1)
    live = {part: {name: tensor.cuda() for name, tensor in group.items()} for part, group in live.items()}
    live["optimizer"]["on the host"] = torch.tensor(5.0)
    live["model"]["large"] = torch.zeros(2048, 2048, device="cuda")
    for step in (1, 2, 3):
        for _ in range(50):  # the copy must come behind this and before what follows
            live["model"]["large"].add_(1)
        saver.save(step, (live, values))
        live["model"]["large"].mul_(2)
    saver.wait()
    expected = 0.0
    for step in (1, 2, 3):
        expected += 50
        found = read(tmp_path / f"step_{step:08d}")[0]
        assert bool((found["model"]["large"] == expected).all()), step
        assert found["optimizer"]["on the host"] == 5 and torch.equal(
            found["model"]["mask"], state(1)[0]["model"]["mask"]
        )
        expected *= 2


def test_the_writer_gets_no_signals_and_does_not_keep_a_process_alive(tmp_path: Path) -> None:
    saver = Saver(Checkpoints(tmp_path))
    masks: list[Any] = []
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with writer_held() as go:
        saver._sync_log = lambda: masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        saver.save(1, state(1))
        assert saver._thread is not None and saver._thread.daemon
        with pytest.raises(KeyboardInterrupt), saver:
            raise KeyboardInterrupt  # does not wait for the writer, which is held
        go.set()
        saver.wait()
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD} <= masks[0]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


def test_a_process_forked_while_a_checkpoint_is_written_has_nothing_to_wait_for(tmp_path: Path) -> None:
    saver = Saver(Checkpoints(tmp_path))
    with writer_held() as go, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of threads at any fork
        saver.save(1, state(1))
        child = multiprocessing.get_context("fork").Process(target=saver.wait)
        child.start()
        child.join(20)
        assert child.exitcode == 0
        go.set()
        saver.wait()
    assert equal(state(1), read(tmp_path / "step_00000001"))


WRITER = """
import os, shutil, sys
from pathlib import Path
import torch
from isoscale.engine.state.checkpoint import Checkpoints

def counted(function):
    def call(*arguments, **options):
        global budget
        if budget == 0:
            os._exit(9)
        budget -= 1
        return function(*arguments, **options)
    return call

before = Path(sys.argv[1])
code, number = 9, 0
while code:
    folder = before.with_name(str(number))
    shutil.copytree(before, folder, symlinks=True)
    process = os.fork()
    if process == 0:
        budget = number
        for name in ("fsync", "rename", "replace", "mkdir", "symlink", "unlink", "rmdir", "close"):
            setattr(os, name, counted(getattr(os, name)))
        state = {"model": {"w": torch.ones(3)}}, {"model": {}, "progress": {"step": 3}}
        Checkpoints(folder).save(3, state, best=True)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    assert code in (0, 9), code
    number += 1
print(number)
"""


@pytest.mark.slow
def test_a_writer_killed_at_any_of_its_system_calls_leaves_a_good_newest_checkpoint(tmp_path: Path) -> None:
    two(tmp_path / "before")
    done = warm.run(
        [sys.executable, "-c", WRITER, str(tmp_path / "before")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 12
    for number in range(int(done.stdout)):
        folder = tmp_path / str(number)
        found = Checkpoints(folder).newest(lambda text: pytest.fail(text))
        assert found is not None and found[0].name in ("step_00000002", "step_00000003")
        assert Checkpoints(folder).pointed("last") is not None
        Checkpoints(folder).save(4, state(4))
        assert not [name for name in names(folder) if name.startswith(".")]


@contextmanager
def little_room(num_bytes: int) -> Iterator[None]:
    """A disk on which no file may grow beyond a few bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("num_bytes", [0, 150, 700])
def test_a_disk_without_room_is_a_clear_error_and_what_is_there_stays(num_bytes: int, tmp_path: Path) -> None:
    checkpoints, path = two(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with little_room(num_bytes), pytest.raises(UserError, match=r"of step 3 in .*: File too large\. .*are intact"):
        checkpoints.save(3, ({"model": {"w": torch.zeros(5000)}}, {"model": {}}))
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert names(tmp_path) == ["last", "step_00000001", "step_00000002"]
    assert equal(state(2), read(path))


def test_a_file_where_the_folder_should_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match="cannot save the checkpoint of step 1"):
        Checkpoints(tmp_path / "checkpoints").save(1, state())


def test_a_folder_in_the_way_of_a_pointer_is_a_clear_error_and_the_checkpoint_is_there(tmp_path: Path) -> None:
    (tmp_path / "last" / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match="cannot save the checkpoint of step 1"):
        Checkpoints(tmp_path).save(1, state(1))
    found = Checkpoints(tmp_path).newest()
    assert found is not None and equal(state(1), found[1])


def stored_state() -> State:
    """The state in `tests/engine/state/checkpoints`, by formula."""
    generator = torch.Generator().manual_seed(20)
    weights = {
        "model.0.weight": torch.randn(3, 2, generator=generator),
        "model.0.bias": torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64),
        "model.1.num_batches_tracked": torch.tensor(12),
    }
    tensors: dict[str, dict[str, Tensor]] = {
        "model": weights,
        "optimizer": {"0/exp_avg/model.0.weight": torch.full((3, 2), 0.25)},
        "average": {"model.0.bias": torch.tensor([0.25, -0.5, 1.0], dtype=torch.float64)},
    }
    values: dict[str, dict[str, Any]] = {
        "model": {},
        "extra": {},
        "random": {},
        "optimizer": {"0/step/model.0.weight": 12},
        "average": {},
        "schedule": {"factor": 0.5, "best": 0.125, "stalled": 1},
        "progress": {"step": 12, "ended": False, "seconds": 1.5, "values": {"val/loss": 0.125}},
    }
    return tensors, values


@pytest.mark.parametrize("folder", sorted(STORED.glob("format_*")), ids=lambda folder: folder.name)
def test_a_stored_checkpoint_of_every_format_still_gives_its_values(folder: Path) -> None:
    found = Checkpoints(folder).newest(lambda text: pytest.fail(text))
    assert found is not None and equal(stored_state(), found[1])
    weights = read_weights(found[0])
    assert weights["model.0.bias"].tolist() == [0.25, -0.5, 1.0]
    assert weights_sha256(weights) == read_manifest(found[0])["weights_sha256"]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_come_back_wherever_they_lie_in_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    for length in range(1, 9):
        numbers = torch.randn(length, dtype=dtype)
        tensors = {
            "model": {"bytes": torch.zeros(length, dtype=torch.uint8), "numbers": numbers, "real": torch.ones(length)}
        }
        path = Checkpoints(tmp_path / f"{length}").save(1, (tensors, {"model": {}}))
        found = read(path)[0]["model"]["numbers"]
        assert found.dtype == dtype and torch.equal(torch.empty_like(numbers).copy_(found), numbers)
        assert weights_sha256(read_weights(path)) == read_manifest(path)["weights_sha256"]


def test_there_is_a_stored_checkpoint_of_every_format() -> None:
    assert names(STORED) == [f"format_{number}" for number in range(1, checkpoint.FORMAT + 1)]


def test_an_older_format_is_upgraded_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_two(old: State) -> State:
        return old[0], {**old[1], "schedule": {**old[1]["schedule"], "patience": 3}}

    def to_three(old: State) -> State:
        return old[0], {**old[1], "schedule": {**old[1]["schedule"], "patience": old[1]["schedule"]["patience"] * 2}}

    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    monkeypatch.setattr(checkpoint, "UPGRADERS", {1: to_two, 2: to_three})
    found = Checkpoints(STORED / "format_1").newest(lambda text: pytest.fail(text))
    assert found is not None
    assert found[1][1]["schedule"] == {**stored_state()[1]["schedule"], "patience": 6}


def test_the_hash_of_weights_does_not_depend_on_their_order_or_their_place_in_memory() -> None:
    weights = state(5)[0]["model"]
    backwards = dict(reversed(weights.items()))
    strided = {**weights, "layer.weight": weights["layer.weight"].t().contiguous().t()}
    assert weights_sha256(weights) == weights_sha256(backwards) == weights_sha256(strided)


def test_the_hash_of_weights_does_not_depend_on_how_they_are_filed(tmp_path: Path) -> None:
    tensors, values = state(5)
    one = Checkpoints(tmp_path / "one").save(5, (tensors, values))
    other = ({"model": dict(reversed(tensors["model"].items())), "more": {"x": torch.ones(3)}}, {"step": {}})
    two_ = Checkpoints(tmp_path / "two").save(6, other)
    assert read_manifest(one)["weights_sha256"] == read_manifest(two_)["weights_sha256"]
    assert weights_sha256(read_weights(one)) == read_manifest(one)["weights_sha256"]


def test_the_hash_of_weights_changes_with_a_bit_a_name_a_shape_or_a_dtype() -> None:
    weights = {"a": torch.zeros(4), "b": torch.ones(2)}
    others = [
        {"a": torch.tensor([0.0, 0.0, 0.0, -0.0]), "b": torch.ones(2)},
        {"a": torch.zeros(4), "c": torch.ones(2)},
        {"a": torch.zeros(2, 2), "b": torch.ones(2)},
        {"a": torch.zeros(4, dtype=torch.int32), "b": torch.ones(2)},
        {"a": torch.zeros(4)},
    ]
    assert len({weights_sha256(weights), *map(weights_sha256, others)}) == 6


if (
    __name__ == "__main__"
):  # writes the stored checkpoint of the present format: python -m tests.engine.state.test_checkpoint
    target = STORED / f"format_{checkpoint.FORMAT}"
    target.mkdir(parents=True, exist_ok=True)
    print(checkpoint.Checkpoints(target).save(12, stored_state()))
