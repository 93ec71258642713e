"""From a parameter file of MALA to a recipe that trains the same."""

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from isoscale.errors import Problem, UserError
from isoscale.science import importing
from isoscale.science.electronic import is_mala
from isoscale.science.electronic.mala.snapshots import PARAMETER as SNAPSHOTS
from isoscale.science.electronic.mala.snapshots import put_snapshots
from isoscale.science.electronic.mala.tables import (
    ABSOLUTE,
    ACTIVATIONS,
    BY_HAND,
    DEFAULTS,
    LEVELS,
    METRICS,
    NEEDLESS,
    NO_GRID,
    NOT_ABOUT_TRAINING,
    OF_OTHER_NETWORKS,
    OLDER,
    ONE_IN_A_LIST,
    OTHER_ACTIVATIONS,
    RELATIVE,
    SCALES,
    TABLES,
    UNKNOWN,
)
from isoscale.science.importing import Imported, PeerFile, Remark, Translation

ABOUT_TRAINING = ("", "running", "network", "data")
"""The sections of which nothing is passed over in silence."""
INCLUDES_OUTPUT = "network.layer_activations_include_output_layer"


class Said(importing.Said):
    """What a file says, parameter by parameter; what nobody has taken in the end was not understood."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """The whole file; parameters of earlier versions go by their present names."""
        sections = {"": values} | {name: part for name, part in values.items() if _is_section(part)}
        given = {
            f"{section}.{key}".lstrip("."): value
            for section, part in sections.items()
            for key, value in part.items()
            if not _is_section(value) and key != "_parameters_type"
        }
        self.passed_over = {key for key, present in OLDER.items() if key in given and present in given}
        """Earlier names beside the present ones, which alone count in MALA 1.4.0."""
        super().__init__(TABLES, {key: value for key, value in given.items() if key not in self.passed_over})
        self._taken: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        """The value of a parameter, which is then done with; where the file has none, MALA's default."""
        self._taken.add(key)
        value = super().__getitem__(key)
        expected = self.expected(key, value)
        if expected:
            raise UserError(f"{self.name(key)} is {value!r}; expected {expected}, as MALA saves it")
        return value

    def pass_over(self, *keys: str) -> None:
        """Be done with parameters that change nothing."""
        self._taken.update(keys)

    def is_set(self, key: str) -> bool:
        """Whether somebody has changed it."""
        return self._values.get(key, DEFAULTS.get(key)) != DEFAULTS.get(key)

    @property
    def left(self) -> list[str]:
        """What is about training, was set, and nobody took."""
        return [
            key
            for key in sorted(self._values)
            if key not in self._taken | NOT_ABOUT_TRAINING
            and key.rpartition(".")[0] in ABOUT_TRAINING
            and (self.is_set(key) if key in DEFAULTS else self._values[key])
        ]


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) and "_parameters_type" in value


def translate(file: PeerFile, problems: list[Problem]) -> Imported:
    """The recipe of a parameter file; what it cannot say is raised, one at a time."""
    if not is_mala(file.values):
        raise UserError(
            f"{file.source} is not a parameter file of MALA: it has no section `running` of ParametersRunning; "
            "parameters.save writes one"
        )
    said, imported = Said(file.values), Imported(f"{file.source}, parameters of MALA", file.weights)
    _Translation(said, imported).translate(file.moved)
    for key in [*said.left, *(["hyperparameters.hlist"] if said.is_set("hyperparameters.hlist") else [])]:
        remarks, words = (imported.needless, NEEDLESS) if key in NEEDLESS else (imported.by_hand, BY_HAND)
        remarks.append(Remark(said.name(key), words.get(key, UNKNOWN)))
    for key in sorted(said.passed_over):
        imported.remark_by_hand(
            key, f"MALA passes it over beside its present name, {OLDER[key]}, which counts here too"
        )
    return imported


class Metric(NamedTuple):
    """A physical error that the file wants to see."""

    parameter: str
    name: str


