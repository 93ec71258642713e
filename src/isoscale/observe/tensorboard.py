"""Scalars for TensorBoard: one chart for each metric, one curve in it for each stage."""

import os
import socket
import time
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING

from isoscale.observe.events import EpochEnded, Event, Logged
from isoscale.observe.files import failures_in_words

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event as EventProto


class TensorBoard:
    """Writes `train/loss`, `train/loss_epoch` and `val/loss` as three curves of the chart `loss`.

    TensorBoard draws curves in one chart when they have the same tag and come from different folders, so that each
    stage has a folder: `train` (by step, with what belongs to no stage, such as `lr`), `train_epoch` and `val`.
    """

    def __init__(self, directory: str | os.PathLike[str], purge_step: int | None = None) -> None:
        """Go on in `directory`; values at `purge_step` and later are dropped, because they are logged again."""
        self._directory = Path(directory)
        self._purge_step = purge_step
        self._files: dict[str, _EventFile] = {}
        if purge_step is not None and self._directory.exists():
            with failures_in_words(self._directory):
                # Every folder has to know at once, also one that the rest of the run never writes to.
                for folder in filter(Path.is_dir, self._directory.iterdir()):
                    self._file(folder.name)

    def notify(self, event: Event) -> None:
        """Write the values of the event, if it has any."""
        if isinstance(event, Logged | EpochEnded):
            for folder, values in _by_folder(event.values).items():
                self._file(folder).write_scalars(event.step, values)

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()

    def _file(self, folder: str) -> "_EventFile":
        if folder not in self._files:
            self._files[folder] = _EventFile(self._directory / folder, self._purge_step)
        return self._files[folder]


class _EventFile:
    """One file of TensorBoard events, written at once.

    TensorBoard's own EventFileWriter keeps up to two minutes of events in a thread, which a killed run would lose, and
    imports all of TensorFlow where that is installed; only its record format is used here.
    """

    def __init__(self, directory: Path, purge_step: int | None) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        self._file: BufferedWriter = (directory / _file_name(time.time_ns())).open("xb")
        self._records = RecordWriter(self._file)
        self._write(_event(file_version="brain.Event:2"))
        if purge_step is not None:
            self._write(_event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self._file.flush()

    def write_scalars(self, step: int, values: dict[str, float]) -> None:
        """Write one value for each tag and hand them to the operating system."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._write(_event(step=step, summary=Summary(value=scalars)))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: "EventProto") -> None:
        self._records.write(event.SerializeToString())


def _event(**fields: object) -> "EventProto":
    from tensorboard.compat.proto.event_pb2 import Event as EventProto

    return EventProto(wall_time=time.time(), **fields)


def _file_name(nanoseconds: int) -> str:
    # TensorBoard reads the files of a folder in the order of their names, so that the name must grow with time.
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"events.out.tfevents.{seconds:010d}.{rest:09d}.{socket.gethostname()}.{os.getpid()}"


def _by_folder(values: dict[str, float]) -> dict[str, dict[str, float]]:
    folders: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        folder, tag = _folder_and_tag(name)
        folders.setdefault(folder, {})[tag] = value
    return folders


def _folder_and_tag(name: str) -> tuple[str, str]:
    stage, _, metric = name.partition("/")
    if stage == "train" and metric.endswith("_epoch"):
        return "train_epoch", metric.removesuffix("_epoch")
    return (stage, metric) if stage in ("train", "val", "test") else ("train", name)
