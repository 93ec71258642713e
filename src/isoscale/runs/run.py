"""A run: what a training left behind, to look at and to use."""

import json
import shlex
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from isoscale.engine.state.checkpoint import read, read_manifest, weights_of
from isoscale.engine.state.module_state import give_attributes
from isoscale.engine.state.registry import load_weights
from isoscale.errors import UserError
from isoscale.observe.metric_log import history, last_values, read_metrics
from isoscale.runs.directory import REBUILT, ROOT, RunDirectory
from isoscale.runs.lock import is_held
from isoscale.runs.record import checked

if TYPE_CHECKING:
    from isoscale.recipe.loaded import LoadedRecipe


class Run:
    """The training in a directory."""

    def __init__(
        self, path: str | Path, task: nn.Module | None = None, data: Any = None, *, trust: bool = False
    ) -> None:
        """The run in `path`; `task` and `data` where they were given in Python rather than by a recipe.

        What a run of somebody else names is built only where it is known to be harmless, or with `trust`.
        """
        self.directory = RunDirectory(Path(path))
        self._task = task
        self._data = data
        self._trust = trust
        if _is_sweep(self.directory.path):
            raise UserError(f"{path} is a sweep of many runs: `isoscale runs list {shlex.quote(str(path))}` shows them")
        if not self.directory.exists:
            raise UserError(f"there is no run in {path}: no recipe.yaml and run.json; `isoscale runs list` shows runs")

    @staticmethod
    def exists(path: str | Path) -> bool:
        """Whether there is a run in a directory."""
        return RunDirectory(Path(path)).exists

    @classmethod
    def load(cls, path: str | Path, *, trust: bool = False) -> "Run":
        """The run in a directory."""
        return cls(path, trust=trust)

    @classmethod
    def find(cls, name: str | None = None, *, trust: bool = False) -> "Run":
        """A run by path, by its name below `runs`, or the newest one there."""
        if name is not None:
            candidates = [Path(name), ROOT / name]
            path = next((path for path in candidates if cls.exists(path) or _is_sweep(path)), candidates[0])
            return cls(path, trust=trust)
        runs = cls.all()
        if not runs:
            raise UserError("there is no run yet in the folder `runs`; start one with `isoscale train`")
        return cls(runs[-1].path, trust=trust)

    @classmethod
    def all(cls, root: Path = ROOT) -> list["Run"]:
        """Every run below a folder, oldest first."""
        folders = [path.parent for path in root.glob("*/recipe.yaml")]
        found = [cls(path) for path in folders if cls.exists(path) and not _is_sweep(path)]
        # Of runs that began within one second, the longer name is the later one: digits-…, then digits-…-2.
        return sorted(found, key=lambda run: (run._started, len(run.path.name), run.path.name))

    @property
    def _started(self) -> str:
        try:
            return str(self.record.get("started", ""))
        except (UserError, OSError):
            return ""

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.directory.path

    @property
    def record(self) -> dict[str, Any]:
        """run.json: provenance, decisions and status."""
        return checked(self.directory.read(), self.directory.record)

    @property
    def status(self) -> str:
        """running, done, stopped, failed, or killed: it could not say how it ended."""
        status = str(self.record.get("status", "unknown"))
        return "killed" if status == "running" and not is_held(self.path) else status

    @property
    def message(self) -> str | None:
        """Why it ended before its end, and for one that was killed how to go on."""
        rebuilt = self.record.get(REBUILT)
        if self.status != "killed":
            return rebuilt or self.record.get("message")
        path = str(self.path)
        return f"{rebuilt or 'it ended without a word'}; go on from its last checkpoint: " + (
            f"isoscale.Trainer(recipe, run={path!r}).fit(task, data)"
            if self.record.get("given")
            else f"isoscale train --run {shlex.quote(path)}"
        )

    @property
    def metrics(self) -> dict[str, float]:
        """The last value of every metric."""
        return last_values(self.directory.metrics)

    def history(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric over the training."""
        return history(self.directory.metrics, name)

    @property
    def tensorboard(self) -> Path:
        """The folder to open with TensorBoard."""
        return self.directory.tensorboard

    @property
    def has_best(self) -> bool:
        """Whether a metric has chosen a best checkpoint."""
        return self.directory.checkpoints().pointed("best") is not None

    def checkpoint(self, name: str | None = None) -> Path:
        """A checkpoint by name, or the best one, or the last one where nothing was monitored."""
        checkpoints = self.directory.checkpoints()
        if name is not None:
            return checkpoints.find(name)
        return checkpoints.pointed("best") or checkpoints.find("last")

    def checkpoint_words(self, name: str | None = None) -> str:
        """Which checkpoint a name stands for: `best checkpoint, step 69`."""
        step = int(self.checkpoint(name).name.removeprefix("step_"))
        pointer = name or ("best" if self.has_best else "last")
        return f"step {step}" if pointer.removeprefix("step_").isdigit() else f"{pointer} checkpoint, step {step}"

    def caution(self, checkpoint: str | None = None) -> str | None:
        """What users of the weights must know of a run that is damaged or not at its end, in one line; else None."""
        status, record = self.status, self.record
        if status == "done":
            return record.get(REBUILT)
        step = record.get("step")
        if status in ("running", "killed"):  # its record is from before
            step = max((int(row["step"]) for row in read_metrics(self.directory.metrics)), default=None)
        where = "" if step is None else f" after step {step} of {record.get('num_steps', '?')}"
        is_so = {"running": "is still running", "stopped": "was stopped", "killed": "was killed", "failed": "failed"}
        why = str(self.message or "").strip().partition("\n")[0]
        return (
            f"the run {self.path} {is_so.get(status, f'has the status {status}')}{where}{f' ({why})' if why else ''}; "
            f"these weights are those of its {self.checkpoint_words(checkpoint)}"
        )

    def model(self, checkpoint: str | None = None) -> nn.Module:
        """The network as a plain `nn.Module` with the best weights (or those of another checkpoint), on the CPU."""
        task = self.task(checkpoint)
        inner = getattr(task, "model", None)
        return inner if isinstance(inner, nn.Module) else task

    def task(self, checkpoint: str | None = None) -> nn.Module:
        """The whole task with the weights of a checkpoint, on the CPU; of one that was given in Python a copy."""
        own = self._task
        try:
            copy = deepcopy(own)
        except Exception:  # not every module can be copied
            copy = own
        return Run(self.path, copy, self._data, trust=self._trust).live_task(checkpoint).eval()

    def live_task(self, checkpoint: str | None = None) -> nn.Module:
        """The same, but the very task that was given in Python, so that its hooks reach those who look at it."""
        task = self._rebuilt() if self._task is None else self._task
        state = read(self.checkpoint(checkpoint))
        weights = weights_of(state)
        task = task.cpu()
        for name, parameter in task.named_parameters():
            if name in weights:
                parameter.data = parameter.data.to(weights[name].dtype)
        load_weights(task, weights)
        give_attributes(task, state[0].get("extra", {}), state[1]["extra"])
        return task

    def to_build(self) -> "LoadedRecipe":
        """The recipe, all of which may be built; else an error says what a stranger has chosen."""
        from isoscale.recipe.load import load_resolved, to_build
        from isoscale.recipe.trust import Trust

        return to_build(load_resolved(self.directory.recipe), Trust.of(self._trust))

    def data(self) -> Any:
        """The data of the run: as it was given in Python, or built anew from the recipe."""
        from isoscale.recipe.components import data_spec, instantiate

        if self._data is not None:
            return self._data
        if self.record.get("given"):
            raise UserError("the data of this run was given in Python; give it again: isoscale.test(run, data=...)")
        return instantiate(data_spec(self.to_build().recipe.data))

    def _rebuilt(self) -> nn.Module:
        from isoscale.recipe.components import instantiate, task_spec

        given = self.record.get("given")
        if given:
            raise UserError(
                f"the task of this run, {given}, was given in Python; make it again and load it with "
                f"isoscale.Run(path, task=...).model()"
            )
        task: nn.Module = instantiate(task_spec(self.to_build().recipe.task))
        return task

    def summary(self) -> dict[str, Any]:
        """What `isoscale runs show --json` prints."""
        record = self.record
        return {
            "path": str(self.path),
            "name": record.get("name"),
            "status": self.status,
            **{key: record.get(key) for key in ("epoch", "step", "num_steps", "best", "started", "seconds")},
            "message": self.message,
            "metrics": self.metrics,
            "weights_sha256": self._weights_sha256(),
        }

    def summary_if_readable(self) -> dict[str, Any]:
        """The summary; of a run whose files are damaged, only that it is."""
        unknown = ("name", "epoch", "step", "num_steps", "best", "started", "seconds", "weights_sha256")
        try:
            return self.summary()
        except (UserError, OSError) as error:
            nothing = dict.fromkeys(unknown)
            return {"path": str(self.path), "status": "damaged", "message": str(error), "metrics": {}, **nothing}

    def _weights_sha256(self) -> str | None:
        last = self.directory.checkpoints().pointed("last")
        try:
            return read_manifest(last)["weights_sha256"] if last else None
        except UserError:  # damaged; whoever uses the checkpoint is told
            return None

    def __repr__(self) -> str:
        """Path, status and metrics."""
        return f"Run({str(self.path)!r}, {self.status}, {json.dumps(self.metrics)})"


def _is_sweep(path: Path) -> bool:
    return (path / "sweep.json").is_file()
