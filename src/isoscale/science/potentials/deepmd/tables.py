"""The words of DeePMD-kit's input files: what a key is when nobody sets it, and which ones have no meaning here."""

from typing import Any

from isoscale.science.importing import NAMES, NOTHING, NUMBER, NUMBERS, SWITCH, TEXT, WHOLE, WIDTHS, Tables

NESTED = (
    "model", "learning_rate", "loss", "training", "optimizer", "validating", "model.descriptor", "model.fitting_net",
    "training.training_data", "training.validation_data",
)  # fmt: skip
"""Everything that holds keys of its own."""

DEFAULTS: dict[str, Any] = {
    "model.type_map": None, "model.data_stat_nbatch": 10,
    "model.descriptor.sel": "auto", "model.descriptor.rcut": 6.0, "model.descriptor.rcut_smth": 0.5,
    "model.descriptor.neuron": [10, 20, 40], "model.descriptor.axis_neuron": 4, "model.descriptor.resnet_dt": False,
    "model.descriptor.type_one_side": False, "model.descriptor.precision": "default", "model.descriptor.seed": None,
    "model.fitting_net.neuron": [120, 120, 120], "model.fitting_net.resnet_dt": True,
    "model.fitting_net.precision": "default", "model.fitting_net.seed": None,
    "learning_rate.type": "exp", "learning_rate.start_lr": None, "learning_rate.stop_lr": None,
    "learning_rate.stop_lr_ratio": None, "learning_rate.decay_steps": 5000, "learning_rate.decay_rate": None,
    "learning_rate.smooth": False, "learning_rate.scale_by_worker": "linear",
    "loss.start_pref_e": 0.02, "loss.limit_pref_e": 1.0, "loss.start_pref_f": 1000, "loss.limit_pref_f": 1.0,
    "loss.start_pref_v": 0.0, "loss.limit_pref_v": 0.0, "loss.start_pref_ae": 0.0, "loss.limit_pref_ae": 0.0,
    "optimizer.type": "Adam", "optimizer.adam_beta1": 0.9, "optimizer.adam_beta2": 0.999,
    "optimizer.weight_decay": None,
    "training.training_data.systems": None, "training.training_data.batch_size": "auto",
    "training.training_data.auto_prob": "prob_sys_size", "training.training_data.sys_probs": None,
    "training.validation_data.systems": None, "training.validation_data.batch_size": "auto",
    "training.validation_data.numb_btch": 1,
    "training.numb_steps": None, "training.num_epoch": None, "training.seed": None, "training.stat_file": None,
    "training.disp_file": "lcurve.out", "training.disp_freq": 1000, "training.save_freq": 1000,
    "training.save_ckpt": "model.ckpt", "training.max_ckpt_keep": 5, "training.gradient_max_norm": None,
    "training.tensorboard": False,
}  # fmt: skip
"""What the keys that a recipe has words for are in DeePMD-kit 3.2.0 where the file does not say."""

KINDS: dict[str, tuple[str, ...]] = {
    "model.type_map": (NAMES,),
    "model.descriptor.sel": (WIDTHS, TEXT),
    "model.descriptor.seed": (WHOLE, NOTHING),
    "model.fitting_net.seed": (WHOLE, NOTHING),
    "learning_rate.start_lr": (NUMBER,),
    "learning_rate.stop_lr": (NUMBER, NOTHING),
    "learning_rate.stop_lr_ratio": (NUMBER, NOTHING),
    "learning_rate.decay_rate": (NUMBER, NOTHING),
    "optimizer.weight_decay": (NUMBER,),
    "training.training_data.systems": (TEXT, NAMES),
    "training.training_data.batch_size": (WHOLE, WIDTHS, TEXT),
    "training.training_data.sys_probs": (NUMBERS, NOTHING),
    "training.validation_data.systems": (TEXT, NAMES),
    "training.validation_data.batch_size": (WHOLE, WIDTHS, TEXT),
    "training.numb_steps": (WHOLE,),
    "training.num_epoch": (WHOLE, NUMBER),
    "training.seed": (WHOLE, NOTHING),
    "training.stat_file": (TEXT,),
    "training.gradient_max_norm": (NUMBER,),
}
"""What a value may be, where its default does not say it."""

ALIASES = {
    "model.descriptor.n_axis_neuron": "model.descriptor.axis_neuron",
    "model.fitting_net.n_neuron": "model.fitting_net.neuron",
    "training.stop_batch": "training.numb_steps",
    "training.num_step": "training.numb_steps",
    "training.num_steps": "training.numb_steps",
    "training.numb_step": "training.numb_steps",
    "training.num_epochs": "training.num_epoch",
    "training.numb_epoch": "training.num_epoch",
    "training.numb_epochs": "training.num_epoch",
    "training.training_data.auto_prob_style": "training.training_data.auto_prob",
    "training.training_data.sys_weights": "training.training_data.sys_probs",
    "training.validation_data.auto_prob_style": "training.validation_data.auto_prob",
    "training.validation_data.sys_weights": "training.validation_data.sys_probs",
    "training.validation_data.numb_batch": "training.validation_data.numb_btch",
}
"""Other names of keys."""

