"""Training on crystals: energies, forces, stresses and properties of structures of any size, right on any split."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from isoscale.data.sources import Source, locate
from isoscale.engine.dataset_metrics import EvaluatedDataset, Store
from isoscale.engine.task import Task, TaskRanks, Training, WeightedSum, check_labels
from isoscale.errors import UserError, nearest
from isoscale.science.atoms.cache import say_first
from isoscale.science.crystals import results
from isoscale.science.crystals.edges import GraphSettings
from isoscale.science.crystals.labels import Labels
from isoscale.science.crystals.model import CrystalModel
from isoscale.science.crystals.normalise import Normalisation
from isoscale.science.crystals.reading.elements import SYMBOLS
from isoscale.science.crystals.targets import KNOWN, Learned, learned
from isoscale.science.crystals.transforms import PeriodicEdges, settings_of

TINY = 1e-30
"""A weight of nothing: too small to change any other when it is added, and still something to divide by."""
MOST_NAMED = 5
"""Structures that an error names."""


class Crystal(Task):
    """Targets of structures of atoms, learned by a graph network.

    A term of the loss is a mean over structures, or over atoms, that have the target. The number of labelled atoms per
    structure is that of all training data, so that every atom weighs the same wherever a batch is cut: what a
    structure adds to the loss does not depend on the others of its batch.
    """

    of_all: ClassVar[str] = "all structures"
    dataset_metrics_only: ClassVar[bool] = True
    predicts_on_ranks: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        targets: Mapping[str, Any] | Sequence[str] | None = None,
        loss: Literal["mse", "mae", "huber"] = "mse",
        delta: float = 1.0,
        normalise: Any = "auto",
        allow_unknown_elements: bool = False,
    ) -> None:
        """`model` is a network such as painn, or a whole CrystalModel; `targets` are learned: energy and forces.

        A target is a name, or a name with options: `{energy: {per_atom: sqrt}, forces: {loss: huber, delta: 0.1},
        band_gap: {of: structure}, charges: {of: atom}, crystal_system: {classes: 7}}`. `loss` and `delta`, where a
        Huber loss becomes linear, are for targets that have none of their own; `train.loss_weights` weighs them.
        `normalise` is auto, none, or numbers: `{energy_mean: -3.7, energy_std: 0.5}`, of energies per atom. Elements
        that the training data does not have are refused in other data, unless they are allowed.
        """
        super().__init__()
        self.targets = learned(targets, loss, delta)
        self._normalisation = Normalisation(normalise, self.targets)
        self.model = with_heads(model, self.targets)
        """In the units of the data."""
        self._allows_unknown = allow_unknown_elements
        self._trained_on: set[int] = set()
        self.as_stored = frozenset(("pos", "cell", *(target.name for target in self.targets)))  # type: ignore[misc]
        self.std: Tensor
        self.register_buffer("std", torch.ones(len(self.targets), dtype=torch.float64))
        self.share: Tensor
        # of the data that is learned now, and not of that behind given weights: found at every start
        self.register_buffer("share", torch.zeros(len(self.targets), dtype=torch.float64), persistent=False)

    @property
    def units(self) -> Mapping[str, str]:  # type: ignore[override]
        """Of errors, as they are shown."""
        return results.units(self.targets)

    def adapt(self, data: Any, ranks: TaskRanks, say: Callable[[str], None]) -> Any:
        """The structures as graphs with the cutoff of the model, where transforms have not made such of them."""
        return as_graphs(data, self.model.cutoff, ranks, say)

    def check_data(self, split: str, source: Source) -> None:
        """Refuse structures that cannot be learned, or that the training data says nothing of.

        A test takes any structures with a target: what they lack is not measured.
        """
        labels = Labels(source)
        self._check_elements(split, labels)
        if split not in ("train", "val", "test"):
            return
        for target in self.targets:
            if target.name in labels:
                _check_target(target, labels, split)
            elif split != "test":
                raise UserError(_without_target(target, labels, split))
        if split == "test" and not any(target.name in labels for target in self.targets):
            names = ", ".join(target.name for target in self.targets)
            raise UserError(
                f"no structure of the test data has {names}: there is nothing to compare with; isoscale predict "
                "computes them"
            )

    def _check_elements(self, split: str, labels: Labels) -> None:
        found = set(labels.elements)
        if split == "train":
            self._trained_on = found
            return
        known = self._trained_on | set(self.model.elements)
        unknown = sorted(found - known)
        if known and unknown and not self._allows_unknown:
            raise UserError(_unknown_elements(unknown, labels, split))

    def fit_statistics(self, training: Training) -> None:
        """Units of the targets that are easy to learn."""
        units = self._normalisation.fit(training)
        for place, target in enumerate(self.targets):
            self.std[place] = units[target.name].std
        for name, unit in units.items():
            if name in self.model.heads:
                self.model.set_units(name, unit.mean, unit.scale)

    def prepare_training(self, source: Source, transforms: Sequence[Any]) -> None:
        """Count labels; remember which elements are learned, besides those that given weights know, and what edges."""
        labels = Labels(source)
        for place, target in enumerate(self.targets):
            self.share[place] = labels.share(target)
        self.model.set_elements(self._trained_on)
        settings = graph_of_source(source)
        if settings is not None:
            self.model.set_edges(settings)

    def described(self) -> dict[str, str]:
        """What files of weights say of the model."""
        from isoscale.science.crystals.deploy import described

        return described(self.model)

    def deployed(self) -> nn.Module:
        """For use elsewhere: any structures with a list of their edges, in plain torch operations."""
        from isoscale.science.crystals.deploy import Deployed

        return Deployed(self.model)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """The terms of the loss, one for each target."""
        return self._step(batch, is_training=True)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        """The terms of the loss, one for each target: means over all structures or atoms that have it."""
        return self._step(batch, is_training=False)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Everything the model can say of structures and atoms, in the units of the data; padding is not cut off.

        Of classes, the most probable one and the probability of each.
        """
        found = dict(self.model(batch, create_graph=False, wanted=None))
        for target in self.targets:
            if target.kind == "classes":
                probability = torch.softmax(found[target.name].double(), 1)
                found |= {target.name: probability.argmax(1), f"{target.name}_probability": probability}
        return found

    def evaluate_dataset(self, dataset: EvaluatedDataset) -> dict[str, float]:
        """Predictions against true values, and errors by element, size and system."""
        return results.evaluate_dataset(dataset, self.targets)

    def write_predictions(self, dataset: EvaluatedDataset, store: Store) -> None:
        """Energies, forces and whatever else is predicted, of all structures one after the other."""
        results.write_predictions(dataset, store, self.targets)

    def _step(self, batch: dict[str, Tensor], is_training: bool) -> dict[str, Any]:
        found = self.model(batch, create_graph=is_training, wanted=[target.name for target in self.targets])
        layout = Layout.of(batch)
        terms: dict[str, Any] = {}
        for place, target in enumerate(self.targets):
            if target.name not in batch:  # a term for all that, because all ranks must have the same
                nothing = next(iter(found.values())).sum() * 0.0
                terms[target.name] = WeightedSum(nothing, torch.full_like(nothing, TINY))
                continue
            compared = compare(target, found[target.name], batch, layout)
            self._log(target, compared)
            terms[target.name] = self._term(place, target, compared, layout, is_training)
        return terms

    def _term(
        self, place: int, target: Learned, compared: "Compared", layout: "Layout", is_training: bool
    ) -> Tensor | WeightedSum:
        """A term of the loss: in training a mean over structures, so that one backward pass serves all terms."""
        counts, losses = compared.counts, compared.losses
        if losses is None:
            apart = compared.apart / self.std[place]
            if target.kind == "energy" and target.per_atom is not True:
                apart = apart * layout.num_atoms.pow(1.0 if target.per_atom is False else 0.5).unsqueeze(1)
            losses = target.penalty(apart).mean(1)
        if target.of == "atom" and target.average == "structures":
            counts = counts / layout.of_atoms(layout.num_atoms)
        total, weight = (losses * counts).sum(), counts.sum().clamp(min=TINY)
        if not is_training:
            return WeightedSum(total, weight)
        per_structure = torch.where(self.share[place] > 0, self.share[place], weight / layout.num_structures)
        return total / per_structure / layout.num_structures

    def _log(self, target: Learned, compared: "Compared") -> None:
        """What people read of a batch, in their units."""
        weight = compared.counts.sum().clamp(min=TINY)
        if target.kind == "classes":
            self.log(f"{target.name}_accuracy", (compared.apart.detach().sum(), weight))
            return
        apart = compared.apart.detach() * target.shown
        weight = weight * target.num_entries
        self.log(f"{target.name}_mae", (apart.abs().sum(), weight))
        self.log(f"{target.name}_rmse", (apart.square().sum(), weight), root=True)


