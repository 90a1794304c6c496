"""Each fault makes exactly one check of `baton doctor` fail, and valid runs pass."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from baton.flows.doctor import data_checks
from tests.fakes.gcs.server import FakeGcs
from tests.support import forked
from tests.support.faulty_runs import ALL_CHECKS, diagnose, layer_doing, make_run

GRAPH_SKIPS = {"xla"}


MODEL_SKIPS = {"dtype", "graph", "xla", "memory", "step", "commit", "preemption"}


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_checks, "_MEASURED_SECONDS", 0.05)


@pytest.mark.slow
def test_valid_run_passes_and_leaves_no_files(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run")
    found = diagnose(file)
    assert [finding for finding in found.values() if finding.verdict != "pass"] == []
    assert sorted(path.name for path in file.parent.iterdir() if path.name != "__pycache__") == [
        "data.py",
        "model.py",
        "run.yaml",
    ]
    assert "83 parameters" in found["model"].text
    # Adam has two slots per parameter, iteration and learning rate; two metrics have a sum and a count each; the step.
    assert "332 bytes of parameters, 700 bytes of optimizer and metrics" in found["memory"].text
    assert "; a commit keeps 1.1 kB in the host's memory while it is written" in found["memory"].text
    batch = 8 * (6 * 4 + 8)
    gradients = 332
    assert found["memory"].value == 332 + 700 + gradients + batch


@pytest.mark.slow
def test_dict_features_and_custom_step_pass_in_a_bucket(tmp_path: Path, cloud: FakeGcs) -> None:
    x = "draw.normal(size=6).astype(np.float32), np.int64(number % 3)"
    named = "{'left': draw.normal(size=6).astype(np.float32), 'right': np.float32([number])}, {'kind': np.int64(0)}"
    model = """
    left, right = keras.Input((6,), name="left"), keras.Input((1,), name="right")
    hidden = keras.layers.Dropout(0.1)(keras.layers.Concatenate()([left, right]))
    class Own(keras.Model):
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0], training=True)["kind"] ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            return {"loss": loss}
    model = Own({"left": left, "right": right}, {"kind": keras.layers.Dense(3)(hidden)})
    model.compile("sgd")
    return model
    x = keras.Input((6,))"""
    edits = [
        ("data.py", x, named),
        ("model.py", "\n    x = keras.Input((6,))", model),
        ("run.yaml", ", classes: 3", ""),
    ]
    overrides = ["data.validation_fraction=0", "storage=gs://bucket/team"]
    found = diagnose(make_run(tmp_path / "run", *edits), overrides=overrides)
    assert [finding for finding in found.values() if finding.verdict != "pass"] == []
    assert found["storage"].text.startswith("gs://bucket/team: ")
    assert cloud.store.names("bucket") == []
    assert cloud.count("object.delete") + cloud.count("batch") >= 2


NEW_CODE = "model.py", "import tensorflow as tf", "import tensorflow as tf\nimport no_such_package"


NO_IMPORT = "model.py", "import tensorflow as tf", "import tensorflow as tf\n1 / 0"


MASK = layer_doing("kept = tf.boolean_mask(x, x[:, 0] > 0)", "return x + tf.reduce_sum(kept)")


UNKNOWN_TO_XLA = layer_doing(
    "turn, images = tf.one_hot([0, 4], 8, axis=0), tf.reshape(x, [-1, 2, 4, 1])",
    "turn = tf.reshape(tf.reduce_sum(turn, axis=1), [1, 8])",
    "turned = tf.raw_ops.ImageProjectiveTransformV3(",
    "    images=images, transforms=turn, output_shape=[2, 4], fill_value=0.0, interpolation='NEAREST')",
    "return x + tf.reshape(turned, tf.shape(x))",
)


INFINITE = layer_doing("return x / 0.0")


NAN = "data.py", "draw.normal(size=6)", "(draw.normal(size=6) if number < 50 else np.full(6, np.nan))"


LABEL = "data.py", "number % 3", "number % 4"


NO_FILE = "run.yaml", 'source: "data.py:load"', "source: table, options: {path: none.csv, y: y}"


FLOAT64 = "model.py", "keras.layers.Dense(8, ", 'keras.layers.Dense(8, dtype="float64", '


# Name: edits, the check that finds the fault, its verdict, words of its text, and the checks that are skipped then.
# None: the checks after it do not run. More faults are asked of the function of a check in the other files.
FAULTS: dict[str, tuple[list[tuple[str, str, str]], str, str, list[str], set[str] | None]] = {
    "misspelled key in the run file": (
        [("run.yaml", "steps:", "stepz:")],
        "run file",
        "fail",
        ["stepz", "steps"],
        set(ALL_CHECKS[1:]),
    ),
    "missing package": (
        [NEW_CODE],
        "code",
        "fail",
        ["no_such_package", "line 3"],
        {"preflight", "model", *MODEL_SKIPS},
    ),
    "model module that fails to import": (
        [NO_IMPORT],
        "model",
        "fail",
        ["ZeroDivisionError", "line 3"],
        MODEL_SKIPS,
    ),
    "missing function": (
        [("run.yaml", "build_model", "build_modle")],
        "code",
        "fail",
        ["build_model"],
        {"preflight", "model", *MODEL_SKIPS},
    ),
    "NaN in the data": ([NAN], "data", "fail", ["example 50", "nan"], {"model", "input", *MODEL_SKIPS}),
    "label out of range": ([LABEL], "data", "fail", ["example 3", "[0, 3)"], {"model", "input", *MODEL_SKIPS}),
    "missing data file": (
        [NO_FILE, ("run.yaml", ", classes: 3", "")],
        "data",
        "fail",
        ["none.csv"],
        {"model", "input", *MODEL_SKIPS},
    ),
    "boolean_mask in a layer": ([MASK], "graph", "fail", ["layer between", "Where", "dynamic"], GRAPH_SKIPS),
    "operation that XLA does not support": (
        [UNKNOWN_TO_XLA],
        "xla",
        "fail",
        ["layer between", "ImageProjectiveTransformV3"],
        None,
    ),
    "batch that does not divide": (
        [("run.yaml", "global_batch_size: 64", "global_batch_size: 60")],
        "batch",
        "fail",
        ["56 or 64"],
        None,
    ),
    "storage that is not writable": (
        [("run.yaml", "./runs", "./model.py/runs")],
        "storage",
        "fail",
        ["model.py", "name a folder"],
        None,
    ),
    "storage in memory": (
        [("run.yaml", "./runs", "memory://small")],
        "preflight",
        "fail",
        ["ends with this process"],
        None,
    ),
    "feature that Keras lacks on several replicas": (
        [("model.py", '"adam"', "keras.optimizers.Adam(gradient_accumulation_steps=2)")],
        "model",
        "fail",
        ["gradient_accumulation_steps", "8 replicas"],
        None,
    ),
    "float16": (
        [("model.py", "keras.layers.Dense(8, ", 'keras.layers.Dense(8, dtype="mixed_float16", ')],
        "dtype",
        "warn",
        ["mixed_bfloat16"],
        None,
    ),
    "float64": ([FLOAT64], "dtype", "fail", ["float64"], None),
    "draws of each pass": (
        [("data.py", "draw.normal(size=6)", "np.random.normal(size=6)")],
        "data",
        "warn",
        ["draws random numbers (data.py, line", "np.random.normal(size=6)", "data.transform"],
        None,
    ),
    "stateful layer on shuffled examples": (
        [("model.py", "model.compile(", "model.layers[1].stateful = True\n    model.compile(")],
        "model",
        "warn",
        ["stateful=True", "data.shuffle: false"],
        None,
    ),
    "loss that is not finite": ([INFINITE], "step", "fail", ["the loss is"], None),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_by_exactly_one_check(name: str, tmp_path: Path) -> None:
    edits, check, verdict, words, skipped = FAULTS[name]
    found = diagnose(make_run(tmp_path / "run", *edits), until=check if skipped is None else None)
    assert {each.check: each.verdict for each in found.values() if each.verdict in {"fail", "warn"}} == {
        check: verdict
    }, [each for each in found.values() if each.verdict in {"fail", "warn"}]
    text = f"{found[check].text} {found[check].remedy}"
    assert [word for word in words if word not in text] == [], text
    assert {each.check for each in found.values() if each.verdict == "skipped"} == (skipped or set())
    assert not list(tmp_path.rglob(".baton-doctor-*"))
    assert not (tmp_path / "run" / "runs").exists()


CALLBACKS = """
import keras