_ONLY_TANH = "only tanh is known"
_NOT_HERE = "there is no such thing here"
_WARMUP = "another warm-up, whose first step is not zero, is schedule.warmup=1000 beside ~{key}"
_EMA = "a moving average of the weights is train.ema=0.999 beside ~{key}"
_PROFILE = "it is isoscale train input.json --profile beside ~{key}"
_IN_TURN = "an evaluation goes through the systems one after the other, and every frame counts once"
_MEAN = "the loss here is a mean of squares"
_WHOLE_RUN = "a run holds its checkpoints: isoscale train input.json --run DIR beside ~{key}"

ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "model.type": (("standard",), "only the standard model is known"),
    "model.model_dict": ((), "one model is trained at a time: write an input for each"),
    "model.data_stat_protect": ((0.01,), _NOT_HERE),
    "model.data_bias_nsample": ((10,), "it belongs to change_bias_after_training"),
    "model.use_srtab": ((), _NOT_HERE),
    "model.smin_alpha": ((), _NOT_HERE),
    "model.sw_rmin": ((), _NOT_HERE),
    "model.sw_rmax": ((), _NOT_HERE),
    "model.srtab_add_bias": ((True,), _NOT_HERE),
    "model.pair_exclude_types": (([],), "all pairs are neighbours"),
    "model.atom_exclude_types": (([],), "all atoms count"),
    "model.preset_out_bias": ((None,), "the energies of single atoms are fitted to the data"),
    "model.type_embedding": ((), "only se_e2_a is known, which has none"),
    "model.modifier": ((), _NOT_HERE),
    "model.compress": ((), _NOT_HERE),
    "model.spin": ((), _NOT_HERE),
    "model.finetune_head": ((), "weights to start from are task.init_from=RUN beside ~{key}"),
    "model.model_branch_alias": (([],), "one model is trained at a time"),
    "model.info": (({},), "the run keeps its whole recipe"),
    "model.bridging_method": (("None", "none", None), _NOT_HERE),
    "model.bridging_r_inner": ((0.5,), "it belongs to bridging_method"),
    "model.bridging_r_outer": ((0.8,), "it belongs to bridging_method"),
    "model.descriptor.type": (("se_e2_a", "se_a"), "only se_e2_a is known"),
    "model.descriptor.activation_function": (("tanh",), _ONLY_TANH),
    "model.descriptor.trainable": ((True,), "all of the network is trained"),
    "model.descriptor.exclude_types": (([],), "all pairs are neighbours"),
    "model.descriptor.env_protection": ((0,), _NOT_HERE),
    "model.descriptor.set_davg_zero": ((False,), "mean and deviation are measured"),
    "model.fitting_net.type": (("ener",), "only energies are fitted"),
    "model.fitting_net.activation_function": (("tanh",), _ONLY_TANH),
    "model.fitting_net.trainable": ((True,), "all of the network is trained"),
    "model.fitting_net.numb_fparam": ((0,), _NOT_HERE),
    "model.fitting_net.numb_aparam": ((0,), _NOT_HERE),
    "model.fitting_net.default_fparam": ((None,), _NOT_HERE),
    "model.fitting_net.dim_case_embd": ((0,), _NOT_HERE),
    "model.fitting_net.rcond": ((None,), "energies of single atoms are those of least norm"),
    "model.fitting_net.atom_ener": (([],), "the energies of single atoms are fitted to the data"),
    "model.fitting_net.layer_name": ((), "no layers are shared"),
    "model.fitting_net.use_aparam_as_mask": ((False,), _NOT_HERE),
    "learning_rate.warmup_steps": ((0,), _WARMUP),
    "learning_rate.warmup_ratio": ((None,), _WARMUP),
    "learning_rate.warmup_start_factor": ((0,), _WARMUP),
    "loss.type": (("ener",), "energy, force, virial and atomic energies are what is learnt"),
    "loss.start_pref_h": ((0,), _NOT_HERE),
    "loss.limit_pref_h": ((0,), _NOT_HERE),
    "loss.start_pref_pf": ((0,), _NOT_HERE),
    "loss.limit_pref_pf": ((0,), _NOT_HERE),
    "loss.start_pref_gf": ((0,), _NOT_HERE),
    "loss.limit_pref_gf": ((0,), _NOT_HERE),
    "loss.numb_generalized_coord": ((0,), _NOT_HERE),
    "loss.use_default_pf": ((False,), _NOT_HERE),
    "loss.relative_f": ((None,), _MEAN),
    "loss.enable_atom_ener_coeff": ((False,), _NOT_HERE),
    "loss.use_huber": ((False,), _MEAN),
    "loss.huber_delta": ((0.01,), _MEAN),
    "loss.loss_func": (("mse",), _MEAN),
    "loss.f_use_norm": ((False,), _MEAN),
    "loss.intensive_ener_virial": ((False,), "squared errors are divided by the number of atoms once"),
    "training.training_data.rglob_patterns": ((None,), "name the systems, or folders that are searched for them"),
    "training.training_data.min_pair_dist": ((0,), _NOT_HERE),
    "training.training_data.set_prefix": (("set",), "the folders of a system are called set.*"),
    "training.validation_data.rglob_patterns": ((None,), "name the systems, or folders that are searched for them"),
    "training.validation_data.set_prefix": (("set",), "the folders of a system are called set.*"),
    "training.validation_data.auto_prob": (("prob_sys_size",), _IN_TURN),
    "training.validation_data.sys_probs": ((None,), _IN_TURN),
    "training.stat_file_mode": (("update",), "what is not in the file is measured"),
    "training.mixed_precision": ((), "for all networks it is train.precision=32 beside ~{key}"),
    "training.num_epoch_dict": ((), "one model is trained at a time"),
    "training.save_dir": ((None,), _WHOLE_RUN),
    "training.ckpt_keep_ratio": ((None,), "a number is training.max_ckpt_keep=5 beside ~{key}"),
    "training.enable_ema": ((False,), _EMA),
    "training.ema_decay": ((0.999,), _EMA),
    "training.ema_ckpt_keep": ((None,), _EMA),
    "training.change_bias_after_training": ((False,), _NOT_HERE),
    "training.profiling": ((False,), _PROFILE),
    "training.profiling_file": (("timeline.json",), _PROFILE),
    "training.enable_profiler": ((False,), _PROFILE),
    "training.tensorboard_log_dir": (("log",), "the directory of a run holds it: isoscale tensorboard RUN"),
    "training.tensorboard_freq": ((1,), "curves get a value every observe.every steps (training.disp_freq)"),
    "training.acc_freq": ((1,), "a batch in several pieces is train.accumulate=2 beside ~{key}"),
    "training.zero_stage": ((0,), _NOT_HERE),
    "training.neighbor_graph_method": (("auto",), _NOT_HERE),
    "training.enable_compile": ((False,), "a compiled step is train.program=compiled beside ~{key}"),
    "training.enable_tf32": ((False,), "it is train.precision=tf32 beside ~{key}"),
    "training.systems": ((), "they stand in training.training_data.systems"),
    "training.batch_size": ((), "it stands in training.training_data.batch_size"),
    "training.set_prefix": ((), "it stands in training.training_data.set_prefix"),
    "training.numb_test": ((), "errors are measured on training.validation_data: name its systems, and numb_btch"),
    "training.opt_type": (("Adam",), "another optimizer is optimizer.name=adamw beside ~{key}"),
    "validating.full_validation": ((False,), "all validation data at each evaluation is train.limit_val_batches=null"),
    "validating.ema_full_validation": ((False,), _EMA),
    "nvnmd": ((), _NOT_HERE),
}  # fmt: skip
"""Keys with the values that can be honoured here, and what to know about others."""

