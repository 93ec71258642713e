"""The arguments of Lightning's Trainer as values of a recipe: a table from each argument to what it is here.

Each is translated, or accepted because isoscale does it anyway (then a note says so), or refused with what to do
instead. Objects of Lightning are known by the name of their class, which in a file of LightningCLI is a `class_path`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from isoscale.errors import UserError, nearest
from isoscale.parallel.environments import find as environment

EPOCHS = 1000
"""What Lightning trains for where nobody says how long."""


@dataclass
class Translated:
    """What arguments of Lightning's Trainer mean here."""

    values: dict[str, Any] = field(default_factory=dict)
    """Keys of a recipe, such as `train.epochs`."""
    notes: list[str] = field(default_factory=list)
    """What is done in another way than the argument says, a line each."""
    callbacks: list[Any] = field(default_factory=list)
    logger: Any = None
    """The loggers that were given and are written to by isoscale itself."""
    root: str | None = None
    """The folder in which run directories are made."""
    profile: bool = False
    dev: int = 0
    """How many batches of everything, with nothing saved; 0: a training like others."""
    limit_predict: int | float | None = None
    max_time: float | None = None


class _Refused(Exception):
    """What to do instead."""


def translate(given: Mapping[str, Any], whole: bool = True) -> Translated:
    """Arguments of Lightning's Trainer as values of a recipe; raises UserError with what cannot be had.

    Where they are the whole of what is said about a training, its length is Lightning's if they do not say it.
    """
    found, refused = Translated(), list[str]()
    for name, value in given.items():
        if name not in ARGUMENTS:
            meant = nearest(name, ARGUMENTS)
            hint = f'; did you mean "{meant}"?' if meant else ""
            raise UserError(f"Lightning's Trainer has no argument {name!r}{hint}")
        try:
            ARGUMENTS[name](value, given, found)
        except _Refused as error:
            refused.append(f"Trainer({name}={_shown(value)}): {error}")
    if refused:
        raise UserError("\n".join(refused))
    if whole and not found.dev:
        _set_length(given, found)
    return found


def _shown(value: Any) -> str:
    """An argument as messages show it."""
    plain = isinstance(value, str | int | float | bool | timedelta | None)
    return repr(value) if plain else f"<{kind_of(value)}>"


def kind_of(value: Any) -> str:
    """The name of the class of an object, or of what a mapping names by `class_path` or `class`."""
    if isinstance(value, Mapping):
        return str(value.get("class_path", value.get("class", ""))).rpartition(".")[2]
    return type(value).__name__


def _listed(value: Any) -> list[Any]:
    """One or several, in a list of any kind (hydra has its own)."""
    is_several = isinstance(value, Sequence) and not isinstance(value, str)
    return list(value) if is_several else [] if value is None else [value]


def _set_length(given: Mapping[str, Any], found: Translated) -> None:
    """How long is trained where not both limits are said."""
    steps, epochs = given.get("max_steps", -1), given.get("max_epochs")
    if steps in (None, -1) and epochs is None:
        if found.max_time is not None:
            raise UserError(
                "Trainer(max_time=…) alone would train without an end but the clock's; a run has one that it can be "
                "continued to: give max_epochs or max_steps too"
            )
        found.values["train.epochs"] = EPOCHS
        found.notes.append(f"max_epochs is not given: {EPOCHS} epochs, as under Lightning")
    elif epochs in (None, -1):
        if steps in (None, -1):
            raise UserError("Trainer(max_epochs=-1) trains without end: give max_epochs or max_steps")
        found.values["train.epochs"] = None


