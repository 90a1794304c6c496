"""Baton from Python: the notebook's cells, rows, models, refusals in its own words, and an interrupt."""

import ast
import base64
import inspect
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from baton.flows.api import Rows, Run, _changes, in_python_words, run
from baton.tasks.foundation.contracts.log_entry import Change
from baton.tasks.foundation.errors import InvalidInput, ModelError, NoSuchRun, RunFileError
from baton.tasks.foundation.model.saved_code import save_code
from baton.tasks.foundation.text import command, option, worded
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.fake_run import FakeRun
from tests.support.lab import Lab, in_fresh_process, lab_of, spec_of
from tests.support.run_notebook import NOTEBOOK, REGENERATE, comparable, copy_of_runs

OPTION = re.compile(r"--([a-z][a-z-]+)")


@pytest.mark.parametrize(
    ("text", "of_command", "of_python"),
    [
        (option("run-file", "FILE"), "--run-file FILE", 'Run("run.yaml")'),
        (option("trust-code", True), "--trust-code", "Run(home, trust_code=True)"),
        (option("take-over", True) + " starts", "--take-over starts", "take_over=True starts"),
        ("with " + option("accept", "compile,data"), "with --accept compile,data", 'with accept="compile,data"'),
        (
            command("run", ("accept", "model.contents")),
            "baton run FILE --accept model.contents",
            'run("run.yaml", accept="model.contents")',
        ),
        (command("run", ("try-again", True)), "baton run FILE --try-again", 'run("run.yaml", try_again=True)'),
        (
            command("run", ("set", "run=NEW"), ("set", "a.b=null")),
            "baton run FILE --set run=NEW --set a.b=null",
            'run("run.yaml", run="NEW", a__b=None)',
        ),
        (
            command("run", ("set", "run=NEW"), ("accept", "data"), after="baton fork /r --as NEW"),
            "baton fork /r --as NEW, then baton run FILE --set run=NEW --accept data",
            'baton fork /r --as NEW, then run("run.yaml", run="NEW", accept="data")',
        ),
        (
            command("", ("set", 'init.weights={"source":"/a b","strict":false}')),
            """--set 'init.weights={"source":"/a b","strict":false}'""",
            "init__weights={'source': '/a b', 'strict': False}",
        ),
        (command("export", ("step", "best")), "baton export FILE --step best", 'export(step="best")'),
        (option("set", "train.steps=2000"), "--set train.steps=2000", "train__steps=2000"),
        (option("set", "a=[1, 2…"), "--set a=[1, 2…", "a=[1, 2…"),
        (option("until-step") + " = 9", "--until-step = 9", "until_step = 9"),
        (option("to", "a b.keras"), "--to a b.keras", 'to="a b.keras"'),
        ("use " + option("format", "keras") + " or", "use --format keras or", 'use form="keras" or'),
        (option("tolerance"), "--tolerance", "tolerance"),
        (option("tolerance", 0.02), "--tolerance 0.02", "tolerance=0.02"),
        (option("", "train.steps"), "train.steps", "train__steps"),
        ("run.yaml, line 7: no such key", "run.yaml, line 7: no such key", "run.yaml, line 7: no such key"),
    ],
)
def test_options_become_parameters(text: str, of_command: str, of_python: str) -> None:
    assert (text, worded(text, in_python_words)) == (of_command, of_python)


PARAMETERS = {name for each in (run, Run.__init__, Run.export) for name in inspect.signature(each).parameters}
HAS_PARAMETER = {"set": "overrides", "format": "form", "run-file": "home"}


