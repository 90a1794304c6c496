"""The part of a run's identity that its model and its transforms determine, and the summary of the model.

It has their configuration and code, and what they keep beside their variables.

Vocabularies, tables and arrays of layers, and what its code reads, are in no checkpoint. A process that resumes the
run, evaluates or exports it builds the model anew, from files that may have grown since, or from a set that has another
order. So the identity has a record of each (contracts/identity.py), and another content is refused by the name of its
layer or transform. What follows from variables is left out: layers make it again after each restore
(`finalize_layers`). What a trace of the steps depends on besides variables, the Python attributes of the model, is
compared too.
"""

import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from baton.tasks.foundation.contracts.contents import block_length, record_of_floats, record_of_items
from baton.tasks.foundation.contracts.home_files import LayerSummary, ModelSummary
from baton.tasks.foundation.contracts.identity import CONTENTS, TRANSFORM_CONTENTS, difference_words, differences
from baton.tasks.foundation.contracts.run_spec import ModelSpec, RunSpec
from baton.tasks.foundation.errors import IdentityChanged
from baton.tasks.foundation.masking import masked_values
from baton.tasks.foundation.model.build import has_fixed_batch_size, without_batch_sizes
from baton.tasks.foundation.model.hidden_state import NOT_FILLED, sorted_table
from baton.tasks.foundation.model.keras_steps import is_of_keras
from baton.tasks.foundation.model.saved_code import UserCode, module_digest, user_code
from baton.tasks.foundation.model.variables import (
    has_finalized_state,
    layers_of,
    named_layers,
    other_optimizers,
    own_values,
)
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.text import command, message
from baton.tasks.foundation.user_functions import load_function
from baton.tasks.foundation.user_traceback import USER_PACKAGE_PREFIX

# Values of `add_loss` while the model was built, and what TensorFlow tracks: attributes once more.
_NOT_KEPT = ("_losses", "_self_")
_DEPTH = 4
_SHOWN_NUMBERS = 40
_REMEDY = "let the code read what it read when the run began; where a set decides an order, use sorted(...)"
# The private package's name depends on the checkout's path, which must not change the identity.
_PRIVATE_PACKAGE = re.compile(rf"{USER_PACKAGE_PREFIX}[0-9a-f]+")
# The default repr of an object that Keras cannot serialize contains its memory address.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+>")
# Containers are compared by their items down to this depth.
_ATTRIBUTE_DEPTH = 2
# Set when callbacks are started; no step reads it.
_IGNORED = frozenset({"stop_training"})
_MISSING = object()
# Chosen by the process, and of no effect: names count up, and seeds are replaced.
_OF_NO_EFFECT = {"name", "seed"}


def contents_of(model: keras.Model, reference: str, code: UserCode | None = None, *, batch: int = 0) -> dict[str, Any]:
    """Return a record of each content that a model keeps beside its variables, by name, as JSON values.

    Args:
        reference: the user's name of the model, `model.py:build_model`.
        code: of `user_code(model, reference)`, if the caller has it.
        batch: size of the batch that it was built with. Tensors that begin with it are activations of this batch.
    """
    code = user_code(model, reference) if code is None else code
    return _records((*_of_layers(model, code, batch), *_of_compile(model, code), *_of_code(code)))


