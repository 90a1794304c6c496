"""The part of a run's identity that its model determines."""

import json
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import keras

from tasks.foundation.contracts.identity_keys import CONTENTS
from tasks.foundation.contracts.run_spec import ModelSpec
from tasks.foundation.masking import masked_values
from tasks.foundation.model.batch_shapes import has_fixed_batch_size, without_batch_sizes
from tasks.foundation.model.code_digest import module_digest, user_code
from tasks.foundation.model.contents import contents_of
from tasks.foundation.model.variables import other_optimizers
from tasks.foundation.user_errors import USER_PACKAGE_PREFIX

# The private package's name depends on the checkout's path, which must not change the identity.
_PRIVATE_PACKAGE = re.compile(rf"{USER_PACKAGE_PREFIX}[0-9a-f]+")
# The default repr of an object that Keras cannot serialize contains its memory address.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")


def model_identity(model: keras.Model, spec: ModelSpec, code_folder: Path, *, batch: int = 0) -> dict[str, Any]:
    """Return model and compile configuration as JSON values; a digest of the source where Keras cannot serialize it.

    Args:
        model: built and compiled.
        spec: names the function that builds it.
        code_folder: the run file's folder.
        batch: size of the batch that it was built with.
    """
    config = _serialized(lambda: json.loads(model.to_json()), spec, code_folder)
    config.pop("compile_config", None)  # recorded below, under other keys
    if not has_fixed_batch_size(model):
        config = without_batch_sizes(config)
    identity = {"model.config": config}
    compiled = _serialized(lambda: model.get_compile_config() or {}, spec, code_folder)
    if isinstance(compiled, dict):
        parts = {"optimizer": "optimizer", "loss": "loss", "metrics": "metrics"}
        for key, name in parts.items():
            identity[f"compile.{name}"] = compiled.pop(key, None)
    others = {
        attribute_path: _serialized(partial(keras.optimizers.serialize, optimizer), spec, code_folder)
        for attribute_path, optimizer in other_optimizers(model).items()
    }
    identity["compile.other"] = compiled | {"optimizers": others} if others else compiled
    code = user_code(model, spec.build)
    identity["model.code"] = code.digests()
    identity[CONTENTS] = contents_of(model, spec.build, code, batch=batch)
    identity["model.options"] = spec.options
    return dict(masked_values(plain_values(identity)))


def plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values as they are in JSON; text where JSON has no such value, such as dates of YAML."""
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return plain


def _serialized(serialize: Any, spec: ModelSpec, code_folder: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns that the result cannot be loaded; it is never loaded
            text = json.dumps(serialize(), default=str)
    except (NotImplementedError, TypeError, ValueError, AttributeError, RecursionError):
        # Keras raises any of these when it cannot serialize; the last one if a rate is computed from its own optimizer.
        text = ""
    if not text or _ADDRESS.search(text):
        return {"source": module_digest(spec.build, code_folder)}
    return json.loads(_PRIVATE_PACKAGE.sub("user", text), object_hook=_without_bytecode)


def _without_bytecode(value: dict[str, Any]) -> dict[str, Any]:
    """Drop a lambda's bytecode, which depends on file, line and Python version; model.code has its source."""
    match value:
        case {"value": [str(code), defaults, closure]} if code.endswith("\n"):
            return {**value, "value": ["see model.code", defaults, closure]}
    return value
