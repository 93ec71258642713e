"""From an input file of DeePMD-kit to a recipe that trains the same."""

import math
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from isoscale.errors import Problem
from isoscale.science.atoms.cache import Single
from isoscale.science.importing import Imported, PeerFile, Remark, Translation
from isoscale.science.potentials.atomic_systems import AtomicSystems
from isoscale.science.potentials.deepmd.said import Said
from isoscale.science.potentials.deepmd.tables import PRECISIONS, PROBABILITIES, TABLES, TERMS

DESCRIPTOR, FITTING = "model.descriptor", "model.fitting_net"
RATE, TRAINING = "learning_rate", "training.training_data"
VALIDATION = "training.validation_data"
FEWEST_KEPT = 2
AUTO_FACTOR, AUTO_STEP = 1.1, 4
"""`auto` leaves room for so many times the neighbours that are found, cut to a whole number, in steps of so many."""
STOP_LR = 5e-8
"""The last learning rate of a file that says none."""
SYSTEMS_ELSEWHERE = (
    '; say where they are: "{parameter}=[FOLDER, …]", or isoscale recipe import FILE --data FOLDER --out RECIPE, where '
    "FOLDER is what they lie in"
)
"""What to do about systems that are not found."""
OF_EXP = ("decay_steps", "decay_rate", "smooth")
"""Keys of a learning rate that falls exponentially."""


FOR_ONE = "is that of each worker there and of all ranks together here: for 4 ranks, four times as much"


def translate(file: PeerFile, problems: list[Problem]) -> Imported:
    """The recipe of an input file; what it cannot say becomes problems.

    Systems are in the current folder or in that of the file; or else where they were moved, by the end of their paths.
    """

    def places(name: str) -> list[str]:
        if file.moved is None:
            return list(dict.fromkeys([_absolute(name, Path()), _absolute(name, file.folder)]))
        path, hash_sign, group = name.partition("#")
        words = [word for word in Path(path).parts if word not in ("/", "..")]
        ends = ["/".join(words[start:]) for start in range(len(words))]
        return [_absolute(end + hash_sign + group, file.moved) for end in ends or [""]]

    imported = Imported(f"{file.source}, an input of DeePMD-kit")
    translation = _Translation(Said(file, problems), imported, file.world or 1, places)
    translation.translate()
    if not problems:
        translation.count_neighbours()
    if file.world is None:
        imported.needless.append(Remark(f"{TRAINING}.batch_size", FOR_ONE))
    return imported


