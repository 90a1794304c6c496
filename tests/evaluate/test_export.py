"""Exports load with Keras and TensorFlow alone and predict the same; the lines of Python that load them."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from flows.commands.main import main
from tasks.evaluate.export import Loading
from tasks.evaluate.export_target import RUNTIMES, form_of, require_free_target, require_runtime
from tasks.foundation.errors import InvalidInput
from tasks.foundation.user_code import load_function
from tests.support.lab import Lab, lab_of, restored, spec_of

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
assert not any(name.split(".")[0] in {"tasks", "flows"} for name in sys.modules)
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
        ([file, *to, "--tolerance", "0.1"], "--tolerance 0.1: a keras export is not compared with Keras; drop it"),
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


@pytest.mark.slow
def test_variables_missing_in_a_tf_checkpoint_are_named(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.begin(spec_of("build", run="listed", model__options={"kind": "Listed"}))
    file, home = run_file_of(lab, "listed.yaml", kind="Listed"), f"{lab.root}/storage/listed"
    words = ["--run-file", str(file), "--format", "checkpoint", "--to", str(lab.code / "listed")]
    assert main(["export", home, *words]) == 0
    warning = capsys.readouterr().err
    assert warning.startswith("warning: listed/")
    assert "moving_mean" in warning
    assert "gamma" not in warning  # the optimizer tracks it


@pytest.mark.slow
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
def test_printed_lines_load_custom_objects(lab: Lab, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Runs without Baton, in another folder than the user's code."""
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
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
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
