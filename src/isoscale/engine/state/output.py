"""Where a training writes its checkpoints, its metrics and its trace."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from isoscale.engine.state.checkpoint import Checkpoints
from isoscale.engine.state.writer import Saver
from isoscale.observe.metric_log import MetricLog


@dataclass(frozen=True)
class Output:
    """Where a training writes; as it stands, nowhere."""

    checkpoints: Checkpoints | None = None
    metric_log: MetricLog | None = None
    folder: Path | None = None
    """Where people leave the files STOP and SAVE."""
    check_folder: Callable[[], None] = lambda: None
    """Raises where the folder is not this process's any more."""
    trace: Path | None = None
    """Where a trace of some steps goes, where time is measured."""

    @property
    def saver(self) -> Saver | None:
        """What writes checkpoints beside the training."""
        if self.checkpoints is None:
            return None
        return Saver(self.checkpoints, self.metric_log.sync) if self.metric_log else Saver(self.checkpoints)


NOWHERE = Output()
