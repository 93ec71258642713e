"""Checkpoints: a directory of safetensors and JSON with a manifest, written aside, synced and renamed.

    step_00000400/
      manifest.json      format, step, size and sha256 of every other file, hashes of the weights and of itself
      state.json         everything that is not a tensor
      <part>.safetensors one file for each part of the state registry that has tensors

A directory with a valid manifest is complete: it got its name only after all its bytes were on the disk.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from isoscale.engine.state import weights_sha256
from isoscale.errors import UserError

FORMAT = 1
MODEL = "model"
_MANIFEST = "manifest.json"
_STATE = "state.json"

State = tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Any]]]
Upgrader = Callable[[State], State]
UPGRADERS: dict[int, Upgrader] = {}
"""From a format to the next one: `UPGRADERS[1]` turns a state of format 1 into one of format 2."""


class CheckpointError(UserError):
    """A checkpoint that cannot be used, and why."""


class Checkpoints:
    """The checkpoints of a run, in one folder, with the pointers `last` and `best`."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """The checkpoints below `folder`; `keep` recent ones stay."""
        self.folder = folder
        self.keep = keep

    def save(self, step: int, state: State, best: bool = False) -> Path:
        """Write a checkpoint whole or not at all, then move the pointers and drop old ones."""
        final = self.folder / f"step_{step:08d}"
        aside = self.folder / f".writing-{final.name}-{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
            _write(aside, step, state)
            if final.exists():  # the same step again, after a restart: equal bytes, but perhaps a damaged copy
                final.rename(self.folder / f".replaced-{final.name}-{os.getpid()}")
            aside.rename(final)
            _sync_folder(self.folder)
            self._sweep()
            self._point("last", final)
            if best:
                self._point("best", final)
            self._drop_old(final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise UserError(
                f"cannot save the checkpoint of step {step} in {self.folder}: {getattr(error, 'strerror', error)}. "
                "The checkpoints already there are intact; make room or fix the permissions, then start the same "
                "command again"
            ) from error
        return final

    def newest(self, say: Callable[[str], None] = lambda text: None) -> tuple[Path, State] | None:
        """The newest checkpoint that is whole, read and verified; says so when a newer one had to be passed over."""
        for path in self._all():
            try:
                return path, read(path)
            except CheckpointError as error:
                say(f"checkpoint {path.name} is damaged and passed over: {error}")
        return None

    def find(self, name: str) -> Path:
        """A checkpoint by pointer (`best`, `last`), by name or by step."""
        for candidate in (name, f"step_{int(name):08d}" if name.isdigit() else name):
            if (self.folder / candidate / _MANIFEST).exists():
                return (self.folder / candidate).resolve()
        have = ", ".join(path.name for path in self._all()) or "none"
        raise UserError(f"there is no checkpoint {name!r} in {self.folder}; there is: {have}")

    def pointed(self, name: str) -> Path | None:
        """What `best` or `last` points to, if it is there."""
        link = self.folder / name
        return link.resolve() if (link / _MANIFEST).exists() else None

    def _all(self) -> list[Path]:
        return sorted((path for path in self.folder.glob("step_*") if path.is_dir()), reverse=True)

    def _point(self, name: str, target: Path) -> None:
        link = self.folder / f".{name}-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        link.replace(self.folder / name)
        _sync_folder(self.folder)

    def _drop_old(self, newest: Path) -> None:
        """Drop all but some; those that are newer than the newest were passed over as damaged, and do not count."""
        spared = {self.pointed("best"), self.pointed("last")}
        for path in [path for path in self._all() if path.name <= newest.name][self.keep :]:
            if path.resolve() not in spared:
                doomed = path.rename(self.folder / f".dropped-{path.name}-{os.getpid()}")
                shutil.rmtree(doomed, ignore_errors=True)

    def _sweep(self) -> None:
        """Remove what killed writers left."""
        for pattern in (".writing-*", ".dropped-*", ".replaced-*"):
            for path in self.folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        for pattern in (".last-*", ".best-*"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)


def read(path: Path) -> State:
    """Read and verify a checkpoint: sizes and hashes of all files, then format upgrades."""
    manifest = read_manifest(path)
    try:
        for name, expected in manifest["files"].items():
            _verify(path / name, expected)
        values = json.loads((path / _STATE).read_text())
        files = [name for name in manifest["files"] if name.endswith(".safetensors")]
        tensors = {name.removesuffix(".safetensors"): load_file(path / name) for name in files}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from None
    return _upgraded(manifest["format"], (tensors, values))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text())
        number, names, seal = int(manifest["format"]), list(manifest["files"]), manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / _MANIFEST} cannot be read: {error}") from None
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{path}: the manifest names a file outside of the checkpoint")
    if number > FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {number}, and this isoscale reads up to {FORMAT}: install a newer one"
        )
    if seal != _seal(manifest):
        raise CheckpointError(f"{path / _MANIFEST} is not what was written: its sha256 differs")
    return dict(manifest)


def read_weights(path: Path, average: bool = True) -> dict[str, Tensor]:
    """The weights of a checkpoint; their moving average where there is one."""
    tensors, _ = read(path)
    weights = dict(tensors[MODEL])
    if average:
        weights.update(tensors.get("average", {}))
    return weights


def _upgraded(number: int, state: State) -> State:
    for old in range(number, FORMAT):
        state = UPGRADERS[old](state)
    return state


def _write(folder: Path, step: int, state: State) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tensors, values = state
    for part, group in tensors.items():
        if group:
            save_file(_on_host(group), folder / _file(part))
    (folder / _STATE).write_text(json.dumps(values, indent=1))  # a metric may be NaN, which Python reads back
    manifest = {
        "format": FORMAT,
        "step": step,
        "weights_sha256": weights_sha256(_weights(tensors)),
        "files": {path.name: _fingerprint(path) for path in sorted(folder.iterdir())},
    }
    (folder / _MANIFEST).write_text(json.dumps({**manifest, "sha256": _seal(manifest)}, indent=1))
    for path in folder.iterdir():
        _sync_file(path)
    _sync_folder(folder)


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as safetensors takes them: none may share its memory with another."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        copy = tensor.detach().cpu().contiguous()
        storage = copy.untyped_storage()
        if storage.data_ptr() in seen or storage.nbytes() != copy.nbytes:
            copy = copy.clone()
        seen.add(copy.untyped_storage().data_ptr())
        found[name] = copy
    return found


def _seal(manifest: Mapping[str, Any]) -> str:
    """A hash of everything else in a manifest."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _weights(tensors: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {**tensors.get(MODEL, {}), **tensors.get("average", {})}


def _file(part: str) -> str:
    return f"{part}.safetensors"


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


def _verify(path: Path, expected: dict[str, Any]) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    if path.stat().st_size != expected["bytes"]:
        raise CheckpointError(f"{path} has {path.stat().st_size} bytes instead of {expected['bytes']}")
    if _sha256(path) != expected["sha256"]:
        raise CheckpointError(f"{path} is not what was written: its sha256 differs")


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
