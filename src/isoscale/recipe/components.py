"""Components: the classes that a recipe names, found by short name or class path and built with their arguments."""

import functools
import importlib
import importlib.metadata
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from isoscale.data.config import Data
from isoscale.engine.config import LossWeightClass, Train
from isoscale.errors import KeyPath, Problem, UserError, found, nearest
from isoscale.recipe.arguments import check_arguments
from isoscale.recipe.formats.tree import children
from isoscale.recipe.names import TORCHVISION, full_name, no_module, parted, short_names
from isoscale.recipe.schema import Task

OWN = ("isoscale", "torch", "torchvision")
"""Packages whose errors are about the values of a recipe; those of one's own code are shown with their lines."""
FUNCTIONS = ("loss", "metrics")
"""Arguments of supervised tasks that functions may be given for: these are handed over, and not called."""
LAMBDA = "lr_lambda"
"""Such an argument of schedulers of torch."""
PACKAGE = "torchvision"
INSTALL = "pip install 'isoscale[vision]'"
INSTEAD = "isoscale's own networks, such as resnet, need none of it"
Spec = str | Mapping[str, Any]
"""A component in a recipe: a name, or a mapping with `class` and the arguments beside it."""


class UnknownComponent(UserError):
    """A name that leads to no class, with the name that was probably meant."""

    def __init__(self, message: str, suggestion: str | None = None) -> None:
        super().__init__(f'{message}; did you mean "{suggestion}"?' if suggestion else message)
        self.message = message
        self.suggestion = suggestion


def resolve(name: str) -> Callable[..., Any]:
    """The class or function that a short name, `package.module.Class` or `package.module:Class` stands for."""
    module_name, attribute = parted_name(name)
    target: Any = _import(module_name, name)
    for part in attribute.split("."):
        if not hasattr(target, part):
            suggestion = as_written(nearest(part, _public(target)), name)
            raise UnknownComponent(f'{module_name} has no "{part}"{_hides(module_name)}', suggestion)
        target = getattr(target, part)
    if not callable(target):
        functions = [other for other in _public(target) if other.islower() and callable(getattr(target, other))]
        message = f'"{name}" is a {type(target).__name__}, not a class or function'
        raise UnknownComponent(message, as_written(nearest(attribute, functions), name))
    return _explained(name, target) if module_name.startswith(f"{PACKAGE}.models") else target


def parted_name(name: str) -> tuple[str, str]:
    """The module of a component and its name there, or an error with the nearest name that is known."""
    module_name, attribute = parted(full_name(name))
    if not module_name or not attribute:
        known = sorted(short_names())
        words = f'there is no component "{name}"; write package.module.Class, or one of {", ".join(known)}'
        raise UnknownComponent(words, nearest(name, known))
    return module_name, attribute


def _import(module_name: str, name: str) -> ModuleType:
    # Let recipes name classes in the user's own files, also when started through an installed command. Installed
    # packages come first: whatever a library imports later must not be found among the files of a project.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        if module_name.partition(".")[0] == PACKAGE:
            raise UnknownComponent(_why_no_torchvision(error)) from error
        raise UnknownComponent(_why_not(error, module_name, name)) from error


def _why_not(error: Exception, module_name: str, name: str) -> str:
    """Why a module cannot be imported."""
    if isinstance(error, ModuleNotFoundError):
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            return no_module(error.name, name)
        return f"importing {module_name} failed: {error}"
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"importing {module_name} failed: {type(error).__name__}: {error} ({where.filename}:{where.lineno})"


def _hides(module_name: str) -> str:
    """A word on a file of the user's that has the name of an installed package, which is found before it."""
    top = module_name.partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    own = next((path for path in (Path(f"{top}.py"), Path(top)) if path.exists()), None)
    if not file or own is None or Path(file).is_relative_to(own.absolute()):
        return ""
    return f" ({file} is found before {own} of this folder: give that another name)"


def _public(owner: Any) -> list[str]:
    names = (name for name in dir(owner) if not name.startswith("_"))
    return [name for name in names if not isinstance(getattr(owner, name), ModuleType)]


def as_written(suggestion: str | None, name: str) -> str | None:
    """A suggestion that can be typed in the place of `name`, where that is no path."""
    return f"{TORCHVISION}{suggestion}" if suggestion and name.startswith(TORCHVISION) else suggestion


