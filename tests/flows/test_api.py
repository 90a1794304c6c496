"""Baton from Python: the notebook's cells, rows, models, refusals in its own words, and an interrupt."""

import ast
import base64
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml

from flows.api import Rows, Run, _changes, _print_lines, in_python_words, run
from flows.bare_process import _wait
from tasks.foundation.contracts.log_entry import Change
from tasks.foundation.errors import InvalidInput, ModelError, NoSuchRun, RunFileError
from tasks.foundation.model.code_digest import save_code
from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.fake_run import FakeRun
from tests.support.lab import Lab, lab_of, spec_of
from tests.support.run_notebook import NOTEBOOK, REGENERATE, comparable, copy_of_runs

OPTION = re.compile(r"--([a-z][a-z-]+)")


@pytest.mark.parametrize(
    ("of_command", "of_python"),
    [
        ("with the code beside it: --run-file FILE", "with the code beside it: Run('run.yaml')"),
        ("run it as yourself with --trust-code", "run it as yourself with trust_code=True"),
        ("go on with --accept compile,callbacks", 'go on with accept="compile,callbacks"'),
        ("or: baton run FILE --accept model.contents", 'or: run(FILE, accept="model.contents")'),
        ("then baton run FILE --set run=NEW --accept data", 'then run(FILE, run=NEW, accept="data")'),
        ("baton run FILE --try-again", "run(FILE, try_again=True)"),
        ("as with --set train.steps=2000", "as with train__steps=2000"),
        ("--until-step = 9 lies beyond", "until_step = 9 lies beyond"),
        ("--to a b.keras already exists", "to=a b.keras already exists"),
        ("use --format keras or weights", 'use form="keras" or weights'),
        ("--tolerance is 0.001: add --tolerance 0.02", "tolerance is 0.001: add tolerance=0.02"),
        ("run baton fork HOME --as NEW", "run baton fork HOME --as NEW"),
        (
            "--set train.step=3: train.step (here 3) is not a known key; did you mean train.steps?",
            "train__step=3: train.step (here 3) is not a known key; did you mean train__steps?",
        ),
        (
            "run.yaml, line 7: train.step (here 3) is not a known key; did you mean train.steps?",
            "run.yaml, line 7: train.step (here 3) is not a known key; did you mean train.steps?",
        ),
    ],
)
def test_options_become_parameters(of_command: str, of_python: str) -> None:
    assert in_python_words(of_command) == of_python


def test_every_option_with_a_parameter_is_known() -> None:
    names = {name for each in (run, Run.__init__, Run.export) for name in inspect.signature(each).parameters}
    options = {
        found
        for path in CHECKOUT.glob("*/**/*.py")
        if path.relative_to(CHECKOUT).parts[0] in {"flows", "tasks"}
        for found in OPTION.findall(path.read_text(encoding="utf-8"))
    }
    known = {option for option in options if option.replace("-", "_") in names}
    assert {"accept", "take-over", "trust-code", "to"} <= known
    assert {option for option in known if "--" in in_python_words(f"with --{option} x")} == set()


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
    done = forked.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)
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


@pytest.mark.parametrize("breaks", [False, True])
def test_lines_of_a_training_are_shown_as_they_come(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], breaks: bool
) -> None:
    output = tmp_path / "output"
    code = "print('step 1/2\\nstep 2/2'); print('error: ModelError: it is raised\\n  not shown'); print('end', end='')"

    def show(lines: Sequence[str]) -> None:
        if breaks:
            raise BrokenPipeError
        _print_lines(lines)

    with output.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=file)
        assert _wait(process, output, show) is False
    assert process.returncode == 0
    assert capsys.readouterr().err == ("" if breaks else "step 1/2\nstep 2/2\n")


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
    with pytest.raises(InvalidInput, match=r"model\.h5: the name does not say the format"):
        opened.export(tmp_path / "model.h5")


@pytest.mark.slow
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
        "import sys, flows; print('flows.api' in sys.modules); from flows import run, Run; "
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "[]"]
    assert (CHECKOUT / "flows" / "py.typed").is_file()
    assert (CHECKOUT / "tasks" / "py.typed").is_file()
