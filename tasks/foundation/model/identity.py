"""The part of a run's identity that its model decides."""

import json
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import keras

from tasks.foundation.contracts.run_spec import ModelSpec
from tasks.foundation.model.batch_shapes import means_a_batch_size, of_any_batch
from tasks.foundation.model.code_digest import digests_of_user_code, module_digest
from tasks.foundation.model.variables import other_optimizers
from tasks.foundation.user_code import USER_PACKAGE_PREFIX

# The private package's name depends on where the checkout lies; what is in it does not.
_PRIVATE_PACKAGE = re.compile(rf"{USER_PACKAGE_PREFIX}[0-9a-f]+")
# An object that Keras could not serialize, shown by its place in memory.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")


def model_identity(model: keras.Model, spec: ModelSpec, code_folder: Path) -> dict[str, Any]:
    """Configuration of model and compile as JSON values; the digest of the source where Keras cannot serialize it."""
    config = _serialized(lambda: json.loads(model.to_json()), spec, code_folder)
    config.pop("compile_config", None)  # has keys of its own, below
    if not means_a_batch_size(model):
        config = of_any_batch(config)
    identity = {"model.config": config}
    compiled = _serialized(lambda: model.get_compile_config() or {}, spec, code_folder)
    if isinstance(compiled, dict):
        parts = {"optimizer": "optimizer", "loss": "loss", "metrics": "metrics"}
        for key, name in parts.items():
            identity[f"compile.{name}"] = compiled.pop(key, None)
    others = {
        place: _serialized(partial(keras.optimizers.serialize, optimizer), spec, code_folder)
        for place, optimizer in other_optimizers(model).items()
    }
    identity["compile.other"] = compiled | {"optimizers": others} if others else compiled
    identity["model.code"] = digests_of_user_code(model, spec.build)
    identity["model.options"] = spec.options
    return json.loads(json.dumps(identity, default=str))  # type: ignore[no-any-return]


def _serialized(serialize: Any, spec: ModelSpec, code_folder: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras's about loading it again, which nobody will
            text = json.dumps(serialize(), default=str)
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        text = ""  # Keras says that it cannot with any of these
    if not text or _ADDRESS.search(text):
        return {"source": module_digest(spec.build, code_folder)}
    return json.loads(_PRIVATE_PACKAGE.sub("user", text), object_hook=_without_bytecode)


def _without_bytecode(value: dict[str, Any]) -> dict[str, Any]:
    """Keras gives a lambda's bytecode, which knows its file, line and Python; model.code has its source."""
    match value:
        case {"value": [str(code), defaults, closure]} if code.endswith("\n"):
            return {**value, "value": ["see model.code", defaults, closure]}
    return value
