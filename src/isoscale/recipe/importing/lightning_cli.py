"""Configs of LightningCLI as recipes: what `python main.py fit --config FILE` trains, `isoscale train` does."""

from collections.abc import Mapping
from typing import Any

from isoscale.errors import Problem, UserError
from isoscale.recipe.lightning import EPOCHS, kind_of, translate
from isoscale.science.importing import Imported, PeerFile, Remark

SECTIONS = ("seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler", "ckpt_path", "fit")
_CLASS = ("class_path", "class")
"""How classes are named in a config, and in a word of the command that changes it."""
_SEED = 42
"""What `seed_everything: true` stands for here; Lightning draws one."""
_RECIPES_OWN = {
    "ModelCheckpoint": {"monitor": "checkpoint.monitor", "mode": "checkpoint.mode"},
}
"""Callbacks that say what a recipe has keys for, too."""


def translate_config(file: PeerFile, problems: list[Problem]) -> Imported:
    """The recipe of a config; what has no place in one is said."""
    imported = Imported(file.source)
    values = dict(file.values)
    inside = values.pop("fit", None)  # the config of a subcommand
    values = {**values, **(inside if isinstance(inside, Mapping) else {})}
    for name in values:
        if name not in SECTIONS:
            imported.remark_by_hand(name, "is an argument of the script's own: what it does is not known here")
    _put_seed(values.get("seed_everything"), imported)
    _put_class("model", "task", values.get("model"), imported, problems)
    _put_class("data", "data", values.get("data"), imported, problems)
    _put_trainer(values.get("trainer") or {}, imported, problems)
    _put_optimizer(values.get("optimizer"), imported)
    _put_schedule(values.get("lr_scheduler"), imported)
    if values.get("ckpt_path"):
        imported.remark_by_hand("ckpt_path", f"to begin with these weights: task.init_from={values['ckpt_path']}")
    return imported


def _put_seed(seed: Any, imported: Imported) -> None:
    if seed is not None and seed is not False:
        imported.put("seed", _SEED if seed is True else int(seed), "seed_everything")


def _put_class(name: str, section: str, given: Any, imported: Imported, problems: list[Problem]) -> None:
    """A module or data module with its arguments."""
    given = {"class_path": given} if isinstance(given, str) else dict(given or {})
    path = next((given.pop(key) for key in _CLASS if key in given), None)
    if path is None:
        problems.append(
            Problem(
                (name,),
                f"the script says the class, LightningCLI(…), and the file only its arguments: add "
                f"{name}.class_path=main.{'Model' if name == 'model' else 'Data'} to the command",
            )
        )
        return
    nested = given.pop("init_args", None) or {}
    arguments = {**given, **nested}
    arguments.pop("dict_kwargs", None)
    imported.put(f"{section}.class", path, name)
    if name == "data" and arguments:
        imported.put("data.init_args", _flattened(arguments), name)
    else:
        for key, value in arguments.items():
            imported.put(f"{section}.{key}", _flattened(value), f"{name}.{key}")


def _flattened(value: Any) -> Any:
    """Classes inside of arguments, with theirs beside them as a recipe has them."""
    if isinstance(value, list):
        return [_flattened(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    path = next((value[key] for key in _CLASS if key in value), None)
    if path is None:
        return {key: _flattened(each) for key, each in value.items()}
    inside = {key: _flattened(each) for key, each in value.items() if key not in (*_CLASS, "init_args")}
    return {"class": path, **inside, **_flattened(value.get("init_args") or {})}


def _put_trainer(given: Mapping[str, Any], imported: Imported, problems: list[Problem]) -> None:
    """The arguments of the Trainer, each by itself, so that all that is wrong is said at once."""
    arguments = {name: value for name, value in given.items() if name != "callbacks"}
    try:
        found = translate(arguments)
    except UserError as error:
        problems += [Problem(("trainer",), line) for line in str(error).splitlines()]
        return
    for key, value in found.values.items():
        imported.put(key, value, "trainer")
    imported.needless += [Remark("trainer", note) for note in found.notes if str(EPOCHS) not in note]
    if found.profile:
        imported.remark_by_hand("trainer.profiler", "isoscale train RECIPE --profile")
    if found.root is not None:
        imported.remark_by_hand("trainer.default_root_dir", f"isoscale train RECIPE --run {found.root}/NAME")
    listed = given.get("callbacks") or []
    for callback in listed if isinstance(listed, list) else [listed]:
        spec = _flattened(callback)
        if "." not in spec["class"]:  # LightningCLI knows its own by their names alone
            spec["class"] = f"lightning.pytorch.callbacks.{spec['class']}"
        imported.append("train.callbacks", spec, "trainer.callbacks")
        arguments = callback.get("init_args") or {}
        for argument, key in _RECIPES_OWN.get(kind_of(callback), {}).items():
            if arguments.get(argument) is not None:
                imported.put(key, arguments[argument], f"trainer.callbacks: {kind_of(callback)}")


def _put_optimizer(given: Any, imported: Imported) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping) or not any(key in given for key in _CLASS):
        imported.remark_by_hand("optimizer", "name its class: optimizer.class=torch.optim.Adam optimizer.lr=…")
        return
    spec = _flattened(given)
    if "." not in spec["class"]:
        spec["class"] = f"torch.optim.{spec['class']}"
    for key, value in spec.items():
        imported.put(f"optimizer.{key}", value, "optimizer")


_PLATEAU = {
    "monitor": "monitor", "mode": "mode", "factor": "gamma", "patience": "patience", "threshold": "threshold",
    "min_lr": "end",
}  # fmt: skip


def _put_schedule(given: Any, imported: Imported) -> None:
    if given is None:
        return
    if kind_of(given) == "ReduceLROnPlateau":
        imported.put("schedule.name", "plateau", "lr_scheduler")
        for argument, value in (given.get("init_args") or {}).items():
            if argument in _PLATEAU:
                imported.put(f"schedule.{_PLATEAU[argument]}", value, f"lr_scheduler.{argument}")
            elif value is not None:
                imported.remark_by_hand(f"lr_scheduler.{argument}", "has no place in the plateau schedule")
        return
    imported.remark_by_hand(
        "lr_scheduler",
        f"{kind_of(given) or given} counts epochs under LightningCLI, and schedules count steps here: say it in "
        "schedule, with steps (schedule.class=torch.optim.lr_scheduler.… or schedule.name), or return the scheduler "
        "from configure_optimizers of the module",
    )