def build_callbacks(monitor="val_loss"):
    return [keras.callbacks.EarlyStopping(monitor=monitor)]


def build_wrong_callbacks():
    return build_callbacks("val_nonsense")
"""


@pytest.mark.slow
def test_callbacks_metrics_and_initial_weights_are_checked(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run")
    (file.parent / "callbacks.py").write_text(CALLBACKS)
    settings = ["train.callbacks=callbacks.py:build_callbacks", "evaluate.every_steps=5", "train.accumulate=2"]
    found = diagnose(file, overrides=settings, tpu=None)
    assert [finding for finding in found.values() if finding.verdict != "pass"] == []
    for override, expected in (
        ("train.callbacks=callbacks.py:build_wrong_callbacks", "val_nonsense"),
        ("checkpoint.keep_best={metric: nonsense, mode: max}", "checkpoint.keep_best.metric = 'nonsense'"),
        ("init.weights={source: weights.py:load}", "weights.py"),
    ):
        found = diagnose(file, overrides=[*settings, override], tpu=None, until="model")
        failed = {each.check: each.text for each in found.values() if each.verdict == "fail"}
        assert expected in " ".join(failed.values()), (override, failed)


LOOKUP = (
    "data.py",
    "import numpy as np\n",
    'import keras\nimport numpy as np\n\nkinds = keras.layers.StringLookup(vocabulary=["a", "b", "c"])\n',
)


NOISE = layer_doing("return x + tf.ensure_shape(tf.numpy_function(lambda v: v, [x], x.dtype), x.shape)")


DROPOUT = "model.py", "keras.layers.Dense(3)(hidden)", "keras.layers.Dense(3)(keras.layers.Dropout(0.5)(hidden))"


@pytest.mark.slow
def test_warnings_of_a_run_are_reported(tmp_path: Path) -> None:
    """Needs a new process: the doctor must configure the devices before TensorFlow is used."""
    file = make_run(
        tmp_path / "run", LOOKUP, NOISE, DROPOUT, ("run.yaml", "global_batch_size: 64", "global_batch_size: 80")
    )
    command = [sys.executable, "-m", "baton.flows.commands.main", "doctor", str(file), "--json"]
    done = forked.run(command, capture_output=True, text=True, check=False)
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert {check: each["verdict"] for check, each in found.items() if each["verdict"] != "pass"} == {
        "data": "warn",
        "graph": "warn",
        "xla": "warn",
    }, found
    assert "train.global_batch_size = 80 is larger than the number of training examples (72)" in found["data"]["text"]
    assert "PyFunc" in found["graph"]["text"]
    assert "a resumed run can differ" in found["graph"]["text"]
    assert "83 parameters" in found["model"]["text"]
    assert "layer between, operation PyFunc" in found["xla"]["text"]
    assert "332 bytes of parameters" in found["memory"]["text"]


WORDS = """class Between(keras.layers.Layer):
    def __init__(self, **named):
        super().__init__(**named)
        words = list(set(open("words.txt").read().split()))
        numbers = tf.range(len(words), dtype=tf.int64)
        self.table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(words, numbers), -1)
