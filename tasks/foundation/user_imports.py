"""Find missing packages in the imports of the user's files, without importing these: that would import TensorFlow."""

import ast
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from tasks.foundation.errors import ModelError

# A file that changes the import path may find modules that are not found here, so it is not checked.
_CHANGES_THE_PATH = ("sys.path", "sys.meta_path", "addsitedir", "import_module")
_REMEDY = "or correct the import"


def require_imports(reference: str, folder: Path) -> None:
    """Refuse a function if its file, or a sibling that it imports, imports a package that is not installed.

    Only unconditional imports count: statements at the top level of a module, not inside a `try`.

    Args:
        reference: `file.py:name`, relative to `folder`, or `package.module:name`.
        folder: the run file's folder.

    Raises:
        ModelError: importing the function would fail.
    """
    module = reference.partition(":")[0]
    if not module.endswith(".py"):
        top = module.partition(".")[0]
        if not _is_installed(top):
            raise ModelError(f"{reference}: package {top} is not installed here; install it, {_REMEDY}")
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
                    f"{reference}: {file.name}, line {line}, imports {name}, which is not installed here; install it, "
                    f"{_REMEDY}"
                )


def _imports(file: Path) -> Iterator[tuple[str, int, Path | None]]:
    """Yield name, line and sibling file (if it is one) of each top-level import in a file."""
    try:
        text = file.read_bytes()
        body = ast.parse(text, filename=str(file)).body
    except (OSError, SyntaxError, ValueError):
        return  # importing the file reports the error
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
        return True  # it exists, but has no ordinary import spec
