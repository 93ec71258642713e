"""torchmetrics objects, inside a step: their state is updated in place, so that a captured step can replay it.

Duck typed, so that nothing here imports torchmetrics.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from isoscale.parallel.collectives import ALONE, Ranks


def is_metric(value: Any) -> bool:
    """Whether this is a torchmetrics object."""
    return isinstance(value, nn.Module) and all(hasattr(value, name) for name in ("_defaults", "compute", "update"))


def adds_up(metric: Any) -> bool:
    """Whether the state is made of sums: only then can a batch be added in place."""
    reductions = getattr(metric, "_reductions", {})
    names = [getattr(reduction, "__name__", "") for reduction in reductions.values()]
    return bool(names) and all(name == "dim_zero_sum" for name in names)


def update(metric: Any, prediction: Tensor, target: Tensor) -> None:
    """Add a batch to a metric; in place where its state is made of sums."""
    if not adds_up(metric):
        metric.update(prediction, target)
        return
    totals = {name: getattr(metric, name) for name in metric._defaults}
    metric.reset()
    metric.update(prediction, target)
    for name, total in totals.items():
        total.add_(getattr(metric, name))
        setattr(metric, name, total)
    metric._in_place = True


def in_place(metric: Any) -> bool:
    """Whether the metric was updated by `update` here, in place, rather than by the task itself."""
    return getattr(metric, "_in_place", False)


def compute(metric: Any) -> dict[str, float]:
    """The metric's values by suffix: "" for one number, else the name or number of each."""
    metric._update_count = max(1, metric._update_count)  # replayed updates are not counted on the host
    metric._computed = None
    value = metric.compute()
    if isinstance(value, dict):
        return {f"_{name}": float(entry) for name, entry in value.items()}
    if value.numel() == 1:
        return {"": float(value)}
    return {f"_{index}": float(entry) for index, entry in enumerate(value.flatten())}


def reset(metric: Any) -> None:
    """Back to the initial state, at the same addresses where the state is made of sums."""
    if not adds_up(metric):
        metric.reset()
        return
    for name, default in metric._defaults.items():
        getattr(metric, name).copy_(default)
    metric._update_count, metric._computed = 0, None


def keep(task: nn.Module) -> Callable[[], None]:
    """Remember what every metric below a task has counted; the function returned goes back to it."""
    found: list[Any] = [metric for metric in task.modules() if is_metric(metric)]
    kept = [
        (metric, metric._update_count, {key: _copy(getattr(metric, key)) for key in metric._defaults})
        for metric in found
    ]

    def go_back() -> None:
        for metric, count, states in kept:
            metric._update_count, metric._computed = count, None
            for key, state in states.items():
                setattr(metric, key, state)

    return go_back


def _copy(state: Any) -> Any:
    return state.clone() if isinstance(state, Tensor) else list(state)


def paths(task: nn.Module, logged: dict[str, Any]) -> dict[str, str]:
    """Where in a task the metrics are that were logged under these names."""
    found = {id(module): path for path, module in task.named_modules()}
    return {name: found[id(metric)] for name, metric in logged.items() if id(metric) in found}


class MetricStates:
    """The state of every torchmetrics object below a task."""

    def __init__(self, task: nn.Module, logged: dict[str, Any], ranks: Ranks = ALONE) -> None:
        """Find the metrics of a task; `logged` holds those of the training stage by the names they are logged under."""
        self._ranks = ranks
        self._task = task
        self._logged = logged

    def _metrics(self) -> Iterator[tuple[str, Any]]:
        return ((name, module) for name, module in self._task.named_modules() if is_metric(module))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors by metric and name; a list state as its concatenation, one that metrics share only once."""
        tensors: dict[str, Tensor] = {}
        owners: dict[int, str] = {}
        values: dict[str, Any] = {}
        for name, metric in self._metrics():
            names = [key for key, value in self._logged.items() if value is metric]
            values[name] = {"count": metric._update_count, "logged": names, "shared": {}}
            for key in metric._defaults:
                entry = getattr(metric, key)
                if isinstance(entry, Tensor) and owners.setdefault(id(entry), f"{name}/{key}") != f"{name}/{key}":
                    values[name]["shared"][key] = owners[id(entry)]
                elif isinstance(entry, Tensor):
                    tensors[f"{name}/{key}"] = entry
                elif entry:
                    tensors[f"{name}/{key}"] = torch.cat([piece.reshape(-1, *piece.shape[1:]) for piece in entry])
        return tensors, values

    def together(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """What all ranks have counted; every rank must ask for it."""
        tensors, values = self.state()
        if self._ranks.alone or not values:
            return tensors, values
        every = self._ranks.all_gather((tensors, values), "the metrics of all ranks")
        joined = {}
        for name, metric in self._metrics():
            for key, default in metric._defaults.items():
                pieces = [found[f"{name}/{key}"] for found, _ in every if f"{name}/{key}" in found]
                if pieces and isinstance(default, Tensor):
                    joined[f"{name}/{key}"] = metric._reductions[key](torch.stack(pieces))
                elif pieces:
                    joined[f"{name}/{key}"] = torch.cat(pieces)
        return joined, every[0][1]

    def load(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Take over a state; on several ranks, the first one goes on with the counts of all."""
        for name, metric in self._metrics():
            saved = values.get(name, {"count": 0, "logged": [], "shared": {}})
            metric._update_count = saved["count"]
            self._logged.update(dict.fromkeys(saved["logged"], metric))
            for key, default in metric._defaults.items():
                stored = tensors.get(saved["shared"].get(key, f"{name}/{key}"))
                if stored is not None and self._ranks.is_main:
                    loaded = stored.to(metric.device, copy=True)
                    setattr(metric, key, loaded if isinstance(default, Tensor) else [loaded])
