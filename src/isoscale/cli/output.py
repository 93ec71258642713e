"""Output for programs."""

import json
import math
from typing import Any


def print_json(value: Any) -> None:
    """One line of JSON; a number that is not finite, for which JSON has no word, becomes "nan", "inf" or "-inf"."""
    print(json.dumps(_finite(value), allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
