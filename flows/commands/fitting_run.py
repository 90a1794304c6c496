"""Writes the run file and the model for the data that `baton init --data` found.

Both are beginnings to change, in the style of the templates in new_run/: the keys that every run file has, and a model
of a few layers that fits the inputs and the labels. Images get convolutions, codes and words an embedding, and numbers
a normalization, so that they need no scale.
"""

import math
import re
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from tasks.foundation.contracts.dataset import Feature
from tasks.foundation.dataset.features import STRING
from tasks.foundation.errors import InvalidInput
from tasks.prepare_data.look import Found

_COLUMNS = 100
_COMMENT_AT = 32
# Most examples -> passes, and examples in a step.
_LENGTHS: Final = ((5_000, 20, 32), (50_000, 10, 64), (math.inf, 3, 128))
_SMALLEST_IMAGE, _IMAGE_RANK = 8, 3
_UNSCALED = 10  # labels that lie within this of 0 are learned as they are
_WIDEST_CODE = 16
_NAME_CHARACTERS = 50
_WORDS, _WORD_IDS = 100, 10_000

WORDS: Final = "model.py:word_ids"
_OF_WORDS = f'''
def word_ids(example, *, seed):
    """Texts in x -> ids of their first {_WORDS} words, int32 [{_WORDS}]; `data.transform` calls it for each example."""
    x, y = example
    return PUT, y


def ids_of(text):
    words = tf.strings.split(tf.strings.lower(text))[:{_WORDS}]
    ids = 1 + tf.strings.to_hash_bucket_fast(words, {_WORD_IDS - 1})
    padded = tf.pad(ids, [[0, {_WORDS} - tf.size(ids)]])
    return tf.ensure_shape(tf.cast(padded, tf.int32), [{_WORDS}])
'''


def data_keys(found: Found, paths: Mapping[str, str]) -> dict[str, Any]:
    """Return `data` of the run file.

    Args:
        found: the data.
        paths: path -> how the run file names it.
    """
    plan = found.plan

    def options_of(options: Mapping[str, Any]) -> dict[str, Any]:
        return {**options, "path": paths.get(options["path"], options["path"])}

    keys: dict[str, Any] = {"source": plan.source, "options": options_of(plan.options)}
    for name, options in plan.sets.items():
        keys[name] = {"source": plan.source, "options": options_of(options)}
    if "validation" not in plan.sets:
        keys["validation_fraction"] = 0.1
    if any(each.dtype == STRING for each in found.inputs):
        keys |= {"transform": WORDS, "validation_transform": WORDS}
    return keys


def run_text(found: Found, data: Mapping[str, Any], name: str) -> str:
    """Return the run file.

    Args:
        found: the data.
        data: see `data_keys`.
        name: a file or a folder, which the run is named after.
    """
    epochs, batch = next((epochs, batch) for most, epochs, batch in _LENGTHS if found.examples <= most)
    of_data: str = yaml.dump(
        {"data": dict(data)},
        Dumper=_Dumper,
        default_flow_style=None,
        sort_keys=False,
        width=_COLUMNS,
        allow_unicode=True,
    )
    fraction = "  validation_fraction: 0.1"
    of_data = of_data.replace(fraction, _with_comment(fraction, "held out, and evaluated at the end of each epoch"))
    return "\n".join(
        [
            "# What is trained, for how long, and where it goes. Paths start at this file's folder.",
            "# Every other key has a default: deploy/runs/README.md in Baton's repository.",
            _with_comment(f"run: {_run_name(name)}", "the run's name; its home is <storage>/<run>"),
            _with_comment("storage: ./runs", "or gs://bucket/prefix"),
            of_data.rstrip(),
            _with_comment("model: model.py:build_model", "returns a compiled keras.Model"),
            "train:",
            _with_comment(f"  epochs: {epochs}", "passes over the training examples, as in fit; or steps: N batches"),
            _with_comment(f"  global_batch_size: {batch}", "examples in a step, over all replicas"),
            "",
        ]
    )


