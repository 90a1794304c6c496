"""Exports are compared with the model before they are kept; and `serving.json`, which describes every export.

Keras writes files that lack variables, or that it refuses to load, without a word. So a plain Python process, with none
of Baton's registrations, loads a `.keras` file or SavedModel by the lines that the user gets, and predicts validation
examples. For LiteRT, ONNX and OpenVINO Keras converts the model (`model.export`), and their own runtime predicts them,
all together and the first one alone. A file that predicts something else than the model is not kept.

Inputs have the names that the model's dict or its `keras.Input`s give them, else x. Outputs have the names that the
converters give them, and stand in the order in which TensorFlow flattens the model's outputs.
"""

import importlib
import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from baton.tasks.foundation.contracts.dataset import Feature
from baton.tasks.foundation.dataset.features import unflatten
from baton.tasks.foundation.errors import InvalidInput, ModelError
from baton.tasks.foundation.machine.environment import silent_stderr
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.text import counted, listed, message, option
from baton.tasks.foundation.user_traceback import user_error

Array = npt.NDArray[Any]
# Predicts a batch by the names of the inputs; the outputs with all of their names.
Predict = Callable[[Mapping[str, Array]], list[tuple[frozenset[str], Array]]]

# As many validation examples are predicted, if there are as many.
COMPARED = 32
# OpenVINO writes two files of this name into a folder.
OPENVINO_MODEL = "model.xml"
# On processors with bfloat16 OpenVINO otherwise rounds to it.
_EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
# Names that Keras gives to inputs that have none.
_UNNAMED = re.compile(r"(keras_tensor|input_layer)(_\d+)?")
# The converters' names of outputs that have none: LiteRT's, and those of ONNX and OpenVINO.
_NUMBERED = re.compile(r"(?:output_(\d+)|Identity(?:_(\d+))?(?::0)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """An input or output; None is a dimension of any length, as the first one, which is that of the batch."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionComparison:
    """How the predictions of an exported file compare with Keras's.

    Attributes:
        examples: how many were predicted.
        largest_difference: over all outputs, as `difference` measures it.
        tolerance: the largest that is accepted.
        outputs: of the file.
    """

    examples: int
    largest_difference: float
    tolerance: float
    outputs: tuple[Value, ...]


def model_inputs_of(model: keras.Model, features: Sequence[Feature], form: str) -> dict[str, Value]:
    """Return what a model takes, by the name of the feature: x, x/<key> or x[0].

    It is what the model declares (`keras.Input`), or else what its examples have.

    Args:
        form: of the export.
    """
    own = [each for each in features if _is_input(each)]
    declared = list(getattr(model, "inputs", None) or ())  # only a model of layers declares some
    by_name = {each.name: each for each in declared}
    by_place = dict(zip((each.name for each in own), declared, strict=True)) if len(own) == len(declared) else {}
    found: dict[str, Value] = {}
    for each in own:
        key = each.name.partition("/")[2]
        layer = by_name.get(key) if key else by_place.get(each.name)
        name = key or re.sub(r"\W+", "_", each.name).strip("_")
        if layer is not None and not key and not _UNNAMED.fullmatch(layer.name):
            name = layer.name
        shape, dtype = tuple(each.shape), each.dtype
        if layer is not None:
            dtype = str(keras.backend.standardize_dtype(layer.dtype))
            if len(layer.shape) == len(shape) + 1:  # else Keras itself adds a dimension
                shape = tuple(layer.shape[1:])
        elif dtype in {"float16", "float64"}:
            dtype = "float32"  # layers cast it to what they compute in
        # Keras names the inputs of OpenVINO by their keys; the others are TensorFlow's, which has no other characters.
        name = name if form == "openvino" else _for_tensorflow(name)
        found[each.name] = Value(name=name, shape=(None, *shape), dtype=dtype)
    return found


def inputs_of_saved_model(folder: Path) -> tuple[Value, ...]:
    """Return the inputs of an exported SavedModel, with the names that Keras has given them."""
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((folder / "saved_model.pb").read_bytes())
    return tuple(
        Value(
            name=name,
            shape=tuple(None if dim.size < 0 else dim.size for dim in each.tensor_shape.dim),
            dtype=tf.as_dtype(each.dtype).name,
        )
        for name, each in sorted(saved.meta_graphs[0].signature_def["serving_default"].inputs.items())
    )


def _is_input(feature: Feature) -> bool:
    return feature.name == "x" or feature.name.startswith(("x/", "x["))


def _for_tensorflow(name: str) -> str:
    return re.sub(r"\W", "_", name)


def require_no_text(features: Sequence[Feature], form: str) -> None:
    """Refuse inputs of text, which these runtimes do not take, or only with TensorFlow's operations.

    Raises:
        InvalidInput: an input of the model is text.
    """
    texts = [each.name for each in features if _is_input(each) and each.dtype == "string"]
    if texts:
        raise InvalidInput(
            option("format", form)
            + f": the model's input {listed(texts)} is text, and such a file takes only numbers; use "
            + option("format", "saved_model")
            + " or keras, or turn text into numbers in data.transform, before the model"
        )


def write_for_runtime(
    model: keras.Model,
    inputs: Mapping[str, Value],
    x: Any,
    *,
    form: str,
    path: Path,
    tolerance: float,
    reference: str,
) -> PredictionComparison:
    """Write a model for another runtime, let that predict examples, and compare with Keras.

    Args:
        inputs: as `model_inputs_of` returns them.
        x: examples as the model takes them, [examples, ...].
        form: litert, onnx or openvino.
        path: the file, or for openvino the folder, to write.
        tolerance: the largest difference to accept.
        reference: the function that builds the model, for messages.

    Raises:
        ModelError: Keras cannot convert the model, its runtime cannot run it, or predicts something else.
    """
    arrays = _arrays(inputs, x)
    examples = len(next(iter(arrays.values())))
    worst, outputs = 0.0, tuple[Value, ...]()
    counts = dict.fromkeys((examples, 1))
    parts = [tf.nest.map_structure(lambda value, count=count: value[:count], x) for count in counts]
    try:
        predictions = [model(part, training=False) for part in parts]
        with silent_stderr(), _log_level_kept():
            predict = _WRITERS[form](model, inputs, path)
            predicted = [predict({name: value[:count] for name, value in arrays.items()}) for count in counts]
        for expected, outcome in zip(predictions, predicted, strict=True):
            found = _in_order(outcome, expected)
            mine = [np.asarray(each) for each in tf.nest.flatten(expected)]
            worst = max([worst, *(difference(own, its) for own, (_, its) in zip(mine, found, strict=True))])
            outputs = outputs or tuple(
                Value(name=name, shape=(None, *value.shape[1:]), dtype=str(value.dtype)) for name, value in found
            )
    except OSError:
        raise
    except Exception as fault:
        what = f"{reference}: this model cannot be exported as {form}:"
        raise ModelError(user_error(what, fault, hints=_remedies(fault, form))) from fault
    require_close(
        worst,
        form=form,
        examples=examples,
        tolerance=tolerance,
        reference=reference,
        hint="or use another format: saved_model computes what Keras computes",
    )
    return PredictionComparison(examples=examples, largest_difference=worst, tolerance=tolerance, outputs=outputs)


def require_close(
    worst: float, *, form: str, examples: int, tolerance: float, reference: str, hint: str | None = None
) -> None:
    """Refuse a file whose predictions differ by more than the tolerance.

    Raises:
        ModelError: they do, or differ in shape.
    """
    if worst <= tolerance:
        return
    enough = option("tolerance", float(f"{2 * worst:.1g}"))
    hints = ["if that is close enough, add " + enough] if math.isfinite(worst) else []
    raise ModelError(
        message(
            f"{reference}: as {form} this model predicts something else than Keras: on {counted(examples, 'example')} "
            f"the largest difference is {worst:.2g}, and "
            + option("tolerance")
            + f" is {tolerance:g}; nothing was written",
            hints=[*hints, *([] if hint is None else [hint])],
        )
    )


@dataclass(frozen=True, slots=True)
class ReadBack:
    """What a plain Python process found in an export.

    Attributes:
        variables: the sha256 of each variable's bytes.
        outputs: the arrays that it predicts, floats as float64; None if it was given no examples.
    """

    variables: tuple[str, ...]
    outputs: tuple[Array, ...] | None


def read_back(lines: Sequence[str], x: Any, *, folder: Path) -> ReadBack:
    """Load an export in a plain Python process, on the CPU and without Baton, and let it predict.

    Args:
        lines: of Python; the last one is an expression, the loaded model.
        x: examples as the model takes them, [examples, ...]; None: only the variables are read.
        folder: the run file's folder; the import of its code may read files there.

    Raises:
        ModelError: it cannot be loaded, or does not predict; the message is the last line that Python says.
    """
    path = os.pathsep.join(str(Path(each).absolute()) for each in sys.path if each)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "-1",
        "TPU_LOAD_LIBRARY": "0",
        "PYTHONPATH": path,
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    with temporary_folder("baton-reading-back-") as scratch:
        given = [] if x is None else [tf.constant(each) for each in tf.nest.flatten(x)]
        places = None if x is None else tf.nest.pack_sequence_as(x, list(range(len(given))))
        for place, each in enumerate(given):
            (scratch / f"given-{place}").write_bytes(tf.io.serialize_tensor(each).numpy())
        dtypes = [each.dtype.name for each in given]
        (scratch / "given.json").write_text(json.dumps({"x": places, "dtypes": dtypes}), encoding="utf-8")
        program = "\n".join(["import keras", *lines[:-1], f"model = {lines[-1]}", _READ])
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, str(scratch)],
            cwd=folder if folder.is_dir() else None,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if done.returncode:
            ended = f"its process ended with exit code {done.returncode}, as for want of memory"
            raise ModelError(ended if done.returncode < 0 else next(reversed(done.stderr.strip().splitlines()), ended))
        found = json.loads((scratch / "found.json").read_text(encoding="utf-8"))
        outputs = (
            tf.io.parse_tensor((scratch / f"found-{place}").read_bytes(), dtype).numpy()
            for place, dtype in enumerate(found["dtypes"])
        )
        return ReadBack(variables=tuple(found["variables"]), outputs=None if x is None else tuple(outputs))


