"""Write the reference pages from the code that they describe: `python docs/make_reference.py`."""

import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from torch import nn
from typer.main import get_command

import isoscale
from isoscale.cli.main import app
from isoscale.data.sources import Sources
from isoscale.engine.metrics.losses import LOSSES, METRICS
from isoscale.recipe.components import resolve
from isoscale.recipe.names import short_names
from isoscale.recipe.presets import preset_description, preset_names
from isoscale.recipe.schema import Recipe
from isoscale.science.models import ACTIVATIONS
from isoscale.science.registry import public_names

HEAD = """# Reference: the keys of a recipe

<!-- written by docs/make_reference.py from the schema; change the docstrings there instead -->

A recipe is a YAML or JSON file (`.yaml`, `.yml`, `.json`). Every key has a default; `isoscale recipe show RECIPE`
prints all of them for a recipe, with the origin of each value. On the command line and in Python a key is written with
dots: `optimizer.lr=3e-4`,
`isoscale.train("images/digits", **{"optimizer.lr": 3e-4})`; `~schedule` deletes what a recipe says about a section.
`isoscale recipe schema` prints the same as JSON Schema, with which editors complete and check. What can stand behind
`class` is in [Presets and components](components.md).
"""
COMPONENTS_HEAD = """# Reference: presets and components

<!-- written by docs/make_reference.py from the code; change the docstrings there instead -->
"""
NAMES = """Anything else is named by its path, `package.module.Class`: your own, or any of torch's. So are
[optimizers](how-to/train/models.md#an-optimizer-of-your-own),
[schedules](how-to/train/schedules.md#a-schedule-of-your-own),
[losses and metrics](how-to/train/models.md#losses-and-metrics).
`torchvision:resnet18` and its like stand for networks of torchvision (`pip install 'isoscale[vision]'`).
"""
COMMANDS_HEAD = """# Reference: the commands

<!-- written by docs/make_reference.py from the command line itself; change the help texts there instead -->

`isoscale --help` and `isoscale COMMAND --help` print the same. `isoscale --install-completion` teaches your shell to
complete presets, keys and runs. `--debug`, anywhere in a command, shows the traceback of an error.

| exit code | meaning |
|---|---|
| 0 | done |
| 2 | you can fix it: the message says what was found, what was expected and what to type |
| 75 | stopped on request with a checkpoint: start the same command again |
| 1 | anything else |
"""
PYTHON_HEAD = """# Reference: Python

<!-- written by docs/make_reference.py from the code; change the docstrings there instead -->

What `import isoscale` offers. The command line is made of the same functions.
"""
KINDS = ("Tasks", "Networks", "Data", "Transforms", "Loggers")
SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
WORDS = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false", "array": "list",
         "object": "mapping", "null": "null"}  # fmt: skip


def reference() -> str:
    """The page of keys."""
    schema = Recipe.model_json_schema()
    sections = schema["$defs"]
    top = {name: field for name, field in schema["properties"].items() if not sections_in(field)}
    parts = [HEAD, "## The recipe itself\n", table(top, "")]
    for name, field in schema["properties"].items():
        first, *others = sections_in(field) or [""]
        parts += section(name, sections[first], sections) if first else []
        for other in others:  # it names its inner sections as the first does
            parts += by_class(name, sections[other])
    return "\n".join(parts)


def sections_in(field: dict[str, Any]) -> list[str]:
    """The section that a key of the recipe is, or those that it may be."""
    return [last_name(part["$ref"]) for part in (field, *field.get("oneOf", [])) if "$ref" in part]


def section(path: str, found: dict[str, Any], sections: dict[str, Any]) -> list[str]:
    """A heading, what the section is for, its keys, and the sections inside it."""
    parts = [f"## {path}\n", found.get("description", "") + "\n", table(found["properties"], f"{path}.")]
    for name, field in found["properties"].items():
        first, *others = refs(field) or [""]
        parts += section(f"{path}.{name}", sections[first], sections) if first else []
        for other in others:
            parts += by_class(f"{path}.{name}", sections[other])
    return parts


def by_class(path: str, found: dict[str, Any]) -> list[str]:
    """The keys of a section in its other form."""
    return [f"### {path} by class\n", found["description"] + "\n", table(found["properties"], f"{path}.")]


def table(fields: dict[str, Any], prefix: str) -> str:
    """One row per key."""
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
    return sorted({last_name(part["$ref"]) for part in _inside(field) if "$ref" in part})


