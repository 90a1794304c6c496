"""Keras's configuration, which belongs to the process: that of the run is kept in every process of it.

Keras reads epsilon, floatx and image_data_format from keras.json when it is imported, from the user's home folder or
KERAS_HOME: it may be another file on each machine, and another project may change it between two attempts. The log has
the configuration that a run began with, and every process of the run sets it again before the run's code is imported.
What the import of that code sets comes on top: a module is imported once per process, and models are built several
times, so it is remembered and set before each build.
"""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from baton.tasks.foundation.contracts.log_entry import KerasConfig
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.text import message

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


@contextmanager
def kept_keras_config_put_back() -> Iterator[None]:
    """Forget after the block which run's configuration it has set; the configuration itself is left as it is."""
    before = _own[:], _kept[:]
    try:
        yield
    finally:
        _own[:], _kept[:] = before


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
    """The dtype policy that the imports of a run's code have set; None: none but the default, which is floatx."""
    return _policies_of_imports.get(folder.absolute())


def keras_config_for_build(folder: Path) -> KerasConfig:
    """The configuration of the run, with what the imports of its code have set."""
    base = _kept[0] if _kept else keras_config()
    return base.model_copy(update=_of_imports.get(folder.absolute(), {}))
