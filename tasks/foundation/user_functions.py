"""The user's functions, such as `model.py:build_model`: found, loaded, and kept from changing their process.

A file's folder is loaded as a package with a private name. Sibling modules can then import each other relatively (`from
.layers import Block`), and no module of a user can shadow Baton. Packages that its files import and that are missing
are found without importing these, which would import TensorFlow.

Relative paths in user code start at the run file's folder. The working folder belongs to the whole process, so it is
changed only while user code runs, or TensorFlow's threads read ahead for it. Baton's own paths are absolute: storage
roots, run files and temporary folders do not depend on it.

TensorFlow's debugging modes, which a run's code may have left on, change what is traced or how it is computed: Baton's
loops would run in Python, checks would be part of the step, and a later process need not meet the line that did it. So
they are switched off, with a warning.
"""

import ast
import hashlib
import importlib
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from baton.tasks.foundation.child_imports import Import, keep_generated_sources_together, share_with_children
from baton.tasks.foundation.errors import ModelError
from baton.tasks.foundation.keras_config import remembered_keras_config
from baton.tasks.foundation.seeding import seeded_import
from baton.tasks.foundation.text import listed
from baton.tasks.foundation.user_traceback import USER_PACKAGE_PREFIX, remember_run_folder, user_error

_LOGGER = logging.getLogger(__name__)
_OF_DATA = "tensorflow.python.data.ops.debug_mode"
_GRAPH_MODE = (
    "eager execution is off: the run's code called tf.compat.v1.disable_eager_execution() or disable_v2_behavior(); "
    "remove the call, since Keras 3 cannot train without it"
)
# User code of two threads must not change the folder under each other; the same thread may enter twice.
_IN_USE = threading.RLock()
_NAMES_SHOWN = 10
# A file that changes the import path may find modules that are not found here, so it is not checked.
_CHANGES_THE_PATH = ("sys.path", "sys.meta_path", "addsitedir", "import_module")
_REMEDY = "or correct the import"


@contextmanager
def without_debug_modes(where: str) -> Iterator[None]:
    """Switch off the debugging modes that code within the block switches on, and warn.

    Args:
        where: the code, for the message.

    Raises:
        ModelError: it has switched eager execution off.
    """
    known = _modes()
    yield
    tf = sys.modules.get("tensorflow")
    if tf is not None and not tf.executing_eagerly() and not tf.inside_function():
        raise ModelError(f"{where}: {_GRAPH_MODE}")
    if not known:
        switch_off_debug_modes(where)


def switch_off_debug_modes(where: str = "the run's code") -> None:
    """Switch off all debugging modes of the process, and warn if one was on.

    Args:
        where: the code, for the message.
    """
    found = _modes()
    if not found:
        return
    tf = sys.modules["tensorflow"]
    tf.config.run_functions_eagerly(False)
    sys.modules[_OF_DATA].toggle_debug_mode(False)  # no public call switches it off
    tf.debugging.disable_check_numerics()
    tf.debugging.experimental.disable_dump_debug_info()
    _LOGGER.warning(
        "%s switched on %s, which would change what is traced and computed; it is off from here on, so remove the call",
        where,
        listed(found),
    )


def _modes() -> list[str]:
    """The debugging modes that are on, by the calls that switch them on; none before TensorFlow is imported."""
    tf, modules = sys.modules.get("tensorflow"), sys.modules
    if tf is None or not hasattr(tf, "debugging") or _OF_DATA not in modules:
        return []
    # The modes that watch operations are callbacks of the context; no public call says which are on.
    watching = modules["tensorflow.python.eager.context"].context().op_callbacks
    kinds = [f"{type(getattr(each, '__self__', each)).__module__}" for each in watching]
    modes = {
        "tf.config.run_functions_eagerly(True)": tf.config.functions_run_eagerly(),
        "tf.data.experimental.enable_debug_mode()": modules[_OF_DATA].DEBUG_MODE,
        "tf.debugging.enable_check_numerics()": any("check_numerics" in kind for kind in kinds),
        "tf.debugging.experimental.enable_dump_debug_info()": any("dumping" in kind for kind in kinds),
    }
    return [call for call, is_on in modes.items() if is_on]


@contextmanager
def in_user_folder(folder: Path) -> Iterator[None]:
    """Make a folder the working folder during the block; if the folder is gone, the working folder stays."""
    with _IN_USE, ExitStack() as back:
        try:
            # A descriptor, because the folder that was current may have been moved or deleted.
            before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            before = None
        if before is not None:
            back.callback(os.close, before)
            try:
                os.chdir(folder)
            except OSError:
                pass
            else:
                back.callback(os.fchdir, before)
        yield


def load_function(reference: str, folder: Path, *, seed: int = 0, key: str = "") -> Callable[..., object]:
    """Load the function that a run file names.

    Args:
        reference: `file.py:name`, relative to `folder`, or `package.module:name`.
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
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        beside = _sibling_words((folder / module_name).parent, missing.partition(".")[0]) if missing else ""
        hints = [f"{missing} is {beside}"] if beside else []
        what = f"{prefix}{reference}: importing it raised"
        raise ModelError(user_error(what, error, hints=hints, folder=folder)) from error
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


def require_imports(reference: str, folder: Path) -> None:
    """Refuse a function if its file, or a sibling that it imports, imports a package that is not installed.

    Only unconditional imports count: statements at the top level of a module, not inside a `try`.

    Args:
        reference: `file.py:name`, relative to `folder`, or `package.module:name`.

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
                what = f"{reference}: {file.name}, line {line}, imports {name}, which is"
                if beside := _sibling_words(file.parent, name):
                    raise ModelError(f"{what} {beside}")
                raise ModelError(f"{what} not installed here; install it, {_REMEDY}")


def _sibling_words(folder: Path, name: str) -> str:
    """What to do about an absolute import of a module that lies in the importing file's folder; "" if none does."""
    found = next((path for path in (folder / f"{name}.py", folder / name) if path.exists()), None)
    if found is None:
        return ""
    return (
        f"{found.name} beside it; files of a run import each other relatively: from .{name} import ..., or from . "
        f"import {name}"
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