def test_errors_name_options_with_a_parameter_as_values() -> None:
    """Text of an error that names one would be in the words of the command for a caller from Python, too."""
    values, texts = set(), set()
    for path in (file for name in ("flows", "tasks") for file in (CHECKOUT / name).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            constants = {str(each.value) for each in ast.walk(node) if isinstance(each, ast.Constant)}
            match node:
                case ast.Call(func=ast.Name(id="option" | "command")):
                    values |= constants
                case ast.Raise() | ast.Call(func=ast.Name(id="message")) if "commands" not in path.parts:
                    texts |= {name for text in constants for name in OPTION.findall(text)}
    assert {"accept", "take-over", "trust-code", "to", "until-step", "try-again", "set", "format"} <= values
    assert {name for name in texts if HAS_PARAMETER.get(name, name.replace("-", "_")) in PARAMETERS} == set()


LIMIT_SECONDS = 300.0
MODEL = """
def build(rate=0.1):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, use_ema=True), loss, metrics=["accuracy"])
    return model
"""


def run_file(lab: Lab, **changes: Any) -> Path:
    values = spec_of("build", **changes).model_dump(mode="json", exclude_defaults=True)
    path = lab.code / "run.yaml"
    path.write_text(yaml.safe_dump(values | {"storage": str(lab.root / "storage")}))
    return path


@pytest.mark.slow
def test_notebook_has_the_outputs_of_its_cells(tmp_path: Path) -> None:
    folder = copy_of_runs(tmp_path / "runs")
    arguments = json.dumps({"notebook": NOTEBOOK.name})
    words = ["-m", "tests.support.call_function", "tests.support.run_notebook", "with_outputs", arguments]
    environment = os.environ | forked.forking_python()
    done = forked.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]
    before, _, result = done.stdout.partition("result: ")
    now, committed = json.loads(result), json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert before == ""
    assert comparable(now) == comparable(committed), f"write it anew with {REGENERATE}"
    _, trained, status, rows, evaluations, _, accuracy, _ = [
        cell["outputs"][-1].get("data") if cell["outputs"] else None
        for cell in now["cells"]
        if cell["cell_type"] == "code"
    ]
    assert "digits-notebook', step=100, target=100)" in trained["text/plain"]
    step, target, state, best = ast.literal_eval(status["text/plain"])
    assert (step, target, state) == (100, 100, "complete")
    assert [row["step"] for row in ast.literal_eval(rows["text/plain"])] == [50, 100]
    assert best == max(row["accuracy"] for row in ast.literal_eval(evaluations["text/plain"]))
    assert float(accuracy["text/plain"]) > 0.5  # of ten digits; a model without its weights has about 0.1
    assert (folder / "digits-notebook.keras").is_file()


def test_parameters_are_merged_into_the_run_file() -> None:
    given = {"steps": np.int64(8), "class_weight": {0: 1.5}}
    assert list(_changes("train", given)) == ["train.steps=8", "train.class_weight.0=1.5"]
    assert list(_changes("storage", Path("runs"))) == ['storage="runs"']
    assert list(_changes("data.options", {"a.b": 1, "c": 2})) == ['data.options={"a.b": 1, "c": 2}']
    with pytest.raises(InvalidInput, match="train__steps has a set, which a run file cannot have"):
        list(_changes("train.steps", {8}))


def test_notebook_shows_how_far_a_run_is(tmp_path: Path) -> None:
    fake = FakeRun(tmp_path, target=400).train(100, 200)
    opened = Run(fake.address)
    assert (repr(opened), opened.target) == (f"Run({fake.address!r}, step=200, target=400)", 400)
    rows, shown = opened.history(), opened._repr_html_()
    assert "step 200 of 400" in shown
    assert rows._repr_html_().startswith("<table><thead><tr><th>step</th><th>epoch</th><th>learning_rate</th>")
    for page in (shown, rows._repr_html_()):
        alt, data = re.findall(r'<img alt="(\w+)".*? src="data:image/svg\+xml;base64,([^"]+)"', page)[0]
        assert (alt, b"training" in base64.b64decode(data)) == ("loss", True)
    many = Rows({"step": step, "loss": 1.0, "<b>": "<i>"} for step in range(100))._repr_html_()
    assert many.count("<tr>") == 1 + 10 + 1
    assert "<b>" not in many
    assert "<i>" not in many


def test_code_of_somebody_else_is_refused_or_the_run_files_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeRun(tmp_path / "storage").train(100)
    lab = lab_of(tmp_path, MODEL)
    identity = {**fake.head.identity, **save_code(fake.home, spec_of("build"), lab.code)}
    change = Change(environment=fake.head.environment, identity=identity, accepted=("data",))
    fake.log.append(lambda _: change, attempt="c")
    file = run_file(lab, run="digits")
    file.write_text(file.read_text().replace(str(lab.root / "storage"), fake.root.uri))
    own = Run(fake.address)._with_code(None)[1]
    assert (own.path.parent / "model.py").read_bytes() == (lab.code / "model.py").read_bytes()
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)  # what is there belongs to somebody else
    for take in (Run(fake.address).model, lambda: Run(fake.address).export(tmp_path / "out.keras")):
        with pytest.raises(InvalidInput, match=r"others can have written it(.|\n)*Run\(home, trust_code=True\)"):
            take()
    assert Run(fake.address, trust_code=True)._with_code(None)[1].path.parent != lab.code
    assert Run(file)._with_code(None)[1].path == file
    assert Run(file, trust_code=True)._with_code(None)[1].path != file


