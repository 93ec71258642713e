"""Write docs/reference.md from the schema of recipes: `python docs/make_reference.py`."""

import json
from pathlib import Path
from typing import Any

from isoscale.recipe.names import SHORT_NAMES
from isoscale.recipe.schema import Recipe

HEAD = """# Reference: the keys of a recipe

<!-- written by docs/make_reference.py from the schema; change the docstrings there instead -->

A recipe is a YAML or JSON file. Every key has a default; `isoscale recipe show RECIPE` prints all of them for a recipe,
with the origin of each value. On the command line and in Python a key is written with points: `optimizer.lr=3e-4`,
`isoscale.train("images/digits", **{"optimizer.lr": 3e-4})`; `~schedule` deletes what a recipe says about a section.
`isoscale recipe schema` prints the same as JSON Schema, with which editors complete and check.
"""
SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "array": "list",
         "object": "mapping", "null": "null"}  # fmt: skip


def reference() -> str:
    """The whole page."""
    schema = Recipe.model_json_schema()
    sections = schema["$defs"]
    top = {name: field for name, field in schema["properties"].items() if "$ref" not in field}
    parts = [HEAD, "## The recipe itself\n", table(top, "")]
    for name, field in schema["properties"].items():
        if "$ref" in field:
            parts += section(name, sections[last_name(field["$ref"])], sections)
    return "\n".join([*parts, short_names()])


def section(path: str, found: dict[str, Any], sections: dict[str, Any]) -> list[str]:
    """A heading, what the section is for, its keys, and the sections inside it."""
    parts = [f"## {path}\n", found.get("description", "") + "\n", table(found["properties"], f"{path}.")]
    for name, field in found["properties"].items():
        for inner in refs(field):
            parts += section(f"{path}.{name}", sections[inner], sections)
    return parts


def table(fields: dict[str, Any], prefix: str) -> str:
    """One row a key."""
    rows = [
        f"| `{prefix}{name}` | {kind(field)} | {default(field)} | {text(field)} |" for name, field in fields.items()
    ]
    return "\n".join(["| key | value | default | |", "|---|---|---|---|", *rows, ""])


def kind(field: dict[str, Any]) -> str:
    """What may be written, in words."""
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        return " or ".join(kind(option) for option in options)
    if "$ref" in field:
        return "a section, see below"
    if "enum" in field or "const" in field:
        return " or ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    word = WORDS.get(field.get("type", ""), "anything")
    if word == "list" and field.get("items", {}).get("type"):
        word += f" of {kind(field['items'])}"
    bounds = [f"{sign} {field[name]:g}" for name, sign in SIGNS.items() if name in field and field[name] < 2**60]
    return " ".join([word, ", ".join(bounds)]).strip()


def default(field: dict[str, Any]) -> str:
    """The default as it would be written."""
    return f"`{json.dumps(field['default'])}`" if "default" in field else "needed"


def text(field: dict[str, Any]) -> str:
    """The docstring on one line."""
    return " ".join(field.get("description", "").split()).replace("|", "\\|")


def refs(field: dict[str, Any]) -> list[str]:
    """The sections that a key may hold."""
    inside = [field, *field.get("anyOf", []), *_values(field), *(v for o in field.get("anyOf", []) for v in _values(o))]
    return sorted({last_name(part["$ref"]) for part in inside if "$ref" in part})


def _values(field: dict[str, Any]) -> list[dict[str, Any]]:
    extra = field.get("additionalProperties")
    return [extra, *extra.get("anyOf", [])] if isinstance(extra, dict) else []


def last_name(path: str) -> str:
    """`#/$defs/Train` is Train."""
    return path.rpartition("/")[2]


def short_names() -> str:
    """The classes that have a short name."""
    rows = [f"| `{name}` | `{path}` |" for name, path in SHORT_NAMES.items()]
    head = "## Short names of classes\n\nAnything else is named by its path, `package.module.Class`.\n"
    return "\n".join([head, "| name | class |", "|---|---|", *rows, ""])


if __name__ == "__main__":
    (Path(__file__).parent / "reference.md").write_text(reference(), encoding="utf-8")
