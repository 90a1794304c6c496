"""The user's functions, such as `model.py:build_model`: found, loaded, and kept from changing their process.

A file's folder is loaded as a package with a private name. Sibling modules can then import each other relatively (`from
.layers import Block`), and a user's `tasks.py` cannot shadow Baton's packages. Packages that its files import and that
are missing are found without importing these, which would import TensorFlow.

Relative paths in user code start at the run file's folder. The working folder belongs to the whole process, so it is
changed only while user code runs, or TensorFlow's threads read ahead for it. Baton's own paths are absolute: storage
roots, run files and temporary folders do not depend on it.

Keras's configuration (epsilon, floatx, image_data_format) belongs to the process too. Keras reads it from keras.json
when it is imported, from the user's home folder or KERAS_HOME: it may be another file on each machine, and another
project may change it between two attempts. The log has the configuration that a run began with, and every process of
the run sets it again before the run's code is imported. What the import of that code sets comes on top: a module is
imported once per process, and models are built several times, so it is remembered and set before each build.

TensorFlow's debugging modes, which a run's code may have left on, change what is traced or how it is computed: Baton's
loops would run in Python, checks would be part of the step, and a later process need not meet the line that did it. So
they are switched off, with a warning.
"""

import ast
import hashlib
import importlib
import importlib.util
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tasks.foundation.child_imports import Import, keep_generated_sources_together, share_with_children
from tasks.foundation.contracts.log_entry import KerasConfig
from tasks.foundation.errors import InvalidInput, ModelError
from tasks.foundation.messages import listed, message
from tasks.foundation.seeding import seeded_import
from tasks.foundation.user_errors import USER_PACKAGE_PREFIX, remember_run_folder, user_error

_LOGGER = logging.getLogger(__name__)
_OF_DATA = "tensorflow.python.data.ops.debug_mode"
_GRAPH_MODE = (
    "eager execution is off: the run's code called tf.compat.v1.disable_eager_execution() or disable_v2_behavior(); "
    "remove the call, since Keras 3 cannot train without it"
)
# What TensorFlow and Keras accept in keras.json; they end with a bare error at other values.
_ACCEPTED: Final = {
    "floatx": ("float16", "float32", "float64"),
    "image_data_format": ("channels_first", "channels_last"),
}
# The process's own configuration, and the one that is kept in it; each has at most one element.
_own: list[KerasConfig] = []
_kept: list[KerasConfig] = []
# What the imports of the run's code have set, by its folder: the configuration, and the dtype policy.
_of_imports: dict[Path, dict[str, object]] = {}
_policies_of_imports: dict[Path, Any] = {}
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


def require_keras_file(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a keras.json with which TensorFlow and Keras cannot be imported. Call it before they are.

    Args:
        environ: the environment variables of this process.

    Raises:
        InvalidInput: names the file and the value.
    """
    file = Path(environ.get("KERAS_HOME") or "~/.keras", "keras.json").expanduser()
    try:
        config = json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError:
        return  # Keras ignores it
    except OSError as fault:
        raise InvalidInput(
            f"{file} cannot be read ({fault.strerror}), and Keras reads it; correct or delete it"
        ) from fault
    if not isinstance(config, dict):
        raise InvalidInput(f"{file} is no JSON object, as Keras needs it; correct or delete it")
    for key, accepted in _ACCEPTED.items():
        if (value := config.get(key, accepted[0])) not in accepted:
            raise InvalidInput(
                f"{file}: {key} = {value} is not one of {', '.join(accepted)}; correct or delete the file"
            )
    if not isinstance(value := config.get("epsilon", 1e-7), float):
        raise InvalidInput(
            f"{file}: epsilon = {value} is no number with a point or exponent; correct or delete the file"
        )


def keep_keras_config(recorded: KerasConfig | None) -> KerasConfig:
    """Set Keras's configuration to that of a run. Call it before the run's code is imported.

    Where it is set already, what code has set since stays.

    Args:
        recorded: the run's, from its log; None for a new run, or where the log does not know it: the process's own.

    Returns:
        The configuration, without what the run's code sets.

    Raises:
        InvalidInput: Keras already uses another backend in this process.
    """
    import keras

    if keras.config.backend() != "tensorflow":
        raise InvalidInput(
            message(
                f"Keras uses the backend {keras.config.backend()} in this process, and Baton trains with tensorflow",
                hints=["set KERAS_BACKEND=tensorflow before Keras is imported"],
            )
        )
    if not _own:
        _own.append(keras_config())
    config = recorded or _own[0]
    if _kept != [config]:
        _kept[:] = [config]
        set_keras_config(config)
    return config


def keras_config() -> KerasConfig:
    """Keras's configuration as it is now."""
    import keras

    return KerasConfig(
        epsilon=float(keras.config.epsilon()),
        floatx=keras.config.floatx(),
        image_data_format=keras.config.image_data_format(),
    )


def set_keras_config(config: KerasConfig) -> None:
    """Set Keras's configuration; a default dtype policy that follows from floatx is set along."""
    import keras

    now = keras_config()
    if config.epsilon != now.epsilon:
        keras.config.set_epsilon(config.epsilon)
    if config.image_data_format != now.image_data_format:
        keras.config.set_image_data_format(config.image_data_format)
    if config.floatx != now.floatx:
        keras.config.set_floatx(config.floatx)
        if default_policy_of(now.floatx):
            from keras.src.backend.common import global_state  # no public call unsets it

            global_state.set_global_attribute("dtype_policy", None)


def default_policy_of(floatx: str) -> bool:
    """Whether this thread's dtype policy is not set, or is the one that follows from floatx."""
    from keras.src.backend.common import global_state  # the public call sets a policy where there is none

    policy = global_state.get_global_attribute("dtype_policy")
    return policy is None or policy.name == floatx


@contextmanager
def remembered_keras_config(folder: Path) -> Iterator[None]:
    """Remember what the import of the run's code sets within the block; nothing if Keras is not imported yet."""
    if "keras" not in sys.modules:
        yield
        return
    from keras.src.backend.common import global_state  # the public call sets a policy where there is none

    before, policy_before = keras_config(), global_state.get_global_attribute("dtype_policy")
    yield
    old, new = before.model_dump(), keras_config().model_dump()
    _of_imports.setdefault(folder, {}).update({key: new[key] for key in new if new[key] != old[key]})
    policy = global_state.get_global_attribute("dtype_policy")
    if policy is not policy_before:
        _policies_of_imports[folder] = None if default_policy_of(new["floatx"]) else policy


def dtype_policy_for_imports(folder: Path) -> Any:
    """The dtype policy that the imports of a run's code have set; None: none but the default, which is floatx.

    Args:
        folder: of the run file.
    """
    return _policies_of_imports.get(folder.absolute())


def keras_config_for_build(folder: Path) -> KerasConfig:
    """The configuration of the run, with what the imports of its code have set.

    Args:
        folder: of the run file.
    """
    base = _kept[0] if _kept else keras_config()
    return base.model_copy(update=_of_imports.get(folder.absolute(), {}))


@contextmanager
def in_user_folder(folder: Path) -> Iterator[None]:
    """Make a folder the working folder during the block; if the folder is gone, the working folder stays.

    Args:
        folder: the run file's folder.
    """
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