def as_mapping(spec: Spec) -> dict[str, Any]:
    """A component as a mapping, also when it is written as its name alone."""
    return {"class": spec} if isinstance(spec, str) else dict(spec)


def task_spec(task: Task) -> dict[str, Any]:
    """The task of a recipe as a component; the model is one of its arguments."""
    model = {} if task.model is None else {"model": as_mapping(task.model)}
    return {"class": task.class_, **task.arguments, **model}


def data_spec(data: Data) -> dict[str, Any]:
    """The data of a recipe as a component; batch size and the like are the engine's and stay out."""
    return {"class": data.class_, **data.arguments, **data.init_args}


def instantiate(spec: Spec, **provided: Any) -> Any:
    """Build a component: first the components among its arguments, then itself, with `provided` as well."""
    mapping = as_mapping(spec)
    target = resolve(mapping["class"])
    handed = FUNCTIONS if hands_over(target) else ()
    arguments = {
        key: _handed(value) if key in handed else _build(value) for key, value in mapping.items() if key != "class"
    }
    try:
        return target(**arguments, **provided)
    except (ValueError, TypeError, ArithmeticError, RuntimeError, MemoryError) as error:
        if getattr(target, "__module__", "").partition(".")[0] not in OWN or isinstance(error, UserError):
            error.add_note(f"while building {mapping['class']} from the recipe")
            raise
        said = ", ".join(f"{key}={value!r:.60}" for key, value in mapping.items() if key != "class")
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"cannot build {mapping['class']} ({said}): {reason}; correct these values") from error
    except Exception as error:
        error.add_note(f"while building {mapping['class']} from the recipe")
        raise


def prepared(spec: Spec) -> "partial[Any]":
    """A component that is made later, or a function that is to be called: what it names, with its arguments built.

    `lr_lambda` of a scheduler of torch may be a function, as a loss may be.
    """
    mapping = as_mapping(spec)
    arguments = {
        key: _handed(value) if key == LAMBDA else _build(value) for key, value in mapping.items() if key != "class"
    }
    return partial(resolve(mapping["class"]), **arguments)


def own_weights(train: Train) -> "dict[str, partial[Any]]":
    """The functions by which terms of the loss are weighed, where a recipe names them by class path."""
    weights = {name: weight for name, weight in train.loss_weights.items() if isinstance(weight, LossWeightClass)}
    return {name: prepared({"class": weight.class_, **weight.arguments}) for name, weight in weights.items()}


def handed_over(spec: Any) -> Any:
    """A loss or metric for a task: an object of a class, or a function as it is, its further arguments filled in.

    A function that needs nothing more than the recipe gives it makes the loss, and is called.
    """
    if not is_path(spec):
        return _build(spec)
    mapping = as_mapping(spec)
    made = prepared(mapping)
    return instantiate(mapping) if _is_maker(made.func, made.keywords) else made if made.keywords else made.func


def hands_over(target: Any) -> bool:
    """Whether a task takes losses and metrics as functions of prediction and target."""
    from isoscale.engine.task import Supervised

    return isinstance(target, type) and issubclass(target, Supervised)


def _handed(value: Any) -> Any:
    return [handed_over(each) for each in value] if isinstance(value, list) else handed_over(value)


def is_path(spec: Any) -> bool:
    """Whether a loss or metric is named by a path, and not by one of the names that tasks know."""
    return "class" in spec if isinstance(spec, Mapping) else isinstance(spec, str) and ("." in spec or ":" in spec)


def _is_maker(target: Callable[..., Any], arguments: Mapping[str, Any]) -> bool:
    try:
        inspect.signature(target).bind(**arguments)
    except TypeError:
        return isinstance(target, type)
    except ValueError:  # written in C
        return False
    return True


def _build(value: Any) -> Any:
    if isinstance(value, Mapping):
        return instantiate(value) if "class" in value else {key: _build(child) for key, child in value.items()}
    return [_build(item) for item in value] if isinstance(value, list) else value


Look = Callable[[str], Callable[..., Any] | None]
"""How to get at the signature of what a name stands for: `resolve` imports it, `read` does not."""


