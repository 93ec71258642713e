"""Whether the metrics that steer a training are there: looked at before it begins."""

from collections.abc import Callable
from difflib import get_close_matches

from isoscale.engine.settings import Settings
from isoscale.errors import UserError


def check_without_evaluation(settings: Settings) -> None:
    """Refuse metrics that only an evaluation gives, where there is none."""
    for key, name in _steering(settings).items():
        if not name.endswith("_epoch"):
            raise UserError(f"{key} is {name!r}, but nothing is evaluated; train/loss_epoch is always there")


def check_monitors(settings: Settings, names: list[str], say: Callable[[str], None]) -> None:
    """Refuse metrics that the validation, which gives these names, does not log."""
    for key, name in {"checkpoint.monitor": settings.checkpoint.monitor, **_steering(settings)}.items():
        if name in names or (name.startswith("train") and name.endswith("_epoch")):
            continue  # what the training logs is not known yet
        if key == "checkpoint.monitor" and name == "val/loss":  # nobody chose it
            say(f"the validation logs no val/loss but {', '.join(names)}; the last checkpoint is the best")
            continue
        close = get_close_matches(name, names, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there is: {', '.join(names)}"
        raise UserError(f"{key} is {name!r}, which the validation does not log; {hint}")


def _steering(settings: Settings) -> dict[str, str]:
    """The metrics that steer the training, by the key that names them."""
    watched = {}
    if settings.train.early_stopping:
        watched["train.early_stopping.monitor"] = settings.train.early_stopping.monitor
    if settings.schedule.name == "plateau":
        watched["schedule.monitor"] = settings.schedule.monitor
    return watched
