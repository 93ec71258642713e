"""A run in TensorBoard: one chart for each metric, one curve in it for each stage, and whatever else is to be seen."""

import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from io import BufferedWriter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isoscale.observe.events import Ended, EpochEnded, Event, FiguresMade, Logged, LoggedByTask, Started
from isoscale.observe.figures import Figure, Network
from isoscale.system.files import failures_in_words, own_folder
from isoscale.system.printing import one_line

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


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


FINAL, TAGGED, EXPERIMENT = "final", "tagged", "experiment"


class TensorBoard:
    """Writes `train/loss`, `train/loss_epoch` and `val/loss` as three curves of the chart `loss`.

    TensorBoard draws curves in one chart when they have the same tag and come from different folders, so that each
    stage has a folder: `train` (by step, with what belongs to no stage, such as `lr`), `train_epoch` and `val`.
    Metrics that have tags of one's own are together in the folder `tagged`, where no other can have the same tag.
    From level 2 on it also shows figures, in the folders of their stages, and lists settings beside final metrics.
    TensorBoard looks for the latter two in one folder, and believes the first settings it finds there: they have the
    folder `final`, which is written anew at each start. What a task writes itself is in the folder `experiment`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        purge_step: int | None = None,
        level: Literal[1, 2] = 1,
        note: Callable[[str, Literal["debug", "warning"]], None] = lambda text, level: None,
        check: Callable[[], None] = lambda: None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Go on in `directory`; values at `purge_step` and later are dropped, because they are logged again.

        `check` is called before a file is made, and raises where there must be none. `tags` are tags of one's own for
        metrics, by their names.
        """
        self._directory = Path(directory)
        self._purge_step = purge_step
        self._level = level
        self._note = note
        self._check = check
        self._tags = dict(tags or {})
        self._seen: set[str] = set()
        """The metrics of this process."""
        self._files: dict[str, EventFile] = {}
        self._writer: SummaryWriter | None = None
        if purge_step is not None and self._directory.exists():
            with failures_in_words(self._directory):
                # Every folder has to know at once, also one that the rest of the run never writes to.
                for folder in filter(Path.is_dir, self._directory.iterdir()):
                    if folder.name == EXPERIMENT:
                        self.writer()
                    else:
                        self._file(folder.name)

    def notify(self, event: Event) -> None:
        """Write what the event has to show, as far as the level asks for it."""
        match event:
            case Logged() | LoggedByTask() | EpochEnded():
                self._write_scalars(event.step, event.values)
            case Started() if self._level > 1:
                self._write_settings(event)
            case FiguresMade() if self._level > 1:
                for name, figure in event.figures.items():
                    self._write_figure(event.step, name, figure)
            case Ended():
                self._say_unseen(event)
                if self._level > 1:
                    self._write_end(event)

    def writer(self) -> "SummaryWriter":
        """A SummaryWriter for what a task shows itself, in a folder of its own; what it drops is dropped there too."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._check()
            own_folder(own_folder(self._directory) / EXPERIMENT)
            self._writer = SummaryWriter(str(self._directory / EXPERIMENT), purge_step=self._purge_step, flush_secs=30)
        return self._writer

    def flush(self) -> None:
        """Bring what the writer still holds to its file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Close all files."""
        if self._writer is not None:
            self._writer.close()
        for file in self._files.values():
            file.close()

    def _file(self, folder: str) -> EventFile:
        if folder not in self._files:
            self._check()
            self._files[folder] = EventFile(self._directory / folder, self._purge_step)
        return self._files[folder]

    def _write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        from isoscale.observe.tensorboard.summaries import scalars

        self._seen |= values.keys()
        folders: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            folder, tag = (TAGGED, self._tags[name]) if name in self._tags else _folder_and_tag(name)
            folders.setdefault(folder, {})[tag] = value
        for folder, tagged in folders.items():
            self._file(folder).write(step, summary=scalars(tagged))

    def _say_unseen(self, event: Ended) -> None:
        """Say which tags were for nothing; a run that was continued, or did not end, may have had no time for them."""
        unseen = [name for name in self._tags if name not in self._seen]
        if unseen and event.status == "done" and self._purge_step in (None, 1):
            logged = ", ".join(sorted(self._seen))
            self._note(f"observe.tensorboard_tags: no metric is called {', '.join(unseen)}; logged are {logged}",
                       "warning")  # fmt: skip

    def _write_figure(self, step: int, name: str, shown: Figure) -> None:
        from isoscale.observe.tensorboard.summaries import figure

        folder, tag = _folder_and_tag(name)
        if isinstance(shown, Network):
            self._write_graph(folder, shown)
        else:
            self._file(folder).write(step, summary=figure(tag, shown))

    def _write_graph(self, folder: str, network: Network) -> None:
        from isoscale.observe.tensorboard.summaries import graph

        try:
            drawn = graph(network)
        except Exception as error:  # whatever a network does when it is traced
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            self._note(f"TensorBoard gets no graph of {type(network.module).__name__}: {reason}", "debug")
        else:
            self._file(folder).write(0, graph_def=drawn)

    def _write_settings(self, event: Started) -> None:
        from isoscale.observe.tensorboard.summaries import settings

        if FINAL in self._files:
            self._files.pop(FINAL).close()
            shutil.rmtree(self._directory / FINAL)
        self._file(FINAL).write(event.step, summary=settings(event.settings))

    def _write_end(self, event: Ended) -> None:
        from isoscale.observe.tensorboard.summaries import ended, scalars

        values = {_final_tag(name): value for name, value in event.values.items()}
        self._file(FINAL).write(event.step, summary=scalars(values))
        self._file(FINAL).write(event.step, summary=ended(event.status))


def _folder_and_tag(name: str) -> tuple[str, str]:
    stage, _, metric = one_line(name).partition("/")
    if stage == "train" and metric.endswith("_epoch"):
        return "train_epoch", metric.removesuffix("_epoch")
    return (stage, metric) if stage in ("train", "val", "test") else ("train", name)


def _final_tag(name: str) -> str:
    """`val/accuracy` and `best/val/accuracy` as `accuracy` and `accuracy/best`, which TensorBoard keeps together."""
    metric = name.removeprefix("best/").removeprefix("val/")
    return f"{metric}/best" if name.startswith("best/") else metric