@pytest.mark.slow
def test_model_has_the_state_of_its_step(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODEL)
    spec = spec_of("build")
    head = lab.train_and_commit(spec, 4, 8)
    opened = Run(f"{lab.storage.uri}/build")
    (lab.code / "model.py").write_text("def build(): raise ValueError('edited since')")
    columns = {"step", "epoch", "learning_rate", "loss", "accuracy"}
    assert [(row["step"], set(row)) for row in opened.history()] == [(4, columns), (8, columns)]
    x = np.random.default_rng(1).normal(size=(5, 6)).astype(np.float32)
    predictions = {step: np.array(opened.model(step)(x, training=False)) for step in (0, 4, 8, None)}
    assert np.array_equal(predictions[8], predictions[None])
    assert not np.allclose(predictions[0], predictions[4])
    assert not np.allclose(predictions[4], predictions[8])
    model = opened.model(8)
    assert model.optimizer.iterations.numpy() == 8
    assert set(model.evaluate(x, np.zeros(5), verbose=0, return_dict=True)) == {"loss", "accuracy"}
    assert head.tip is not None
    assert opened.status()["state_digest"] == head.tip.state_digest
    with pytest.raises(InvalidInput, match="retains no checkpoint at step 5; it has: 0, 4, 8"):
        opened.model(5)
    with pytest.raises(InvalidInput, match="has no best checkpoint"):
        opened.best_model()
    with pytest.raises(InvalidInput, match=r"model\.h5\": the name does not say the format"):
        opened.export(tmp_path / "model.h5")


RUDE = """
import logging
import os
import random
import sys
import warnings

import numpy as np


def be_rude(number):
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = os.environ["OMP_NUM_THREADS"] = str(number)
    sys.path.insert(0, f"/nowhere/{number}")
    warnings.simplefilter("ignore")
    logging.getLogger().setLevel(number)
    logging.getLogger("keras").addHandler(logging.NullHandler())
    logging.getLogger("baton").disabled = True
    logging.disable(number)
    np.seterr(all="ignore")
    sys.setrecursionlimit(3000 + number)
    random.seed(number)
    np.random.seed(number)
    keras.utils.set_random_seed(number)
    keras.config.set_epsilon(number / 1000)
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.config.disable_interactive_logging()
    keras.config.disable_traceback_filtering()
    tf.config.experimental.enable_op_determinism()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
    tf.config.set_soft_device_placement(False)
    tf.config.run_functions_eagerly(True)


keras.config.set_floatx("float64")
be_rude(7)
random.random(), np.random.rand(), keras.random.normal(())
AT_IMPORT = keras.layers.Dense(3)


def build():
    be_rude(8)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model
"""


KEEPS_BEST = {"checkpoint__keep_best": {"metric": "accuracy", "mode": "max"}}


