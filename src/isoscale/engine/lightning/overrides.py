"""Whether a user's class, rather than a framework's, defines a method."""

from typing import Any

_FRAMEWORKS = (
    "lightning.pytorch.core", "pytorch_lightning.core", "lightning.fabric", "lightning_fabric", "isoscale.engine.task"
)  # fmt: skip


def overrides(owner: Any, name: str) -> bool:
    """Whether the class of `owner`, or a callback beside it, has a method under a name that frameworks define too."""
    if of_callbacks(owner, name):
        return True
    found = next((cls for cls in type(owner).__mro__ if name in vars(cls)), None)
    return found is not None and not found.__module__.startswith(_FRAMEWORKS)


def of_callbacks(owner: Any, name: str) -> bool:
    """Whether a callback beside `owner` has a hook of this name."""
    return name in getattr(owner, "__dict__", {}).get("_hooks_of_callbacks", ())