class Layout(NamedTuple):
    """Which atoms of a batch belong to which structure."""

    num_structures: int
    num_atoms: Tensor
    """Of each structure, in float64."""
    is_atom: Tensor
    """1 for an atom, 0 for padding."""
    structure: Tensor
    """Of each atom; of padding, the last one."""

    @classmethod
    def of(cls, batch: Mapping[str, Tensor]) -> "Layout":
        """Of a batch, without waiting for the device."""
        member, num_structures = batch["batch"], len(batch["cell"])
        edges = torch.arange(num_structures + 1, device=member.device)
        counts = torch.searchsorted(member, edges).diff().double()
        is_atom = (member < num_structures).double()
        return cls(num_structures, counts.clamp(min=1.0), is_atom, member.clamp(max=num_structures - 1))

    def of_atoms(self, values: Tensor) -> Tensor:
        """What structures have, for each of their atoms."""
        return values.index_select(0, self.structure)


class Compared(NamedTuple):
    """Predictions of a target against its true values."""

    apart: Tensor
    """Errors (rows, entries) in stored units, of energies per atom; 0 where there is no label. Of classes (rows, 1):
    1 where the right one was found."""
    counts: Tensor
    """1 for each row that counts, 0 for padding and where there is no label."""
    losses: Tensor | None = None
    """Of each row, where they do not follow from the errors."""


