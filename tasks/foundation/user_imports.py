"""What the user's files import, looked at without importing them: a missing package need not wait for TensorFlow."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from tasks.foundation.errors import ModelError

# A file that changes where modules are looked for knows better than this.
_CHANGES_THE_PATH = ("sys.path", "sys.meta_path", "addsitedir", "import_module")
_OR = "or correct the name"


def require_imports(reference: str, folder: Path) -> None:
    """Refuse a function whose file, or a sibling that it imports, imports a module that is not installed.

    Only imports that cannot be left out count: those that are statements of the module itself, and not of a `try`.

    Args:
        reference: `file.py:name`, relative to `folder`, or `package.module:name`.
        folder: the run file's folder.

    Raises:
        ModelError: importing it would fail.
    """
    module = reference.partition(":")[0]
    if not module.endswith(".py"):
        top = module.partition(".")[0]
        if not _is_installed(top):
            raise ModelError(f"{reference}: no package {top} is installed where baton runs; install it there, {_OR}")
        return
    waiting, seen = [folder / module], set()
    while waiting:
        file = waiting.pop()
        if file in seen or not file.is_file():
            continue
        seen.add(file)
        for name, line, sibling in _imports(file):
            if sibling is not None:
                waiting.append(sibling)
            elif not _is_installed(name):
                raise ModelError(
                    f"{reference}: {file.name}, line {line}, imports {name}, and no such package is installed where "
                    f"baton runs; install it there, {_OR}"
                )


def _imports(file: Path) -> Iterator[tuple[str, int, Path | None]]:
    """Top-level package and line of each import of a module's own statements; and the file, if it is a sibling."""
    try:
        text = file.read_bytes()
        body = ast.parse(text, filename=str(file)).body
    except (OSError, SyntaxError, ValueError):
        return  # told by whoever imports it
    if any(word.encode() in text for word in _CHANGES_THE_PATH):
        return
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0], node.lineno, None
        elif isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            for name in names:
                yield name, node.lineno, file.parent / f"{name.partition('.')[0]}.py"


def _is_installed(name: str) -> bool:
    if name in sys.modules or name in sys.builtin_module_names:
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return True  # it is there, in a way of its own
