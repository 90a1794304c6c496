"""The part of a run's identity that its transforms determine."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tasks.foundation.contracts.identity import TRANSFORM_CONTENTS
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.user_code import load_function
from tasks.foundation.user_errors import USER_PACKAGE_PREFIX

# Chosen by the process, and of no effect: names count up, and seeds are replaced.
_OF_NO_EFFECT = {"name", "seed"}


def transforms_identity(spec: RunSpec, code_folder: Path) -> dict[str, Any]:
    """Return the identity keys of the transforms as JSON values: code, and the layers and arrays that it uses.

    Raises:
        ModelError: a function cannot be loaded.
    """
    named = spec.data.transform_of_key
    return {key: _of_function(reference, spec, code_folder) for key, reference in named.items()}


def transform_contents(spec: RunSpec, code_folder: Path) -> dict[str, Any]:
    """Return a record of the vocabularies, tables and arrays that transforms use, by name; see `model/identity.py`.

    Raises:
        ModelError: a function cannot be loaded.
    """
    from tasks.foundation.model.identity import contents_of_function

    found: dict[str, Any] = {}
    for key, reference in spec.data.transform_of_key.items():
        if reference is not None:
            function = load_function(reference, code_folder, seed=spec.train.seed)
            contents = contents_of_function(function, reference)
            found |= {f"{key.partition('.')[2]}.{name}": record for name, record in contents.items()}
    return found


def require_recorded_transform_contents(
    identity: Mapping[str, Any], spec: RunSpec, code_folder: Path, *, home: str
) -> None:
    """Refuse transforms that use other vocabularies, tables or arrays than those of the run.

    Args:
        identity: the run's, from its log; one of an earlier version has no contents.
        spec: the run file. What it leaves out of the run's transforms, or adds to them, is not compared.
        code_folder: the run file's folder.
        home: of the run, for the message.

    Raises:
        IdentityChanged: names the contents and the first differences.
    """
    recorded = identity.get(TRANSFORM_CONTENTS)
    if not isinstance(recorded, Mapping) or not recorded:
        return
    from tasks.foundation.model.identity import require_same_contents

    now = transform_contents(spec, code_folder)
    both = recorded.keys() & now.keys()
    require_same_contents(
        {name: recorded[name] for name in both},
        {name: now[name] for name in both},
        key=TRANSFORM_CONTENTS,
        what=f"the transforms use other contents than those that {home} was trained with",
    )


def _of_function(reference: str | None, spec: RunSpec, code_folder: Path) -> dict[str, Any] | None:
    if reference is None:
        return None
    from tasks.foundation.model.code_digest import digests_of_user_code, module_digest

    function = load_function(reference, code_folder, seed=spec.train.seed)
    found: dict[str, Any] = {
        "function": reference.partition(":")[2],
        # A partial function or a tf.function is no plain function; then its whole file counts.
        "code": digests_of_user_code(function, reference) or module_digest(reference, code_folder),
    }
    values = dict(sorted(_values(function, set())))
    return found | {"values": values} if values else found


def _values(function: Any, seen: set[int]) -> Iterator[tuple[str, str]]:
    """Yield the layers, arrays and tables of the user's modules that a function uses, as (name, digest)."""
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    used = {name: cell.cell_contents for name, cell in cells if _is_set(cell)}
    names = _names(function.__code__)
    used |= {name: function.__globals__[name] for name in names if name in function.__globals__}
    for module in [value for value in used.values() if _is_users(value)]:
        used |= {
            f"{module.__name__.rpartition('.')[2]}.{name}": vars(module)[name] for name in names & set(vars(module))
        }
    for name, value in sorted(used.items()):
        if isinstance(value, FunctionType):
            if value.__module__.startswith(USER_PACKAGE_PREFIX):
                yield from _values(value, seen)
        elif (text := _text(value)) is not None:
            yield name, hashlib.sha256(text).hexdigest()[:16]


def _is_users(value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__.startswith(USER_PACKAGE_PREFIX)


def _names(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _is_set(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # not assigned yet
        return False


def _text(value: Any) -> bytes | None:
    """Return the bytes that determine a value; None if it has none that are the same in every process."""
    import keras
    import numpy as np

    if isinstance(value, keras.Layer):
        return json.dumps(_config(keras.saving.serialize_keras_object(value)), sort_keys=True, default=str).encode()
    if hasattr(value, "__array__") and not isinstance(value, type):
        array = np.asarray(value)
        return None if array.dtype == object else f"{array.dtype} {array.shape} ".encode() + array.tobytes()
    if isinstance(value, dict | list):
        try:
            return json.dumps(value, sort_keys=True).encode()
        except (TypeError, ValueError):
            return None
    return None


def _config(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _config(below) for key, below in value.items() if key not in _OF_NO_EFFECT}
    if isinstance(value, list | tuple):
        return [_config(item) for item in value]
    return value