def _inside(field: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A key, what it may be instead, and what the list or mapping that it may be holds."""
    yield field
    values = field.get("additionalProperties") or field.get("items")
    options = [*field.get("anyOf", []), *field.get("oneOf", []), *([values] if isinstance(values, dict) else [])]
    for option in options:
        yield from _inside(option)


def last_name(path: str) -> str:
    """`#/$defs/Train` is Train."""
    return path.rpartition("/")[2]


def components() -> str:
    """The page of presets, components, losses and metrics."""
    presets = [f"| `{name}` | {preset_description(name)} |" for name in preset_names()]
    parts = [COMPONENTS_HEAD, "## Presets\n", "`isoscale train NAME` trains one.\n", *rows("name", presets)]
    parts += ["## Short names of classes\n", NAMES]
    for kind_name in KINDS:
        found = [component(name) for name in short_names() if kind_of(name) == kind_name]
        parts += [f"### {kind_name}\n", *rows("name", found, "arguments")]
    parts += ["## Names of functions\n", *rows("where", [f"| {where} | {names} |" for where, names in functions()])]
    return "\n".join(parts)


def rows(first: str, found: list[str], last: str = "") -> list[str]:
    """A table under its head."""
    columns = [first, "", *([last] if last else [])]
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *found, ""]


def kind_of(name: str) -> str:
    """Which table a component belongs into."""
    target: Any = resolve(name)
    if issubclass(target, nn.Module):
        return "Tasks" if hasattr(target, "training_step") else "Networks"
    return "Data" if issubclass(target, Sources) else "Loggers" if hasattr(target, "notify") else "Transforms"


def component(name: str) -> str:
    """A row about one component."""
    target = resolve(name)
    arguments = [argument(parameter) for parameter in inspect.signature(target).parameters.values()]
    return f"| `{name}` | {sentence(target)} | {', '.join(arguments)} |"


def argument(parameter: inspect.Parameter) -> str:
    """An argument as it would be written in a recipe, with its default."""
    if parameter.default is inspect.Parameter.empty:
        return f"`{parameter.name}`"
    value = round(parameter.default, 6) if isinstance(parameter.default, float) else parameter.default
    return f"`{parameter.name}: {json.dumps(value)}`"


def sentence(target: Any) -> str:
    """The first paragraph of a docstring on one line."""
    return " ".join((inspect.getdoc(target) or "").partition("\n\n")[0].split()).replace("|", "\\|")


def functions() -> Iterator[tuple[str, str]]:
    """Places of a recipe that take the name of a function."""
    known: dict[str, dict[str, Any]] = {
        "`task.loss`": LOSSES,
        "`task.metrics`": METRICS,
        "`activation` of `mlp`": ACTIVATIONS,
    }
    for where, names in known.items():
        yield where, ", ".join(f"`{name}`" for name in names)


def commands() -> str:
    """The page of commands."""
    parts = [COMMANDS_HEAD]
    for path, command in walk("isoscale", get_command(app)):
        context = typer.Context(command, info_name=path)
        usage = " ".join([path, *command.collect_usage_pieces(context)])
        parts += [f"## {path}\n", f"{command.help}\n", f"```text\n{usage}\n```\n"]
        shown = [each for each in command.get_params(context) if each.name != "help" and not getattr(each, "hidden", 0)]
        found = [described(each, context) for each in shown]
        parts += rows("argument or option", found) if found else []
    return "\n".join(parts)


def walk(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every command that does something, under what to type for it."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield path, command
    for name, child in inner.items():
        yield from walk(f"{path} {name}", child)


def described(parameter: Any, context: typer.Context) -> str:
    """A row about one argument or option."""
    words, help_text = parameter.get_help_record(context)
    words = re.sub(r" <(str|path|list\[str\])>$", "", words).replace("|", "/")
    return f"| `{words}` | {help_text} |".replace("[", "\\[")


def python() -> str:
    """The page of functions and classes."""
    parts = [PYTHON_HEAD]
    for name in sorted({*isoscale.__all__, *public_names()} - {"__version__"}):
        target = getattr(isoscale, name)
        parts += [f"## isoscale.{name}\n", f"```text\nisoscale.{name}{call(target)}\n```\n", *explained(target)]
        if inspect.isclass(target):
            found = [member(key, value) for key, value in members(target)]
            parts += rows(f"of `{name}`", found) if found else []
    return "\n".join(parts)


def call(target: Any) -> str:
    """How something is called: its arguments with their defaults, without types; nothing where it inherits that."""
    if inspect.isclass(target) and "__init__" not in vars(target):
        return ""
    own = [each for each in inspect.signature(target).parameters.values() if each.name not in ("self", "cls")]
    simple = [
        each.replace(annotation=inspect.Parameter.empty, default=str(each.default))
        if isinstance(each.default, Path)
        else each.replace(annotation=inspect.Parameter.empty)
        for each in own
        if not inspect.isfunction(each.default)  # how to tell of progress, say
    ]
    return str(inspect.Signature(simple))


def explained(target: Any) -> list[str]:
    """The docstring of a function, or of a class and of how it is made."""
    texts = [inspect.getdoc(target)]
    if inspect.isclass(target) and "__init__" in vars(target):
        texts.append(inspect.getdoc(target.__init__))
    return [f"{text}\n" for text in texts if text]


def members(target: type) -> Iterator[tuple[str, Any]]:
    """What a class offers that no class below it does."""
    for name, value in vars(target).items():
        inner = getattr(value, "__func__", value)
        is_new = not any(hasattr(base, name) for base in target.__bases__)
        is_new = is_new and getattr(inner, "__name__", name) == name  # and no old name of something
        if not name.startswith("_") and is_new and (inspect.isfunction(inner) or isinstance(inner, property)):
            yield name, inner


def member(name: str, value: Any) -> str:
    """A row about a method or property."""
    words = name if isinstance(value, property) else f"{name}{call(value)}"
    return f"| `{words}` | {sentence(value)} |"


PAGES = {"reference.md": reference, "components.md": components, "commands.md": commands, "python.md": python}
"""The pages, and what writes them."""

if __name__ == "__main__":
    for page, write in PAGES.items():
        (Path(__file__).parent / page).write_text(write(), encoding="utf-8")
