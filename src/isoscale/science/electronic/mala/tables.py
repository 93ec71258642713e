"""The words of MALA: what its parameters are when nobody sets them, and what they are called here."""

from typing import Any

from isoscale.science.importing import LIST, MAPPING, NAME, NOTHING, NUMBER, SWITCH, Tables

DEFAULTS: dict[str, Any] = {
    "comment": "", "manual_seed": None, "openpmd_configuration": {}, "openpmd_granularity": 1,
    "use_atomic_density_formula": False, "use_ddp": False, "use_gpu": False, "use_lammps": True, "use_mpi": False,
    "verbosity": 1,
    "data.data_splitting_type": "by_snapshot", "data.input_rescaling_type": "None",
    "data.output_rescaling_type": "None", "data.shuffling_seed": None, "data.snapshot_directories_list": [],
    "data.use_fast_tensor_data_set": False, "data.use_lazy_loading": False, "data.use_lazy_loading_prefetch": False,
    "descriptors.descriptors_contain_xyz": True,
    "hyperparameters.hlist": [],
    "network.bidirection": False, "network.dropout": 0.1, "network.layer_activations": "LeakyReLU",
    "network.layer_activations_include_output_layer": True, "network.layer_sizes": [10, 10, 10],
    "network.loss_function_type": "mse", "network.nn_type": "feed-forward", "network.no_hidden_state": False,
    "network.num_heads": 10, "network.num_hidden_layers": 1,
    "running.checkpoint_name": "checkpoint_mala", "running.checkpoint_path": "./", "running.checkpoints_each_epoch": 0,
    "running.dropout": 0.0, "running.early_stopping_epochs": 0, "running.early_stopping_threshold": 0,
    "running.final_validation_metric": "ldos", "running.inference_data_grid": [0, 0, 0],
    "running.l2_regularization": 0.0, "running.learning_rate": 1e-05, "running.learning_rate_decay": 0.1,
    "running.learning_rate_patience": 0, "running.learning_rate_scheduler": None,
    "running.log_metrics_on_train_set": False, "running.logger": None, "running.logging_dir": "./mala_logging",
    "running.logging_dir_append_date": True, "running.logging_metrics": ["ldos"],
    "running.logging_metrics_interval": 1, "running.max_number_epochs": 100, "running.mini_batch_size": 10,
    "running.num_workers": 0, "running.optimizer": "Adam", "running.profiler_range": [1000, 2000],
    "running.run_name": "", "running.training_log_interval": 1000, "running.use_graphs": False,
    "running.use_mixed_precision": False, "running.use_shuffling_for_samplers": True,
    "running.validation_metric": "ldos",
    "targets.ldos_gridoffset_ev": 0, "targets.ldos_gridsize": 0, "targets.ldos_gridspacing_ev": 0,
    "targets.restrict_targets": "zero_out_negative", "targets.target_type": "LDOS",
}  # fmt: skip
"""As a `Parameters` object of MALA 1.4.0 is saved that nobody has touched: what is about training."""
KINDS: dict[str, tuple[str, ...]] = {
    "manual_seed": (NUMBER, NOTHING),
    "network.layer_activations": (NAME, LIST, NOTHING),
    "running.learning_rate_scheduler": (NAME, NOTHING),
    "running.logger": (NAME, NOTHING),
    "running.visualisation": (NUMBER, NOTHING),
    "targets.ldos_gridsize": (NUMBER, LIST),
    "targets.restrict_targets": (NAME, NOTHING),
}
"""What a parameter may be, where it is not of the kind of its default alone."""
OLDER = {
    "running.trainingtype": "running.optimizer",
    "running.weight_decay": "running.l2_regularization",
    "running.during_training_metric": "running.validation_metric",
    "running.after_before_training_metric": "running.final_validation_metric",
    "running.training_report_frequency": "running.training_log_interval",
    "running.visualisation_dir": "running.logging_dir",
    "running.visualisation_dir_append_date": "running.logging_dir_append_date",
    "data.descriptors_contain_xyz": "descriptors.descriptors_contain_xyz",
}
"""What parameters were called in earlier versions."""
NOT_ABOUT_TRAINING = frozenset({"comment", "openpmd_configuration", "openpmd_granularity", "use_atomic_density_formula",
                                "use_lammps", "running.inference_data_grid"})  # fmt: skip
OF_OTHER_NETWORKS = ("network.bidirection", "network.dropout", "network.no_hidden_state", "network.num_heads",
                     "network.num_hidden_layers")  # fmt: skip
"""Kinds of networks that MALA no longer has."""

