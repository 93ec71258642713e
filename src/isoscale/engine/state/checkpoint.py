"""Checkpoints: a directory of safetensors and JSON with a manifest, written aside, synced and renamed.

    step_00000400/
      manifest.json      format, step, size and sha256 of every other file, hashes of the weights and of itself,
                         and whether it was the best so far
      state.json         everything that is not a tensor
      run.json           the record of the run, as it was then
      <part>.safetensors one file for each part of the state registry that has tensors

A directory with a valid manifest is complete: it got its name only after all its bytes were on the disk.
"""

import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from isoscale.engine.state.host_snapshot import HostSnapshot, Snapshot
from isoscale.engine.state.registry import weights_sha256
from isoscale.engine.state.tensor_files import save_tensors
from isoscale.errors import RunLost, UserError
from isoscale.system.files import own_folder, refuse_link, sync_file, sync_folder

FORMAT = 2
MODEL = "model"
_MANIFEST = "manifest.json"
_STATE = "state.json"
_RECORD = "run.json"

State = tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Any]]]
Upgrader = Callable[[State], State]
UPGRADERS: dict[int, Upgrader] = {
    # what modules have besides weights and buffers, and the generators of Python and numpy
    1: lambda state: (state[0], {**state[1], "extra": {}, "random": {}}),
}
"""From a format to the next one: `UPGRADERS[1]` turns a state of format 1 into one of format 2."""
_PAIRS = "complex128"
"""Names of tensors that are stored as pairs of real numbers: safetensors has no such dtype."""


class CheckpointError(UserError):
    """A checkpoint that cannot be used, and why."""


class NewerFormat(CheckpointError):
    """A checkpoint that only a newer isoscale can read: not damaged, and not to be trained over."""


