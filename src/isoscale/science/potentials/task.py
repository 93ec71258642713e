"""Training a potential: errors of energies, forces, virials and energies of atoms, right on any split of frames."""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from isoscale.data.sources import Source
from isoscale.engine.dataset_metrics import EvaluatedDataset, Store
from isoscale.engine.task import Task, TaskRanks, Training
from isoscale.errors import UserError
from isoscale.science.potentials import results
from isoscale.science.potentials.atomic_systems import AtomicSystems
from isoscale.science.potentials.deepmd import checkpoint as deepmd_checkpoint
from isoscale.science.potentials.deploy import Deployed
from isoscale.science.potentials.model import DeepPotential, Prediction
from isoscale.science.potentials.statistics import fit_statistics, systems_of
from isoscale.science.potentials.systems import FILES

UNITS = {"energy": "eV/atom", "force": "eV/Å", "virial": "eV/atom", "atom_energy": "eV"}
"""Of the errors of each label, as they are shown."""
ALWAYS = ("energy", "force")
"""What every system must be labelled with where it is learned; other labels may be missing in some."""
CURVE_COLUMNS = {"energy": "rmse_e", "force": "rmse_f", "virial": "rmse_v"}
"""The columns of a learning curve as tools for Deep Potentials know them, by label."""


class Potential(Task):
    """Energies and forces of atoms, learned from frames."""

    units: ClassVar[Mapping[str, str]] = {
        f"{label}_{error}": unit for label, unit in UNITS.items() for error in ("rmse", "mae")
    }
    of_all = "all systems"
    dataset_metrics_only = True
    as_stored = frozenset(("coord", "box", "energy", "vectors"))

    def __init__(
        self,
        model: DeepPotential,
        labels: list[str] | None = None,
        statistics_frames: int = 10,
        statistics_file: str | None = None,
        allow_more_neighbours: bool = False,
    ) -> None:
        """`labels` are learned: any of energy, force, virial and atom_energy; by default the first two.

        Statistics are measured on the first `statistics_frames` frames of each system, and kept in `statistics_file`
        for other runs. With `allow_more_neighbours`, those beyond the model's `sel` are left out, the farthest first.
        """
        super().__init__()
        self.model = model
        self.labels = list(ALWAYS if labels is None else labels)
        for label in self.labels:
            if label not in UNITS:
                raise UserError(f"task.labels: {label!r} is not one of {', '.join(UNITS)}")
        if not self.labels or statistics_frames < 1:
            raise UserError("task.labels and task.statistics_frames must not be empty or 0: there is nothing to learn")
        self._statistics_frames = statistics_frames
        self._statistics_file = Path(statistics_file) if statistics_file else None
        self._allows_more = allow_more_neighbours

    @property
    def curve_columns(self) -> Mapping[str, str]:
        """The root of the loss, and the error of each label that is learned."""
        learned = [label for label in CURVE_COLUMNS if label in self.labels]
        return {"rmse": "loss", **{CURVE_COLUMNS[label]: f"{label}_rmse" for label in learned}}

    def adapt(self, data: Any, ranks: TaskRanks, say: Callable[[str], None]) -> Any:
        """The frames with their neighbours within the cutoff."""
        if not isinstance(data, AtomicSystems):
            raise UserError(
                f"a potential learns from systems of atoms, not from {type(data).__name__}: use "
                "data.class=atomic_systems"
            )
        return data.with_neighbours(self.model.types, self.model.cutoff, ranks, say)

    def check_data(self, split: str, source: Source) -> None:
        """Refuse frames without a label that is learned, or with more neighbours than the model has room for.

        A test takes any frames with a label: what they lack is not measured.
        """
        systems = systems_of(source)
        for label in self.labels if split in ("train", "val") else ():
            lacking = [system for system in systems if label not in system.labels]
            if lacking and (label in ALWAYS or len(lacking) == len(systems)):
                raise UserError(_without_label(label, lacking[0].name, split))
        for system in systems if split == "test" else ():
            if not system.labels:
                raise UserError(_without_labels(system.name))
        for system in systems if not self._allows_more else ():
            over = system.count_over(self.model.sel)
            if over is not None:
                raise UserError(_too_many(over, system, self.model, split))

    def weights_from(self, found: Any) -> dict[str, Tensor] | None:
        """Those of a checkpoint of DeePMD-kit, with its statistics."""
        saved = deepmd_checkpoint.potential(found)
        if saved is None:
            return None
        _check_same(saved, self.model)
        return {f"model.{name}": tensor for name, tensor in saved.state_dict().items()}

    def fit_statistics(self, training: Training) -> None:
        """Statistics of what the descriptor sees, and the energies of lone atoms."""
        fit_statistics(self.model, training, self._statistics_frames, self._statistics_file)

    def precompute(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the model makes of coordinates before anything learned comes in."""
        dtype = next(self.model.parameters()).dtype
        found = self.model.prepare(batch, with_virial="virial" in self.labels)
        as_cast = {key for key, tensor in found.items() if tensor.is_floating_point()} - self.as_stored
        return {key: tensor.to(dtype) if key in as_cast else tensor for key, tensor in found.items()}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The terms of the loss, one for each label."""
        return self._step(batch, with_mae=False)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """The terms of the loss, one for each label, and mean absolute errors beside them."""
        return self._step(batch, with_mae=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Energy, forces, virial and energies of atoms of each frame, its atoms in the order that they are stored."""
        return results.in_stored_order(self.model(batch), batch["places"])

    def evaluate_dataset(self, dataset: EvaluatedDataset) -> dict[str, float]:
        """Predictions against labels, and errors by system where there are several."""
        return results.evaluate_dataset(dataset)

    def write_predictions(self, dataset: EvaluatedDataset, store: Store) -> None:
        """Energies, forces and virials, arrays of its own for each system."""
        results.write_predictions(dataset, store)

    def deployed(self) -> Deployed:
        """For use elsewhere: any atoms with a list of neighbours, in plain torch operations."""
        return Deployed(self.model, self._allows_more)

    def _step(self, batch: dict[str, Tensor], with_mae: bool) -> dict[str, Tensor]:
        with_virial = "virial" in self.labels
        batch = self.model.prepare(batch, with_virial) if "coord" in batch else batch
        found: Prediction = self.model(batch, with_virial)
        num_atoms = batch["num_atoms"].to(found.force.dtype)
        errors = {label: errors_of(label, found, batch, num_atoms) for label in self.labels}
        terms = {label: self._judge(label, each) for label, each in errors.items()}
        for label, each in errors.items() if with_mae else ():
            self.log(f"{label}_mae", ((each.entries.abs().sum(1) * each.scale).sum(), each.weight))
        return terms

    def _judge(self, label: str, errors: "Errors") -> Tensor:
        """Log the error of a label; returns its part of the loss, a mean over frames."""
        squares = errors.entries.square().sum(1) * errors.learned
        self.log(f"{label}_rmse", ((squares.detach() * errors.shown).sum(), errors.weight), root=True)
        return squares.mean()


class Errors(NamedTuple):
    """What is wrong with the predictions of a label."""

    entries: Tensor
    """Differences (frames, …); nothing for a virtual atom, and in a frame without the label."""
    learned: Tensor
    """Factor of a frame's sum of squares in the loss (frames)."""
    shown: Tensor | float
    """Factor of that in the sum of squares that people see."""
    scale: Tensor | float
    """Factor of an entry as people see it."""
    weight: Tensor | float
    """Number of entries that count, of all frames."""


def errors_of(label: str, found: Prediction, batch: Mapping[str, Tensor], num_atoms: Tensor) -> Errors:
    """The errors of frames in a label; energies and virials are shown and learned per atom."""
    if label not in batch:  # no part of this system's loss, but logged: all ranks must log the same
        nothing = torch.zeros_like(num_atoms)
        return Errors(nothing.unsqueeze(1), nothing, 0.0, 0.0, 0.0)
    predicted: Tensor = getattr(found, label)
    entries = (predicted - batch[label]).to(num_atoms.dtype).view(len(predicted), -1)
    share, count = 1 / num_atoms, num_atoms
    has = batch.get(f"has_{label}")
    if has is not None:
        entries, count = entries * has.unsqueeze(1), num_atoms * has
    num_frames = len(entries) if has is None else has.sum(dtype=num_atoms.dtype)
    match label:
        case "energy":
            return Errors(entries, share, share, share, num_frames)
        case "force":
            return Errors(entries, share / 3, 3 * num_atoms, 1.0, 3 * count.sum())
        case "virial":
            return Errors(entries, share / 9, 9 * share, share, 9 * num_frames)
        case _:
            return Errors(entries, share, num_atoms, 1.0, count.sum())


def _without_label(label: str, system: str, split: str) -> str:
    return (
        f"{system} ({split}) has no {FILES.get(label, label)}.npy, but {label} is learned: add the file, or leave "
        f"{label} out of task.labels (in an input file of DeePMD-kit: set its prefactors to 0)"
    )


def _check_same(saved: DeepPotential, model: DeepPotential) -> None:
    """Refuse weights of another model, in its own words: their shapes say less, and not all of it."""
    theirs, ours = _settings(saved), _settings(model)
    differ = [key for key, value in theirs.items() if value != ours[key]]
    if differ:
        told = ", ".join(f"its {key} is {theirs[key]}, here it is {ours[key]}" for key in differ)
        words = " ".join(shlex.quote(f"task.model.{key}={json.dumps(theirs[key])}") for key in differ)
        raise UserError(f"{told}: use {words}")


def _settings(model: DeepPotential) -> dict[str, Any]:
    """What two models must have in common to share a descriptor's weights."""
    shape = {name: getattr(model.descriptor, name, None) for name in ("widths", "axis_width", "dt", "one_side")}
    own = {**model.descriptor.statistics(), **shape}
    return {"types": model.types, **{f"descriptor.{name}": value for name, value in own.items()}}


def _without_labels(system: str) -> str:
    files = ", ".join(f"{FILES.get(label, label)}.npy" for label in UNITS)
    return (
        f"{system} (test) has no labels to compare with, expected one of {files}; isoscale predict RUN --systems "
        f"{system} --out FILE computes them"
    )


def _too_many(over: Any, system: Any, model: DeepPotential, split: str) -> str:
    most = [max(most, found) for most, found in zip(system.most_neighbours, model.sel, strict=True)]
    is_training = split in ("train", "val")
    advice = "use a" if is_training else "the potential was not made for such frames: train another, with a"
    return (
        f"{system.locate(over.frame)}: atom {over.atom} has {over.found} neighbours of type {model.types[over.type]} "
        f"within {model.cutoff:g} Å, but sel allows {model.sel[over.type]} ({over.num_atoms:,} atoms in "
        f"{over.num_frames:,} frames have more than that); {advice} sel of at least {most}, or "
        "task.allow_more_neighbours=true, which leaves out the farthest"
    )
