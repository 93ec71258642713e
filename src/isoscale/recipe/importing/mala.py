"""From a parameter file of MALA to a recipe: what it says in our words, and what has none."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isoscale.errors import UserError

Values = dict[str, Any]

ACTIVATIONS = {"Sigmoid": "sigmoid", "ReLU": "relu", "LeakyReLU": "leaky_relu", "Tanh": "tanh", "ELU": "elu"}
SCALES = {
    "feature-wise-standard": {"kind": "standard", "per": "feature"},
    "standard": {"kind": "standard", "per": "whole"},
    "feature-wise-minmax": {"kind": "minmax", "per": "feature"},
    "minmax": {"kind": "minmax", "per": "whole"},
}
METRICS = {
    "band_energy": "band_energy",
    "band_energy_actual_fe": "band_energy_true_fermi",
    "fermi_energy": "fermi_energy",
    "density": "density",
    "density_relative": "density_relative",
    "dos": "dos",
    "dos_relative": "dos_relative",
    "ldos": "ldos",
}
NEEDLESS = {
    "use_gpu": "the device is found by itself",
    "use_ddp": "start it with --devices, torchrun, srun or mpirun",
    "use_mpi": "start it with mpirun",
    "data.use_fast_tensor_data_set": "data is gathered at once, always",
    "running.use_graphs": "train.program: auto captures whole steps where that is possible",
    "data.use_lazy_loading_prefetch": "data.residency: disk reads ahead",
    "running.num_workers": "data.workers: auto",
}
"""What needs no word here, and why."""


@dataclass
class Imported:
    """A recipe, and what of the file it does not hold."""

    recipe: Values
    needless: list[str] = field(default_factory=list)
    """What the file asks for and is so by itself."""
    left_out: list[str] = field(default_factory=list)
    """What has no counterpart."""


def is_mala(values: Any) -> bool:
    """Whether a file is one of MALA's."""
    running = values.get("running") if isinstance(values, Mapping) else None
    return isinstance(running, Mapping) and running.get("_parameters_type") == "ParametersRunning"