def compare(target: Learned, predicted: Tensor, batch: Mapping[str, Tensor], layout: Layout) -> Compared:
    """Predictions against labels, in float64."""
    true, has = batch[target.name], batch.get(f"has_{target.name}")
    if target.of == "atom":
        counts = layout.is_atom if has is None else layout.is_atom * layout.of_atoms(has)
    else:
        counts = torch.ones_like(layout.num_atoms) if has is None else has.double()
    counted = (counts > 0).unsqueeze(1)
    if target.kind == "classes":
        labels = true.long().flatten()
        losses = functional.cross_entropy(predicted.double(), labels, reduction="none")
        right = (predicted.argmax(1) == labels).double().unsqueeze(1)
        return Compared(torch.where(counted, right, 0.0), counts, losses)
    if predicted.numel() != true.numel():
        raise UserError(_other_shape(target, predicted, true))
    apart = (predicted.double().view(true.shape) - true.double()).reshape(len(true), -1)
    if target.kind == "energy":
        apart = apart / layout.num_atoms.unsqueeze(1)
    return Compared(torch.where(counted, apart, 0.0), counts)


def with_heads(model: nn.Module, targets: Sequence[Learned]) -> CrystalModel:
    """A model that predicts targets, made of a network where it is not a whole one."""
    whole = model if isinstance(model, CrystalModel) else CrystalModel(model)
    whole.add_heads(targets)
    return whole


def as_graphs(data: Any, cutoff: float, ranks: TaskRanks, say: Callable[[str], None]) -> Any:
    """Structures with their edges."""
    if _has_edges(data):
        return data
    settings = settings_of(data)
    if settings is None:
        return PeriodicEdges(cutoff=cutoff).adapt(data, ranks, say)
    if settings.cutoff < cutoff:
        raise UserError(
            f"data.transforms finds neighbours up to {settings.cutoff:g} Å, but the network looks for them up to "
            f"{cutoff:g} Å: forces would jump where atoms come in between; use task.model.cutoff={settings.cutoff:g}, "
            f"or a cutoff of {cutoff:g} for both"
        )
    if settings.cutoff > cutoff and not settings.adaptive_cutoff:
        say_first(
            ranks, say, f"neighbours are found up to {settings.cutoff:g} Å, but the network looks up to {cutoff:g} Å: "
            "those beyond it only cost time"
        )  # fmt: skip
    return data