NEEDLESS = ("training.disp_training", "training.time_training", "training.disp_avg")
"""Keys that change what is said, and not the training."""
WITHOUT_MEANING = ("validating.",)
"""Keys that mean nothing while their section is switched off."""

TERMS = {"e": "energy", "f": "force", "v": "virial", "ae": "atom_energy"}
PROBABILITIES = {"prob_uniform": "uniform", "prob_sys_size": "size"}
PRECISIONS = {"default": "64", "float64": "64", "float32": "32"}

CHOICES = {"optimizer.name": ("optimizer.type", {"Adam": "adam", "AdamW": "adamw"})}
SAME = {
    "task.model.types": "model.type_map",
    "task.model.descriptor.sel": "model.descriptor.sel",
    "task.model.descriptor.cutoff": "model.descriptor.rcut",
    "task.model.descriptor.smooth": "model.descriptor.rcut_smth",
    "task.model.descriptor.widths": "model.descriptor.neuron",
    "task.model.descriptor.axis_width": "model.descriptor.axis_neuron",
    "task.model.descriptor.dt": "model.descriptor.resnet_dt",
    "task.model.descriptor.one_side": "model.descriptor.type_one_side",
    "task.model.fitting_widths": "model.fitting_net.neuron",
    "task.model.fitting_dt": "model.fitting_net.resnet_dt",
    "task.statistics_frames": "model.data_stat_nbatch",
    "observe.every": "training.disp_freq",
}
IF_ANY = {"train.clip": "training.gradient_max_norm"}
TABLES = Tables(DEFAULTS, KINDS, (SWITCH, WHOLE, NUMBER, TEXT, WIDTHS), ALIASES, CHOICES, SAME, IF_ANY)
