"""What the shell offers when the user presses Tab: presets, keys of a recipe, runs."""

from collections.abc import Iterator
from pathlib import Path


def recipes(incomplete: str) -> list[str]:
    """Presets; the shell itself completes files. Keys as well, because overrides may come first."""
    from isoscale.recipe.presets import preset_names

    presets = [name for name in preset_names() if name.startswith(incomplete)]
    return presets or overrides(incomplete)


def overrides(incomplete: str) -> list[str]:
    """Keys of a recipe, ready for their value."""
    from isoscale.recipe.schema import Recipe

    mark = "~" if incomplete.startswith("~") else ""
    schema = Recipe.model_json_schema()
    keys = (mark + key + ("" if mark else "=") for key in dict.fromkeys(_keys(schema, schema["$defs"])))
    return [key for key in keys if key.startswith(incomplete)]


def _keys(section: dict, sections: dict, prefix: str = "") -> Iterator[str]:  # type: ignore[type-arg]
    for name, field in section.get("properties", {}).items():
        inner = [part["$ref"].rpartition("/")[2] for part in (field, *field.get("oneOf", [])) if "$ref" in part]
        for each in inner:
            yield from _keys(sections[each], sections, f"{prefix}{name}.")
        if not inner and name != "extends":
            yield prefix + name


def runs(incomplete: str) -> list[str]:
    """Names of the runs below `runs`."""
    found = (path.parent.name for path in Path("runs").glob("*/recipe.yaml"))
    return sorted(name for name in found if name.startswith(incomplete))


def checkpoints(incomplete: str) -> list[str]:
    """The pointers that every run has."""
    return [name for name in ("best", "last") if name.startswith(incomplete)]


def published(incomplete: str) -> list[str]:
    """Data sets and weights that can be fetched."""
    from isoscale.science.registry import downloads

    return [name for name in downloads() if name.startswith(incomplete)]


def described(incomplete: str) -> list[str]:
    """All that `data info` knows: what can be fetched, and recipes with their keys."""
    return [*published(incomplete), *recipes(incomplete)]
