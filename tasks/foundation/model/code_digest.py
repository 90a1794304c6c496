"""Digests of the user's own code. Comments, docstrings and layout do not count, and neither does where it lies."""

import ast
import hashlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from tasks.foundation.user_code import USER_PACKAGE_PREFIX

_CONSTANTS = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))


def module_digest(reference: str, folder: Path) -> str:
    """sha256 over a referenced module and the sibling modules that it imports, 16 hex digits.

    Args:
        reference: `file.py:name`, or `package.module:name`.
        folder: the run file's folder.
    """
    name = reference.partition(":")[0]
    first = folder / name if name.endswith(".py") else Path(inspect.getfile(sys.modules[name]))
    pending, digests = [first], {}
    while pending:
        file = pending.pop()
        if file.name not in digests and file.is_file():
            tree = ast.parse(file.read_bytes())
            digests[file.name] = _digest(tree)
            pending.extend(file.with_name(f"{module}.py") for module in _siblings(tree))
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
    return dict(sorted(code.digests.items()))


class _UserCode:
    """Collects digests of classes and functions, each with what it refers to."""

    def __init__(self, package: str) -> None:
        self.digests: dict[str, str] = {}
        self._package = package

    def owns(self, kind: Any) -> bool:
        """Whether a class or function is the user's."""
        root = _root(kind)
        return root.startswith(USER_PACKAGE_PREFIX) or (bool(self._package) and root == self._package)

    def add(self, kind: Any) -> None:
        """A class with its bases, or a function, if it is the user's."""
        for part in kind.__mro__ if isinstance(kind, type) else (kind,):
            # The private package's name depends on where the folder lies.
            name = f"{part.__module__.partition('.')[2]}.{part.__qualname__}"
            if not self.owns(part) or name in self.digests:
                continue
            module = sys.modules[part.__module__]
            tree = _tree(part, module)
            self.digests[name] = ""  # code may refer to itself
            constants: dict[str, str] = {}
            for used, value in _referred(tree, module):
                if isinstance(value, FunctionType | type):
                    self.add(value)
                elif isinstance(value, _CONSTANTS):
                    constants[used] = repr(value)
            self.digests[name] = _digest(tree, repr(sorted(constants.items())))


def _root(kind: Any) -> str:
    return (getattr(kind, "__module__", "") or "").partition(".")[0]


def _tree(part: Any, module: ModuleType) -> ast.Module:
    """The code of a class or function; of all lambdas of a lambda's line."""
    if part.__name__ == "<lambda>":
        line = part.__code__.co_firstlineno
        nodes = ast.walk(ast.parse(inspect.getsource(module)))
        lambdas = [node for node in nodes if isinstance(node, ast.Lambda) and node.lineno == line]
        return ast.Module([ast.Expr(node) for node in lambdas], [])
    return ast.parse(textwrap.dedent(inspect.getsource(part)))


def _referred(tree: ast.Module, module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Module-level names that code uses, with their values; those of a sibling module as `module.name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in vars(module):
            yield node.id, vars(module)[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            sibling = vars(module).get(node.value.id)
            if isinstance(sibling, ModuleType) and node.attr in vars(sibling):
                yield f"{node.value.id}.{node.attr}", vars(sibling)[node.attr]


def _siblings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            yield from [node.module] if node.module else (alias.name for alias in node.names)


def _digest(tree: ast.Module, more: str = "") -> str:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [statement for statement in node.body if not _is_text(statement)]
    return hashlib.sha256((ast.dump(tree) + more).encode()).hexdigest()[:16]


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, or a string that stands alone as a comment does."""
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
