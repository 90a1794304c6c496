"""Exports load with Keras and TensorFlow alone and predict the same; the lines of Python that load them."""

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import yaml

from baton.flows.commands.main import main
from baton.tasks.evaluate.export import Loading
from baton.tasks.evaluate.export_target import (
    RUNTIMES,
    atomic_target,
    form_of,
    require_free_target,
    require_runtime,
    serving_path,
)
from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.user_functions import load_function
from tests.support import forked
from tests.support.lab import Lab, lab_of, restored, spec_of
from tests.support.weights_lab import SUBCLASSED

LAYERS = """
import keras
import tensorflow as tf


@keras.saving.register_keras_serializable("own")
class Doubled(keras.layers.Layer):
    def call(self, x):
        return 2 * x


class Listed(keras.layers.Layer):
    def __init__(self, **config):
        super().__init__(**config)
        self.norms = [keras.layers.BatchNormalization()]

    def build(self, shape):
        self.norms[0].build(shape)
        super().build(shape)

    def call(self, x, training=False):
        return self.norms[0](x, training=training)


class Eager(keras.layers.Layer):  # a file has the graph, which computes something else
    def call(self, x):
        return x + 1 if tf.executing_eagerly() else x


class Tripled(keras.layers.Layer):
    def call(self, x):
        return 3 * x


def bent(x):
    return keras.ops.tanh(x) / 2
"""
MODEL = """
from . import own


def build(kind="Doubled", activation="tanh"):
    x = keras.Input((6,))
    activation = getattr(own, activation, activation)
    y = keras.layers.Dense(5, activation=activation, name="hidden")(getattr(own, kind)()(x))
    y = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(y))
    model = keras.Model(x, keras.layers.Dense(3)(y))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), loss, metrics=["accuracy"])
    return model
"""
# Runs without Baton, in the folder of the user's code.
PLAIN = """
import sys

import keras
import numpy as np
import onnxruntime
import openvino
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

import own

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}

x = np.load("x.npy")


def rebuilt():
    inputs = keras.Input((6,))
    y = keras.layers.Dense(5, activation="tanh")(own.Doubled()(inputs))
    y = keras.layers.Dropout(0.3)(keras.layers.BatchNormalization()(y))
    model = keras.Model(inputs, keras.layers.Dense(3)(y))
    model.compile(keras.optimizers.SGD(0.1, use_ema=True))
    return model


whole = keras.saving.load_model("out.keras")
weights = rebuilt()
weights.load_weights("out.weights.h5")
checkpoint = rebuilt()
checkpoint.optimizer.build(checkpoint.trainable_variables)
tf.train.Checkpoint(model=checkpoint).read("out.checkpoint/ckpt").expect_partial()
predictions = [model.predict(x, verbose=0) for model in (whole, weights, checkpoint)]
served = tf.saved_model.load("out.saved")
predictions.append(served.serve(x).numpy())
predictions.append(Interpreter("out.tflite").get_signature_runner()(x=x)["output_0"])
predictions.append(onnxruntime.InferenceSession("out.onnx").run(None, {"x": x})[0])
predictions.append(openvino.compile_model("out.openvino/model.xml", "CPU", EXACT)({"x": x})[0])
np.save("predictions.npy", np.stack(predictions))
assert not any(name.split(".")[0] == "baton" for name in sys.modules)
"""
TARGETS = {
    "keras": "out.keras",
    "weights": "out.weights.h5",
    "saved_model": "out.saved",
    "checkpoint": "out.checkpoint",
    "litert": "out.tflite",
    "onnx": "out.onnx",
    "openvino": "out.openvino",
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = lab_of(tmp_path_factory.mktemp("lab"), MODEL)
    (lab.code / "own.py").write_text(LAYERS)
    lab.train_and_commit(spec_of("build"), 3, 6)
    run_file_of(lab, "run.yaml")
    return lab


def run_file_of(lab: Lab, name: str, **options: Any) -> Path:
    spec = spec_of("build", model__options=options).model_copy(update={"storage": str(lab.root / "storage")})
    path = lab.code / name
    path.write_text(yaml.safe_dump(json.loads(spec.model_dump_json(exclude_defaults=True))))
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("forked_reading")
def test_every_form_loads_without_baton(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    spec = spec_of("build")
    head = lab.log(spec).head()
    assert head is not None
    metrics = lab.evaluate(spec, head.retained[-1])
    x = np.random.default_rng(1).normal(size=(20, 6)).astype(np.float32)
    np.save(lab.code / "x.npy", x)
    for form, name in TARGETS.items():
        address = [str(lab.code / "run.yaml")]
        if form == "weights":
            address = [f"{lab.root}/storage/build", "--run-file", *address]
        assert main(["export", *address, "--format", form, "--to", str(lab.code / name), "--json"]) == 0
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (result["step"], result["warnings"]) == (6, [])
        inside = {"checkpoint": "/ckpt", "openvino": "/model.xml"}.get(form, "")
        assert result["path"] == str(lab.code / name) + inside
        serving = json.loads(Path(result["serving"]).read_bytes())
        keys = ("run", "step", "state_digest", "checkpoint")
        assert {key: serving[key] for key in keys} == {key: result[key] for key in keys}
        assert serving["metrics"] == metrics
        assert serving["inputs"] == [
            {"name": "keras_tensor" if form == "saved_model" else "x", "shape": [None, 6], "dtype": "float32"}
        ]
        if form in RUNTIMES:
            assert result["compared"]["examples"] == serving["examples"] == 16
            assert serving["largest_difference"] < 1e-5
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PLAIN)],
        cwd=lab.code,
        env={**os.environ, "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    state = restored(lab, spec, head.retained[-1])
    raw = np.array(state.model(x, training=False))
    state.model.optimizer.finalize_variable_values(state.model.trainable_variables)
    expected = np.array(state.model(x, training=False))
    assert not np.allclose(raw, expected)  # the averages must differ from the weights, or the test shows nothing
    for predictions in np.load(lab.code / "predictions.npy"):
        np.testing.assert_allclose(predictions, expected, rtol=1e-5, atol=1e-6)


def refused(lab: Lab, capsys: pytest.CaptureFixture[str], *words: str, code: int = 2) -> str:
    before = sorted(path.name for path in lab.code.iterdir())
    assert main(["export", *words]) == code
    assert sorted(path.name for path in lab.code.iterdir()) == before
    return capsys.readouterr().err


@pytest.mark.slow
def test_bad_exports_are_refused(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    file, home, new = str(lab.code / "run.yaml"), f"{lab.root}/storage/build", str(lab.code / "new.keras")
    (lab.code / "there.keras").touch()
    to = ["--format", "keras", "--to", new]
    cases = [
        ([file, "--format", "keras", "--to", str(lab.code / "there.keras")], "there.keras already exists"),
        ([file, "--format", "coreml", "--to", new], "--format coreml is unknown; use one of keras, weights, saved_m"),
        ([file, "--format", "weights", "--to", new], "must end in .weights.h5"),
        ([file, "--format", "keras", "--to", "gs://bucket/new.keras"], "exports are written to a local path"),
        (
            [file, "--format", "keras", "--to", str(lab.code / "no" / "new.keras")],
            "/no does not exist; create it",
        ),
        (
            [file, "--to", str(lab.code / "new.weights.h5"), "--tolerance", "0.1"],
            "--tolerance 0.1: a weights export has no predictions to compare; drop it, or use --format keras, saved_m",
        ),
        ([file, "--to", str(lab.code / "new.onnx"), "--tolerance", "nan"], "--tolerance nan is no difference"),
        ([file, *to, "--step", "5"], "retains no checkpoint at step 5; it has: 0, 3, 6"),
        ([file, *to, "--step", "best"], "has no best checkpoint"),
        ([file, *to, "--step", "newest"], "--step newest is neither a step nor best"),
        ([f"{lab.root}/storage/none", *to], "no run is at"),
    ]
    for words, text in cases:
        assert text in refused(lab, capsys, *words)
    other = str(run_file_of(lab, "other.yaml", activation="relu"))
    assert "config.activation: tanh -> relu" in refused(lab, capsys, home, "--run-file", other, *to)


@pytest.mark.slow
def test_file_that_predicts_something_else_is_refused(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    """Without validation examples, it predicts training examples."""
    lab.train_and_commit(
        spec_of("build", run="eager", model__options={"kind": "Eager"}, data__validation_fraction=0), 2
    )
    file = str(run_file_of(lab, "eager.yaml", kind="Eager"))
    words = [f"{lab.root}/storage/eager", "--run-file", file, "--set", "data.validation_fraction=0"]
    target = lab.code / "eager.onnx"
    text = refused(lab, capsys, *words, "--to", str(target))
    assert "as onnx this model predicts something else than Keras: on 32 examples the largest difference is" in text
    assert "and --tolerance is 0.001; nothing was written" in text
    assert main(["export", *words, "--to", str(target), "--tolerance", "1000"]) == 0
    assert target.is_file()


def test_missing_package_is_named_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "tf2onnx" else object())
    with pytest.raises(InvalidInput, match="--format onnx needs tf2onnx, not installed here; install the extra"):
        require_runtime("onnx", None)
    assert require_runtime("litert", None) == 1e-3


LACKING = (
    SUBCLASSED
    + """

class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense, self.scale = keras.layers.Dense(3), tf.Variable([1.0, 2.0, 3.0])

    def call(self, x):
        return self.dense(x) * self.scale


def shared():
    x, inner = keras.Input((6,)), keras.Input((6,))
    dense = keras.layers.Dense(6, name="shared")
    return keras.Model(x, keras.Model(inner, keras.layers.Dense(3)(dense(inner)), name="within")(dense(x)))


def hiding():
    @keras.saving.register_keras_serializable("mine")
    class Closed(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    return keras.Sequential([keras.Input((6,)), Closed(), keras.layers.Dense(3)])


def listing():
    return keras.Sequential([keras.Input((6,)), layers.Listed(), keras.layers.Dense(3)])


def others(kind, loss=None):
    def inner(y, predictions):
        return keras.losses.sparse_categorical_crossentropy(y, predictions, from_logits=True)

    kinds = {"raw": Own, "shared": shared, "hiding": hiding, "listing": listing, "plain": layers.Subclassed}
    model = kinds[kind]()
    model.compile("adam", inner if loss else keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""
)
# The model, its refused forms, what the message of the first one says, and the form that it names.
REFUSED = [
    (
        "lacking",
        "hidden",
        ("keras", "weights", "checkpoint"),
        "loses 4 variables of hidden/one, hidden/two: h",
        "saved_model",
    ),
    (
        "lacking",
        "omitting",
        ("keras", "weights"),
        "loses 1 variable of omitting: omitting/b; nothing was",
        "saved_model",
    ),
    ("others", "shared", ("keras",), "cannot be loaded in plain Python: ValueError: Output with path", "saved_model"),
    ("others", "hiding", ("keras",), "hint: Closed: defined inside a function or class, where no", "saved_model"),
    ("others", "raw", ("keras", "weights"), "loses 1 variable of own: own/scale; nothing", "saved_model"),
    ("others", "listing", ("checkpoint",), "loses 4 variables of sequential/listed/batch_norm", "keras"),
]
AT_NIGHT = {"omitting", "hiding", "raw", "listing"}


@pytest.mark.slow
@pytest.mark.usefixtures("forked_reading")
@pytest.mark.parametrize(
    "case",
    [pytest.param(each, id=each[1], marks=[pytest.mark.nightly] * (each[1] in AT_NIGHT)) for each in REFUSED],
)
def test_export_that_lacks_something_is_refused(
    case: tuple[str, str, tuple[str, ...], str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keras and TensorFlow write these files, and mostly load them, without a word."""
    build, kind, forms, words, instead = case
    lacking = lab_of(tmp_path, LACKING)
    with (lacking.code / "layers.py").open("a") as file:
        file.write("class Listed" + LAYERS.partition("class Listed")[2].partition("class Eager")[0])
    lacking.train_and_commit(spec_of(build, run="run", model__options={"kind": kind}), 2)
    for form in ("keras", "weights", "saved_model", "checkpoint"):
        target = tmp_path / "exports" / TARGETS[form]
        target.parent.mkdir(exist_ok=True)
        address = [f"{tmp_path}/storage/run", "--format", form, "--to", str(target)]
        if form in forms:
            text = refused(lacking, capsys, *address)
            assert not list(target.parent.iterdir())
            assert f"use --format {instead}: it was tried, and is what was trained" in text
            assert form != forms[0] or words in text, text
        elif form == instead:
            assert main(["export", *address]) == 0
            shutil.rmtree(target.parent)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_reading")
def test_loss_that_no_import_finds_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, target = lab_of(tmp_path, LACKING), tmp_path / "out.keras"
    own.begin(spec_of("others", run="run", model__options={"kind": "plain", "loss": "inner"}))
    assert main(["export", f"{tmp_path}/storage/run", "--to", str(target)]) == 0
    captured = capsys.readouterr()
    assert "warning: inner: defined inside a function or class, where no import finds it, so the model" in captured.err
    call = f"keras.saving.load_model({str(target)!r}, custom_objects={{'Subclassed': Subclassed}}, compile=False)"
    assert call in captured.out


WAITING = """
import os
import time


class Slow(keras.layers.Layer):
    def build(self, shape):
        self.w = self.add_weight(shape=(6,), name="w")

    def call(self, x):
        return x * self.w

    def save_own_variables(self, store):
        super().save_own_variables(store)
        if "BATON_TEST_PIPE" in os.environ and not isinstance(store, dict):
            with open(os.environ["BATON_TEST_PIPE"], "w") as pipe:
                pipe.write("in the middle of the file")
            time.sleep(600)


def build():
    model = keras.Sequential([keras.Input((6,)), Slow(), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
"""


@pytest.mark.slow
def test_killed_export_leaves_nothing(tmp_path: Path) -> None:
    slow = lab_of(tmp_path, WAITING)
    slow.begin(spec_of("build", run="run"))
    pipe, scratch, exports = tmp_path / "pipe", tmp_path / "scratch", tmp_path / "exports"
    os.mkfifo(pipe)
    scratch.mkdir()
    exports.mkdir()
    words = ["export", f"{tmp_path}/storage/run", "--format", "weights", "--to", str(exports / "out.weights.h5")]
    command = [sys.executable, "-P", "-m", "baton.flows.commands.main", *words]
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with forked.Popen(command, env={**environment, "BATON_TEST_PIPE": str(pipe)}) as killed:
        assert pipe.read_text() == "in the middle of the file"
        killed.kill()
    assert list(exports.iterdir()) == []
    assert list(scratch.glob("baton-export-*/*"))
    done = forked.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = ["out.weights.h5", "out.weights.h5.serving.json"]
    assert sorted(each.name for each in exports.iterdir()) == names
    assert not list(scratch.glob("baton-export-*"))


@pytest.mark.parametrize("form", ["keras", "saved_model"])
def test_export_comes_from_another_disk(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, target = Path.rename, tmp_path / "there" / TARGETS[form]
    target.parent.mkdir()

    def across_disks(self: Path, to: Path) -> Path:
        if target.parent not in self.parents:
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", across_disks)
    monkeypatch.setattr(Path, "replace", across_disks)
    with atomic_target(form, target) as path:
        if form == "saved_model":
            path.mkdir()
        file = path if form == "keras" else path / "saved_model.pb"
        file.write_text("content")
        serving_path(form, path).write_text("{}")
    assert (target if form == "keras" else target / "saved_model.pb").read_text() == "content"
    assert serving_path(form, target).read_text() == "{}"
    assert len(list(target.parent.iterdir())) == (2 if form == "keras" else 1)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_reading")
def test_copied_home_is_exported_without_its_dataset(
    lab: Lab, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(lab.root / "storage" / "build", tmp_path / "build")
    for name in ("out.keras", "out.onnx", "out.weights.h5"):
        assert main(["export", str(tmp_path / "build"), "--to", str(tmp_path / name), "--json"]) == 0
        captured = capsys.readouterr()
        result = json.loads(captured.out.splitlines()[-1])
        if name == "out.weights.h5":
            assert result["warnings"] == []
            continue
        (warning,) = result["warnings"]
        assert warning.startswith("predictions were compared on zeros and not on validation examples: ")
        assert "/datasets/" in warning
        assert warning.endswith(" is missing")
        assert result["compared"]["examples"] == 32
    weights = keras.saving.load_model(tmp_path / "out.keras").get_weights()
    head = lab.log(spec_of("build")).head()
    assert head is not None
    state = restored(lab, spec_of("build"), head.retained[-1])
    state.model.optimizer.finalize_variable_values(state.model.trainable_variables)
    assert all(map(np.array_equal, weights, state.model.get_weights()))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_reading")
def test_manifest_is_asked_for_where_a_model_declares_no_inputs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = lab_of(tmp_path, SUBCLASSED)
    own.begin(spec_of("build", run="run"))
    folder = own.log(spec_of("build", run="run")).require_head().identity["data.folder"]
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "storage" / "run", copy / "run")
    words = [str(copy / "run"), "--format", "saved_model", "--to", str(tmp_path / "out")]
    text = refused(own, capsys, *words)
    assert f"{copy}/{folder}/manifest.json is missing, and the model does not say which examples it takes" in text
    (copy / folder).mkdir(parents=True)
    shutil.copy(tmp_path / "storage" / folder / "manifest.json", copy / folder)
    assert main(["export", *words]) == 0
    assert "warning: predictions were compared on zeros and not on validation examples: " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("forked_reading")
def test_adapters_that_keras_rounds_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = """
    def build():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, name="hidden"), keras.layers.Dense(3)])
        model.layers[0].quantize("int8")
        model.layers[0].enable_lora(2)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model
    """
    quantized = lab_of(tmp_path, model)
    quantized.train_and_commit(spec_of("build"), 3)
    file, home = run_file_of(quantized, "run.yaml"), f"{quantized.root}/storage/build"
    for name, words in {"out.keras": "warning: hidden: Keras merges the adapters", "out.saved": ""}.items():
        format_of = ["--format", "saved_model"] if name == "out.saved" else []
        assert main(["export", home, "--run-file", str(file), "--to", str(tmp_path / name), *format_of]) == 0
        warning = capsys.readouterr().err
        assert words in warning
        assert bool(words) == ("warning" in warning)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_reading")
def test_printed_lines_load_custom_objects(lab: Lab, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """In another folder than the user's code."""
    options = {"kind": "Tripled", "activation": "bent"}
    spec = spec_of("build", run="tripled", model__options=options)
    lab.begin(spec)
    file, home = run_file_of(lab, "tripled.yaml", **options), f"{lab.root}/storage/tripled"
    words = ["--step", "0", "--format", "keras", "--to"]
    assert main(["export", home, *words, str(tmp_path / "from-home.keras")]) == 0
    assert "sys.path.insert(0, 'FOLDER')  # where the run's code is;" in capsys.readouterr().out
    assert main(["export", home, "--run-file", str(file), *words, str(tmp_path / "tripled.keras")]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("warning: Tripled, bent: not registered with Keras")
    lines = captured.out.partition("load with   ")[2].splitlines()
    program = "\n".join(
        [*(line.strip() for line in lines[:-1]), f"model = {lines[-1].strip()}", "print(model.count_params())"]
    )
    done = forked.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, program + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == str(restored(lab, spec, lab.begin(spec).retained[0]).model.count_params())


FILES = {
    "layers.py": "class Scale: ...\nclass Shift: ...\ndef bent(x): ...\n",
    "heads.py": "from .layers import Scale, bent\nclass Head: ...\n",
}
REFERENCE = "heads.py:Head"


@dataclass(frozen=True)
class Code:
    """A folder of user code, loaded as Baton loads it."""

    folder: Path
    package: str

    def of(self, name: str, file: str = "layers", **more: Any) -> dict[str, Any]:
        return {"module": f"{self.package}.{file}", "class_name": name, "registered_name": name, "config": {}, **more}


@pytest.fixture
def code(tmp_path: Path) -> Code:
    folder = tmp_path / "iris"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return Code(folder, load_function(REFERENCE, folder).__module__.partition(".")[0])


def function(name: str) -> dict[str, Any]:
    return {"module": "builtins", "class_name": "function", "config": name, "registered_name": "function"}


def lines(config: Any, here: Path) -> tuple[str, ...]:
    return Loading.of_config(config, REFERENCE).lines(Path("out.keras"), here=here)


def test_model_of_keras_layers_needs_no_imports(code: Code) -> None:
    dense = {"module": "keras.layers", "class_name": "Dense", "config": {"activation": function("relu")}}
    spec = {"module": "tensorflow.python.framework.tensor", "class_name": "__typespec__", "registered_name": None}
    assert lines({"layers": [dense, spec]}, code.folder) == ("keras.saving.load_model('out.keras')",)


def test_custom_objects_are_passed_or_imported(code: Code) -> None:
    layers = [code.of("Scale"), code.of("Scale"), code.of("Shift", registered_name="own>Shift")]
    assert lines({"config": layers, "activation": function("bent")}, code.folder) == (
        "from layers import Scale, bent, Shift",
        "import keras",
        "keras.saving.load_model('out.keras', custom_objects={'Scale': Scale, 'bent': bent})",
    )


def test_code_of_another_folder_is_added_to_the_path(code: Code, tmp_path: Path) -> None:
    """A file with relative imports is imported as part of its folder."""
    assert lines([code.of("Scale"), code.of("Head", "heads")], tmp_path / "elsewhere") == (
        "import sys",
        f"sys.path.insert(0, {str(tmp_path)!r})",
        f"sys.path.insert(0, {str(code.folder)!r})",
        "from iris.heads import Head",
        "from layers import Scale",
        "import keras",
        "keras.saving.load_model('out.keras', custom_objects={'Head': Head, 'Scale': Scale})",
    )


def test_folder_that_is_no_name_is_imported(tmp_path: Path) -> None:
    folder = tmp_path / "my-run"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text)
    own = Code(folder, load_function(REFERENCE, folder).__module__.partition(".")[0])
    assert lines([own.of("Head", "heads")], tmp_path) == (
        "import importlib",
        "Head = importlib.import_module('my-run.heads').Head",
        "import keras",
        "keras.saving.load_model('out.keras', custom_objects={'Head': Head})",
    )


def test_objects_that_cannot_be_imported_cause_warnings(code: Code) -> None:
    layer = {"class_name": "Lambda", "module": "keras.layers", "config": {"function": {"class_name": "__lambda__"}}}
    config = [layer, code.of("Inner"), function("closure"), code.of("Scale"), code.of("Scale", "heads")]
    loading = Loading.of_config(config, REFERENCE)
    assert loading.lines(Path("out.keras"), here=code.folder)[-1].endswith(", safe_mode=False)")
    warned = "\n".join(loading.warnings())
    assert "Inner, closure: defined inside a function or class" in warned
    assert "Scale: several classes have this name" in warned
    assert "a lambda is stored as code" in warned


@pytest.mark.parametrize(
    ("form", "name", "better"),
    [
        ("weights", "w.h5", "w.weights.h5"),
        ("weights", "w.hdf5", "w.weights.h5"),
        ("weights", "w.weights", "w.weights.h5"),
        ("weights", "w.keras", "w.weights.h5"),
        ("weights", "w", "w.weights.h5"),
        ("weights", "w.v2", "w.v2.weights.h5"),
        ("weights", ".h5", ".h5.weights.h5"),
        ("keras", "w.weights.h5", "w.keras"),
        ("keras", "w.h5", "w.keras"),
        ("keras", "w.KERAS", "w.KERAS.keras"),
    ],
)
def test_suggested_name_is_accepted(form: str, name: str, better: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        require_free_target(form, tmp_path / name)
    assert str(caught.value).endswith(f"; use {tmp_path / better}")
    require_free_target(form, tmp_path / better)
    assert form_of(tmp_path / better) == form


@pytest.mark.parametrize("name", ["model", "model.h5", "keras"])
def test_name_that_says_no_form_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match=rf"--to {name}: the name does not say the format"):
        form_of(Path(name))