def _max_epochs(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value is not None and value != -1:
        found.values["train.epochs"] = _at_least_one(value, "give the number of epochs, or leave fit out")


def _max_steps(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value is not None and value != -1:
        found.values["train.steps"] = _at_least_one(value, "give the number of optimizer steps, or leave fit out")


def _at_least_one(value: Any, instead: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise _Refused(f"nothing would be trained; {instead}")
    return value


def _minimum(key: str) -> "Argument":
    def put(value: Any, given: Mapping[str, Any], found: Translated) -> None:
        if value:
            found.values[key] = value

    return put


def _max_time(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value is None:
        return
    if isinstance(value, str):
        parts = value.split(":")
        if len(parts) != 4 or not all(part.isdigit() for part in parts):
            raise _Refused('write "DD:HH:MM:SS"')
        days, hours, minutes, seconds = map(int, parts)
        value = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
    value = timedelta(**value) if isinstance(value, Mapping) else value
    found.max_time = found.values["train.stop_after"] = value.total_seconds()


def _limit(split: str) -> "Argument":
    key = f"train.limit_{split}_batches"

    def put(value: Any, given: Mapping[str, Any], found: Translated) -> None:
        if value is None or (isinstance(value, float) and value == 1.0):
            return
        if not value and split == "train":
            raise _Refused("nothing would be trained: leave fit out")
        if not value and split == "val":
            found.values["train.evaluate"] = "never"
        elif not value:
            raise _Refused("nothing would be measured: leave trainer.test out")
        else:
            found.values[key] = _in_updates(value, given) if split == "train" else value

    return put


def _in_updates(value: Any, given: Mapping[str, Any]) -> Any:
    """A number of training batches as a number of updates; fractions are the same of both."""
    every = given.get("accumulate_grad_batches") or 1
    if not isinstance(value, int) or every == 1:
        return value
    if value % every:
        raise _Refused(
            f"{value} batches are no whole number of updates of accumulate_grad_batches={every}: use a multiple of it"
        )
    return value // every


def _limit_predict(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    found.limit_predict = None if isinstance(value, float) and value == 1.0 else value


def _overfit(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value:
        found.values["train.overfit_batches"] = value


def _fast_dev_run(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    found.dev = int(value or 0)
    if found.dev:
        few = {f"train.limit_{split}_batches": found.dev for split in ("train", "val", "test")}
        found.values |= {**few, "train.epochs": 1, "train.steps": found.dev, "observe.every": 1}


def _check_val_every_n_epoch(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    interval = given.get("val_check_interval")
    if value is None or value == 1:
        return
    if interval not in (None, 1.0) or isinstance(interval, int):
        raise _Refused("together with val_check_interval: choose one of them")
    found.values.setdefault("train.evaluate", f"{value} epochs")


def _val_check_interval(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value is None or found.values.get("train.evaluate") == "never":
        return
    if isinstance(value, float):
        if value != 1.0:
            found.values["train.evaluate"] = f"{value:g} epochs"
    elif isinstance(value, int):
        in_each = given.get("check_val_every_n_epoch", 1) is not None
        found.values["train.evaluate"] = f"{_in_updates(value, given)} steps{' of each epoch' if in_each else ''}"
    else:
        raise _Refused("the clock decides nothing here, so that a run can be repeated: give a number of batches")


def _accelerator(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    name = value if isinstance(value, str) else kind_of(value).removesuffix("Accelerator").lower()
    known = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "mps": "mps", "xpu": "xpu", "auto": "auto"}
    if name not in known:
        raise _Refused(f"there is {', '.join(known)}")
    if name == "gpu":
        from isoscale.system import devices  # torch is not needed before

        found.values["train.device"] = "mps" if devices.is_available("mps") else "cuda"
    elif name != "auto":
        found.values["train.device"] = known[name]


def _strategy(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    name = (value if isinstance(value, str) else kind_of(value)).lower().removesuffix("strategy")
    if name not in ("auto", "singledevice", "single_device") and not name.startswith("ddp"):
        raise _Refused(
            "every rank holds the whole model here; what saves memory is precision='bf16-mixed', "
            "**{'train.recompute': 'all'}, and smaller batches with accumulate_grad_batches"
        )


def _devices(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value in ("auto", -1, "-1", None):
        return
    if isinstance(value, str) and "," in value:
        value = [int(part) for part in value.split(",") if part.strip()]
    if isinstance(value, Sequence) and not isinstance(value, str):
        if list(value) != list(range(len(value))):
            numbers = ",".join(map(str, value))
            raise _Refused(f"which devices is said outside: CUDA_VISIBLE_DEVICES={numbers}, and devices={len(value)}")
        value = len(value)
    _check_world(int(value) * int(given.get("num_nodes") or 1), int(value))


def _num_nodes(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if given.get("devices", "auto") in ("auto", -1, "-1", None) and (value or 1) > environment.find().world:
        _check_world(int(value), 1)


def _check_world(wanted: int, per_node: int) -> None:
    here = environment.find().world
    if wanted != here:
        start = f"torchrun --nproc-per-node {per_node} SCRIPT.py, srun or mpirun, or isoscale train RECIPE --devices"
        raise _Refused(
            f"that is {wanted} process{'es' if wanted > 1 else ''}, and there {'are' if here > 1 else 'is'} {here}: a "
            f"launcher starts them ({start} {per_node}); or leave it out to take those that there are"
        )


_PRECISIONS = {
    "64": "64", "64-true": "64", "32": "32", "32-true": "32", "16": "fp16", "16-mixed": "fp16", "bf16": "bf16",
    "bf16-mixed": "bf16",
}  # fmt: skip


def _precision(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value is None:
        return
    if str(value) not in _PRECISIONS:
        raise _Refused("weights stay in float32 here: use 'bf16-mixed' or '16-mixed'")
    found.values["train.precision"] = _PRECISIONS[str(value)]


_OWN_LOGGERS = ("TensorBoardLogger", "CSVLogger")
"""Whose files every run has: TensorBoard's folder and metrics.jsonl."""


def _logger(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value is None or value is True:
        return
    listed = _listed(None if value is False else value)
    if not listed:
        found.values["observe.tensorboard"] = 0
    for each in listed:
        name = kind_of(each)
        if name not in _OWN_LOGGERS:
            short = name.removesuffix("Logger").lower()
            raise _Refused(
                f"{name} is a logger of Lightning; isoscale has its own: "
                f"**{{'observe.loggers': [{{'class': {short!r}, …}}]}} (mlflow, wandb, comet, neptune)"
            )
        found.notes.append(f"{name}: TensorBoard's files and metrics.jsonl are in the run directory")
    found.logger = listed or None


def _callbacks(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    found.callbacks = _listed(value)


def _log_every(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value == 0:
        raise _Refused("the end of an epoch is always logged; give a large number to have nothing in between")
    if value is not None:
        found.values["observe.every"] = value


def _enable_checkpointing(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value is False:
        found.values["checkpoint.every"] = "never"
        found.notes.append("enable_checkpointing=False: the end of the training and a stop are saved all the same")


def _enable_progress_bar(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value is False:
        found.values["observe.level"] = "warning"


def _accumulate(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value not in (None, 1):
        found.values["data.loader_batches"] = value


def _clip(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value:
        found.values["train.clip"] = float(value)


def _clip_algorithm(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if str(value) not in ("None", "norm") and given.get("gradient_clip_val"):
        raise _Refused(
            "gradients are clipped by their norm; for others, define configure_gradient_clipping in the module and "
            "call self.clip_gradients there, and leave gradient_clip_val out"
        )


def _deterministic(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value is True:
        found.values["train.deterministic"] = "true"


def _profiler(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    found.profile = value is not None and kind_of(value) != "PassThroughProfiler"


def _distributed_sampler(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    if value is False and environment.find().world > 1:
        raise _Refused(
            "samples are always shared out among the ranks, those of a sampler of one's own by their places: give "
            "each rank the same loaders, and leave it out"
        )


def _plugins(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    for each in _listed(value):
        name = kind_of(each)
        if not name.endswith("Environment") and name != "TorchSyncBatchNorm":
            raise _Refused(
                f"{name or each} has no place here: precision, launchers, checkpoints and batch norms are isoscale's "
                "own (precision=…, checkpoint and parallel in a recipe)"
            )


def _root(value: Any, given: Mapping[str, Any], found: Translated) -> None:
    found.root = None if value is None else str(value)


def _never(unless: Callable[[Any], Any], instead: str) -> "Argument":
    def put(value: Any, given: Mapping[str, Any], found: Translated) -> None:
        if unless(value):
            raise _Refused(instead)

    return put


def _always(said: Callable[[Any], bool], note: str) -> "Argument":
    """Done in any case; where somebody asks for something else, a note says so."""

    def put(value: Any, given: Mapping[str, Any], found: Translated) -> None:
        if said(value):
            found.notes.append(note)

    return put


Argument = Callable[[Any, Mapping[str, Any], Translated], None]
ARGUMENTS: dict[str, Argument] = {
    "accelerator": _accelerator,
    "strategy": _strategy,
    "devices": _devices,
    "num_nodes": _num_nodes,
    "precision": _precision,
    "logger": _logger,
    "callbacks": _callbacks,
    "fast_dev_run": _fast_dev_run,
    "max_epochs": _max_epochs,
    "min_epochs": _minimum("train.min_epochs"),
    "max_steps": _max_steps,
    "min_steps": _minimum("train.min_steps"),
    "max_time": _max_time,
    "limit_train_batches": _limit("train"),
    "limit_val_batches": _limit("val"),
    "limit_test_batches": _limit("test"),
    "limit_predict_batches": _limit_predict,
    "overfit_batches": _overfit,
    "val_check_interval": _val_check_interval,
    "check_val_every_n_epoch": _check_val_every_n_epoch,
    "num_sanity_val_steps": _always(
        lambda value: value == 0, "num_sanity_val_steps=0: one batch of the evaluation is always tried before training"
    ),
    "log_every_n_steps": _log_every,
    "enable_checkpointing": _enable_checkpointing,
    "enable_progress_bar": _enable_progress_bar,
    "enable_model_summary": _always(
        lambda value: value is False, "enable_model_summary=False: the start of a run always says what is trained"
    ),
    "accumulate_grad_batches": _accumulate,
    "gradient_clip_val": _clip,
    "gradient_clip_algorithm": _clip_algorithm,
    "deterministic": _deterministic,
    "benchmark": _always(
        lambda value: value is True,
        "benchmark=True: kernels are chosen so that every start has the same; train.deterministic=false times them",
    ),
    "inference_mode": _always(
        lambda value: value is False, "inference_mode=False: evaluations always run under torch.no_grad"
    ),
    "use_distributed_sampler": _distributed_sampler,
    "profiler": _profiler,
    "detect_anomaly": _always(
        lambda value: value is True,
        "detect_anomaly=True: a NaN always ends a run, with its step, samples, layer and operation",
    ),
    "barebones": _never(bool, "leave it out: hooks that nobody defines cost nothing here"),
    "plugins": _plugins,
    "sync_batchnorm": _always(
        lambda value: value is False and environment.find().world > 1,
        "sync_batchnorm=False: batch norms always see the whole batch of all ranks",
    ),
    "reload_dataloaders_every_n_epochs": _never(
        bool, "loaders are made once; let the Dataset or the sampler follow the epoch that set_epoch(epoch) tells it"
    ),
    "default_root_dir": _root,
    "enable_autolog_hparams": _always(
        lambda value: value is False, "enable_autolog_hparams=False: the recipe of a run is always kept with it"
    ),
    "model_registry": _never(lambda value: value is not None, "write the trained network: isoscale.export(run, FILE)"),
}
"""Every argument of Lightning's Trainer, and what it is here."""