# The SavedModel's signature has its own containers and dtypes, and Keras may have added a dimension.
_READ = """
import hashlib, json, pathlib, sys
import tensorflow as tf

folder = pathlib.Path(sys.argv[1])
given = json.loads((folder / "given.json").read_text(encoding="utf-8"))

def tensor(place):
    return tf.io.parse_tensor((folder / f"given-{place}").read_bytes(), given["dtypes"][place])

def predicted(x):
    if isinstance(model, keras.Model):
        return model(x, training=False)
    takes = model.serve.concrete_functions[0].structured_input_signature[0][0]
    if isinstance(x, dict):
        named = isinstance(takes, dict)
        x = {key: x[key] for key in takes} if named else [x[spec.name] for spec in tf.nest.flatten(takes)]
    values = []
    for value, spec in zip(tf.nest.flatten(x), tf.nest.flatten(takes), strict=True):
        value = tf.constant(value) if spec.dtype == tf.string else tf.cast(value, spec.dtype)
        if value.shape.rank != spec.shape.rank:
            value = tf.reshape(value, [-1 if size is None else size for size in spec.shape])
        values.append(value)
    return model.serve(tf.nest.pack_sequence_as(takes, values))

tensors = []
if given["x"] is not None:
    tensors = tf.nest.flatten(predicted(tf.nest.map_structure(tensor, given["x"])), expand_composites=True)
tensors = [tf.cast(each, tf.float64) if each.dtype.is_floating else tf.convert_to_tensor(each) for each in tensors]
for place, each in enumerate(tensors):
    (folder / f"found-{place}").write_bytes(tf.io.serialize_tensor(each).numpy())
variables = [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in model.variables]
found = {"variables": variables, "dtypes": [each.dtype.name for each in tensors]}
(folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
"""


