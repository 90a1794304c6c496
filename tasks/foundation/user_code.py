"""Load the user's functions, such as `model.py:build_model` or `package.module:build`.

A file's folder is loaded as a package with a private name. Sibling modules can then import each other relatively
(`from .layers import Block`), and a user's `tasks.py` cannot shadow Baton's packages.
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

from tasks.foundation.errors import ModelError
from tasks.foundation.seeding import seeded_import

USER_PACKAGE_PREFIX = "_baton_user_"
_NAMES_SHOWN = 10
# TensorFlow's messages about non-deterministic operations, and about random operations without a seed.
_DETERMINISM = re.compile(r"determinism is (enabled|not)|deterministic (\w+ )?implementation", re.IGNORECASE)
_DETERMINISM_REMEDY = (
    "; pass a seed to random operations (a keras.random.SeedGenerator, tf.random.Generator.from_seed), use another "
    "operation, or set train.deterministic: false"
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def load_function(reference: str, folder: Path, *, seed: int = 0) -> Callable[..., object]:
    """Load the function that a run file names.

    Args:
        reference: `file.py:name`, relative to `folder`, or `package.module:name`.
        folder: the run file's folder.
        seed: `train.seed`, which seeds the random generators during the import.

    Raises:
        ModelError: the file or the function is missing, or the import raises.
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
    except (Exception, SystemExit) as error:
        raise ModelError(f"{reference}: importing it raised {describe(error)}") from error
    function: object = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")][
            :_NAMES_SHOWN
        ]
        raise ModelError(f"{reference}: {module_name} has no function {name}; it has: {', '.join(known) or 'none'}")
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
        raise ModelError(f"{reference}: {describe(error)}") from error
    known = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    # The name is certainly missing only if nothing else in the file can bind it.
    bound = {node.id for node in ast.walk(ast.Module(body, [])) if isinstance(node, ast.Name)}
    imported = any(isinstance(node, ast.Import | ast.ImportFrom) and _binds(node, name) for node in body)
    in_block = any(isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While) for node in body)
    if name not in known and name not in bound and not imported and not in_block:
        raise ModelError(f"{reference}: {module_name} defines no function {name}; it has: {', '.join(known) or 'none'}")


def _binds(node: ast.Import | ast.ImportFrom, name: str) -> bool:
    return any((alias.asname or alias.name) in {name, "*"} for alias in node.names)


def describe(error: BaseException) -> str:
    """Return an exception of user code as one line: type, message, and the last line of user code that it passed."""
    frames = list(traceback.walk_tb(error.__traceback__))
    # If a library raised, the useful line is the user's line that called it.
    own = [(frame, line) for frame, line in frames if _is_own(frame)] or frames
    if isinstance(error, SyntaxError):
        place = f"{Path(error.filename or '?').name}, line {error.lineno}"
    elif own:
        frame, line = own[-1]
        place = f"{Path(frame.f_code.co_filename).name}, line {line}"
    else:
        place = "unknown line"
    # Keras's messages have several lines and colours, which str() of a KeyError would escape.
    is_multiline = isinstance(error, KeyError) and any("\n" in str(each) for each in error.args)
    raw = error.args[0] if is_multiline else error
    text = " ".join(_COLOURS.sub("", str(raw)).split())
    return f"{type(error).__name__}: {text} ({place}){determinism_remedy(text)}"


def determinism_remedy(text: str) -> str:
    """Return the remedy if TensorFlow refuses a non-deterministic operation; "" for any other message."""
    return _DETERMINISM_REMEDY if _DETERMINISM.search(text) else ""


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(USER_PACKAGE_PREFIX)


def _missing_file(file: Path) -> str:
    files = sorted(path.name for path in file.parent.glob("*.py")) if file.parent.is_dir() else []
    return f"{file} does not exist; its folder contains {', '.join(files) or 'no Python files'}"


def _load(name: str, folder: Path, seed: int, *, module: str) -> ModuleType:
    """Import a module that the run file names as `module` in `folder`; an imported module draws nothing again."""
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