class Checkpoints:
    """The checkpoints of a run, in one folder, with the pointers `last` and `best`."""

    def __init__(
        self, folder: Path, keep: int = 2, check: Callable[[], None] = lambda: None, record: Callable[[], str] = str
    ) -> None:
        """The checkpoints below `folder`; `keep` recent ones stay.

        `check` raises where the run is no longer this process's to write; `record` is what run.json says.
        """
        self.folder = folder
        self.keep = keep
        self._check = check
        self._record = record
        self._writer = uuid.uuid4().hex
        """In the names of what is being written: numbers of processes are not unique where hosts share a folder."""

    def save(self, step: int, state: State, best: bool = False) -> Path:
        """Write a checkpoint of a live state in this thread."""
        return self.write(step, HostSnapshot().take(*state), best)

    def write(
        self, step: int, state: Snapshot, best: bool = False, sync_log: Callable[[], None] = lambda: None
    ) -> Path:
        """Write a checkpoint whole or not at all, then move the pointers and drop old ones.

        `sync_log` brings to the disk what the checkpoint relies on; that happens before it gets its name.
        """
        final = self.folder / f"step_{step:08d}"
        aside = self.folder / f".writing-{final.name}-{self._writer}"
        try:
            self._check_ahead(step)
            own_folder(self.folder)
            self._sweep()
            _write(aside, step, state, best, self._record())
            sync_log()
            self._check_ahead(step)
            self._name(aside, final)
            self._check_ahead(step)
            self._point_to(final, best)
            self._drop_old(final)
        except (OSError, SafetensorError) as error:
            self._check()  # a directory that is gone has reasons of its own
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"cannot save the checkpoint of step {step} in {self.folder}: {reason}. "
                "The checkpoints already there are intact; make room or fix the permissions, then start the same "
                "command again"
            ) from error
        finally:
            with suppress(OSError):
                self._sweep(self._writer)
        return final

    def _check_ahead(self, step: int) -> None:
        """Raise where the run is not ours any more, or has come further than we have: `last` never moves back."""
        self._check()
        last = re.fullmatch(r"step_(\d+)", getattr(self.pointed("last"), "name", ""))
        if last is not None and int(last[1]) > step:
            raise RunLost(
                f"{self.folder} has a checkpoint of step {int(last[1])}, and this training is at step {step}: another "
                "one has trained there meanwhile. Nothing was written; this one ends here"
            )

    def newest(self, say: Callable[[str], None] = lambda text: None) -> tuple[Path, State] | None:
        """The newest checkpoint that is whole, read and verified; says so when a newer one had to be passed over.

        What a killed writer left undone is done now: the pointers are moved, and its leftovers removed.
        """
        self._check()
        refuse_link(self.folder)
        self._put_back()
        for path in self.all():
            try:
                state = read(path)
            except NewerFormat:
                raise
            except CheckpointError as error:
                say(f"checkpoint {path.name} is damaged and passed over: {error}")
                continue
            with suppress(OSError):  # what may only be read is still read
                self._point_to(path, read_manifest(path).get("best", False))
                self._sweep()
            return path, state
        return None

    def find(self, name: str) -> Path:
        """A checkpoint by pointer (`best`, `last`), by name or by step."""
        for candidate in (name, f"step_{int(name):08d}" if name.isdigit() else name):
            if (self.folder / candidate / _MANIFEST).exists():
                return (self.folder / candidate).resolve()
        have = ", ".join(path.name for path in self.all()) or "none"
        raise UserError(f"there is no checkpoint {name!r} in {self.folder}; there is: {have}")

    def pointed(self, name: str) -> Path | None:
        """What `best` or `last` points to, if it is there."""
        link = self.folder / name
        return link.resolve() if (link / _MANIFEST).exists() else None

    def all(self) -> list[Path]:
        """Every checkpoint, newest first, whole or not."""
        return sorted((path for path in self.folder.glob("step_*") if path.is_dir()), reverse=True)

    def _name(self, aside: Path, final: Path) -> None:
        """Give a written checkpoint its name, from where on it counts."""
        if final.exists():  # the same step again, after a restart; perhaps a damaged copy
            final.rename(self.folder / f".replaced-{final.name}-{self._writer}")
        aside.rename(final)
        sync_folder(self.folder)

    def _point_to(self, newest: Path, best: bool) -> None:
        self._point("last", newest)
        if best:
            self._point("best", newest)

    def _point(self, name: str, target: Path) -> None:
        if (self.folder / name).is_symlink() and os.readlink(self.folder / name) == target.name:
            return
        link = self.folder / f".{name}-{self._writer}"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        link.replace(self.folder / name)
        sync_folder(self.folder)

    def _drop_old(self, newest: Path) -> None:
        """Drop all but some; those that are newer than the newest were passed over as damaged, and do not count."""
        spared = {self.pointed("best"), self.pointed("last")}
        for path in [path for path in self.all() if path.name <= newest.name][self.keep :]:
            if path.resolve() not in spared:
                self._drop(path)

    def _drop(self, path: Path) -> None:
        doomed = path.rename(self.folder / f".dropped-{path.name}-{self._writer}")
        shutil.rmtree(doomed, ignore_errors=True)

    def _put_back(self, writer: str = "*") -> None:
        """A writer that failed or was killed between two renames leaves a checkpoint without its name."""
        for path in self.folder.glob(f".replaced-*-{writer}"):
            final = self.folder / path.name.removeprefix(".replaced-").rpartition("-")[0]
            if not final.exists():
                with suppress(OSError):
                    path.rename(final)

    def _sweep(self, writer: str = "*") -> None:
        """Remove what failed and killed writers left, or what one of them did."""
        self._put_back(writer)
        for kind in ("writing", "dropped", "replaced"):
            for path in self.folder.glob(f".{kind}-*-{writer}"):
                shutil.rmtree(path, ignore_errors=True)
        for name in ("last", "best"):
            for path in self.folder.glob(f".{name}-{writer}"):
                path.unlink(missing_ok=True)