def difference(expected: Array, found: Array) -> float:
    """Return the largest difference of two arrays, relative to the largest number expected, or to 1 if that is larger.

    Numbers that are not finite must be the same: else it is inf, as for arrays of different shapes.
    """
    if expected.shape != found.shape:
        return math.inf
    if not expected.size:
        return 0.0
    if expected.dtype.kind in "OSU":  # text
        return 0.0 if np.array_equal(expected, found) else math.inf
    one, other = expected.astype(np.float64), found.astype(np.float64)
    finite = np.isfinite(one)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
        return math.inf
    if not finite.any():
        return 0.0
    return float(np.abs(one[finite] - other[finite]).max() / max(1.0, np.abs(one[finite]).max()))


def _arrays(inputs: Mapping[str, Value], x: Any) -> dict[str, Array]:
    """A batch of examples by the names of the file's inputs."""
    if isinstance(x, dict):
        parts = {name: x[name.partition("/")[2]] for name in inputs}
    else:
        parts = dict(zip(inputs, x if isinstance(x, tuple) else (x,), strict=True))
    return {each.name: np.asarray(parts[name]).astype(each.dtype) for name, each in inputs.items()}


def _in_order(found: list[tuple[frozenset[str], Array]], expected: Any) -> list[tuple[str, Array]]:
    """The outputs in the order of the model's, each with its name; converters sort them by name, and add some."""
    keys = sorted(expected) if isinstance(expected, dict) else []
    placed: dict[int, tuple[str, Array]] = {}
    for names, value in found:
        for name in names:
            numbered = _NUMBERED.fullmatch(name)
            if name in keys:
                placed[keys.index(name)] = name, value
            elif numbered is not None and not keys:
                placed[int(numbered[1] or numbered[2] or 0)] = name, value
    wanted = len(tf.nest.flatten(expected))
    if set(placed) != set(range(wanted)):  # other names, as those of outputs within outputs
        placed = dict(enumerate((min(names, default=""), value) for names, value in found))
    if len(placed) != wanted:
        raise ValueError(f"the file has {counted(len(placed), 'output')}, and the model {wanted}")
    return [placed[place] for place in range(wanted)]