class _Translation(Translation):
    _said: Said

    def translate(self, folder: Path | None) -> None:
        self._put("seed", "manual_seed", self._said["manual_seed"] or 0)
        self.put_by_tables(TABLES)
        self._task()
        self._data(folder)
        self._schedule()
        self._train()
        self._observe()

    def _only(self, parameter: str, *known: Any) -> Any:
        found = self._said[parameter]
        if found not in known:
            name, words = self._said.name(parameter), ", ".join(map(str, known))
            raise UserError(f"{name} is {found!r}, which cannot be trained here; known is {words}")
        return found

    def _task(self) -> None:
        self._network()
        self._energies()
        restricted = self._said["targets.restrict_targets"]
        self._put("task.clamp", "targets.restrict_targets", restricted == "zero_out_negative")
        if restricted == "absolute_values":
            self._by_hand("targets.restrict_targets", ABSOLUTE)
        self._physics()

    def _network(self) -> None:
        self._said.pass_over(*OF_OTHER_NETWORKS)
        *hidden, output = self._activations()
        if hidden:
            names = [ACTIVATIONS.get(str(name), "relu") for name in hidden]
            wanted = names[0] if len(set(names)) == 1 else names
            self._put("task.model.activation", "network.layer_activations", wanted)
        if output is not None:
            self._put("task.model.output_activation", "network.layer_activations", ACTIVATIONS.get(output))
        unknown = {name for name in (*hidden, output) if name not in (None, *ACTIVATIONS)}
        if None in hidden or unknown:
            found = ", ".join(map(str, (*hidden, output)))
            self._by_hand("network.layer_activations", f"found {found}; {OTHER_ACTIVATIONS}")

    def _activations(self) -> list[str | None]:
        """The name of the activation after each layer, the last one included."""
        given, num_layers = self._said["network.layer_activations"], len(self._said["network.layer_sizes"]) - 1
        if num_layers < 1:
            raise UserError("network.layer_sizes needs at least an input and an output width")
        is_older = INCLUDES_OUTPUT not in self._said
        if is_older and isinstance(given, list) and len(given) == 1:
            self._by_hand("network.layer_activations", ONE_IN_A_LIST)
            given = given[0]
        names = given if isinstance(given, list) else [given] * num_layers
        every = [name and str(name) for name, _ in zip_longest(names[:num_layers], range(num_layers))]
        return every if self._said[INCLUDES_OUTPUT] else [*every[:-1], None]

    def _energies(self) -> None:
        size, spacing = self._said["targets.ldos_gridsize"], self._said["targets.ldos_gridspacing_ev"]
        if isinstance(size, list):
            raise UserError(f"targets.ldos_gridsize is {size}: several energy grids at a time are not known here")
        self._put("task.energies.size", "targets.ldos_gridsize", size or self._said["network.layer_sizes"][-1])
        self._put("task.energies.spacing", "targets.ldos_gridspacing_ev", spacing or 1.0)
        if not size or not spacing:
            self._by_hand("targets.ldos_gridspacing_ev", NO_GRID)

    def _physics(self) -> None:
        each_epoch = self._metrics("running.validation_metric")
        logged = self._metrics("running.logging_metrics")
        final = self._metrics("running.final_validation_metric")
        self._said.pass_over("running.logging_metrics_interval")
        wanted = [*each_epoch, *logged, *final]
        if not wanted:
            return
        names = list(dict.fromkeys(METRICS[metric.name] for metric in wanted))
        origins = dict.fromkeys(metric.parameter for metric in wanted)
        self._imported.put("task.physics.metrics", names, ", ".join(origins))
        if each_epoch:
            self._put("task.physics.every", "running.validation_metric", 1)
        elif logged:
            self._put("task.physics.every", "running.logging_metrics_interval")
        else:
            self._put("task.physics.every", "running.max_number_epochs")

    def _metrics(self, parameter: str) -> list[Metric]:
        """The physical ones among the metrics of a parameter; ldos is the loss itself."""
        found, name = self._said[parameter], self._said.name(parameter)
        metrics = [str(metric) for metric in (found if isinstance(found, list) else [found]) if metric != "ldos"]
        for metric in metrics:
            if metric not in METRICS:
                self._by_hand(parameter, f"{metric} is not measured here; there is {', '.join(METRICS.values())}")
        return [Metric(name, metric) for metric in metrics if metric in METRICS]

    @property
    def _monitor(self) -> str | None:
        """The physical metric that decides, where it is not the loss."""
        metric = METRICS.get(str(self._said["running.validation_metric"]))
        return f"val/{metric}" if metric else None

    def _data(self, folder: Path | None) -> None:
        self._put("data.class", SNAPSHOTS, "snapshots")
        put_snapshots(self._imported, self._said[SNAPSHOTS], folder)
        contain_xyz = self._said["descriptors.descriptors_contain_xyz"]
        self._put("data.columns", "descriptors.descriptors_contain_xyz", "3:" if contain_xyz else None)
        if self._said["data.use_lazy_loading"]:
            self._put("data.residency", "data.use_lazy_loading", "disk")
        if not self._said["running.use_shuffling_for_samplers"]:
            self._put("data.shuffle", "running.use_shuffling_for_samplers", False)
        self._scales()

    def _scales(self) -> None:
        """MALA passes over a name that it does not know, and scales nothing."""
        for key, parameter in (("input", "data.input_rescaling_type"), ("target", "data.output_rescaling_type")):
            kind = str(self._said[parameter])
            if kind in SCALES:
                self._imported.append("data.transforms", {"class": "scale", "key": key, **SCALES[kind]}, parameter)
            elif self._said.is_set(parameter):
                self._by_hand(parameter, f"{kind!r} is not a scaling, neither there nor here")

    def _schedule(self) -> None:
        self._only("running.learning_rate_scheduler", None, "ReduceLROnPlateau")
        gamma, patience = "running.learning_rate_decay", "running.learning_rate_patience"
        self._said.pass_over(gamma, patience)
        if self._said["running.learning_rate_scheduler"]:
            self._put("schedule.name", "running.learning_rate_scheduler", "plateau")
            self._put("schedule.gamma", gamma)
            self._put("schedule.patience", patience)
            self._watch("schedule.monitor")

    def _watch(self, key: str) -> None:
        if self._monitor is not None:
            self._put(key, "running.validation_metric", self._monitor)

    def _train(self) -> None:
        if self._said["running.use_mixed_precision"]:
            self._put("train.precision", "running.use_mixed_precision", "fp16")
        threshold = self._said["running.early_stopping_threshold"]
        if self._said["running.early_stopping_epochs"]:
            self._watch("train.early_stopping.monitor")
            if threshold:
                self._by_hand("running.early_stopping_threshold", RELATIVE)
        every = self._said["running.checkpoints_each_epoch"]
        if every:
            self._put("checkpoint.every", "running.checkpoints_each_epoch", f"{every} epoch{'s' * (every > 1)}")
        self._watch("checkpoint.monitor")

    def _observe(self) -> None:
        if self._said.is_set("running.training_log_interval"):
            self._put("observe.every", "running.training_log_interval")
        logger, visualisation = self._said["running.logger"], self._said["running.visualisation"]
        if logger == "tensorboard":
            self._put("observe.tensorboard", "running.logger", 1)
        elif logger == "wandb":
            self._put("observe.loggers", "running.logger", ["wandb"])
        elif logger is not None:
            self._by_hand("running.logger", f"{logger!r} is not a logger of MALA; see observe.loggers")
        if visualisation in (0, 1, 2):
            self._put("observe.tensorboard", "running.visualisation")
        if self._said.is_set("verbosity"):
            self._put("observe.level", "verbosity", LEVELS.get(self._said["verbosity"], "debug"))