def check(spec: Any, path: KeyPath, provided: frozenset[str] = frozenset(), look: Look = resolve) -> list[Problem]:
    """What would keep a component from being built, found without building it."""
    if not isinstance(spec, str | Mapping) or (isinstance(spec, Mapping) and "class" not in spec):
        message = f"expected a component (a short name, or a mapping with class and its arguments), found {found(spec)}"
        return [Problem(path, message)]
    mapping = as_mapping(spec)
    place = path if isinstance(spec, str) else (*path, "class")
    arguments = {key: value for key, value in mapping.items() if key != "class"}
    problems = check_call(mapping["class"], place, arguments, path, provided, look=look)
    return problems + check_nested(arguments, path, look)


def check_call(
    name: Any,
    place: KeyPath,
    arguments: dict[str, Any],
    path: KeyPath,
    provided: frozenset[str] = frozenset(),
    neighbours: Iterable[str] = (),
    look: Look = resolve,
) -> list[Problem]:
    """Whether the class called `name` (written at `place`) exists and takes the arguments (written at `path`)."""
    if not isinstance(name, str):
        return [Problem(place, f"expected the name of a class, found {found(name)}")]
    try:
        target = look(name)
    except UnknownComponent as error:
        return [Problem(place, error.message, None, error.suggestion)]
    return [] if target is None else check_arguments(target, arguments, path, provided, neighbours)


def check_handed(value: Any, path: KeyPath, look: Look = resolve, num_later: int = 2) -> list[Problem]:
    """Check functions that are handed over, such as losses, which get their first `num_later` arguments later."""
    specs = [((*path, place), spec) for place, spec in enumerate(value)] if isinstance(value, list) else [(path, value)]
    problems = []
    for here, spec in specs:
        if isinstance(spec, int | float):
            message = "expected a name, a class path, or a mapping with class and its arguments"
            problems.append(Problem(here, f"{message}, found {found(spec)}"))
        if not is_path(spec):
            problems += check_nested(spec, here, look)
            continue
        mapping = as_mapping(spec)
        try:
            target = look(mapping["class"]) if isinstance(mapping["class"], str) else None
        except UnknownComponent:
            target = None
        arguments = {key: each for key, each in mapping.items() if key != "class"}
        # an outline of a function's source tells its arguments, but not whether it is a class
        is_function = target is not None and not isinstance(target, type) and not _is_maker(target, arguments)
        called = list(inspect.signature(target).parameters)[:num_later] if is_function and target is not None else []
        problems += check(spec, here, frozenset(called), look)
    return problems


def check_nested(value: Any, path: KeyPath, look: Look = resolve) -> list[Problem]:
    """Check the components among arguments, in lists and mappings too."""
    problems = []
    for key, child in children(value):
        is_component = isinstance(child, Mapping) and "class" in child
        here = (*path, key)
        problems += check(child, here, look=look) if is_component else check_nested(child, here, look)
    return problems


def _why_no_torchvision(error: Exception) -> str:
    """Why torchvision cannot be imported, and what to do."""
    if isinstance(error, ModuleNotFoundError):
        if error.name == PACKAGE:
            return f"torchvision is not installed: {INSTALL}; {INSTEAD}"
        return f"importing torchvision failed: {error}; {INSTALL} brings what it needs"
    versions = " and ".join(f"{name} {_version(name)}" for name in (PACKAGE, "torch"))
    return (
        f"torchvision does not work here: {type(error).__name__}: {error}. {versions} were not built for each other: "
        f"install both together, from the same place; {INSTEAD}"
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown)"


def _explained(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """The function that makes a network, with errors that say what to change in the recipe."""

    @functools.wraps(make)
    def made(**arguments: Any) -> Any:
        try:
            return make(**arguments)
        except OSError as error:
            raise UserError(
                f"cannot fetch the weights {arguments.get('weights')} of {name}: {error}\n"
                "Where there is no way to the internet, bring a file of weights (`isoscale data get` lists some) and "
                "start from that: task.model.weights=null task.init_from=FILE"
            ) from error
        except (KeyError, TypeError, ValueError) as error:
            written = ", ".join(f"{key}={value}" for key, value in arguments.items()) or "no arguments"
            words = f"there is nothing called {error}" if isinstance(error, KeyError) else str(error)
            raise UserError(f"torchvision cannot make {name} with {written}: {words}") from error

    return made