def _signature(inputs: Mapping[str, Value]) -> list[Any]:
    """The argument of the model in TensorFlow's specifications."""
    specs = {
        name: tf.TensorSpec(each.shape, each.dtype, name=_for_tensorflow(each.name)) for name, each in inputs.items()
    }
    return [unflatten(specs)[0]]


def _as_litert(model: keras.Model, inputs: Mapping[str, Value], path: Path) -> Predict:
    model.export(path, format="litert", verbose=False, input_signature=_signature(inputs))
    interpreter = importlib.import_module("ai_edge_litert.interpreter").Interpreter(model_path=str(path))
    run = interpreter.get_signature_runner()
    return lambda arrays: [(frozenset([name]), value) for name, value in run(**arrays).items()]


def _as_onnx(model: keras.Model, inputs: Mapping[str, Value], path: Path) -> Predict:
    model.export(path, format="onnx", verbose=False, input_signature=_signature(inputs))
    session = importlib.import_module("onnxruntime").InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    return lambda arrays: [
        (frozenset([name]), value) for name, value in zip(names, session.run(None, dict(arrays)), strict=True)
    ]


def _as_openvino(model: keras.Model, inputs: Mapping[str, Value], path: Path) -> Predict:
    path.mkdir()
    with _no_usage_statistics():
        openvino = importlib.import_module("openvino")
        target = str(path / OPENVINO_MODEL)
        model.export(target, format="openvino", verbose=False, input_signature=_signature(inputs))
    compiled = openvino.Core().compile_model(target, "CPU", _EXACT)

    def predict(arrays: Mapping[str, Array]) -> list[tuple[frozenset[str], Array]]:
        found = compiled(dict(arrays))
        return [(frozenset(port.get_names()), found[port]) for port in compiled.outputs]

    return predict


_WRITERS = {"litert": _as_litert, "onnx": _as_onnx, "openvino": _as_openvino}


@contextmanager
def _no_usage_statistics() -> Iterator[None]:
    """OpenVINO's package reports each import and conversion to its makers, unless this package cannot be imported."""
    name = "openvino_telemetry"
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]


@contextmanager
def _log_level_kept() -> Iterator[None]:
    """OpenVINO's converter raises the level of the root logger, and leaves it there where it fails."""
    level = logging.root.level
    try:
        yield
    finally:
        logging.root.setLevel(level)


def _remedies(fault: Exception, form: str) -> list[str]:
    text = str(fault)
    if form == "litert" and "Select TensorFlow op" in text:
        return [
            "LiteRT's runtime has no TensorFlow operations; a recurrent layer needs unroll=True; or use "
            + option("format", "onnx")
        ]
    if form == "openvino":
        return ["OpenVINO also reads ONNX: try " + option("format", "onnx") + ", or saved_model"]
    return ["try " + option("format", "saved_model")]


def load_lines(form: str, path: Path, inputs: Iterable[Value]) -> tuple[str, ...]:
    """Lines of Python that load an export for another runtime without Baton; x stands for the arrays of a batch."""
    names = [each.name for each in inputs]
    given = ", ".join(f"{name!r}: {name if name.isidentifier() else 'x'}" for name in names)
    if form == "litert":
        load = f"Interpreter({str(path)!r}).get_signature_runner()(**{{{given}}})"
        return "from ai_edge_litert.interpreter import Interpreter", load
    if form == "onnx":
        return "import onnxruntime", f"onnxruntime.InferenceSession({str(path)!r}).run(None, {{{given}}})"
    return "import openvino", f"openvino.compile_model({str(path)!r}, 'CPU', {_EXACT})({{{given}}})"


def serving_json(
    facts: Mapping[str, object],
    inputs: Iterable[Value],
    compared: PredictionComparison | None,
    metrics: Mapping[str, float],
) -> bytes:
    """Return the file that describes an export: strict JSON, numbers that are not finite as null."""
    more = {} if compared is None else asdict(compared)
    content = {
        "format": 1,
        **facts,
        "inputs": [asdict(each) for each in inputs],
        **more,
        "metrics": {name: value if math.isfinite(value) else None for name, value in metrics.items()},
    }
    return json.dumps(content, indent=2, allow_nan=False).encode() + b"\n"