ACTIVATIONS = {
    "ReLU": "relu", "LeakyReLU": "leaky_relu", "GELU": "gelu", "SiLU": "silu", "Tanh": "tanh", "Sigmoid": "sigmoid",
    "ELU": "elu", "Softplus": "softplus",
}  # fmt: skip
SCALES = {
    "standard": {"kind": "standard", "per": "whole"},
    "feature-wise-standard": {"kind": "standard", "per": "feature"},
    "minmax": {"kind": "minmax", "per": "whole"},
    "normal": {"kind": "minmax", "per": "whole"},
    "feature-wise-minmax": {"kind": "minmax", "per": "feature"},
    "feature-wise-normal": {"kind": "minmax", "per": "feature"},
}
METRICS = {
    "band_energy": "band_energy",
    "band_energy_actual_fe": "band_energy_true_fermi",
    "fermi_energy": "fermi_energy",
    "density": "density",
    "density_relative": "density_relative",
    "dos": "dos",
    "dos_relative": "dos_relative",
}
LEVELS = {0: "warning", 1: "info", 2: "debug"}

NEEDLESS = {
    "use_gpu": "the device is found by itself (train.device)",
    "use_mpi": "start it with mpirun",
    "use_horovod": "start it with mpirun, srun or torchrun",
    "data.shuffling_seed": "the order of samples follows from seed",
    "data.use_fast_tensor_data_set": "batches are gathered whole, always",
    "data.use_lazy_loading_prefetch": "what is read from disk is read ahead, always",
    "running.checkpoint_name": "a run is a folder: start it with --run DIR, and the same command goes on",
    "running.checkpoint_path": "a run is a folder: start it with --run DIR",
    "running.logging_dir": "the folder of the run holds tensorboard/",
    "running.logging_dir_append_date": "the folder of a run that is not named has the time in its name",
    "running.num_workers": "arrays are read in whole batches, ahead of the training, without workers",
    "running.profiler_range": "isoscale train RECIPE --profile",
    "running.use_graphs": "whole steps are captured where that is possible (train.program), with the batch as it is",
}
"""What needs no word here, and why."""

BY_HAND = {
    "data.data_splitting_type": "snapshots are split by name alone: see data.train, data.val and data.test",
    "hyperparameters.hlist": "a search is not part of a recipe here: see `isoscale sweep`",
    "running.dropout": "MALA 1.4.0 trains the same with and without it, so it is left out; where you want it, set "
    "task.model.dropout",
    "running.log_metrics_on_train_set": "name training snapshots in data.test, and `isoscale test RUN` measures them",
    "use_ddp": "start it with --devices, torchrun or srun. There mini_batch_size is the batch of one rank, here "
    "data.batch_size is that of all ranks together: multiply it by the ranks that you had",
}
"""What has no counterpart in a recipe, and what to do about it."""
UNKNOWN = "not known here: MALA takes any name in silence, so it may be misspelt, or of another version"
OTHER_ACTIVATIONS = (
    f"here every hidden layer has one of {', '.join(ACTIVATIONS)}; for others, name your own network in task.model"
)
ONE_IN_A_LIST = (
    "in the versions that this file is from, one name in a list is that of all layers, the last one too; if not in "
    "yours, delete task.model.output_activation"
)
NO_GRID = "the file has no energy grid, which physical metrics need: set task.energies (size, spacing, offset; in eV)"
ABSOLUTE = "absolute values are not taken here; task.clamp: true counts a density below zero as zero"
RELATIVE = (
    "there it is a part of the best loss so far, here train.early_stopping.min_delta is a difference: set it to that "
    "part of a loss that you expect"
)

CHOICES = {
    "task.class": ("targets.target_type", {"LDOS": "ldos"}),
    "task.model.class": ("network.nn_type", {"feed-forward": "mlp"}),
    "task.loss": ("network.loss_function_type", {"mse": "mse"}),
    "optimizer.name": ("running.optimizer", {"Adam": "adam", "FusedAdam": "adam", "SGD": "sgd"}),
}
SAME = {
    "task.model.widths": "network.layer_sizes",
    "task.energies.offset": "targets.ldos_gridoffset_ev",
    "data.batch_size": "running.mini_batch_size",
    "optimizer.lr": "running.learning_rate",
    "train.epochs": "running.max_number_epochs",
}
IF_ANY = {
    "name": "running.run_name",
    "optimizer.weight_decay": "running.l2_regularization",
    "train.early_stopping.patience": "running.early_stopping_epochs",
}
TABLES = Tables(DEFAULTS, KINDS, (SWITCH, NUMBER, NAME, LIST, MAPPING, NOTHING), OLDER, CHOICES, SAME, IF_ANY)
