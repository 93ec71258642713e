"""Loaders that are given one by one, as `trainer.fit(model, train, val)` has them, in the place of a data module."""

from typing import Any

from torch.utils.data import DataLoader

from isoscale.data.sources import Sources
from isoscale.engine.lightning.loaders import is_loader
from isoscale.engine.lightning.overrides import overrides

_SPLITS = ("train", "val", "test", "predict")


class _Loaders:
    """Has the loader method of each split that there is something for."""

    def __init__(self, found: dict[str, Any]) -> None:
        self._found = found

    def train_dataloader(self) -> Any:
        return self._of("train")

    def val_dataloader(self) -> Any:
        return self._of("val")

    def test_dataloader(self) -> Any:
        return self._of("test")

    def predict_dataloader(self) -> Any:
        return self._of("predict")

    def _of(self, split: str) -> Any:
        """A loader, or what the module's own method gives, when it is asked for."""
        found = self._found.get(split)
        return found() if callable(found) and not isinstance(found, DataLoader) else found


def given_loaders(model: Any, **loaders: Any) -> Any:
    """Data of loaders by split; where there is none for a split, the module's own method gives it, if it has one.

    Tensors, datasets and other data that is not in loaders become `Sources`; a data module stays what it is.
    """
    given = {split: loader for split, loader in loaders.items() if loader is not None}
    if not given:
        return None
    if len(given) == 1 and (only := given.get("train")) is not None and not _is_loaders(only):
        return only  # a data module, `Sources`, a Dataset or tensors
    if not all(_is_loaders(each) for each in given.values()):
        return Sources(**given)
    own = {split: getattr(model, f"{split}_dataloader") for split in _SPLITS if overrides(model, f"{split}_dataloader")}
    return _Loaders({**own, **given})


def _is_loaders(value: Any) -> bool:
    """Whether these are loaders: one, several, or something that gives batches of them together."""
    if isinstance(value, list | tuple | dict):
        inside = list(value.values()) if isinstance(value, dict) else list(value)
        return bool(inside) and all(_is_loaders(each) for each in inside)
    return is_loader(value)