def _records(contents: Iterable[tuple[str, str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, what, value in contents:
        unique, number = name, 1
        while unique in found:
            number += 1
            unique = f"{name}~{number}"
        found[unique] = _record(value, what)
    return found


def require_recorded_contents(
    identity: Mapping[str, Any], model: keras.Model, reference: str, *, home: str, batch: int = 0
) -> None:
    """Refuse a model that keeps other contents than those that its run was trained with.

    Args:
        reference: the user's name of the model, `model.py:build_model`.
        home: of the run, for the message.
        batch: see `contents_of`.

    Raises:
        IdentityChanged: names the layers and the first differences.
    """
    if identity.get(CONTENTS) is not None:
        now = contents_of(model, reference, batch=batch)
        what = f"{reference} builds another model than {home} was trained with"
        require_same_contents(identity[CONTENTS], now, key=CONTENTS, what=what)


def require_same_contents(recorded: Any, now: Mapping[str, Any], *, key: str, what: str) -> None:
    """Refuse contents that differ from recorded ones.

    Args:
        now: those of this process.
        key: the identity key of both.
        what: what differs, for the message.

    Raises:
        IdentityChanged: names the contents and the first differences.
    """
    found = differences({key: recorded}, {key: dict(now)})
    if found:
        accepted = "or continue with the change from the newest checkpoint: " + command("run", ("accept", key))
        raise IdentityChanged(message(f"{what}: {difference_words(found)}", hints=[_REMEDY, accepted]))


def _of_compile(model: keras.Model, code: UserCode) -> Iterator[tuple[str, str, Any]]:
    for part, value in {"optimizer": model.optimizer, "loss": getattr(model, "loss", None)}.items():
        for inside, content in _leaves(value, code, _DEPTH):
            yield f"{part}{inside}", f"`{part}{inside}` of the model", content


def _of_code(code: UserCode) -> Iterator[tuple[str, str, Any]]:
    for name, value in sorted(code.values.items()):
        module, _, used = name.partition(".")
        if isinstance(value, keras.Layer):
            for inside, what, content in _of_layers(value, code, 0):
                yield f"{name}{inside}", what.replace("the model", f"`{used}` of {module}.py"), content
        for inside, content in _leaves(value, code, _DEPTH):
            yield f"{name}{inside}", f"`{used}{inside}` of {module}.py", content


def _of_layers(model: keras.Model, code: UserCode, batch: int) -> Iterator[tuple[str, str, Any]]:
    inner: dict[int, str] = {}  # layers that no user has named, with the path of the layer that keeps them
    for own, layer in named_layers(model):
        path = inner.get(id(layer), own)
        if isinstance(layer, keras.layers.TextVectorization):
            inner[id(layer._lookup_layer)] = path
        of = f"layer `{path}`" if path else "the model"
        follows = is_of_keras(layer) or has_finalized_state(layer)
        for name, value in sorted(vars(layer).items()):
            for inside, content in () if name.startswith(_NOT_KEPT) else _leaves(value, code, _DEPTH):
                if _is_table(content):
                    kind = "vocabulary" if name == "lookup_table" else f"table `{name}{inside}`"
                    yield f"{path}.{name}{inside}", f"{kind} of {of}", content
                elif not (follows or _begins_with(content, batch)):
                    yield f"{path}.{name}{inside}", f"array `{name}{inside}` of {of}", content
        yield from _saved(path, of, layer)


def _leaves(value: Any, code: UserCode, depth: int) -> Iterator[tuple[str, Any]]:
    """Yield tables, arrays and tensors in containers and in objects of the user's classes, each with its place."""
    if _is_table(value) or _is_array(value):
        yield "", value
    elif depth:
        for place, item in _items(value, code):
            for inside, leaf in _leaves(item, code, depth - 1):
                yield f"{place}{inside}", leaf


def _items(value: Any, code: UserCode) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif code.owns(type(value)) and not isinstance(value, keras.Layer) and hasattr(value, "__dict__"):
        yield from ((f".{name}", item) for name, item in sorted(vars(value).items()))


def _saved(path: str, of: str, layer: keras.Layer) -> Iterator[tuple[str, str, Any]]:
    """Yield what a layer saves by methods of its own, besides variables and what follows from them."""
    if _overrides(layer, "save_own_variables"):
        variables = [np.asarray(variable) for variable in layer.weights]
        for key, value in sorted(own_values(layer).items()):
            if isinstance(value, keras.Variable | tf.Variable) or not _is_array(array := np.asarray(value)):
                continue
            if not any(np.array_equal(array, each) for each in variables):
                yield f"{path}.saved.{key}", f"`{key}` that save_own_variables of {of} stores", array
    if _overrides(layer, "save_assets"):
        with temporary_folder("baton-assets-") as folder:
            try:
                layer.save_assets(str(folder))
            except Exception:  # noqa: BLE001 - a layer that cannot be saved has no assets
                return
            for file in sorted(each for each in folder.rglob("*") if each.is_file()):
                name = file.relative_to(folder).as_posix()
                yield f"{path}.assets.{name}", f"{name} of {of}", file.read_bytes()


def _record(value: Any, what: str) -> dict[str, Any]:
    if isinstance(value, bytes):
        lines = value.decode("utf-8", errors="replace").splitlines()
        return record_of_items([repr(line) for line in lines], what=what, item="line", start=1)
    if _is_table(value):
        return _record_of_table(value, what)
    array = np.asarray(value)
    if array.dtype.kind in "OSU":
        return record_of_items([_text(each) for each in array.ravel()], what=what, item="value")
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    if array.dtype.kind in "biu":
        return _record_of_numbers(array, what)
    return _record_of_floats(array, what)


def _record_of_table(table: Any, what: str) -> dict[str, Any]:
    table = getattr(table, "_table", table)  # of a vocabulary with buckets
    try:
        keys, values = sorted_table(*table.export())
    except (*NOT_FILLED, AttributeError):  # not filled; or all words go to buckets
        keys = values = np.empty(0, object)
    for numbers, texts in ((values, keys), (keys, values)):
        order = np.argsort(numbers) if numbers.dtype.kind in "iu" else None
        if order is not None and len(numbers) and (np.diff(numbers[order]) == 1).all():
            start = int(numbers[order[0]])
            return record_of_items([_text(each) for each in texts[order]], what=what, item="token", start=start)
    pairs = [f"{_text(key)}: {_text(value)}" for key, value in zip(keys, values, strict=True)]
    return record_of_items(pairs, what=what, item="entry")


def _record_of_numbers(array: Any, what: str) -> dict[str, Any]:
    """The record of integers and truth values: the first ones, and a digest of each block."""
    flat = array.ravel()
    few = [str(each) for each in flat[:_SHOWN_NUMBERS]]
    length = block_length(flat.size)
    blocks = [
        hashlib.sha256(flat[begin : begin + length].tobytes()).hexdigest() for begin in range(0, flat.size, length)
    ]
    record = record_of_items(blocks, what=what, item="value")
    return {**record, "size": flat.size, "first": few, "dtype": array.dtype.name, "shape": list(array.shape)}


def _record_of_floats(array: Any, what: str) -> dict[str, Any]:
    flat = array.ravel()
    length = block_length(flat.size)
    # Another order of the same values has another sum.
    weights = 0.5 + (np.arange(min(length, flat.size), dtype=np.uint64) * 2654435761 % 2**32) / 2**32
    blocks = []
    for begin in range(0, flat.size, length):
        part = flat[begin : begin + length].astype(np.float64)
        part = np.nan_to_num(part, nan=1e30, posinf=2e30, neginf=-2e30)
        blocks.append((float(part @ weights[: part.size]), float(np.abs(part).sum())))
    return record_of_floats(blocks, what=what, dtype=array.dtype.name, shape=array.shape)


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return repr(value.decode("utf-8", errors="backslashreplace"))
    return repr(value.item() if isinstance(value, np.generic) else value)


def _is_table(value: Any) -> bool:
    return isinstance(value, tf.lookup.StaticHashTable | tf.lookup.StaticVocabularyTable)


def _is_array(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        is_text = value.dtype.kind == "O" and all(isinstance(each, str | bytes) for each in value.ravel())
        return is_text or value.dtype.kind in "biufcSU" or value.dtype.name == "bfloat16"
    is_tensor = isinstance(value, tf.Tensor) and not isinstance(value, tf.Variable) and hasattr(value, "numpy")
    return is_tensor and value.dtype not in {tf.resource, tf.variant}


def _begins_with(value: Any, batch: int) -> bool:
    """Whether a tensor has a value for each example of the batch that the model was built with."""
    return isinstance(value, tf.Tensor) and len(value.shape) > 0 and value.shape[0] == batch


def _overrides(layer: keras.Layer, method: str) -> bool:
    """Whether a class other than Keras's own defines a method of a layer."""
    found = getattr(type(layer), method, None)
    return found is not None and not str(found.__module__).startswith("keras.")


def model_identity(model: keras.Model, spec: ModelSpec, code_folder: Path, *, batch: int = 0) -> dict[str, Any]:
    """Return model and compile configuration as JSON values; a digest of the source where Keras cannot serialize it.

    Args:
        spec: names the function that builds it.
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


def python_attributes(model: keras.Model) -> dict[tuple[int, str], Any]:
    """Return the attributes of a model, its layers and its optimizer, as values that can be compared.

    Numbers and text are compared by value, and other objects by identity. Tracing a step changes none of them, unless
    the model's Python code has side effects.
    """
    return {
        (number, name): _comparable(value, _ATTRIBUTE_DEPTH)
        for number, item in enumerate(_attribute_items(model))
        for name, value in vars(item).items()
        if name not in _IGNORED
    }


@dataclass(frozen=True, slots=True)
class PythonAttributes:
    """The attributes of a model at one moment, which can be put back.

    Attributes:
        items: the model, its layers and its optimizer.
        compared: see `python_attributes`.
        plain: values that are numbers, text or None, by number of the item and name.
    """

    items: tuple[Any, ...]
    compared: dict[tuple[int, str], Any]
    plain: dict[tuple[int, str], Any]

    @classmethod
    def of(cls, model: keras.Model) -> "PythonAttributes":
        """The attributes as they are now."""
        items = tuple(_attribute_items(model))
        values = ((number, name, value) for number, item in enumerate(items) for name, value in vars(item).items())
        return cls(
            items, python_attributes(model), {(number, name): value for number, name, value in values if _plain(value)}
        )

    def changed(self, model: keras.Model) -> frozenset[tuple[int, str]] | None:
        """Which attributes differ now, by number of the item and name; None if the model has other layers."""
        if [id(item) for item in _attribute_items(model)] != [id(item) for item in self.items]:
            return None
        now = python_attributes(model)
        names = self.compared.keys() | now.keys()
        return frozenset(name for name in names if self.compared.get(name, _MISSING) != now.get(name, _MISSING))

    def can_be_put_back(self, model: keras.Model) -> bool:
        """Whether all that differs are numbers and texts of the user's own, which nothing else depends on."""
        changed = self.changed(model)
        return changed is not None and all(
            # A leading underscore is Keras's. `trainable`, for instance, is also kept in the variables.
            not name.startswith("_")
            and ((number, name) in self.plain or (number, name) not in self.compared)
            and _plain(vars(self.items[number]).get(name))
            for number, name in changed
        )

    def put_back(self, model: keras.Model) -> None:
        """Set what differs to these values; call it if `can_be_put_back`."""
        for number, name in self.changed(model) or ():
            # Around Keras's own `__setattr__`, which only keeps track of layers and variables.
            attributes = vars(self.items[number])
            if (number, name) in self.plain:
                attributes[name] = self.plain[number, name]
            else:
                attributes.pop(name, None)


class _Identity:
    """Equal only for the same object, which it keeps alive, because the id of a freed object is used again."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self._value is other._value


def _attribute_items(model: keras.Model) -> list[Any]:
    # What a layer makes of its variables is no state of its own: it follows each restore.
    return [*(layer for layer in layers_of(model) if not has_finalized_state(layer)), model.optimizer]


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def _comparable(value: Any, depth: int) -> Any:
    if _plain(value):
        return (type(value).__name__, repr(value))
    if depth and isinstance(value, list | tuple | set | frozenset):
        return [_comparable(item, depth - 1) for item in value]
    if depth and isinstance(value, dict):
        return [(_comparable(key, 0), _comparable(item, depth - 1)) for key, item in value.items()]
    return _Identity(value)


def summarize(model: keras.Model) -> ModelSummary:
    """Return the layers of a built model and the numbers of its parameters.

    Unlike `model.summary()`, it asks no layer to compute a shape, which could run the user's Python code.
    """
    return ModelSummary(
        layers=tuple(
            LayerSummary(
                name=layer.name,
                kind=type(layer).__name__,
                output_shape=_output_shape(layer),
                parameters=_numbers_in(layer.weights),
            )
            for layer in model.layers
        ),
        trainable=_numbers_in(model.trainable_weights),
        frozen=_numbers_in(model.non_trainable_weights),
        optimizer=_numbers_in(model.optimizer.variables),
    )


def _numbers_in(variables: Iterable[Any]) -> int:
    return sum(math.prod(variable.shape) for variable in {id(each): each for each in variables}.values())


def _output_shape(layer: keras.Layer) -> str | None:
    """The shape of what the layer computes in a functional or sequential model; None for layers of other models."""
    try:
        output = layer.output
    except (AttributeError, ValueError):  # it was never called on a symbolic tensor
        return None
    shapes = [str(tuple(tensor.shape)) for tensor in tree.flatten(output)]
    return ", ".join(shapes)


def transforms_identity(spec: RunSpec, code_folder: Path) -> dict[str, Any]:
    """Return the identity keys of the transforms as JSON values: code, and the layers and arrays that it uses.

    Raises:
        ModelError: a function cannot be loaded.
    """
    named = spec.data.transform_of_key
    return {key: _of_function(reference, spec, code_folder) for key, reference in named.items()}


def transform_contents(spec: RunSpec, code_folder: Path) -> dict[str, Any]:
    """Return a record of the vocabularies, tables and arrays that transforms use, by name.

    Raises:
        ModelError: a function cannot be loaded.
    """
    found: dict[str, Any] = {}
    for key, reference in spec.data.transform_of_key.items():
        if reference is not None:
            function = load_function(reference, code_folder, seed=spec.train.seed)
            contents = _records(_of_code(user_code(function, reference)))
            found |= {f"{key.partition('.')[2]}.{name}": record for name, record in contents.items()}
    return found


def require_recorded_transform_contents(
    identity: Mapping[str, Any], spec: RunSpec, code_folder: Path, *, home: str
) -> None:
    """Refuse transforms that use other vocabularies, tables or arrays than those of the run.

    Args:
        spec: the run file. What it leaves out of the run's transforms, or adds to them, is not compared.
        home: of the run, for the message.

    Raises:
        IdentityChanged: names the contents and the first differences.
    """
    recorded = identity.get(TRANSFORM_CONTENTS)
    if not isinstance(recorded, Mapping) or not recorded:
        return

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

    function = load_function(reference, code_folder, seed=spec.train.seed)
    code = user_code(function, reference)
    found: dict[str, Any] = {
        "function": reference.partition(":")[2],
        # A partial function or a tf.function is no plain function; then its whole file counts.
        "code": code.digests() or module_digest(reference, code_folder),
    }
    values = {
        name.partition(".")[2]: hashlib.sha256(text).hexdigest()[:16]
        for name, value in sorted(code.values.items())
        if (text := _bytes_of(value)) is not None
    }
    return found | {"values": values} if values else found


def _bytes_of(value: Any) -> bytes | None:
    """Return the bytes that determine a value; None if it has none that are the same in every process."""
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