class _Translation(Translation):
    _said: Said

    def __init__(self, said: Said, imported: Imported, world: int, places: Callable[[str], list[str]]) -> None:
        super().__init__(said, imported)
        self._world, self._places = world, places
        self._has_advised = False

    def translate(self) -> None:
        self._put("seed", "training.seed", self._said["training.seed"] or 0)
        self._task()
        self._data()
        self._optimizer()
        self._schedule()
        self._train()
        self._observe()
        self._remark()

    def _only(self, parameter: str, *known: str) -> str:
        value = str(self._said[parameter])
        if value not in known:
            self._said.wrong(parameter, f'"{value}" is not supported here; known is {", ".join(known)}')
            return known[0]
        return value

    def _task(self) -> None:
        said = self._said
        for parameter in ("model.type_map", f"{DESCRIPTOR}.type"):
            said.needed(parameter)
        self._put("task.class", f"{FITTING}.type", "potential")
        self._put("task.model.class", "model.type", "deep_potential")
        self._put("task.model.descriptor.class", f"{DESCRIPTOR}.type", "se_e2_a")
        self.put_by_tables(TABLES)
        sel = said[f"{DESCRIPTOR}.sel"]
        if isinstance(sel, str) and _auto_factor(sel) is None:
            said.wrong(f"{DESCRIPTOR}.sel", f'"{sel}" is not a list of numbers, auto or auto:1.2 (at least auto:1)')
        if not self._terms:
            said.wrong("loss.start_pref_e", "no part of the loss weighs anything: there is nothing to learn")
        self._put("task.labels", "loss.start_pref_e", list(self._terms.values()), words=" and others")
        if said["training.stat_file"]:
            self._put("task.statistics_file", "training.stat_file", _absolute(said["training.stat_file"], Path()))

    @property
    def _terms(self) -> dict[str, str]:
        """What is learnt, by its short name in the file: what weighs something at one time or another."""
        names = ("loss.start_pref_{}", "loss.limit_pref_{}")
        return {short: term for short, term in TERMS.items() if any(self._said[name.format(short)] for name in names)}

    def count_neighbours(self) -> None:
        """Find the numbers of neighbours that the file leaves open, on all training data."""
        sel = self._said[f"{DESCRIPTOR}.sel"]
        factor = _auto_factor(sel) if isinstance(sel, str) else None
        if factor is None:
            return
        most = _most_neighbours(self._imported.values)
        room = [-(-int(number * factor) // AUTO_STEP) * AUTO_STEP for number in most]
        self._put("task.model.descriptor.sel", f"{DESCRIPTOR}.sel", room, words=f" ({sel})")
        self._note(f"{DESCRIPTOR}.sel", f"{sel} is {room} here: no atom of the training data has more than {most}")

    def _data(self) -> None:
        self._put("data.class", f"{TRAINING}.systems", "atomic_systems")
        self._put("data.train", f"{TRAINING}.systems", self._systems(f"{TRAINING}.systems"))
        if self._said.has_section(VALIDATION):
            self._put("data.val", f"{VALIDATION}.systems", self._systems(f"{VALIDATION}.systems"))
        self._probabilities()
        self._batch_size()

    def _systems(self, parameter: str) -> list[str]:
        given = self._said.needed(parameter) or []
        names = [given] if isinstance(given, str) else given
        found = {_absolute(name, Path()): self._system(parameter, name) for name in names}
        twice = next((place for place, count in Counter(found.values()).items() if count > 1), None)
        if twice is not None:
            self._said.wrong(parameter, f"several systems would be {twice}: keep as much of their paths as tells them "
                                        "apart")  # fmt: skip
        return [found[_absolute(name, Path())] for name in names]

    def _system(self, parameter: str, name: str) -> str:
        """A system where it is now; a group of an HDF5 file stands behind #."""
        places = self._places(name)
        found = next((place for place in places if Path(place.partition("#")[0]).exists()), None)
        if found is None:
            advice = "" if self._has_advised else SYSTEMS_ELSEWHERE.format(parameter=parameter)
            self._said.wrong(parameter, f'there is no "{name}": not as {", and not as ".join(places)}{advice}')
            self._has_advised = True
        return found or name

    def _probabilities(self) -> None:
        if self._said[f"{TRAINING}.sys_probs"]:
            self._put("data.probabilities", f"{TRAINING}.sys_probs")
            return
        kind, semicolon, blocks = str(self._said[f"{TRAINING}.auto_prob"]).partition(";")
        if kind not in PROBABILITIES:
            self._only(f"{TRAINING}.auto_prob", *PROBABILITIES)
            return
        self._put("data.probabilities", f"{TRAINING}.auto_prob", PROBABILITIES[kind] + semicolon + blocks)

    def _batch_size(self) -> None:
        """The batch of all ranks together: as many as the file says for each of them."""
        parameter = f"{TRAINING}.batch_size"
        given = self._rule(parameter)
        words = f" × {self._world} ranks" if self._world > 1 else ""
        mixed = _mixed(given)
        if mixed is not None:
            self._put("data.batches", parameter, "mixed")
        self._put("data.batch_size", parameter, _times(mixed or given, self._world), words=words)
        if self._said.has_section(VALIDATION):
            given = self._rule(f"{VALIDATION}.batch_size")
            number = given if isinstance(given, int) else _mixed(given)
            if number is not None:
                self._put("data.eval_batch_size", f"{VALIDATION}.batch_size", number)

    def _rule(self, parameter: str) -> int | list[int] | str:
        """How a batch is chosen."""
        given: int | list[int] | str = self._said[parameter]
        if isinstance(given, str) and not re.fullmatch("auto|(auto|mixed):[0-9]*[1-9][0-9]*", given):
            self._said.wrong(parameter, f'"{given}" is not supported here; known is a number, a list of numbers, auto, '
                                        "auto:N and mixed:N")  # fmt: skip
            return "auto"
        return given

    def _optimizer(self) -> None:
        if "optimizer.adam_beta1" in self._said or "optimizer.adam_beta2" in self._said:
            self._put("optimizer.betas", "optimizer.adam_beta1",
                      [self._said["optimizer.adam_beta1"], self._said["optimizer.adam_beta2"]])  # fmt: skip
        decay = self._said["optimizer.weight_decay"]
        if decay is not None or self._said["optimizer.type"] == "AdamW":
            self._put("optimizer.weight_decay", "optimizer.weight_decay", 0.001 if decay is None else decay)

    def _schedule(self) -> None:
        self._said.needed(f"{RATE}.start_lr")
        self._scaling()
        kind = self._only(f"{RATE}.type", "exp", "cosine")
        self._put("schedule.name", f"{RATE}.type", {"exp": "exponential", "cosine": "cosine"}[kind])
        self._end()
        if kind == "exp":
            self._decay()
        for name in OF_EXP if kind != "exp" else ():
            if f"{RATE}.{name}" in self._said:
                self._said.wrong(f"{RATE}.{name}", f"means nothing where the type is {kind}; leave it out")

    def _end(self) -> None:
        """The last learning rate: one of two keys says it, or none."""
        stop, ratio = self._said[f"{RATE}.stop_lr"], self._said[f"{RATE}.stop_lr_ratio"]
        if stop is not None and ratio is not None:
            self._said.wrong(f"{RATE}.stop_lr", "say either stop_lr or stop_lr_ratio")
        elif ratio is not None:
            self._put("schedule.end", f"{RATE}.stop_lr_ratio", ratio * (self._said[f"{RATE}.start_lr"] or 0.0))
        else:
            self._put("schedule.end", f"{RATE}.stop_lr", STOP_LR if stop is None else stop)

    def _decay(self) -> None:
        every, rate = self._said[f"{RATE}.decay_steps"], self._said[f"{RATE}.decay_rate"]
        smooth = self._said[f"{RATE}.smooth"]
        self._put("schedule.every", f"{RATE}.smooth" if smooth else f"{RATE}.decay_steps", 1 if smooth else every)
        if smooth and every < 1:
            self._said.wrong(f"{RATE}.decay_steps", f"expected a number of at least 1, found {every}")
        elif rate is not None and not 0 < rate <= 1:
            self._said.wrong(f"{RATE}.decay_rate", f"expected a number above 0 and up to 1, found {rate:g}")
        elif rate is not None:
            self._put("schedule.gamma", f"{RATE}.decay_rate", rate ** (1 / every) if smooth else rate)

    def _scaling(self) -> None:
        """From one worker to all of them: by the ratio of batches, or at once where a batch depends on its system."""
        rule = self._only(f"{RATE}.scale_by_worker", "linear", "sqrt", "none")
        base, lr = _base(self._said[f"{TRAINING}.batch_size"]), self._said[f"{RATE}.start_lr"]
        if self._world > 1 and rule != "none" and base is None:
            factor = self._world if rule == "linear" else math.sqrt(self._world)
            self._put("optimizer.lr", f"{RATE}.start_lr", (lr or 0) * factor, words=f" × {factor:g} (scale_by_worker)")
            return
        self._put("optimizer.lr", f"{RATE}.start_lr")
        if self._world > 1 and base is not None:
            self._put("schedule.scale", f"{RATE}.scale_by_worker", rule)
            self._put("schedule.base_batch_size", f"{TRAINING}.batch_size", base)

    def _train(self) -> None:
        self._length()
        self._precision()
        if self._said.has_section(VALIDATION):
            self._put("train.evaluate", "training.disp_freq", f"{self._said['training.disp_freq']} steps")
            self._put("train.limit_val_batches", f"{VALIDATION}.numb_btch")
        else:
            self._put("train.evaluate", f"{VALIDATION}.systems", "never")
        for short, term in self._terms.items():
            self._weight(term, f"loss.start_pref_{short}", f"loss.limit_pref_{short}")

    def _length(self) -> None:
        steps, epochs = self._said["training.numb_steps"], self._said["training.num_epoch"]
        if (steps is None) == (epochs is None):
            if not self._said.is_wrong("training.numb_steps") and not self._said.is_wrong("training.num_epoch"):
                self._said.wrong("training.numb_steps", "say either numb_steps or num_epoch")
        elif steps is not None:
            self._put("train.steps", "training.numb_steps")
            self._put("train.epochs", "training.numb_steps", None)
        elif epochs == int(epochs):
            self._put("train.epochs", "training.num_epoch", int(epochs))
        else:
            self._said.wrong("training.num_epoch", f"expected whole epochs, found {epochs:g}; say training.numb_steps")

    def _precision(self) -> None:
        descriptor, fitting = (
            PRECISIONS[self._only(f"{section}.precision", *PRECISIONS)] for section in (DESCRIPTOR, FITTING)
        )
        self._put("train.precision", f"{FITTING}.precision", fitting)
        if descriptor != fitting and fitting == "64":
            self._put("task.model.descriptor.precision", f"{DESCRIPTOR}.precision", descriptor)
        elif descriptor != fitting:
            self._said.wrong(f"{DESCRIPTOR}.precision", "cannot be float64 beside a fitting_net of float32; the other "
                                                        "way round, or one for both")  # fmt: skip

    def _weight(self, term: str, start: str, end: str) -> None:
        key = f"train.loss_weights.{term}"
        for parameter in (start, end):
            if self._said[parameter] < 0:
                self._said.wrong(parameter, f"expected 0 or more, found {self._said[parameter]:g}")
        self._put(f"{key}.start", start)
        self._put(f"{key}.end", end)
        self._put(f"{key}.follows", start, "rate")

    def _observe(self) -> None:
        every, kept = self._said["training.save_freq"], self._said["training.max_ckpt_keep"]
        self._put("checkpoint.every", "training.save_freq", f"{every} steps")
        self._put("checkpoint.keep", "training.max_ckpt_keep", max(FEWEST_KEPT, kept))
        if self._said.has_section(VALIDATION):  # an error: the loss means something else whenever weights move
            short = next((short for short in ("f", *TERMS) if short in self._terms), "e")
            self._put("checkpoint.monitor", f"loss.start_pref_{short}", f"val/{TERMS[short]}_rmse")
        self._put("observe.curve", "training.disp_file", Path(self._said["training.disp_file"]).name)
        if self._said["training.tensorboard"]:
            self._put("observe.tensorboard", "training.tensorboard", 1)

    def _remark(self) -> None:
        """Say what a reader of the file would expect otherwise."""
        said, world = self._said, self._world
        seeds = [key for key in (f"{DESCRIPTOR}.seed", f"{FITTING}.seed") if said[key] is not None]
        if seeds:
            self._note(", ".join(seeds), "one seed is for everything here, also for the initial weights: training.seed")
        if "training.save_ckpt" in said:
            self._note("training.save_ckpt", "checkpoints are in the directory of the run, and have names of their own")
        if said["training.max_ckpt_keep"] < FEWEST_KEPT:
            self._note("training.max_ckpt_keep", f"at least {FEWEST_KEPT} checkpoints are kept")
        if Path(said["training.disp_file"]).name != said["training.disp_file"]:
            self._note("training.disp_file", f"is {Path(said['training.disp_file']).name} in the directory of the run")
        if said["training.num_epoch"] is not None and self._imported.values["data"].get("probabilities") != "size":
            self._note("training.num_epoch", "an epoch has as many batches as all systems together; one of DeePMD-kit "
                                             "is longer where systems are not drawn by their size")  # fmt: skip
        if world > 1:
            self._note(f"{TRAINING}.batch_size", f"is for each of the {world} ranks of the first start")
        steps, every = said["training.numb_steps"], said[f"{RATE}.decay_steps"]
        if said[f"{RATE}.type"] == "exp" and steps is not None and every >= steps and not said[f"{RATE}.smooth"]:
            self._note(f"{RATE}.decay_steps", f"in {steps:,} steps the rate never drops; DeePMD-kit would "
                                                "take a smaller number: set one below the steps")  # fmt: skip


def _auto_factor(sel: str) -> float | None:
    """How much room `auto` or `auto:1.2` leaves; None if it is neither."""
    found = re.fullmatch(r"auto(?::([0-9.]+))?", sel)
    try:
        factor = float(found[1] or AUTO_FACTOR) if found else 0.0
    except ValueError:
        return None
    return factor if factor >= 1 else None


def _most_neighbours(values: dict[str, Any]) -> list[int]:
    """The most neighbours of each type at any atom of the training data."""
    model, systems = values["task"]["model"], AtomicSystems(train=values["data"]["train"])
    found: Any = systems.with_neighbours(model["types"], model["descriptor"]["cutoff"], Single(), lambda text: None)
    return [max(numbers) for numbers in zip(*(each.most_neighbours for each in found.train.systems), strict=True)]


def _absolute(name: str, folder: Path) -> str:
    return os.path.abspath(folder / Path(name).expanduser())


def _mixed(batch: int | list[int] | str) -> int | None:
    """The N of `mixed:N`."""
    found = re.fullmatch("mixed:([0-9]+)", batch) if isinstance(batch, str) else None
    return int(found[1]) if found else None


def _times(batch: int | list[int] | str, world: int) -> int | list[int] | str:
    """A batch for so many workers at once."""
    if isinstance(batch, str):
        least = batch if ":" in batch else f"{batch}:32"
        return batch if world == 1 else f"{least}x{world}"
    return [size * world for size in batch] if isinstance(batch, list) else batch * world


def _base(batch: int | list[int] | str) -> int | None:
    """The largest batch of one worker, where it does not depend on the data."""
    if isinstance(batch, str):
        return _mixed(batch)
    return max(batch) if isinstance(batch, list) and batch else batch if isinstance(batch, int) else None