class Translation:
    """Takes keys out of a file one by one; what is left in the end was not understood."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """The whole file."""
        self._left = {
            f"{section}.{key}" if section else key: value
            for section, part in [("", values), *((name, each) for name, each in values.items() if _is_section(each))]
            for key, value in part.items()
            if not _is_section(value) and key != "_parameters_type"
        }

    def take(self, key: str, default: Any = None) -> Any:
        """The value of a key, which is then done with."""
        return self._left.pop(key, default)

    @property
    def left(self) -> Values:
        """What nobody took."""
        return self._left


def _is_section(value: Any) -> bool:
    return isinstance(value, Mapping) and "_parameters_type" in value


def translate(values: Mapping[str, Any], defaults: Mapping[str, Any] = {}) -> Imported:
    """The recipe of a parameter file; `defaults` are values that need no mention where the file has them."""
    if not is_mala(values):
        raise UserError("this is no parameter file of MALA: it has no section `running` of ParametersRunning")
    file = Translation(values)
    imported = Imported({"seed": file.take("manual_seed") or 0})
    imported.recipe |= {"task": _task(file, imported), "data": _data(file), "optimizer": _optimizer(file)}
    schedule = _schedule(file)
    imported.recipe |= {"schedule": schedule} if schedule else {}
    imported.recipe |= {"train": _train(file), "checkpoint": _checkpoint(file), "observe": _observe(file)}
    imported.needless = [
        f"{key}: {why}" for key, why in NEEDLESS.items() if (value := file.take(key)) and value is not False
    ]
    imported.left_out = [f"{key}: {value}" for key, value in file.left.items() if _is_said(key, value, defaults)]
    return imported


def _is_said(key: str, value: Any, defaults: Mapping[str, Any]) -> bool:
    """Whether somebody has set a key: sections that are not about training have nothing to do here."""
    about_training = key.split(".")[0] in ("running", "network", "data", "targets")
    return about_training and value not in (None, [], {}, "", 0, False) and defaults.get(key, ...) != value


def _task(file: Translation, imported: Imported) -> Values:
    if (kind := file.take("network.nn_type", "feed-forward")) != "feed-forward":
        raise UserError(f"network.nn_type is {kind!r}, and only feed-forward networks are known here")
    widths, names = file.take("network.layer_sizes", []), file.take("network.layer_activations", [])
    unknown = [name for name in names if name is not None and name not in ACTIVATIONS]
    if unknown:
        raise UserError(f"network.layer_activations: {unknown[0]!r} is not known; known are {', '.join(ACTIVATIONS)}")
    found = [ACTIVATIONS[name] for name in names if name is not None]
    if len(set(found)) > 1:
        raise UserError(f"network.layer_activations are {', '.join(names)}: here all hidden layers have the same one")
    model: Values = {"class": "mlp", "widths": widths, "activation": found[0] if found else "relu"}
    if file.take("network.layer_activations_include_output_layer") and len(names) >= len(widths) - 1 and found:
        model["output_activation"] = found[-1]
    if dropout := file.take("running.dropout"):
        model["dropout"] = dropout
    file.take("network.dropout")  # of other kinds of networks
    energies = {
        "size": file.take("targets.ldos_gridsize"), "spacing": file.take("targets.ldos_gridspacing_ev"),
        "offset": file.take("targets.ldos_gridoffset_ev"),
    }  # fmt: skip
    task: Values = {"class": "ldos", "model": model, "loss": file.take("network.loss_function_type", "mse"),
                    "energies": energies, "clamp": file.take("targets.restrict_targets") == "zero_out_negative"}  # fmt: skip
    physics = _physics(file)
    return {**task, "physics": physics} if physics else task


def _physics(file: Translation) -> Values | None:
    validated, final = file.take("running.validation_metric"), file.take("running.final_validation_metric")
    logged = file.take("running.logging_metrics") or []
    before = file.take("running.after_before_training_metric")
    wanted = dict.fromkeys(METRICS[name] for name in (*logged, validated, final, before) if name in METRICS)
    if set(wanted) <= {"ldos"}:
        file.take("running.logging_metrics_interval")
        return None
    return {"metrics": list(wanted), "every": file.take("running.logging_metrics_interval") or 1}


def _data(file: Translation) -> Values:
    data: Values = {"class": "snapshots", "path": ".", "train": ["…"], "val": ["…"]}
    data["columns"] = "3:" if file.take("descriptors.descriptors_contain_xyz", True) else None
    data["batch_size"] = file.take("running.mini_batch_size", 10)
    scales = [("input", file.take("data.input_rescaling_type")), ("target", file.take("data.output_rescaling_type"))]
    data["transforms"] = [{"class": "scale", "key": key, **SCALES[kind]} for key, kind in scales if kind in SCALES]
    if file.take("data.use_lazy_loading"):
        data["residency"] = "disk"
    if file.take("running.use_shuffling_for_samplers", True) is False:
        data["shuffle"] = False
    return data


def _optimizer(file: Translation) -> Values:
    name = file.take("running.optimizer", "Adam")
    known = {"Adam": "adam", "SGD": "sgd", "FusedAdam": "adam", "AdamW": "adamw"}
    if name not in known:
        raise UserError(f"running.optimizer is {name!r}; known are {', '.join(known)}")
    optimizer = {"name": known[name], "lr": file.take("running.learning_rate", 1e-3)}
    decay = file.take("running.l2_regularization")
    return {**optimizer, "weight_decay": decay} if decay else optimizer


def _schedule(file: Translation) -> Values | None:
    name = file.take("running.learning_rate_scheduler")
    factor, patience = file.take("running.learning_rate_decay"), file.take("running.learning_rate_patience")
    if not name:
        return None
    if name != "ReduceLROnPlateau":
        raise UserError(f"running.learning_rate_scheduler is {name!r}; known is ReduceLROnPlateau")
    return {"name": "plateau", "factor": factor, "patience": patience}


def _train(file: Translation) -> Values:
    train: Values = {"epochs": file.take("running.max_number_epochs", 100)}
    if file.take("running.use_mixed_precision"):
        train["precision"] = "auto"  # bf16 or fp16 where it pays
    patience, threshold = file.take("running.early_stopping_epochs"), file.take("running.early_stopping_threshold")
    if patience:
        train["early_stopping"] = {"patience": patience, "min_delta": threshold or 0}
    return train


def _checkpoint(file: Translation) -> Values:
    every = file.take("running.checkpoints_each_epoch")
    file.take("running.checkpoint_name"), file.take("running.checkpoint_path")  # a run has its own directory
    return {"every": f"{every} epoch{'s' * (every > 1)}"} if every else {}


def _observe(file: Translation) -> Values:
    every = file.take("running.training_log_interval")
    logger = file.take("running.logger")
    for key in ("running.logging_dir", "running.logging_dir_append_date", "running.run_name"):
        file.take(key)
    observe: Values = {"every": every} if every else {}
    return {**observe, "loggers": [{"class": "wandb"}]} if logger == "wandb" else observe
