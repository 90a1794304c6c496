"""Load the user's functions, such as `model.py:build_model` or `package.module:build`.

A file's folder is loaded as a package with a private name. Sibling modules can then import each other relatively
(`from .layers import Block`), and a user's `tasks.py` cannot shadow Baton's packages.
"""

import ast
import hashlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from tasks.foundation.child_imports import Import, share_with_children
from tasks.foundation.debug_modes import without_debug_modes
from tasks.foundation.errors import ModelError
from tasks.foundation.keras_config import remembered_keras_config
from tasks.foundation.process_folder import keep_generated_sources_together
from tasks.foundation.seeding import seeded_import
from tasks.foundation.user_errors import USER_PACKAGE_PREFIX, user_error
from tasks.foundation.user_folder import in_user_folder
from tasks.foundation.user_frames import remember_run_folder

_NAMES_SHOWN = 10


def load_function(reference: str, folder: Path, *, seed: int = 0, key: str = "") -> Callable[..., object]:
    """Load the function that a run file names.

    Args:
        reference: `file.py:name`, relative to `folder`, or `package.module:name`.
        folder: the run file's folder.
        seed: `train.seed`, which seeds the random generators during the import.
        key: the run file's key that names it, for messages, where it is not obvious.

    Raises:
        ModelError: the file or the function is missing, or the import raises.
    """
    module_name, _, name = reference.partition(":")
    prefix = f"{key}: " if key else ""
    try:
        folder = folder.absolute()  # before the working folder changes
        with in_user_folder(folder):
            module = (
                _load_file(folder, module_name, seed)
                if module_name.endswith(".py")
                else _load(module_name, folder, seed, module=module_name)
            )
    except ModelError as error:
        raise ModelError(f"{prefix}{error}") from error
    except (Exception, SystemExit) as error:
        raise ModelError(user_error(f"{prefix}{reference}: importing it raised", error, folder=folder)) from error
    function: object = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")][
            :_NAMES_SHOWN
        ]
        raise ModelError(
            f"{prefix}{reference}: {module_name} has no function {name}; it has: {', '.join(known) or 'none'}"
        )
    return function


def require_function(reference: str, folder: Path) -> None:
    """Check, without importing, that a file exists, is valid Python and may define the name.

    Importing a model imports TensorFlow, which is slow; a typo should be reported before.

    Raises:
        ModelError: `load_function` would certainly fail.
    """
    module_name, _, name = reference.partition(":")
    if not module_name.endswith(".py"):
        return
    file = folder / module_name
    if not file.is_file():
        raise ModelError(f"{reference}: {_missing_file(file)}")
    try:
        body = ast.parse(file.read_bytes(), filename=str(file)).body
    except (SyntaxError, ValueError) as error:
        raise ModelError(user_error(f"{reference}:", error, folder=folder)) from error
    known = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    # The name is certainly missing only if nothing else in the file can bind it.
    bound = {node.id for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Name)}
    imported = any(isinstance(node, ast.Import | ast.ImportFrom) and _binds(node, name) for node in body)
    in_block = any(isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While) for node in body)
    if name not in known and name not in bound and not imported and not in_block:
        raise ModelError(f"{reference}: {module_name} defines no function {name}; it has: {', '.join(known) or 'none'}")


def _binds(node: ast.Import | ast.ImportFrom, name: str) -> bool:
    return any((alias.asname or alias.name) in {name, "*"} for alias in node.names)


def _missing_file(file: Path) -> str:
    files = sorted(path.name for path in file.parent.glob("*.py")) if file.parent.is_dir() else []
    return f"{file} does not exist; its folder contains {', '.join(files) or 'no Python files'}"


def _load(name: str, folder: Path, seed: int, *, module: str) -> ModuleType:
    """Import a module that the run file names as `module` in `folder`; an imported module draws nothing again."""
    if name in sys.modules:
        return importlib.import_module(name)
    with seeded_import(module, folder, seed), remembered_keras_config(folder), without_debug_modes(module):
        keep_generated_sources_together()  # TensorFlow is imported by now
        loaded = importlib.import_module(name)
    if not module.endswith(".py"):
        for place in getattr(sys.modules[name.partition(".")[0]], "__path__", ()):
            remember_run_folder(Path(place), folder)
    return loaded


def _load_file(folder: Path, module: str, seed: int) -> ModuleType:
    file = (folder / module).resolve()
    if not file.is_file():
        raise ModelError(_missing_file(file))
    remember_run_folder(file.parent, folder)
    package = f"{USER_PACKAGE_PREFIX}{hashlib.sha256(str(file.parent).encode()).hexdigest()[:12]}"
    if package not in sys.modules:
        spec = ModuleSpec(package, loader=None, is_package=True)
        spec.submodule_search_locations = [str(file.parent)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    began = Import(f"{package}.{file.stem}", module, os.fspath(folder), seed)
    share_with_children(package, file.parent, began)  # the module may start child processes when it is imported
    loaded = _load(began.name, folder, seed, module=module)
    share_with_children(package, file.parent, began)
    return loaded