"""


@pytest.mark.slow
def test_model_of_a_begun_run_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_run(tmp_path / "run", ("model.py", "class Between(keras.layers.Layer):\n", WORDS))
    words, model = file.with_name("words.txt"), file.with_name("model.py")
    words.write_text("a b c d e f g h")

    def command(seed: str, *given: str) -> "subprocess.CompletedProcess[str]":
        named = {"cwd": file.parent, "env": os.environ | {"PYTHONHASHSEED": seed}, "capture_output": True, "text": True}
        return forked.run([sys.executable, "-P", "-m", *given], check=False, **named)  # type: ignore[arg-type]

    started = command("0", "baton.flows.train", str(file), "--until-step", "1")
    assert started.returncode == 0, started.stderr
    done = command("7", "baton.flows.commands.main", "doctor", str(file))
    assert done.returncode == 0, done.stdout  # it has the run's order of the set
    words.write_text("a b c d e f g h i")
    model.write_text(model.read_text().replace("return x", "return 2 * x"))
    monkeypatch.chdir(file.parent)
    found = diagnose(file, tpu=None, until="model")["model"]
    assert found.verdict == "fail"
    assert "table `table` of layer `between` changed: it has 9 tokens instead of 8" in found.text
    assert "model.code" in found.text


@pytest.mark.slow
def test_batched_source_and_fixed_batch_size_are_refused(tmp_path: Path) -> None:
    def failures(name: str, *edits: tuple[str, str, str]) -> dict[str, str]:
        found = diagnose(make_run(tmp_path / name, *edits, ("run.yaml", ", classes: 3", "")), tpu=None, until="model")
        return {check: each.text for check, each in found.items() if each.verdict == "fail"}

    batches = (
        "data.py",
        "draw.normal(size=6).astype(np.float32), np.int64(number % 3)",
        ("draw.normal(size=(16, 6)).astype(np.float32), np.arange(16) % 3"),
    )
    assert "yields batches" in failures("batches", batches)["model"]
    fixed = "model.py", "keras.Input((6,))", "keras.Input(batch_shape=(64, 6))"
    shaped = layer_doing("return tf.reshape(x, (64, 8))")
    assert "validation examples end with a batch of 24" in failures("fixed", fixed, shaped)["model"]


@pytest.mark.slow
def test_tpu_only_faults_are_warnings_without_tpu(tmp_path: Path) -> None:
    found = diagnose(make_run(tmp_path / "run", MASK, FLOAT64), tpu=None, until="memory")
    assert found["graph"].verdict == "warn"
    assert found["dtype"].verdict == "warn"
    assert found["xla"].verdict == "pass"
    assert found["memory"].text.endswith("no TPU type given to compare with")