def read(path: Path) -> State:
    """Read and verify a checkpoint: sizes and hashes of all files, then format upgrades."""
    manifest = read_manifest(path)
    try:
        for name, expected in manifest["files"].items():
            _verify(path / name, expected)
        values = _read_json(path / _STATE)
        files = [name for name in manifest["files"] if name.endswith(".safetensors")]
        # safetensors itself holds the shapes and places in a header against the length of the file
        tensors = {name.removesuffix(".safetensors"): _read_tensors(path / name) for name in files}
    except (OSError, SafetensorError, ValueError, RecursionError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: {error}") from None
    return _upgraded(manifest["format"], (tensors, values))


def read_values(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record of the run and the state in a checkpoint, verified, without its tensors; older ones have no record."""
    files = read_manifest(path)["files"]
    names = [name for name in (_RECORD, _STATE) if name in files]
    try:
        for name in names:
            _verify(path / name, files[name])
        found = {name: _read_json(path / name) for name in names}
    except (OSError, ValueError, RecursionError) as error:
        raise error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: {error}") from None
    return found.get(_RECORD, {}), found[_STATE]


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; its hash of itself is made alike in every format."""
    try:
        _refuse_links(path / _MANIFEST)
        manifest = _read_json(path / _MANIFEST)
        sealed = manifest["sha256"] == _seal(manifest)
        number = int(manifest["format"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path / _MANIFEST} cannot be read: {error}") from None
    if not sealed:
        raise CheckpointError(f"{path / _MANIFEST} is not what was written: its sha256 differs")
    if number > FORMAT:
        raise NewerFormat(
            f"{path} has checkpoint format {number}, and this isoscale reads up to {FORMAT}: install a newer one, or "
            "move that folder away to go on from an older checkpoint"
        )
    if number < 1:
        raise CheckpointError(f"{path} has checkpoint format {number}, which there never was")
    _check_files(path, manifest.get("files"))
    return {**manifest, "format": number}


def _check_files(path: Path, files: Any) -> None:
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise CheckpointError(f"{path / _MANIFEST} names no files with their sizes and hashes")
    if any(Path(name).name != name for name in files):
        raise CheckpointError(f"{path}: the manifest names a file outside of the checkpoint")
    if _STATE not in files:
        raise CheckpointError(f"{path}: the manifest names no {_STATE}")


def _read_json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds a {type(found).__name__}, expected names and values")
    return found


def read_weights(path: Path, average: bool = True) -> dict[str, Tensor]:
    """The weights of a checkpoint; their moving average where there is one."""
    return weights_of(read(path), average)


def weights_of(state: State, average: bool = True) -> dict[str, Tensor]:
    """The weights in a state; their moving average where there is one."""
    tensors, _ = state
    weights = dict(tensors[MODEL])
    if average:
        weights.update(tensors.get("average", {}))
    return weights


def _upgraded(number: int, state: State) -> State:
    for old in range(number, FORMAT):
        state = UPGRADERS[old](state)
    return state


def _write(folder: Path, step: int, state: Snapshot, best: bool, record: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for part, group in state.tensors.items():
        if group:
            _write_tensors(folder / f"{part}.safetensors", group)
    (folder / _STATE).write_text(state.values)
    if record:
        (folder / _RECORD).write_text(record)
    _write_manifest(folder, step, state, best)
    _sync_files(folder)


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    pairs = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    stored = {name: torch.view_as_real(tensor) if name in pairs else tensor for name, tensor in tensors.items()}
    save_tensors(stored, path, {_PAIRS: json.dumps(pairs)} if pairs else None)


def _read_tensors(path: Path) -> dict[str, Tensor]:
    with _named_in_text(path) as name:
        tensors = load_file(name)
        with safe_open(name, "pt") as file:
            pairs = json.loads((file.metadata() or {}).get(_PAIRS, "[]"))
    # cloned, because a file is mapped at places where a complex number must not begin: reading it there is a fault
    return {name: torch.view_as_complex(each.clone()) if name in pairs else each for name, each in tensors.items()}


@contextmanager
def _named_in_text(path: Path) -> Iterator[str]:
    """A name of a file that safetensors takes: it reads none whose path has bytes that are no text."""
    if os.fsencode(path) == str(path).encode(errors="replace"):
        yield str(path)
        return
    with path.open("rb") as file:
        yield f"/proc/self/fd/{file.fileno()}"


def _write_manifest(folder: Path, step: int, state: Snapshot, best: bool) -> None:
    manifest = {
        "format": FORMAT,
        "step": step,
        "best": best,
        "weights_sha256": weights_sha256(_weights(state.tensors)),
        "files": {path.name: _fingerprint(path) for path in sorted(folder.iterdir())},
    }
    (folder / _MANIFEST).write_text(json.dumps({**manifest, "sha256": _seal(manifest)}, indent=1))


def _sync_files(folder: Path) -> None:
    for path in folder.iterdir():
        sync_file(path)
    sync_folder(folder)


def _seal(manifest: Mapping[str, Any]) -> str:
    """A hash of everything else in a manifest."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _weights(tensors: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {**tensors.get(MODEL, {}), **tensors.get("average", {})}


def _fingerprint(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for block in _blocks(path):
        digest.update(block)
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


def _refuse_links(path: Path) -> None:
    if path.exists() and not S_ISREG(path.lstat().st_mode):
        raise CheckpointError(f"{path} is not a plain file; a checkpoint holds no links to files elsewhere")


def _verify(path: Path, expected: dict[str, Any]) -> None:
    _refuse_links(path)
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    if path.stat().st_size != expected.get("bytes"):
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes instead of {expected.get('bytes')}")
    if _sha256(path) != expected.get("sha256"):
        raise CheckpointError(f"{path} is not what was written: its sha256 differs")
