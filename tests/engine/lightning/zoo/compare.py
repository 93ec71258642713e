"""A case trained by Lightning and by isoscale on the CPU, and what is equal."""

import math
import time
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

import isoscale
from tests.engine.lightning.zoo.case import Case

SETTINGS = {"train.device": "cpu", "train.threads": 1, "observe.level": "warning"}
"""Of the machine, not of the script."""


@dataclass(frozen=True)
class Trained:
    """What a training left behind."""

    before: dict[str, Tensor]
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    steps: int
    facts: Any
    seconds: float


@dataclass(frozen=True)
class Compared:
    """What differs, in words; nothing where all is equal."""

    largest: float
    """The largest difference of a weight."""
    differences: list[str]
    """Names of weights, metrics and facts that are not equal."""
    ours: Trained
    theirs: Trained


def trained_by_lightning(case: Case, folder: Path) -> Trained:
    """Lightning's weights and metrics."""
    options = {
        "accelerator": "cpu", "devices": 1, "max_epochs": case.epochs, "logger": False, "num_sanity_val_steps": 1,
        "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, **case.trainer(folder),
    }  # fmt: skip
    saves = any(isinstance(each, pl.callbacks.ModelCheckpoint) for each in options.get("callbacks", []))
    module, data, before = _made(case)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(**options, enable_checkpointing=saves)
        trainer.fit(module, **data)
    seconds = time.perf_counter() - started
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    facts = case.facts(module, options.get("callbacks", []))
    batches = trainer.fit_loop.epoch_loop.total_batch_idx + 1  # under manual optimisation, global_step counts updates
    steps = trainer.global_step if module.automatic_optimization else batches
    return Trained(before, module.state_dict(), metrics, steps, facts, seconds)


def trained_by_isoscale(case: Case, folder: Path, prepare: Callable[[Any], Any] = lambda module: module) -> Trained:
    """The same by isoscale, with the arguments of Lightning's Trainer; a run that is there is continued."""
    options = {"max_epochs": case.epochs, "log_every_n_steps": 1, **case.trainer(folder)}
    module, data, before = _made(case)
    module = prepare(module)
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = isoscale.Trainer(**options, run=folder / "run", **SETTINGS).fit(module, **data)
    seconds = time.perf_counter() - started
    facts = case.facts(module, options.get("callbacks", []))
    metrics = {name: value for name, value in run.metrics.items() if not name.startswith("time/")}
    return Trained(before, module.state_dict(), metrics, run.summary()["step"] - case.skipped, facts, seconds)


def _made(case: Case) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module, data = case.module(), case.data()
    before = {name: each.detach().clone() for name, each in module.named_parameters() if not is_lazy(each)}
    return module, data, before


def compared(case: Case, folder: Path) -> Compared:
    """Train a case twice and compare: weights and steps to the bit, metrics and facts to rounding."""
    ours = trained_by_isoscale(case, _folder(folder / "isoscale"))
    theirs = trained_by_lightning(case, _folder(folder / "lightning"))
    return compare(ours, theirs, case.of_step)


def compare(ours: Trained, theirs: Trained, meant: Collection[str] = ()) -> Compared:
    """What differs between two trainings of a case, but for some metrics that are meant to."""
    differences = [
        f"{name} has other bits"
        for name, value in theirs.weights.items()
        if name not in ours.weights or not torch.equal(value, ours.weights[name])
    ]
    differences += [f"{name} is not in the state_dict" for name in sorted(ours.weights.keys() - theirs.weights.keys())]
    largest = max((_distance(value, ours.weights.get(name)) for name, value in theirs.weights.items()), default=0.0)
    if theirs.before and all(
        torch.equal(value, ours.weights.get(name, value)) for name, value in theirs.before.items()
    ):
        differences.append("nothing was trained")
    if ours.steps != theirs.steps:
        differences.append(f"{ours.steps} steps instead of {theirs.steps}")
    for name, value in theirs.metrics.items():
        if f"{name}_epoch" in theirs.metrics or name in meant:
            continue  # Lightning's callbacks find the value of a step by two names, its loggers by one
        if name not in ours.metrics:
            differences.append(f"no metric {name}")
        elif not math.isclose(ours.metrics[name], value, rel_tol=1e-5, abs_tol=1e-6):
            differences.append(f"{name} is {ours.metrics[name]} instead of {value}")
    differences += _unequal("facts", ours.facts, theirs.facts)
    return Compared(largest, differences, ours, theirs)


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def _distance(one: Tensor, other: Tensor | None) -> float:
    if other is None or one.shape != other.shape:
        return math.inf
    return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0


def _unequal(place: str, ours: Any, theirs: Any) -> list[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict) and ours.keys() == theirs.keys():
        return [word for key in theirs for word in _unequal(f"{place}[{key!r}]", ours[key], theirs[key])]
    if isinstance(theirs, list | tuple) and isinstance(ours, list | tuple) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [word for at, pair in pairs for word in _unequal(f"{place}[{at}]", *pair)]
    if isinstance(theirs, Tensor):
        same = isinstance(ours, Tensor) and torch.equal(ours, theirs)
    elif isinstance(theirs, float):
        same = isinstance(ours, float) and math.isclose(ours, theirs, rel_tol=1e-5, abs_tol=1e-6)
    else:
        same = ours == theirs
    return [] if same else [f"{place} is {ours!r} instead of {theirs!r}"]
