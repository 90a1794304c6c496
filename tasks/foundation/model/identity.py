"""The part of a run's identity that its model decides."""

import ast
import hashlib
import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import keras

from tasks.foundation.contracts.run_spec import ModelSpec
from tasks.foundation.user_code import USER_PACKAGE_PREFIX, source_digest

# The private package's name depends on where the checkout lies; what is in it does not.
_PRIVATE_PACKAGE = re.compile(rf"{USER_PACKAGE_PREFIX}[0-9a-f]+")


def model_identity(model: keras.Model, spec: ModelSpec, code_folder: Path) -> dict[str, Any]:
    """Configuration of model and compile as JSON values; the digest of the source where Keras cannot serialize it."""
    identity = {"model.config": _serialized(lambda: json.loads(model.to_json()), spec, code_folder)}
    compiled = _serialized(lambda: model.get_compile_config() or {}, spec, code_folder)
    if isinstance(compiled, dict):
        parts = {"optimizer": "optimizer", "loss": "loss", "metrics": "metrics"}
        for key, name in parts.items():
            identity[f"compile.{name}"] = compiled.pop(key, None)
    identity["compile.other"] = compiled
    identity["model.code"] = _user_classes(model)
    return json.loads(json.dumps(identity, default=str))  # type: ignore[no-any-return]


def _serialized(serialize: Any, spec: ModelSpec, code_folder: Path) -> Any:
    try:
        text = json.dumps(serialize(), default=str)
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        # Keras says so with any of these.
        return {"source": source_digest(spec.build, code_folder)}
    return json.loads(_PRIVATE_PACKAGE.sub("user", text))


def _user_classes(model: keras.Model) -> dict[str, str]:
    """Digest of the code of each class of the user's that the model is made of; comments and layout do not count."""
    pending: list[Any] = [model, model.optimizer, *model.metrics]
    loss = getattr(model, "loss", None)
    pending.extend(loss.values() if isinstance(loss, dict) else loss if isinstance(loss, list | tuple) else [loss])
    seen: set[int] = set()
    digests: dict[str, str] = {}
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, keras.Layer):
            pending.extend(getattr(item, "_layers", ()))
        kind = item if inspect.isfunction(item) else type(item)
        if _PRIVATE_PACKAGE.match(getattr(kind, "__module__", "") or ""):
            digests[kind.__qualname__] = _code_digest(kind)
    return dict(sorted(digests.items()))


def _code_digest(kind: Any) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:16]