class _Dumper(yaml.SafeDumper):
    """Writes equal values again, and not as anchors."""

    def ignore_aliases(self, data: object) -> bool:  # noqa: ARG002 - as PyYAML calls it
        return True


def _with_comment(line: str, comment: str) -> str:
    return f"{line:{_COMMENT_AT}}  # {comment}"


def _run_name(path: str) -> str:
    """Return a name for the run: the last part of the path that begins with a letter, as mnist of mnist/3.0.1."""
    for part in reversed(PurePosixPath(path).parts):
        last = re.split(r"[*?\[]", part)[0].split(".")[0]
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", last).strip("-._")[:_NAME_CHARACTERS]
        if name[:1].isalpha() and name != "datasets" and yaml.safe_load(name) == name:
            return name
    return "first-run"


def model_text(found: Found) -> str:
    """Return model.py.

    Raises:
        InvalidInput: the labels are texts, which no loss compares.
    """
    if found.label.dtype == STRING:
        raise InvalidInput("--data: the labels are texts; name a column of numbers or of categories: --label NAME")
    inputs = found.inputs
    texts = [each for each in inputs if each.dtype == STRING]
    lines = [f'"""{_signature(found)}"""']
    if inputs[0].name == "x":
        lines += [f"inputs = {_input(inputs[0])}", *_encoded(inputs[0], "inputs", found)]
    else:
        lines += ["inputs = {", *(f'    "{_key(each)}": {_input(each)},' for each in inputs), "}", "encoded = []"]
        for each in inputs:
            lines += [*_encoded(each, f'inputs["{_key(each)}"]', found), "encoded.append(x)"]
        lines.append("x = keras.layers.Concatenate()(encoded)")
    lines += [
        *_hidden(found),
        *_outputs(found),
        "return model",
    ]
    parts = ['"""The model. Whatever `build_model` returns is trained, as `fit` would train it."""\n\nimport keras\n']
    if texts:
        put = "ids_of(x)" if texts[0].name == "x" else _put(texts)
        parts = [f"{parts[0]}import tensorflow as tf\n", _OF_WORDS.replace("PUT", put)]
    return "\n".join([*parts, "\ndef build_model(width=64):", *(f"    {line}" for line in lines), ""])


def _put(texts: list[Feature]) -> str:
    items = ", ".join(f'"{_key(each)}": ids_of(x["{_key(each)}"])' for each in texts)
    return f"{{**x, {items}}}"


def _signature(found: Found) -> str:
    def words(dtype: str, shape: tuple[int, ...]) -> str:
        return f"{dtype} [{', '.join(['batch', *map(str, shape)])}]"

    inputs, label = found.inputs, found.label
    x = f"x {words(*_read_as(inputs[0]))}" if len(inputs) == 1 else f"A dict of {len(inputs)} inputs"
    if (classes := _classes(found)) is not None:
        return f"{x} -> probabilities {words('float32', (*label.shape, classes))}."
    return f"{x} -> y {words('float32', label.shape or (1,))}."


def _key(feature: Feature) -> str:
    return feature.name.partition("/")[2]


def _read_as(feature: Feature) -> tuple[str, tuple[int, ...]]:
    """Return dtype and shape as the model gets them."""
    return ("int32", (_WORDS,)) if feature.dtype == STRING else (feature.dtype, feature.shape)


def _input(feature: Feature) -> str:
    _, shape = _read_as(feature)
    dtype = ', dtype="int32"' if feature.dtype == STRING or feature.vocabulary else ""
    name = "" if feature.name == "x" else f', name="{_key(feature)}"'
    return f"keras.Input({shape}{dtype}{name})"


