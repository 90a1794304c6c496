"""Digests of the user's own code. Comments, docstrings and layout do not count, and neither does where it lies."""

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from tasks.foundation.user_code import USER_PACKAGE_PREFIX

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def module_digest(reference: str, folder: Path) -> str:
    """sha256 over a referenced module and what it imports of its own folder or package, 16 hex digits.

    Args:
        reference: `file.py:name`, or `package.module:name` of a module that is loaded.
        folder: the run file's folder.
    """
    name = reference.partition(":")[0]
    code = _file_code(folder / name) if name.endswith(".py") else _package_code(sys.modules[name])
    pending, digests = list(code.first), {}
    while pending:
        file = pending.pop()
        if not file.is_relative_to(code.root) or not file.is_file():
            continue
        key = file.relative_to(code.root).as_posix()
        if key not in digests:
            tree = _parsed(file)
            digests[key] = _digest(tree) if tree else hashlib.sha256(file.read_bytes()).hexdigest()[:16]
            pending.extend(_imported(tree, file, code.imports_from) if tree else ())
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


def digests_of_user_code(thing: Any, reference: str) -> dict[str, str]:
    """Digest of each class and function of the user's that an object is made of, and of what those use.

    Args:
        thing: a model.
        reference: its function, as the run file names it; what lies in the same package is the user's.
    """
    code = _UserCode("" if ".py:" in reference else reference.partition(":")[0].partition(".")[0])
    pending, seen = [thing], set()
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list | tuple | set):
            pending.extend(item)
        elif isinstance(item, FunctionType | type):
            code.add(item)
        elif (_root(type(item)) == "keras" or code.owns(type(item))) and hasattr(item, "__dict__"):
            code.add(type(item))
            pending.extend(vars(item).values())
    return code.digests()


class _UserCode:
    """Collects digests of classes and functions, each with what it refers to."""

    def __init__(self, package: str) -> None:
        # A factory makes several functions of one name, each with values of its own.
        self._found: dict[str, set[str]] = {}
        self._seen: dict[int, Any] = {}  # holds what it has seen, so that no id comes twice
        self._package = package

    def digests(self) -> dict[str, str]:
        """Digest by name, in the order of the names."""
        return {name: " ".join(sorted(found)) for name, found in sorted(self._found.items())}

    def owns(self, kind: Any) -> bool:
        """Whether a class or function is the user's."""
        root = _root(kind)
        return root.startswith(USER_PACKAGE_PREFIX) or (bool(self._package) and root == self._package)

    def add(self, kind: Any) -> None:
        """A class with its bases, or a function, if it is the user's."""
        for part in kind.__mro__ if isinstance(kind, type) else (kind,):
            if id(part) in self._seen or not self.owns(part):
                continue
            self._seen[id(part)] = part  # before the rest: code may refer to itself
            module = sys.modules[part.__module__]
            tree = _tree(part, module)
            constants: dict[str, str] = {}
            for used, value in (*_referred(tree, module), *self._captured(part)):
                if isinstance(value, FunctionType | type):
                    self.add(value)
                elif isinstance(value, (*_PLAIN, tuple, frozenset)):
                    constants[used] = _text(value)
            # The private package's name depends on where the folder lies.
            name = f"{part.__module__.partition('.')[2]}.{part.__qualname__}"
            self._found.setdefault(name, set()).add(_digest(tree, repr(sorted(constants.items()))))

    def _captured(self, part: Any) -> Iterator[tuple[str, Any]]:
        """Values that a function, or a class's methods, took from the function around it."""
        members = vars(part).values() if isinstance(part, type) else (part,)
        for member in members:
            function = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
            if not isinstance(function, FunctionType) or not self.owns(function):
                continue
            name = function.__name__
            for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                with suppress(ValueError):  # not assigned yet
                    yield f"{name}({free})", cell.cell_contents
            if "<locals>" not in function.__qualname__:
                continue  # its defaults are in its source, or among the names that it uses
            for place, default in enumerate(function.__defaults__ or ()):
                yield f"{name}(default {place})", default
            for key, default in (function.__kwdefaults__ or {}).items():
                yield f"{name}(default {key})", default


def _text(value: Any) -> str:
    """A constant as text that is the same in every process: no place in memory, no order of a set."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    return type(value).__qualname__


def _root(kind: Any) -> str:
    return (getattr(kind, "__module__", "") or "").partition(".")[0]


def _tree(part: Any, module: ModuleType) -> ast.Module:
    """The code of a class or function; of all lambdas of a lambda's line; of its module if it has none of its own."""
    try:
        if part.__name__ == "<lambda>":
            line = part.__code__.co_firstlineno
            nodes = ast.walk(ast.parse(inspect.getsource(module)))
            lambdas = [node for node in nodes if isinstance(node, ast.Lambda) and node.lineno == line]
            return ast.Module([ast.Expr(node) for node in lambdas], [])
        return ast.parse(textwrap.dedent(inspect.getsource(part)))
    except (OSError, TypeError, SyntaxError):  # a namedtuple, a class made by type(), or a text that dedents badly
        file = Path(getattr(module, "__file__", None) or "")
        return (_parsed(file) if file.is_file() else None) or ast.Module([], [])


def _referred(tree: ast.Module, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Module-level names that code uses, with their values; those of a sibling module as `module.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in vars(module):
            yield node.id, vars(module)[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            sibling = vars(module).get(node.value.id)
            if isinstance(sibling, ModuleType) and node.attr in vars(sibling):
                yield f"{node.value.id}.{node.attr}", vars(sibling)[node.attr]


@dataclass(frozen=True, slots=True)
class _Code:
    """Where the code of a reference lies: the files to begin with, and the folder or file that holds all of it."""

    first: tuple[Path, ...]
    root: Path
    imports_from: Path  # where a module that is imported by its full name is looked for


def _file_code(file: Path) -> _Code:
    file = file.resolve()
    return _Code((file,), file.parent, file.parent)


def _package_code(module: ModuleType) -> _Code:
    """A module's file, and those of the packages around it, which run before it does."""
    if not getattr(module, "__file__", None):
        return _Code((), Path(), Path())  # built into Python
    file = Path(inspect.getfile(module)).resolve()
    depth = module.__name__.count(".") + (file.name == "__init__.py")
    if depth == 0:
        return _Code((file,), file.parent, file.parent / file.stem)  # alone: what lies beside it is others'
    around = file.parents[:depth]
    return _Code((file, *(folder / "__init__.py" for folder in around)), around[-1], around[-1].parent)


def _imported(tree: ast.Module, file: Path, imports_from: Path) -> Iterator[Path]:
    """Where the modules that a file imports may lie. What is imported from a package may itself be a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else imports_from
            for alias in node.names:
                yield from _places(base, [*(node.module or "").split("."), alias.name])
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from _places(imports_from, alias.name.split("."))


def _places(base: Path, parts: list[str]) -> Iterator[Path]:
    for part in filter(None, parts):
        base = base / part
        yield base.with_name(f"{part}.py")
        yield base / "__init__.py"


def _parsed(file: Path) -> ast.Module | None:
    """A file's code; None if it is not Python, as an extension module is not."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return None


def _digest(tree: ast.Module, more: str = "") -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)]
    return hashlib.sha256((ast.dump(tree) + more).encode()).hexdigest()[:16]


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, or a string that stands alone as a comment does."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