def global_state() -> dict[str, Any]:
    """What Baton and the user's code can set in a process, as values that can be compared."""
    import keras
    import tensorflow as tf
    from keras.src.backend.common import global_state as of_keras
    from keras.src.random import seed_generator
    from tensorflow.python.data.ops import debug_mode
    from tensorflow.python.eager import context
    from tensorflow.python.framework import config

    from baton.tasks.foundation import keras_config

    policy = keras.config.dtype_policy().name  # sets a policy where there is none
    eager, source = context.context(), seed_generator.python_random
    drawn = getattr(eager, "_rng", None)
    loggers = [logging.getLogger(name) for name in ("baton", "keras", "tensorflow", "absl", "h5py")]
    trackers = of_keras.GLOBAL_STATE_TRACKER, of_keras.GLOBAL_SETTINGS_TRACKER
    return {
        "environment": dict(os.environ),
        "import path": sys.path[:],
        "working folder": str(Path.cwd()),
        "warnings": (warnings.filters[:], warnings.showwarning),
        "loggers": {each.name: (each.level, each.disabled, each.propagate, each.handlers[:]) for each in loggers},
        "root logger": (logging.root.level, logging.root.handlers[:], logging.root.manager.disable),
        "errors of NumPy": np.geterr(),
        "recursion": sys.getrecursionlimit(),
        "random": (random.getstate(), random.seed, random.random),
        "random of NumPy": repr(np.random.get_state()),  # noqa: NPY002
        "random of TensorFlow": (eager._seed, drawn and drawn.getstate()),
        "random of Keras": (id(source), source.getstate()),
        "Keras": keras_config.keras_config(),
        "kept by Baton": (keras_config._own[:], keras_config._kept[:]),
        "Keras's state": (
            [id(each) for each in trackers],
            [{key: repr(value) for key, value in vars(each).items()} for each in trackers],
        ),
        "Keras's policy": policy,
        "names": repr(of_keras.get_global_attribute("object_name_uids")),
        "determinism": config.is_op_determinism_enabled(),
        "debugging": (tf.config.functions_run_eagerly(), debug_mode.DEBUG_MODE),
        "optimizer": (tf.config.optimizer.get_jit(), tf.config.optimizer.get_experimental_options()),
        "devices": (tf.config.get_soft_device_placement(), tf.config.list_logical_devices()),
        "precision": tf.config.experimental.tensor_float_32_execution_enabled(),
        "threads": (
            tf.config.threading.get_intra_op_parallelism_threads(),
            tf.config.threading.get_inter_op_parallelism_threads(),
        ),
    }


def trained_rudely(folder: str) -> None:
    """A run with a best checkpoint, whose code sets everything at its import and in its function."""
    lab = lab_of(Path(folder), RUDE)
    spec = spec_of("build", **KEEPS_BEST)
    head = lab.train_and_commit(spec, 4)
    assert head.tip is not None
    lab.evaluate(spec, head.tip)


def changed_by_calls(home: str, file: str, out: str) -> dict[str, Any]:
    """What each call of the Python face changes in this process, and the names of the layers of its models."""
    import keras

    opened = Run(home)
    keras.utils.set_random_seed(3)
    first = [float(keras.random.normal(())), keras.layers.Dense(1).name]
    calls: dict[str, Callable[[], Any]] = {
        "model": opened.model,
        "model again": opened.model,
        "best_model": opened.best_model,
        "export": lambda: opened.export(Path(out) / "a.keras"),
        "saved_model": lambda: opened.export(Path(out) / "saved", form="saved_model"),
        "history": opened.history,
        "evaluations": opened.evaluations,
        "status": opened.status,
        "run": lambda: run(file, until_step=4, progress=False),
        "refused": lambda: opened.model(5),
    }
    changed, said = {}, []
    for name, call in calls.items():
        before = global_state()
        with warnings.catch_warnings(record=True) as caught, suppress(InvalidInput):
            warnings.simplefilter("always")
            call()
        after = global_state()
        changed[name] = [key for key in before if before[key] != after[key]]
        said += [str(each.message) for each in caught if "another configuration" in str(each.message)]
    keras.utils.set_random_seed(3)
    again = [float(keras.random.normal(())), keras.layers.Dense(1).name]
    policies = [layer.dtype_policy.name for layer in opened.model().layers]
    return {"changed": changed, "said": said, "drawn": [first, again], "policies": policies}


@pytest.mark.slow
def test_calls_leave_the_callers_process_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in forked.forking_python().items():
        monkeypatch.setenv(name, value)
    in_fresh_process(trained_rudely, folder=str(tmp_path))
    home, file = tmp_path / "storage" / "build", run_file(Lab(tmp_path, tmp_path / "code"), **KEEPS_BEST)
    found = in_fresh_process(changed_by_calls, home=str(home), file=str(file), out=str(tmp_path))
    assert {name: keys for name, keys in found["changed"].items() if keys} == {}
    assert len(found["changed"]) == 10
    (first, name), (again, next_name) = found["drawn"]
    assert (again, name, next_name) == (first, "dense", "dense_1")
    assert found["policies"] == ["mixed_bfloat16"]
    calls = "keras.config.set_epsilon(0.008), keras.config.set_floatx('float64')"
    assert found["said"] == [f"the model was trained with another configuration; call {calls}"] * 3


