"""The file that TensorBoard reads: one record an event, on disk as soon as it is written."""

import os
import socket
import time
from io import BufferedWriter
from pathlib import Path
from typing import Any

from isoscale.system.files import own_folder


class EventFile:
    """One file of TensorBoard events, written at once.

    TensorBoard's own EventFileWriter keeps up to two minutes of events in a thread, which a killed run would lose, and
    imports all of TensorFlow where that is installed; only its record format is used here.
    """

    def __init__(self, directory: Path, purge_step: int | None) -> None:
        """A new file in `directory`; what older ones there say of `purge_step` and later is void."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        own_folder(own_folder(directory.parent) / directory.name)
        self._file: BufferedWriter = (directory / _name(time.time_ns())).open("xb")
        self._records = RecordWriter(self._file)
        self.write(0, file_version="brain.Event:2")
        if purge_step is not None:
            self.write(purge_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, **content: Any) -> None:
        """Write one event, such as `summary=…`, and hand it to the operating system."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), step=step, **content).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _name(nanoseconds: int) -> str:
    # TensorBoard reads the files of a folder in the order of their names, so that the name must grow with time.
    seconds, rest = divmod(nanoseconds, 10**9)
    return f"events.out.tfevents.{seconds:010d}.{rest:09d}.{socket.gethostname()}.{os.getpid()}"