def graph_of_source(source: Any) -> GraphSettings | None:
    """How the edges of a source, or of what it is a part of, were found; None where it does not say."""
    while not hasattr(source, "graph") and hasattr(source, "source"):
        source = source.source
    return getattr(source, "graph", None)


def _has_edges(data: Any) -> bool:
    """Whether data of one's own comes as graphs."""
    splits = [getattr(data, split, None) for split in ("train", "val", "test", "predict")]
    given = [split for split in splits if split is not None] or [data]
    return all("edges" in getattr(split, "levels", ()) and not hasattr(split, "graph") for split in given)


def _check_target(target: Learned, labels: Labels, split: str) -> None:
    """Refuse a target that is not what the recipe takes it for."""
    name, where = target.name, f"task.targets.{target.name}"
    per_atom = labels.per_atom(name)
    if per_atom != (target.of == "atom"):
        is_known = target.name in KNOWN
        hint = "rename one of them" if is_known else f"write {where}.of={'atom' if per_atom else 'structure'}"
        has = "a value for each atom" if per_atom else "one value for each structure"
        raise UserError(f"{name} of the {split} data has {has}, but is learned for each {target.of}: {hint}")
    dtype = labels.dtype(name)
    if target.kind == "value" and not dtype.is_floating_point:
        low, high = labels.column(name).min(), labels.column(name).max()
        raise UserError(
            f"{name} of the {split} data holds whole numbers, from {low} to {high}: for classes, write "
            f"{where}.classes={high + 1}; for values, store them as floats"
        )
    if target.kind == "classes":
        check_labels(torch.from_numpy(labels.rows(target)[0]), split, target.classes, ignored=None)
    elif labels.shape(name) != target.shape:
        found = list(labels.shape(name))
        hint = f"write {where}.shape={found}" if target.kind == "value" else "correct the data"
        raise UserError(f"{name} of the {split} data has the shape {found}, expected {list(target.shape)}: {hint}")
    if target.kind == "stress":
        volumes = abs(torch.linalg.det(torch.from_numpy(labels.column("cell").copy())))
        flat = torch.nonzero((volumes < 1e-9) & torch.from_numpy(labels.has(name).copy())).flatten().tolist()
        if flat:
            raise UserError(
                f"{_places(labels, flat)}: {len(flat):,} structures of the {split} data have a stress but no cell; "
                "remove it, or give the cell"
            )


def _without_target(target: Learned, labels: Labels, split: str) -> str:
    there = [name for name in labels.names if name in labels]
    close = nearest(target.name, there)
    hint = f'did you mean "{close}"?' if close else f"there are {', '.join(there) or 'no targets at all'}."
    return (
        f"no structure of the {split} data has {target.name}, which is to be learned; {hint} Or leave it out of "
        "task.targets"
    )


def _unknown_elements(unknown: Sequence[int], labels: Labels, split: str) -> str:
    structures = labels.with_elements(unknown)
    where = f"{len(structures):,} structures of the {split} data ({_places(labels, structures)})"
    return (
        f"{', '.join(SYMBOLS[number] for number in unknown)} in {where}: the training data has no such atoms, and what "
        "is predicted for them means nothing; remove them, train with them, or use task.allow_unknown_elements=true"
    )


def _places(labels: Labels, structures: Sequence[int]) -> str:
    named = [locate(labels.source, structure) for structure in structures[:MOST_NAMED]]
    return "; ".join(named) + ("; …" if len(structures) > MOST_NAMED else "")


def _other_shape(target: Learned, predicted: Tensor, true: Tensor) -> str:
    return (
        f"the model predicts {target.name} of the shape {tuple(predicted.shape)}, but the data has "
        f"{tuple(true.shape)}; set task.targets.{target.name}.shape={list(true.shape[1:])}"
    )
