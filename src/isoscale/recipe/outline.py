"""Static analysis of what a recipe names: its modules are found and signatures read without running any of the code."""

import ast
import inspect
import os
import sys
import tokenize
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal, NamedTuple

MOST_STEPS = 20
"""From one import or base class to the next."""
_PLAIN = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "tuple": tuple, "dict": dict}
_UNKNOWN = object()
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
Resolve = Callable[[str], Callable[..., Any] | None]
"""What a full name stands for, where it may be imported; None elsewhere."""
_NO_ARGUMENTS = ast.arguments([], [], None, [], [], None, [])


class Found(NamedTuple):
    """What is there of a module."""

    files: list[Path]
    """What Python would run to import it, in this order: those of the packages around it, and its own."""
    missing: str | None
    """The first module on the way that is not there; None where all are."""
    is_package: bool = False
    """Whether there may be modules inside it."""


def find_module(name: str) -> Found:
    """The files of a module and of the packages around it."""
    files: list[Path] = []
    folders: Sequence[str] | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        here = ".".join(parts[:depth])
        path = search_path() if folders is None else folders
        spec = _spec(here, path, top=folders is None) if all(parts[:depth]) else None
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return Found(files, here if spec is None else ".".join(parts[: depth + 1]))
        if spec.origin is not None and spec.has_location:
            files.append(Path(spec.origin))
        elif spec.submodule_search_locations is None:
            files.append(Path(f"<{spec.origin or here}>"))  # inside the interpreter
        folders = _folders(spec, parts[depth - 1], path)
    return Found(files, None, bool(folders))


def search_path() -> list[str]:
    """Where Python looks for modules of recipes: in the working directory too."""
    here = os.getcwd()
    path = [entry or here for entry in sys.path]
    return path if here in path else [*path, here]


def _spec(name: str, path: Sequence[str], top: bool) -> ModuleSpec | None:
    """What a finder says: those that an installed package has added know it only by its name."""
    for finder in sys.meta_path:
        asked = path if finder is PathFinder or not top else None
        try:
            spec = finder.find_spec(name, asked)
        except Exception:  # whatever a finder of somebody else's raises
            if finder is not PathFinder:
                continue
            # For a package without a file, it asks the package around it, which nobody has imported.
            spec = ModuleSpec(name, None)
            spec.submodule_search_locations = _folders_called(name.rpartition(".")[2], path)
        if spec is not None:
            return spec
    return None


def _folders(spec: ModuleSpec, part: str, path: Sequence[str]) -> list[str]:
    """Where the modules inside a package are."""
    found: Sequence[str] | None = spec.submodule_search_locations
    if found is None:
        return []
    if isinstance(found, list):
        return found
    return _folders_called(part, path)  # what it says itself depends on what was imported


def _folders_called(part: str, path: Sequence[str]) -> list[str]:
    """Of which Python puts a package together that has no file."""
    return [os.path.join(entry, part) for entry in path if os.path.isdir(os.path.join(entry, part))]


class NotThere(Exception):
    """A name that a module does not have; those that it has."""

    def __init__(self, module: str, part: str, others: list[str]) -> None:
        super().__init__(f'{module} has no "{part}"')
        self.part = part
        self.others = others


class NotCallable(Exception):
    """A name that stands for a plain value, in words."""


def outline(module: str, attribute: str, resolve: Resolve) -> Callable[..., Any] | None:
    """A function with the name and the signature of what a module calls so; None where its source does not tell.

    `resolve` gives classes that need not be read, such as those of torch, from which others inherit.
    """
    return _Reader(resolve).named(module, attribute.split("."))


class _Source:
    """The source of a module, and what its names stand for."""

    def __init__(self, module: str, found: Found) -> None:
        self.module, self._found = module, found
        file = found.files[-1] if found.files else Path()
        with tokenize.open(file) as opened:
            self.tree = ast.parse(opened.read())
        self.names: dict[str, ast.AST] = {}
        self.is_open = False
        """Whether it may have names that cannot be read."""
        for node in self.tree.body:
            if isinstance(node, Definition):
                self.names[node.name] = node
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for alias in node.names:
                    self.names[alias.asname or alias.name.partition(".")[0]] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self.names |= {target.id: node for target in targets if isinstance(target, ast.Name)}
                self.is_open |= any(not isinstance(target, ast.Name) for target in targets)
            elif not isinstance(node, ast.Expr | ast.Pass):
                self.is_open = True  # if, try, for, with, exec …: names may come from there
        self.is_open |= "*" in self.names or "__getattr__" in self.names

    @property
    def package(self) -> str:
        """What relative imports are relative to."""
        return self.module if self._found.is_package else self.module.rpartition(".")[0]