def _encoded(feature: Feature, given: str, found: Found) -> list[str]:
    """Return lines that make a vector x of an input, or a vector for each step of a sequence."""
    shape = feature.shape
    layer = "x = keras.layers."
    if _is_sequence(found):
        return [f"{layer}Embedding({_classes(found)}, width)({given})"]
    if feature.dtype == STRING:
        return [f"{layer}Embedding({_WORD_IDS}, width)({given})", f"{layer}GlobalAveragePooling1D()(x)"]
    if feature.vocabulary:
        codes = len(feature.vocabulary)
        lines = [f"{layer}Embedding({codes}, {min(_WIDEST_CODE, 1 + codes // 2)})({given})"]
        return [*lines, f"{layer}Flatten()(x)"] if shape else lines
    scale = "Rescaling(1 / 255)" if feature.dtype == "uint8" else "BatchNormalization()"
    if _is_image(shape):
        as_image = [] if len(shape) == _IMAGE_RANK else [f"{layer}Reshape({(*shape, 1)})(x)"]
        return [
            f"{layer}{scale}({given})",
            *as_image,
            "for filters in (width // 4, width // 2, width):",
            f'    {layer}Conv2D(filters, 3, padding="same", activation="relu")(x)',
            f"    {layer}MaxPooling2D()(x)",
            f"{layer}GlobalAveragePooling2D()(x)",
        ]
    if len(shape) == 1:
        return [f"{layer}BatchNormalization()({given})  # scales the numbers"]
    flat = "Flatten()" if shape else "Reshape((1,))"
    return [f"{layer}{flat}({given})", f"{layer}BatchNormalization()(x)  # scales the numbers"]


def _is_image(shape: tuple[int, ...]) -> bool:
    channels = shape[2:] or (1,)
    return len(shape) in {2, _IMAGE_RANK} and channels[0] in {1, 3} and min(shape[:2]) >= _SMALLEST_IMAGE


def _is_sequence(found: Found) -> bool:
    """Whether each step of x has a label of its own, as the next byte of a text."""
    x, y = found.inputs[0], found.label
    return len(found.inputs) == 1 and len(x.shape) == 1 and x.shape == y.shape and "int" in x.dtype and "int" in y.dtype


def _classes(found: Found) -> int | None:
    """Return the number of classes; of a sequence, of all that may follow: at least the values of a byte."""
    if _is_sequence(found):
        return 1 + max([255, *(int(each.value) for each in found.extremes)])
    return found.classes


def _hidden(found: Found) -> list[str]:
    if _is_sequence(found):
        return ["x = keras.layers.GRU(width, return_sequences=True)(x)"]
    dense = 'x = keras.layers.Dense(width, activation="relu")(x)'
    return [dense, *([dense] if not any(_is_image(each.shape) for each in found.inputs) else []), _DROPOUT]


_DROPOUT = "x = keras.layers.Dropout(0.1)(x)"


def _outputs(found: Found) -> list[str]:
    """Return the last layers, the model and its compilation: for classes, a truth value, or amounts."""
    label, classes = found.label, _classes(found)
    if classes is not None:
        lines, loss, metric = [_dense(classes, "softmax")], "sparse_categorical_crossentropy", "accuracy"
    elif label.dtype == "bool":
        lines, loss, metric = [_dense(math.prod(label.shape), "sigmoid")], "binary_crossentropy", "accuracy"
    else:
        lines, loss, metric = [_dense(math.prod(label.shape)), *_scaled(found)], "mse", "mae"
        if len(label.shape) > 1:
            lines.append(f"outputs = keras.layers.Reshape({label.shape})(outputs)")
    return [
        *lines,
        "model = keras.Model(inputs, outputs)",
        f'model.compile(keras.optimizers.Adam(1e-3), "{loss}", metrics=["{metric}"])',
    ]


def _dense(units: int, activation: str = "") -> str:
    given = f', activation="{activation}"' if activation else ""
    return f"outputs = keras.layers.Dense({units}{given})(x)"


def _scaled(found: Found) -> list[str]:
    """Return a layer that brings outputs near 0 to the range of the labels."""
    span = found.label_range
    if span is None or max(map(abs, span)) <= _UNSCALED:
        return []
    scale, offset = (span[1] - span[0]) / 2 or 1.0, (span[0] + span[1]) / 2
    return [f"outputs = keras.layers.Rescaling({scale:.3g}, {offset:.3g})(outputs)  # the range of y"]
