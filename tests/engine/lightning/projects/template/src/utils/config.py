"""What the template takes from hydra: files put together by `defaults`, overrides, and `_target_`."""

from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml


def compose(folder: Path, overrides: list[str]) -> dict[str, Any]:
    config = yaml.safe_load((folder / "train.yaml").read_text())
    for entry in config.pop("defaults"):
        for group, name in entry.items():
            config[group] = yaml.safe_load((folder / group / f"{name}.yaml").read_text())
    for override in overrides:
        path, value = override.split("=", 1)
        *parents, key = path.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        place[key] = yaml.safe_load(value)
    return config


def instantiate(config: Any, **more: Any) -> Any:
    if not isinstance(config, dict):
        return config
    given = {key: instantiate(value) for key, value in config.items()}
    if "_target_" not in given:
        return given
    module, name = given.pop("_target_").rsplit(".", 1)
    target = getattr(import_module(module), name)
    if given.pop("_partial_", False):
        return partial(target, **given)
    return target(**given, **more)