class _Reader:
    def __init__(self, resolve: Resolve) -> None:
        self._resolve, self._steps = resolve, 0

    def named(self, module: str, parts: list[str]) -> Callable[..., Any] | None:
        known = self._resolve(f"{module}:{'.'.join(parts)}")
        if known is not None:
            return known
        source = self._source(module)
        if source is None:
            return None
        node = source.names.get(parts[0])
        if node is None:
            inside = find_module(f"{module}.{parts[0]}")
            if source.is_open or inside.missing is None:
                return None
            defined = [name for name, each in source.names.items() if isinstance(each, Definition)]
            raise NotThere(module, parts[0], [name for name in defined if not name.startswith("_")])
        return self._of(source, node, parts)

    def _source(self, module: str) -> _Source | None:
        self._steps += 1
        found = find_module(module)
        if self._steps > MOST_STEPS or found.missing or not found.files or found.files[-1].suffix != ".py":
            return None
        try:
            return _Source(module, found)
        except (OSError, SyntaxError, ValueError):
            return None  # whoever imports it is told

    def _of(self, source: _Source, node: ast.AST, parts: list[str]) -> Callable[..., Any] | None:
        """What stands at the first of the parts, and from there the way along the others."""
        if isinstance(node, ast.Import | ast.ImportFrom):
            return self._imported(source, node, parts)
        if isinstance(node, ast.ClassDef) and len(parts) > 1:
            inner = next((each for each in node.body if isinstance(each, Definition) and each.name == parts[1]), None)
            return None if inner is None or not isinstance(inner, ast.ClassDef) else self._of(source, inner, parts[1:])
        if len(parts) > 1 or getattr(node, "decorator_list", []):
            return self._dataclass(node) if isinstance(node, ast.ClassDef) and len(parts) == 1 else None
        if isinstance(node, ast.ClassDef):
            return self._class(source, node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return _stub(node.name, node.args, skip_first=False)
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            raise NotCallable(f"is a {type(node.value.value).__name__}, not a class or function")
        return None

    def _imported(self, source: _Source, node: ast.Import | ast.ImportFrom, parts: list[str]) -> Any:
        if isinstance(node, ast.Import):
            alias = next(each for each in node.names if parts[0] in (each.asname, each.name.partition(".")[0]))
            module = alias.name if alias.asname else parts[0]
            return self.named(module, parts[1:]) if len(parts) > 1 else None
        alias = next(each for each in node.names if parts[0] in (each.asname, each.name))
        module = node.module or ""
        if node.level:
            base = source.package.split(".")
            above = base[: len(base) - node.level + 1]
            module = ".".join([*above, *([module] if module else [])])
        if find_module(f"{module}.{alias.name}").missing is None and len(parts) > 1:
            return self.named(f"{module}.{alias.name}", parts[1:])
        try:
            return self.named(module, [alias.name, *parts[1:]])
        except NotThere:
            return None  # the import fails, and says so

    def _class(self, source: _Source, node: ast.ClassDef) -> Callable[..., Any] | None:
        """The arguments of a class's `__init__`, which may be that of a class it is made from."""
        if node.keywords:
            return None
        functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
        if any(each.name == "__new__" for each in functions):
            return None
        own = next((each for each in functions if each.name == "__init__"), None)
        if own is not None:
            return None if own.decorator_list else _stub(node.name, own.args, skip_first=True)
        if not node.bases:
            return _stub(node.name, _NO_ARGUMENTS, skip_first=False)
        return _renamed(node.name, self._base(source, node.bases[0])) if len(node.bases) == 1 else None

    def _base(self, source: _Source, base: ast.expr) -> Callable[..., Any] | None:
        parts = ast.unparse(base).split(".")
        node = source.names.get(parts[0])
        try:
            return None if node is None else self._of(source, node, parts)
        except (NotThere, NotCallable):
            return None

    def _dataclass(self, node: ast.ClassDef) -> Callable[..., Any] | None:
        """The fields of a plain dataclass; nothing where another decorator may change what a class takes."""
        name = ast.unparse(node.decorator_list[0]).partition("(")[0]
        if len(node.decorator_list) > 1 or name not in ("dataclass", "dataclasses.dataclass") or node.bases:
            return None
        arguments = ast.arguments([], [], None, [], [], None, [])
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                if "ClassVar" in ast.unparse(each.annotation) or isinstance(each.value, ast.Call):
                    return None
                arguments.kwonlyargs.append(ast.arg(each.target.id, each.annotation))
                arguments.kw_defaults.append(each.value)
        return _stub(node.name, arguments, skip_first=False)


def _stub(name: str, arguments: ast.arguments, skip_first: bool) -> Callable[..., Any]:
    """A function that can be asked for its signature, and does nothing."""
    kinds, only = inspect.Parameter, arguments.posonlyargs
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = [
        _parameter(each, default, kinds.POSITIONAL_ONLY if each in only else kinds.POSITIONAL_OR_KEYWORD)
        for each, default in zip(positional, defaults, strict=True)
    ][int(skip_first) :]
    if arguments.vararg:
        found.append(_parameter(arguments.vararg, None, kinds.VAR_POSITIONAL))
    found += [
        _parameter(each, default, kinds.KEYWORD_ONLY)
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        found.append(_parameter(arguments.kwarg, None, kinds.VAR_KEYWORD))
    hints = {each.arg: _type(each.annotation) for each in [*positional, *arguments.kwonlyargs] if each.annotation}
    known = {key: hint for key, hint in hints.items() if hint is not _UNKNOWN}
    return _function(name, inspect.Signature(found), known)


def _function(name: str, signature: inspect.Signature, annotations: Mapping[str, Any]) -> Callable[..., Any]:
    def unread(**arguments: Any) -> None:
        raise AssertionError(f"{name} was only read")

    unread.__name__, unread.__annotations__ = name, dict(annotations)
    unread.__signature__ = signature  # type: ignore[attr-defined]
    return unread


def _renamed(name: str, base: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """A class that takes what its base takes."""
    try:
        return None if base is None else _function(name, inspect.signature(base), {})
    except (TypeError, ValueError):
        return None


def _parameter(argument: ast.arg, default: ast.expr | None, kind: Any) -> inspect.Parameter:
    value: Any = inspect.Parameter.empty
    if default is not None:
        value = None if isinstance(default, ast.Constant) and default.value is None else _UNKNOWN
    return inspect.Parameter(argument.arg, kind, default=value)


def _type(annotation: ast.expr | None) -> Any:
    """A type of plain values, such as `list[int] | None`; _UNKNOWN for all others."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            return _type(ast.parse(annotation.value, mode="eval").body)
        except SyntaxError:
            return _UNKNOWN
    if isinstance(annotation, ast.Constant):
        return annotation.value if annotation.value in (None, ...) else _UNKNOWN
    if isinstance(annotation, ast.Name):
        return _PLAIN.get(annotation.id, _UNKNOWN)
    if isinstance(annotation, ast.BinOp) and isinstance(annotation.op, ast.BitOr):
        left, right = _type(annotation.left), _type(annotation.right)
        unknown = left is _UNKNOWN or right is _UNKNOWN or (left is None and right is None)
        return _UNKNOWN if unknown else left | right
    if isinstance(annotation, ast.Subscript):
        inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
        name = ast.unparse(annotation.value).rpartition(".")[2]
        if name == "Literal":
            values = [each.value for each in inner if isinstance(each, ast.Constant)]
            return Literal.__getitem__(tuple(values)) if len(values) == len(inner) else _UNKNOWN
        arguments = [_type(each) for each in inner]
        if name not in ("list", "tuple", "dict") or any(each is _UNKNOWN for each in arguments):
            return _UNKNOWN
        return _PLAIN[name][tuple(arguments)]  # type: ignore[index]
    return _UNKNOWN
