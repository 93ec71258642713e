"""Whose files `isoscale recipe import` makes recipes of: those that the sciences know, and LightningCLI's."""

from collections.abc import Iterator, Mapping
from typing import Any

from isoscale.science import registry
from isoscale.science.domain import Importer


def _is_of_lightning(values: Mapping[str, Any]) -> bool:
    """Whether these are the values of a config of LightningCLI, as written or as it saves them."""
    inside = values.get("fit") if isinstance(values.get("fit"), Mapping) else values
    return isinstance(inside, Mapping) and isinstance(inside.get("trainer"), Mapping) and "model" in inside


LIGHTNING_CLI = Importer(
    title="a config of LightningCLI",
    files="a config of LightningCLI (.yaml)",
    recognises=_is_of_lightning,
    translate="isoscale.recipe.importing.lightning_cli.translate_config",
    changes=("trainer", "model", "data", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path", "fit"),
    example="model.class_path=main.Model",
)


def importers() -> Iterator[Importer]:
    """All of them, the sciences' first."""
    yield from registry.importers()
    yield LIGHTNING_CLI
