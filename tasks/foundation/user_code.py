"""The user's own functions, `model.py:build_model` or `package.module:build`.

A file's folder is loaded as a package under a private name, so that sibling modules import each other
relatively (`from .layers import Block`) and a user's own `tasks.py` cannot shadow Baton's packages.
"""

import ast
import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from tasks.foundation.errors import ModelError
from tasks.foundation.seeding import seeded_import

USER_PACKAGE_PREFIX = "_baton_user_"
_NAMES_SHOWN = 10
# What TensorFlow says of such operations, and of random ones without a seed.
_DETERMINISM = re.compile(r"determinism is (enabled|not)|deterministic (\w+ )?implementation", re.IGNORECASE)
_DETERMINISM_REMEDY = (
    "; give what draws a seed (a keras.random.SeedGenerator, tf.random.Generator.from_seed), use another operation, or "
    "set train.deterministic: false"
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def load_function(reference: str, folder: Path, *, seed: int = 0) -> Callable[..., Any]:
    """The function that a run file names.

    Args:
        reference: `file.py:name`, relative to `folder`, or `package.module:name`.
        folder: the run file's folder.
        seed: `train.seed`, from which what the module draws when it is imported follows.

    Raises:
        ModelError: the file or the name is not there, or importing it raises.
    """
    module_name, _, name = reference.partition(":")
    try:
        module = (
            _load_file(folder, module_name, seed)
            if module_name.endswith(".py")
            else _load(module_name, folder, seed, module=module_name)
        )
    except ModelError:
        raise
    except (Exception, SystemExit) as fault:
        raise ModelError(f"{reference}: importing it raised {describe(fault)}") from fault
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")][
            :_NAMES_SHOWN
        ]
        raise ModelError(f"{reference}: {module_name} has no function {name}; it has: {', '.join(known) or 'none'}")
    return function  # type: ignore[no-any-return]


def require_function(reference: str, folder: Path) -> None:
    """Look, without importing, whether a file is there, is Python and may define the name.

    Importing a model imports TensorFlow; a typing error should not have to wait for that.

    Raises:
        ModelError: it is plain that `load_function` would fail.
    """
    module_name, _, name = reference.partition(":")
    if not module_name.endswith(".py"):
        return
    file = folder / module_name
    if not file.is_file():
        raise ModelError(f"{reference}: {_missing_file(file)}")
    try:
        body = ast.parse(file.read_bytes(), filename=str(file)).body
    except (SyntaxError, ValueError) as fault:
        raise ModelError(f"{reference}: {describe(fault)}") from fault
    known = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    # Only if nothing else in the file could bind the name is its absence certain.
    bound = {node.id for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Name)}
    imported = any(isinstance(node, ast.Import | ast.ImportFrom) and _binds(node, name) for node in body)
    elsewhere = any(isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While) for node in body)
    if name not in known and name not in bound and not imported and not elsewhere:
        raise ModelError(f"{reference}: {module_name} defines no function {name}; it has: {', '.join(known) or 'none'}")


def _binds(node: ast.Import | ast.ImportFrom, name: str) -> bool:
    return any((alias.asname or alias.name) in {name, "*"} for alias in node.names)


def describe(fault: BaseException) -> str:
    """An exception of user code in one line: type, text, and where in the user's files, if it went through them."""
    frames = list(traceback.walk_tb(fault.__traceback__))
    # A library that raised was called from a line of the user's, and that is the line to look at.
    own = [(frame, line) for frame, line in frames if _is_own(frame)] or frames
    if isinstance(fault, SyntaxError):
        place = f"{Path(fault.filename or '?').name}, line {fault.lineno}"
    elif own:
        frame, line = own[-1]
        place = f"{Path(frame.f_code.co_filename).name}, line {line}"
    else:
        place = "unknown place"
    # Keras's messages have many lines, and colours; a KeyError would show both escaped.
    many = isinstance(fault, KeyError) and any("\n" in str(each) for each in fault.args)
    said = fault.args[0] if many else fault
    text = " ".join(_COLOURS.sub("", str(said)).split())
    return f"{type(fault).__name__}: {text} ({place}){determinism_remedy(text)}"


def determinism_remedy(text: str) -> str:
    """What to do where TensorFlow refuses an operation that is not deterministic; empty for any other message."""
    return _DETERMINISM_REMEDY if _DETERMINISM.search(text) else ""


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(USER_PACKAGE_PREFIX)


def _missing_file(file: Path) -> str:
    here = sorted(path.name for path in file.parent.glob("*.py")) if file.parent.is_dir() else []
    return f"{file} is not there; beside it: {', '.join(here) or 'no Python files'}"


def _load(name: str, folder: Path, seed: int, *, module: str) -> ModuleType:
    """Import a module, named in the run file as `module` in `folder`; what is imported already draws nothing."""
    if name in sys.modules:
        return importlib.import_module(name)
    with seeded_import(module, folder, seed):
        return importlib.import_module(name)


def _load_file(folder: Path, module: str, seed: int) -> ModuleType:
    file = (folder / module).resolve()
    if not file.is_file():
        raise ModelError(_missing_file(file))
    package = f"{USER_PACKAGE_PREFIX}{hashlib.sha256(str(file.parent).encode()).hexdigest()[:12]}"
    if package not in sys.modules:
        spec = ModuleSpec(package, loader=None, is_package=True)
        spec.submodule_search_locations = [str(file.parent)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return _load(f"{package}.{file.stem}", folder, seed, module=module)