@pytest.fixture
def forking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that this one trains in are forks."""
    (python,) = forked.forking_python().values()
    monkeypatch.setattr(sys, "executable", python)


@pytest.mark.slow
@pytest.mark.usefixtures("forking")
def test_interrupt_commits_and_is_raised(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODEL)
    file = run_file(lab, train__steps=10_000_000, train__segment_steps=50)
    home = lab.log(spec_of("build"))
    finished = threading.Event()

    def interrupt_once_it_trains() -> None:
        began = time.monotonic()
        while not finished.is_set() and time.monotonic() - began < LIMIT_SECONDS:
            head = home.head()
            if head is not None and head.tip is not None and head.tip.step > 0:
                os.kill(os.getpid(), signal.SIGINT)
                return
            finished.wait(0.1)

    watcher = threading.Thread(target=interrupt_once_it_trains)
    watcher.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            run(file)
    finally:
        finished.set()
        watcher.join()
    status = Run(file).status()
    assert (status["step"] > 0, status["at_work"]) == (True, [])


@pytest.mark.usefixtures("forking")
def test_refusals_are_the_errors_of_the_command(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, MODEL)
    file = run_file(lab)
    with pytest.raises(RunFileError, match="does not exist"):
        run(tmp_path / "none.yaml")
    with pytest.raises(RunFileError, match=r"train\.stepz .* did you mean train__steps\?"):
        run(file, train={"stepz": 3})
    with pytest.raises(RunFileError, match=r'^accept="nothing": unknown key'):
        run(file, accept="nothing")
    with pytest.raises(ModelError, match=r"model\.py defines no function built; it has: build"):
        run(file, **{"model.build": "model.py:built"})  # found by the other process
    with pytest.raises(RunFileError, match=r"(?m)^until_step = 999 lies beyond .* as with train__steps=999$"):
        run(file, until_step=999)  # found by the other process, too
    with pytest.raises(NoSuchRun):
        Run(tmp_path / "storage" / "build")
    assert not (tmp_path / "storage").exists()


def test_rows_are_a_frame_where_pandas_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class Frame:
        def __init__(self, rows: list[dict[str, Any]]) -> None:
            self.rows = rows

        def set_index(self, column: str) -> tuple[str, list[dict[str, Any]]]:
            return column, self.rows

    rows = Rows([{"step": 4, "loss": 0.5}])
    assert (rows, rows[0]["loss"]) == ([{"step": 4, "loss": 0.5}], 0.5)
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=Frame))
    assert rows.frame() == ("step", [{"step": 4, "loss": 0.5}])
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InvalidInput, match="install pandas, or use the rows"):
        rows.frame()


def test_import_is_light_and_typed() -> None:
    heavy = ("tensorflow", "keras", "prefect", "numpy", "typer")
    code = (
        "import sys, baton; print('baton.flows.api' in sys.modules); from baton import run, Run; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "[]"]


@pytest.mark.slow
def test_wheel_is_one_package_that_users_modules_hide_nothing_of(tmp_path: Path) -> None:
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*wheel, str(tmp_path), str(copy_of_sources(tmp_path / "sources"))], check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as packed:
        packed.extractall(tmp_path / "site")
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"baton"}
    assert {"baton/py.typed", "baton/flows/commands/new_run/run.yaml", "baton/tasks/evaluate/report/curves.js"} <= names
    files = [file for name in ("flows", "tasks") for file in (CHECKOUT / name).rglob("*.py")]
    sources = {f"baton/{file.relative_to(CHECKOUT)}" for file in files}
    assert names >= sources - {"baton/flows/package/__init__.py"}
    user = tmp_path / "user"
    (user / "flows").mkdir(parents=True)
    (user / "flows" / "__init__.py").write_text("")
    (user / "tasks.py").write_text("raise RuntimeError('this is not of Baton')")
    (user / "train.py").write_text(
        "import baton.tasks.stages, flows; from baton import run, Run; print(run.__module__)"
    )
    command = [sys.executable, "-c", "import baton, train; print(baton.__file__)"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=user, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["baton.flows.api", str(tmp_path / "site" / "baton" / "__init__.py")]


def copy_of_sources(folder: Path) -> Path:
    """What a wheel is made of, in a folder of its own, because setuptools writes beside it."""
    for name in ("flows", "tasks"):
        shutil.copytree(CHECKOUT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(CHECKOUT / name, folder)
    return folder
