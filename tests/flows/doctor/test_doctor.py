"""`baton doctor` finds planted faults, each by its own check, and cries over nothing else."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.commands.main import main
from flows.doctor import input_speed
from flows.doctor.finding import Checks, Finding
from flows.doctor.run_file_checks import batch_arithmetic, not_refused, target_of
from flows.doctor.storage_checks import reachable_and_writable
from flows.goal import storage_of
from tasks.foundation.accelerator.tpu_types import TpuType, tpu_type
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import IdentityChanged
from tests.fakes.gcs.fake_gcs import FakeGcs
from tests.support.checkout import CHECKOUT
from tests.support.fake_run import FakeRun
from tests.support.faulty_runs import ALL_CHECKS, diagnose, layer_doing, make_run

RUNS = CHECKOUT / "deploy" / "runs"
GRAPH_SKIPS = {"xla", "memory"}
MODEL_SKIPS = {"dtype", "graph", "xla", "memory", "step", "commit", "preemption"}
STORAGE_SKIPS = {"preflight", "commit", "preemption"}
TINY = TpuType(name="tiny", chips=1, replicas=1, hosts=1, hbm_bytes=9_000)


@pytest.fixture(autouse=True)
def _short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_speed, "_MEASURED_SECONDS", 0.05)


@pytest.mark.slow
def test_a_sound_run_passes_and_nothing_is_left_behind(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run")
    found = diagnose(file)
    assert [finding for finding in found.values() if finding.verdict != "pass"] == []
    assert sorted(path.name for path in file.parent.iterdir() if path.name != "__pycache__") == [
        "data.py",
        "model.py",
        "run.yaml",
    ]
    assert "83 parameters" in found["model"].text
    # Adam keeps two more of each parameter, its iteration and rate; two metrics have a sum and a count each; the step.
    assert "332 bytes of parameters, 700 bytes of optimizer and metrics" in found["memory"].text
    batch = 8 * (6 * 4 + 8)
    assert found["memory"].value == 332 + 700 + batch + found["xla"].value


@pytest.mark.slow
def test_dicts_and_a_train_step_of_its_own_pass(tmp_path: Path) -> None:
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
    found = diagnose(make_run(tmp_path / "run", *edits), overrides=["data.validation_fraction=0"])
    assert [finding for finding in found.values() if finding.verdict != "pass"] == []


NEW_CODE = "model.py", "import tensorflow as tf", "import tensorflow as tf\nimport no_such_package"
NO_IMPORT = "model.py", "import tensorflow as tf", "import tensorflow as tf\n1 / 0"
MASK = layer_doing("kept = tf.boolean_mask(x, x[:, 0] > 0)", "return x + tf.reduce_sum(kept)")
UNIQUE = layer_doing("kept, _ = tf.unique(tf.stop_gradient(tf.reshape(x, [-1])))", "return x + tf.reduce_sum(kept)")
STRING = layer_doing("return x + tf.cast(tf.strings.length(tf.strings.as_string(x)), x.dtype)")
PYTHON = layer_doing("return x + tf.ensure_shape(tf.py_function(lambda v: v, [x], tf.float32), x.shape)")
SLICE = layer_doing("count = tf.reduce_sum(tf.cast(x[:, 0] > 0, tf.int32))", "return x + tf.reduce_sum(x[:count])")
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
NO_FILE = "run.yaml", 'source: "data.py:load"', "source: csv, options: {path: none.csv, label: y}"
FLOAT64 = "model.py", "keras.layers.Dense(8, ", 'keras.layers.Dense(8, dtype="float64", '
# Name, edits, what is asked besides, the check that finds it, its verdict, words of it, and what is skipped for it.
FAULTS: dict[str, tuple[list[tuple[str, str, str]], dict[str, Any], str, str, list[str], set[str]]] = {
    "a typing error in the run file": (
        [("run.yaml", "steps:", "stepz:")],
        {},
        "run file",
        "fail",
        ["stepz", "steps"],
        set(ALL_CHECKS[1:]),
    ),
    "a package that is missing": (
        [NEW_CODE],
        {},
        "code",
        "fail",
        ["no_such_package", "line 3"],
        {"preflight", "model", *MODEL_SKIPS},
    ),
    "a model that does not import": ([NO_IMPORT], {}, "model", "fail", ["ZeroDivisionError", "line 3"], MODEL_SKIPS),
    "a function that is not there": (
        [("run.yaml", "build_model", "build_modle")],
        {},
        "code",
        "fail",
        ["build_model"],
        {"preflight", "model", *MODEL_SKIPS},
    ),
    "NaN in the data": ([NAN], {}, "data", "fail", ["example 50", "nan"], {"model", "input", *MODEL_SKIPS}),
    "a label out of range": ([LABEL], {}, "data", "fail", ["example 3", "[0, 3)"], {"model", "input", *MODEL_SKIPS}),
    "a file of data that is missing": (
        [NO_FILE, ("run.yaml", ", classes: 3", "")],
        {},
        "data",
        "fail",
        ["none.csv"],
        {"model", "input", *MODEL_SKIPS},
    ),
    "a string in a layer": ([STRING], {}, "graph", "fail", ["layer between", "AsString", "string"], GRAPH_SKIPS),
    "a py_function in a layer": (
        [PYTHON],
        {},
        "graph",
        "fail",
        ["layer between", "EagerPyFunc", "python"],
        GRAPH_SKIPS,
    ),
    "boolean_mask in a layer": ([MASK], {}, "graph", "fail", ["layer between", "Where", "dynamic"], GRAPH_SKIPS),
    "unique in a layer": ([UNIQUE], {}, "graph", "fail", ["layer between", "Unique", "dynamic"], GRAPH_SKIPS),
    "a batch of which the data decide the size": (
        [SLICE],
        {},
        "graph",
        "fail",
        ["layer between", "StridedSlice", "dynamic"],
        GRAPH_SKIPS,
    ),
    "an operation that XLA does not know": (
        [UNKNOWN_TO_XLA],
        {},
        "xla",
        "fail",
        ["layer between", "ImageProjectiveTransformV3"],
        {"memory"},
    ),
    "a batch that does not divide": (
        [("run.yaml", "global_batch_size: 64", "global_batch_size: 60")],
        {},
        "batch",
        "fail",
        ["56 or 64"],
        {"preflight"},
    ),
    "a batch that a TPU pads": (
        [("run.yaml", "global_batch_size: 64", "global_batch_size: 40")],
        {},
        "batch",
        "warn",
        ["38%", "64"],
        set(),
    ),
    "a TPU with too little memory": ([], {"tpu": TINY}, "memory", "fail", ["of a replica's 9.0 kB"], set()),
    "a slow input pipeline": ([], {"step_seconds": 1e-7}, "input", "warn", ["would wait"], set()),
    "a store that cannot be written to": (
        [("run.yaml", "./runs", "./model.py/runs")],
        {},
        "storage",
        "fail",
        ["model.py", "name a folder"],
        STORAGE_SKIPS,
    ),
    "a store that does not last": (
        [("run.yaml", "./runs", "memory://small")],
        {},
        "preflight",
        "fail",
        ["ends with this process"],
        set(),
    ),
    "what Keras cannot do on several replicas": (
        [("model.py", '"adam"', "keras.optimizers.Adam(gradient_accumulation_steps=2)")],
        {},
        "model",
        "fail",
        ["gradient_accumulation_steps", "8 replicas"],
        MODEL_SKIPS,
    ),
    "float16": (
        [("model.py", "keras.layers.Dense(8, ", 'keras.layers.Dense(8, dtype="mixed_float16", ')],
        {},
        "dtype",
        "warn",
        ["mixed_bfloat16"],
        set(),
    ),
    "float64": ([FLOAT64], {}, "dtype", "fail", ["float64"], set()),
    "a loss that is not finite": ([INFINITE], {}, "step", "fail", ["the loss is"], set()),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_check_alone(name: str, tmp_path: Path) -> None:
    edits, asked, check, verdict, words, skipped = FAULTS[name]
    found = diagnose(make_run(tmp_path / "run", *edits), **asked)
    assert {each.check: each.verdict for each in found.values() if each.verdict in {"fail", "warn"}} == {
        check: verdict
    }, [each for each in found.values() if each.verdict in {"fail", "warn"}]
    told = f"{found[check].text} {found[check].remedy}"
    assert [word for word in words if word not in told] == [], told
    assert {each.check for each in found.values() if each.verdict == "skipped"} == skipped
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
def test_callbacks_metrics_and_initial_weights_are_tried_as_a_beginning_would(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run")
    (file.parent / "callbacks.py").write_text(CALLBACKS)
    asked = ["train.callbacks=callbacks.py:build_callbacks", "evaluate.every_steps=5", "train.accumulate=2"]
    found = diagnose(file, overrides=asked, tpu=None)
    assert [finding for finding in found.values() if finding.verdict != "pass"] == []
    for override, told in (
        ("train.callbacks=callbacks.py:build_wrong_callbacks", "val_nonsense"),
        ("checkpoint.keep_best={metric: nonsense, mode: max}", "checkpoint.keep_best.metric = 'nonsense'"),
        ("init.weights={source: weights.py:load}", "weights.py"),
    ):
        found = diagnose(file, overrides=[*asked, override], tpu=None)
        failed = {each.check: each.text for each in found.values() if each.verdict == "fail"}
        assert told in " ".join(failed.values()), (override, failed)


LOOKUP = (
    "data.py",
    "import numpy as np\n",
    'import keras\nimport numpy as np\n\nkinds = keras.layers.StringLookup(vocabulary=["a", "b", "c"])\n',
)
NOISE = layer_doing("return x + tf.random.normal(tf.shape(x))")
DROPOUT = "model.py", "keras.layers.Dense(3)(hidden)", "keras.layers.Dense(3)(keras.layers.Dropout(0.5)(hidden))"


@pytest.mark.slow
def test_what_a_run_would_warn_of_and_nothing_that_works(tmp_path: Path) -> None:
    """In a process of its own: TensorFlow is not to be used before the doctor has looked at the devices."""
    file = make_run(
        tmp_path / "run", LOOKUP, NOISE, DROPOUT, ("run.yaml", "global_batch_size: 64", "global_batch_size: 80")
    )
    command = [sys.executable, "-m", "flows.commands.main", "doctor", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = {each["check"]: each for each in json.loads(done.stdout)["findings"]}
    assert {check: each["verdict"] for check, each in found.items() if each["verdict"] != "pass"} == {
        "data": "warn",
        "graph": "warn",
    }, found
    assert "train.global_batch_size = 80 is more than the 72 training examples" in found["data"]["text"]
    assert "RandomStandardNormal" in found["graph"]["text"]
    assert "a resumed run can differ" in found["graph"]["text"]
    assert "83 parameters" in found["model"]["text"]
    assert "332 bytes of parameters" in found["memory"]["text"]


@pytest.mark.slow
def test_batches_and_a_fixed_batch_size_are_found_as_a_beginning_would(tmp_path: Path) -> None:
    def failures(name: str, *edits: tuple[str, str, str]) -> dict[str, str]:
        found = diagnose(make_run(tmp_path / name, *edits, ("run.yaml", ", classes: 3", "")), tpu=None)
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
def test_a_run_in_a_bucket_passes_and_the_bucket_stays_empty(tmp_path: Path, cloud: FakeGcs) -> None:
    found = diagnose(make_run(tmp_path / "run"), overrides=["storage=gs://bucket/team"])
    assert [finding for finding in found.values() if finding.verdict != "pass"] == []
    assert found["storage"].text.startswith("gs://bucket/team: ")
    assert cloud.store.names("bucket") == []
    assert cloud.count("object.delete") >= 2


@pytest.mark.slow
def test_without_a_tpu_what_only_a_tpu_minds_is_a_warning(tmp_path: Path) -> None:
    found = diagnose(make_run(tmp_path / "run", MASK, FLOAT64), tpu=None)
    assert found["graph"].verdict == "warn"
    assert found["dtype"].verdict == "warn"
    assert found["xla"].verdict == "pass"
    assert found["memory"].text.endswith("no TPU type to compare with")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "options"), [("digits", ["--for", "v5litepod-8"]), ("digits", []), ("text", ["--for", "v5litepod-8"])]
)
def test_the_shipped_runs_pass(run: str, options: list[str], tmp_path: Path) -> None:
    file = RUNS / run / "run.yaml"
    words = ["doctor", str(file), "--set", f"storage={tmp_path}", "--json", *options]
    command = [sys.executable, "-m", "flows.commands.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert list(told) == ["file", "for", "ok", "findings"]
    assert told["ok"] is True
    assert [list(finding) for finding in told["findings"]] == [["check", "verdict", "text", "remedy"]] * len(ALL_CHECKS)
    verdicts = {finding["check"]: finding["verdict"] for finding in told["findings"]}
    assert list(verdicts) == ALL_CHECKS
    # 32 examples over eight replicas are four each, which a TPU does pad.
    expected = {"batch"} if run == "text" else set()
    assert {check for check, verdict in verdicts.items() if verdict != "pass"} == expected
    assert list(tmp_path.iterdir()) == []


def test_a_run_file_that_fails_ends_with_2_at_once(tmp_path: Path) -> None:
    file = make_run(tmp_path / "run", ("run.yaml", "steps:", "stepz:"))
    ask = (
        "import sys; from flows.commands.main import main; code = main(sys.argv[1:]); "
        "print({'tensorflow', 'prefect'} & set(sys.modules), code)"
    )
    done = subprocess.run([sys.executable, "-c", ask, "doctor", str(file)], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[-1] == "set() 2"
    assert lines[-2] == f"1 fail, {len(ALL_CHECKS) - 1} skipped"
    assert lines[0].startswith("fail     run file     ")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--for", "v5litepod-9"], ["v5litepod-8", "no TPU type"]),
        (["--for", "h100"], ["v5litepod-8"]),
        (["--step-seconds", "0"], ["--step-seconds = 0.0 must be more than 0"]),
        (["--preempted-every-hours", "inf"], ["--preempted-every-hours"]),
        (["--nonsense"], ["--nonsense", "--help"]),
    ],
)
def test_usage_errors(options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "run.yaml", *options, "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert [word for word in words if word not in captured.err] == []
    assert json.loads(captured.out)["exit_code"] == 2


def test_a_finding_of_several_lines_stands_in_its_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = make_run(tmp_path / "run")
    assert main(["doctor", str(file), "--set", "train.steps=0", "--set", "train.seed=x"]) == 2
    first, second = capsys.readouterr().out.splitlines()[:2]
    column = first.index("--set train.")
    assert second.index("--set train.") == column
    assert second[:column].strip() == ""


def test_a_slice_of_several_hosts_is_refused_and_the_rest_goes_on(tmp_path: Path) -> None:
    run = load_run_file(make_run(tmp_path / "run"))
    found = target_of(run, tpu_type("v5litepod-32"))
    assert (found.verdict, found.value.replicas) == ("fail", 32)
    assert "8 hosts" in found.text
    assert batch_arithmetic(run, found.for_others.value).verdict == "warn"


def test_what_run_would_refuse_of_a_run_that_is_there(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path).train(100)
    (tmp_path / "model.py").write_text("def build_model(): ...", encoding="utf-8")
    before = fake.files()
    run = load_run_file(fake.run_file())
    assert not_refused(run, storage_of(run)).text == "baton run would go on from step 100"
    other = load_run_file(fake.run_file(), ["train.seed=1"])
    with pytest.raises(IdentityChanged, match=r"train\.seed"):
        not_refused(other, storage_of(other))
    assert fake.files() == before


@pytest.mark.parametrize(
    ("denied", "said"),
    [
        (["storage.objects.create"], "may not make objects"),
        (["storage.objects.delete"], "may not delete or replace objects"),
        ([], "a file was made, read and deleted"),
    ],
)
def test_a_bucket_is_asked(cloud: FakeGcs, denied: list[str], said: str, tmp_path: Path) -> None:
    cloud.store.set_bucket("bucket", denied=denied)
    run = load_run_file(make_run(tmp_path / "run"), ["storage=gs://bucket/team"])
    checks = Checks(lambda _: None)
    found = checks.make("storage", lambda: reachable_and_writable(run))
    assert found.verdict == ("fail" if denied else "pass")
    assert said in found.text
    left = cloud.store.names("bucket")
    assert len(left) == ("storage.objects.delete" in denied)
    assert all(name.startswith("team/.probe-") for name in left)


def test_whatever_a_check_raises_is_its_finding() -> None:
    told: list[Finding] = []
    checks = Checks(told.append)

    def crash() -> Finding:
        raise ZeroDivisionError("by zero")

    first = checks.make("first", crash)
    checks.make("second", crash, first)
    checks.make("third", lambda: Finding(check="third", verdict="pass", text="fine"))
    assert [(each.check, each.verdict) for each in told] == [
        ("first", "fail"),
        ("second", "skipped"),
        ("third", "pass"),
    ]
    assert "ZeroDivisionError: by zero" in told[0].text
    assert told[1].text == "needs first, which did not pass"
    assert checks.failed
