"""From a configuration of NERSC's U-Net training (config/UNet.yaml of its tutorials) to a recipe that trains the same.

There a file holds configurations by name, most of them made of others by merge keys; all that is not in the file is
said by the script, train.py, and by its command line.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isoscale.errors import MISSING_KEY, UNKNOWN_KEY, Problem, found, nearest
from isoscale.science import importing
from isoscale.science.domain import Importer
from isoscale.science.importing import (
    NOTHING,
    NUMBER,
    SWITCH,
    TEXT,
    WHOLE,
    Imported,
    PeerFile,
    Tables,
    Translation,
)

SCRIPT = "train.py"
"""The origin of what no configuration says."""
NESTED = ("lr_schedule", "weight_init")
NEEDED = ("train_path", "global_batch_size", "Nsamples", "num_epochs", "lr_schedule.start_lr")
KINDS: dict[str, tuple[str, ...]] = {
    "train_path": (TEXT,), "val_path": (TEXT,), "use_cache": (TEXT, NOTHING),
    "global_batch_size": (WHOLE,), "base_batch_size": (WHOLE,), "Nsamples": (WHOLE,), "Nsamples_val": (WHOLE,),
    "num_epochs": (WHOLE,), "data_size": (WHOLE,), "N_out_channels": (WHOLE,), "full_scale": (SWITCH,),
    "lambda_rho": (NUMBER,), "enable_amp": (SWITCH,), "amp_mode": (TEXT, NOTHING), "data_loader_config": (TEXT,),
    "lr_schedule.scaling": (TEXT,), "lr_schedule.start_lr": (NUMBER,), "lr_schedule.end_lr": (NUMBER,),
    "lr_schedule.warmup_steps": (WHOLE,),
    "weight_init.conv_init": (TEXT,), "weight_init.conv_scale": (NUMBER,), "weight_init.conv_bias": (NUMBER, NOTHING),
}  # fmt: skip
"""The keys that a recipe has words for, and what their values may be."""
DEFAULTS = {"lr_schedule.scaling": "none", "lr_schedule.end_lr": 0.0, "lr_schedule.warmup_steps": 0}
"""Those of the function that sets the learning rate; the script has no others."""
SAME = {
    "task.model.out_channels": "N_out_channels",
    "task.density_weight": "lambda_rho",
    "data.crop": "data_size",
    "data.batch_size": "global_batch_size",
    "data.samples_per_epoch": "Nsamples",
    "data.eval_samples": "Nsamples_val",
    "optimizer.lr": "lr_schedule.start_lr",
    "schedule.end": "lr_schedule.end_lr",
    "train.epochs": "num_epochs",
}
TABLES = Tables(DEFAULTS, KINDS, (), {}, same=SAME)

_PROFILE = "isoscale train RECIPE --profile shows where the time goes"
_NPY = "copies for DALI: crops are cut out of the HDF5 files, on the device where these fit there"
NEEDLESS = {
    "expdir": "the directory of a run has its logs: isoscale train RECIPE --run DIR",
    "box_size": "boxes have the size that their files say, and all of it is used",
    "num_data_workers": "crops are cut without workers",
    "enable_apex": "Adam is fused by itself",
    "enable_jit": "on CUDA whole steps are captured, optimizer included (train.program)",
    "enable_benchy": _PROFILE,
    "enable_manual_profiling": _PROFILE,
    "train_path_npy_data": _NPY,
    "train_path_npy_label": _NPY,
    "val_path_npy_data": _NPY,
    "val_path_npy_label": _NPY,
    "lr_schedule.tot_steps": "follows from num_epochs, Nsamples and global_batch_size, there as here",
}
"""What a recipe need not say, and why."""
BY_HAND = {
    "local_batch_size": "in a file it means nothing there, and on the command line the batch of each GPU; here "
    "data.batch_size is that of all ranks together",
}
KEYS = frozenset({*KINDS, *NEEDLESS, *BY_HAND})

LOADERS = ("inmem", "lowmem", "dali-lowmem", "synthetic")
PRECISIONS = ("none", "fp16", "bf16")
FIRST_WEIGHTS = {"weight_init.conv_scale": 0.02, "weight_init.conv_bias": 0}
"""Those of the network here."""
TAGS = {
    "train/loss_epoch": "Loss/train",
    "val/loss": "Loss/valid",
    "lr": "Learning Rate",
    "time/steps_per_second": "Avg iters per sec",
}
"""What the script calls its curves."""


def is_config(values: Mapping[str, Any]) -> bool:
    """Whether a file holds configurations of this training."""
    return any(isinstance(part, Mapping) and len(KEYS & part.keys()) > 2 for part in values.values())


IMPORTER = Importer(
    title="a configuration file of NERSC's U-Net training",
    files="a configuration file of NERSC's U-Net training (.yaml)",
    recognises=is_config,
    translate=f"{__name__}.translate",
    sections=tuple(dict.fromkeys(key.partition(".")[0] for key in (*KINDS, *NEEDLESS, *BY_HAND))),
    example="num_epochs=3",
    holds_configs=True,
)


class Said(importing.Said):
    """What a configuration says, key by key; a value that it cannot have becomes a problem."""

    def __init__(self, file: PeerFile, problems: list[Problem]) -> None:
        """The whole configuration; the word None is nothing, as there."""
        self._problems, self._origins = problems, file.origins
        given: dict[str, Any] = {}
        for key, value in file.values.items():
            if key not in NESTED:
                given[key] = None if value == "None" else value
            elif isinstance(value, Mapping):
                given |= {f"{key}.{name}": inner for name, inner in value.items()}
            else:
                self.wrong(key, f"expected a section of keys and values, found {found(value)}")
        super().__init__(TABLES, given)
        self.missing = [key for key in NEEDED if key not in given]
        self.unknown = [key for key in given if key not in KEYS]
        for key in [key for key in KINDS if key in given]:
            if expected := self.expected(key, given[key]):
                self.wrong(key, f"expected {expected}, found {found(self._values.pop(key))}")

    def wrong(self, key: str, message: str, meant: str | None = None) -> None:
        """Write down a problem with a key."""
        path = tuple(key.split("."))
        self._problems.append(Problem(path, message, self._origins.get(path), meant))


def translate(file: PeerFile, problems: list[Problem]) -> Imported:
    """The recipe of a configuration; what it cannot say becomes problems."""
    said, imported = Said(file, problems), Imported(f"{file.source}, of NERSC's U-Net training")
    for key in said.missing:
        said.wrong(key, f"{MISSING_KEY}: the HDF5 file with Nbody and Hydro" if key == "train_path" else MISSING_KEY)
    for key in said.unknown:
        meant = nearest(key, KEYS)
        if said.missing:
            said.wrong(key, UNKNOWN_KEY, meant)
        else:
            hint = f'; did you mean "{meant}"?' if meant else ""
            imported.remark_by_hand(key, f"not known here; the script takes any key, and may read it{hint}")
    if not problems:
        _Translation(said, imported).translate(file.moved)
    return imported


class _Translation(Translation):
    _said: Said

    def translate(self, moved: Path | None) -> None:
        for key, value in {"task.class": "field_regression", "task.model.class": "unet3d", "data.class": "boxes",
                           "data.drop_last": True, "data.transforms": ["cube_symmetry"], "optimizer.name": "adam",
                           "schedule.name": "cosine", "observe.tensorboard_tags": dict(TAGS)}.items():  # fmt: skip
            self._imported.put(key, value, SCRIPT)
        for key, parameter in SAME.items():
            if parameter in self._said:
                self._put(key, parameter)
        self._network()
        self._data(moved)
        self._schedule()
        self._precision()
        for text in dict.fromkeys(NEEDLESS.values()):
            asked = [parameter for parameter in NEEDLESS if NEEDLESS[parameter] == text and self._said[parameter]]
            if asked:
                self._note(", ".join(asked), text)
        for parameter, text in BY_HAND.items():
            if parameter in self._said:
                self._by_hand(parameter, text)

    def _only(self, parameter: str, *known: Any) -> Any:
        value = self._said[parameter]
        if value in known:
            return value
        self._said.wrong(parameter, f"{found(value)} is not known there, nor here; known is {', '.join(known)}")
        return known[0]

    def _network(self) -> None:
        if "full_scale" in self._said:
            self._put("task.model.depth", "full_scale", 6 if self._said["full_scale"] else 5)
        others = [key for key, value in FIRST_WEIGHTS.items() if key in self._said and self._said[key] != value]
        if others:
            self._by_hand(", ".join(others), "weights begin as N(0, 0.02) and biases as 0 here; for others, name a "
                                             "network of your own in task.model")  # fmt: skip
        if self._said["lambda_rho"] and self._said["enable_jit"]:
            self._note("lambda_rho", "weighs the mean over the density; with --enable_jit the script takes a fifth of "
                                     "it, because it divides by the number of all fields")  # fmt: skip

    def _data(self, moved: Path | None) -> None:
        """Boxes where the file says, or by their names in the folder that they were copied or moved to."""
        folder, gone = moved or self._said["use_cache"], list[str]()
        for split in ("train", "val"):
            parameter = f"{split}_path"
            if parameter not in self._said:
                continue
            place, words = self._said[parameter], ""
            if folder is not None:
                place, words = str(Path(folder, Path(place).name)), f" in {'--data' if moved else 'use_cache'}"
            self._put(f"data.{split}", parameter, place, words=words)
            gone += [] if Path(place).expanduser().exists() else [split]
        if gone:
            missing = " and no ".join(self._imported.values["data"][split] for split in gone)
            keys = " and ".join(f"data.{split}" for split in gone)
            self._by_hand(", ".join(f"{split}_path" for split in gone), f"there is no {missing} here: set {keys}, or "
                          "name the folder of the boxes with --data FOLDER")  # fmt: skip
        num_samples, batch = self._said["Nsamples"], self._said["global_batch_size"]
        if batch > 0 and num_samples % batch:
            self._note("Nsamples", f"is no multiple of {batch}: the rest is left out of an epoch, as the learning rate "
                                   "counts steps there; its loader for HDF5 trains on it too")  # fmt: skip
        if "data_loader_config" not in self._said:
            return
        if self._only("data_loader_config", *LOADERS) == "synthetic":
            self._by_hand("data_loader_config", "random numbers are no data here: the boxes are trained on; simulated "
                                                "ones are data.class=simulated_boxes")  # fmt: skip
        else:
            self._note("data_loader_config", "boxes are kept where they fit, on the device, in the host's memory or on "
                                             "the disk (data.residency)")  # fmt: skip

    def _schedule(self) -> None:
        """A cosine per step, behind a warm-up where the learning rate was scaled up."""
        said = self._said
        scaling, warmup = self._only("lr_schedule.scaling", "none", "sqrt", "linear"), said["lr_schedule.warmup_steps"]
        batch, base = said["global_batch_size"], said["base_batch_size"]
        if scaling != "none" and base is None:
            said.wrong("base_batch_size", f"{MISSING_KEY}: lr_schedule.scaling is {scaling}")
            return
        if "lr_schedule.scaling" in said:
            self._put("schedule.scale", "lr_schedule.scaling")
        if base is not None:
            self._put("schedule.base_batch_size", "base_batch_size")
        if not warmup:
            return
        if scaling == "none" or batch <= base:
            why = "scaling is none" if scaling == "none" else f"a batch of {batch} is not larger than {base}"
            self._note("lr_schedule.warmup_steps", f"there is no warm-up here, as there, because {why}")
            return
        self._put("schedule.warmup", "lr_schedule.warmup_steps")
        steps = said["num_epochs"] * (said["Nsamples"] // max(1, batch))
        if steps > warmup:
            left = 0.5 * (1 + math.cos(math.pi * (steps - warmup) / steps))
            self._note("lr_schedule.warmup_steps", "the learning rate ends at end_lr with the last step; there it ends "
                       f"with {left:.2%} of its peak above that, because the warm-up comes on top of the cosine's steps"
                       )  # fmt: skip

    def _precision(self) -> None:
        """The type that the file names; where it names none, bfloat16, whose range needs no scaling of the loss."""
        mode, is_mixed = self._said["amp_mode"], self._said["enable_amp"]
        if mode is None and not is_mixed:
            return
        parameter = "enable_amp" if mode is None else "amp_mode"
        precision = "bf16" if mode is None else self._only("amp_mode", *PRECISIONS)
        if precision == "none":
            return
        self._put("train.precision", parameter, precision)
        if precision == "bf16":
            self._put("data.dtype", parameter, "bfloat16")
        else:
            self._note(parameter, "fp16 needs a scaled loss, here as there; amp_mode=bf16 needs none")
        if mode is None:
            self._note(parameter, "is bf16 here; there it is fp16 with a scaled loss, which is train.precision=fp16")
