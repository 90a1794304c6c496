"""Callbacks run at absolute steps and resume exactly, however a run is cut; unsupported callbacks are refused."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from baton.flows import result as results
from baton.flows.api import Run as ApiRun
from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal, RelayResult
from baton.flows.train import train as train_to
from baton.tasks.evaluate.report.page import write_report
from baton.tasks.foundation.checkpoint.fork import fork
from baton.tasks.foundation.contracts.log_entry import Change, Finish
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.stage_calls import InitOrRestoreCall, PrepareDataCall
from baton.tasks.foundation.errors import BatonError, IdentityChanged, NoProgress, StepFailed
from baton.tasks.foundation.log.history import history_of
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.devices import acquire
from baton.tasks.foundation.model import build as built_model
from baton.tasks.foundation.model.user_callbacks import (
    callback_state,
    large_state_words,
    restore_callback_state,
    treat,
)
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.state.host_memory import HostState
from baton.tasks.foundation.state.warm_state import PROCESS_STATE, Recipe
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Waiting
from baton.tasks.foundation.user_functions import load_function
from baton.tasks.init_or_restore.stage import init_or_restore
from baton.tasks.prepare_data.stage import prepare_data
from baton.tasks.train_segment.trainer import take_trainer
from tests.support.event_recorder import EventRecorder
from tests.support.lab import Lab, in_fresh_process, lab_of

MODEL = """
def build():
    x = keras.Input((6,))
    y = keras.layers.Dropout(0.2)(keras.layers.Dense(5, activation="tanh")(x))
    model = keras.Model(x, keras.layers.Dense(3)(y))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model
"""
CALLBACKS = '''
import keras
import numpy as np


class Recorder(keras.callbacks.Callback):
    """Records every call."""

    def on_train_begin(self, logs=None):
        self.calls, self.sums, self.begun = [], np.zeros(2), ()

    def on_epoch_begin(self, epoch, logs=None):
        self.begun = (*self.begun, epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append({"epoch": epoch, **logs})
        self.sums += [epoch, logs["loss"]]


class Adds(keras.callbacks.Callback):
    """Adds values to the logs, which the callbacks after it get."""

    def on_epoch_end(self, epoch, logs=None):
        logs["norm"] = np.float32(np.linalg.norm(self.model.trainable_weights[0]))
        logs["val_gap"] = keras.ops.convert_to_tensor(logs.get("val_loss", 0.0) - logs["loss"])
        logs["note"] = f"epoch {epoch}, token=abcdefgh12345678"
        logs["rows"] = [1, 2]


def both():
    early = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=10.0, patience=4)
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="val_loss", min_delta=10.0, patience=2, factor=0.5)
    return [plateau, Recorder(), early]


def adding():
    plateau, recorder, early = both()
    return [plateau, recorder, Adds(), early]


def on_rows():
    early = keras.callbacks.EarlyStopping(monitor="loss", min_delta=10.0, patience=3)
    return [Recorder(), Adds(), early, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)]


class Batches(keras.callbacks.Callback):
    accepts_several_steps = True

    def on_train_batch_end(self, batch, logs=None):
        pass


def batches():
    return [Batches()]


def scheduled():
    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5), Recorder()]
'''


def make_code(folder: Path) -> Lab:
    lab = lab_of(folder, MODEL)
    (lab.code / "callbacks.py").write_text(CALLBACKS, encoding="utf-8")
    return lab


def run_file(folder: Path, name: str, *extra: str, callbacks: str = "both", every: int | None = 6) -> Any:
    """Write a run file with callbacks, and load it."""
    path = folder / "code" / "run.yaml"
    content = {
        "run": name,
        "storage": str(folder / "storage"),
        "data": {"source": "data.py:load", "validation_fraction": 0.2, "shard_examples": 9},
        "model": "model.py:build",
        "train": {
            "steps": 60,
            "global_batch_size": 8,
            "log_every_steps": 4,
            "callbacks": f"callbacks.py:{callbacks}",
        },
        "accelerator": {"kind": "cpu"},
    }
    if every is not None:
        content["evaluate"] = {"every_steps": every}
    path.write_text(json.dumps(content), encoding="utf-8")
    return load_run_file(path, extra)


@pytest.fixture(scope="module", autouse=True)
def no_report() -> Iterator[None]:
    """Skip the report, which training does not need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "write_report", lambda _home, **_title: None)
        yield


def forget() -> None:
    """Drop warm models, as a new process would start."""
    PROCESS_STATE.forget()


def train(run: Any, *until: int, accept: tuple[str, ...] = (), recorder: EventRecorder | None = None) -> RelayResult:
    """Train to each of the steps in turn, each time like a new process, and then to the end."""
    recorder = recorder or EventRecorder()
    for step in until:
        forget()
        train_to(OpenedRun.open(run), Goal.of(run.spec, until_step=step), telemetry=recorder, accept=accept)
    forget()
    return train_to(OpenedRun.open(run), Goal.of(run.spec), telemetry=recorder, accept=accept)


def log_of(run: Any) -> RunLog:
    return RunLog(LocalStorage(Path(run.spec.storage)).at(run.spec.run))


def memory_of(run: Any, lab: Lab) -> dict[str, Any]:
    """Read the memory of callbacks in the tip's checkpoint with TensorFlow."""
    head = log_of(run).require_head()
    assert head.tip is not None
    key = "host/callbacks/.ATTRIBUTES/VARIABLE_VALUE"
    return dict(json.loads(lab.tensors(run.spec, head.tip)[key][2]))


def outcome_of(run: Any) -> tuple[Any, ...]:
    """Return what must not depend on cuts: state digest, end, rows and evaluations."""
    history = history_of(log_of(run).entries())
    assert history.head is not None
    assert history.head.tip is not None
    return (
        history.head.tip.state_digest,
        history.head.finished,
        [row.model_dump() for row in history.rows],
        [(each.checkpoint.step, each.metrics) for each in history.evaluations],
        [each.model_dump() for each in history.logged],
    )


def curve(run: Any, what: str, name: str) -> list[tuple[int, float]]:
    reader = EventAccumulator(f"{log_of(run).home.uri}/tensorboard/{what}", size_guidance={"scalars": 0})
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Runs that were trained straight: `plain`, and `straight`, whose callbacks add values to their logs."""

    folder: Path
    reason: str
    outcome: tuple[Any, ...]
    notes: str


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, recorder = tmp_path_factory.mktemp("trained"), EventRecorder()
    make_code(folder)
    straight = run_file(folder, "straight", callbacks="adding")
    reason = train(straight, recorder=recorder).exit_reason
    train(run_file(folder, "plain"))
    return Trained(folder=folder, reason=reason, outcome=outcome_of(straight), notes=recorder.text)


@pytest.mark.slow
def test_early_stopping_and_plateau_are_exact_across_cuts(trained: Trained) -> None:
    folder, straight = trained.folder, trained.outcome
    cut = run_file(folder, "cut", callbacks="adding")
    assert train(cut, 12, 29).exit_reason == trained.reason
    assert outcome_of(cut) == straight
    # A fork copies the memory of callbacks, and is evaluated where it starts.
    fork(LocalStorage(folder / "storage"), "straight", "forked", at_step=24, attempt="a" * 32)
    forked = run_file(folder, "forked", callbacks="adding")
    train(forked)
    assert outcome_of(forked)[:2] == straight[:2]
    assert curve(cut, "train", "loss") == [(row["step"], row["metrics"]["loss"]) for row in straight[2]]
    assert curve(cut, "validation", "loss") == [(step, metrics["loss"]) for step, metrics in straight[3]]
    # patience=4: the fifth evaluation is the fourth without an improvement over the first.
    assert (trained.reason, straight[1].step) == ("finished_early", 30)
    assert "EarlyStopping" in straight[1].reason
    lab = Lab(folder)
    plateau, recorder, _, early = memory_of(cut, lab)["memories"]
    # The state of step 29, because the callbacks at step 30 ended the run.
    assert early["wait"] == 3
    assert plateau["wait"] == 1
    calls = [dict(each["dict"]) for each in recorder["calls"]]
    assert [each["epoch"] for each in calls] == [0, 1, 2, 3]
    assert set(calls[0]) == {"epoch", "loss", "accuracy", "val_loss", "val_accuracy", "learning_rate"}
    assert recorder["begun"] == {"tuple": [0, 1, 2, 3, 4]}
    assert rates_in(cut, lab) == [np.float32(0.005)]
    first = next(each for step, each in straight[3] if step == 6)
    assert calls[0]["val_loss"] == first["loss"]
    assert calls[0]["loss"] == straight[2][0]["metrics"]["loss"]


def rates_in(run: Any, lab: Lab) -> list[Any]:
    """The learning rates in the tip's checkpoint."""
    tensors = lab.tensors(run.spec, log_of(run).require_head().tip)
    return [np.frombuffer(value[2], np.float32)[0] for key, value in tensors.items() if "learning_rate" in key]


@pytest.mark.slow
def test_what_callbacks_add_to_logs_is_exact_and_no_metric(trained: Trained) -> None:
    """Their sequence is compared with that of a cut run above."""
    storage, logged = trained.folder / "storage", trained.outcome[-1]
    assert [(each["step"], each["on"]) for each in logged] == [(step, "evaluation") for step in (6, 12, 18, 24, 30)]
    assert_added(logged)
    assert trained.notes.count("leaves out rows, which callbacks added to logs") == 1
    # Neither the bits nor the metrics are others than without it.
    assert outcome_of(run_file(trained.folder, "plain"))[2:4] == trained.outcome[2:4]
    plain, straight = (ApiRun(str(storage / name)) for name in ("plain", "straight"))
    assert [each.status()["logged"] for each in (plain, straight)] == [None, logged[-1]]
    assert [row["norm"] for row in straight.evaluations()] == [each["values"]["norm"] for each in logged]
    write_report(RunLog(LocalStorage(storage / "straight")), title="straight")
    text = (storage / "straight" / "report" / "index.html").read_text()
    assert "<figcaption>norm</figcaption>" in text
    assert "<figcaption>gap</figcaption>" in text
    assert "note epoch 4, token=***" in text


def assert_added(logged: list[Any]) -> None:
    assert [[*each["values"]] for each in logged] == [["norm", "val_gap", "note"]] * len(logged)
    assert logged[1]["values"]["note"] == "epoch 1, token=***"
    assert all(type(each["values"]["norm"]) is float for each in logged)


@pytest.mark.slow
def test_finished_run_stays_finished_until_callbacks_change(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained.folder, folder, ignore=shutil.ignore_patterns("__pycache__"))
    number = log_of(run_file(folder, "plain")).require_head().number
    later = run_file(folder, "plain", "train.steps=90")
    assert train(later).exit_reason == "nothing_to_do"
    assert log_of(later).require_head().number == number
    assert isinstance(log_of(later).entry(number).body, Finish)
    # The same callbacks, accepted: nothing changed, so nothing is written.
    assert train(later, accept=("train.callbacks",)).exit_reason == "finished_early"
    assert log_of(later).require_head().number == number
    others = run_file(folder, "plain", "train.steps=36", callbacks="scheduled")
    with pytest.raises(IdentityChanged, match="--accept callbacks"):
        begin(others)
    built: list[object] = []
    build = built_model.build_model
    monkeypatch.setattr(built_model, "build_model", lambda *given, **named: built.append(0) or build(*given, **named))
    result = train(others, accept=("train.callbacks",))
    assert (result.exit_reason, result.step, len(built)) == ("complete", 36, 1)
    changes = [entry.body for entry in log_of(others).entries() if isinstance(entry.body, Change)]
    assert [change.accepted for change in changes] == [("train.callbacks",)]
    none = run_file(folder, "plain", "train.steps=40", "train.callbacks=null")
    assert train(none, accept=("train.callbacks",)).step == 40
    assert train(run_file(folder, "plain", "train.steps=44"), accept=("train.callbacks",)).step == 44


def begin(run: Any) -> None:
    """Run only the first stages."""
    forget()
    storage = LocalStorage(Path(run.spec.storage))
    place = Place.of(storage, run.spec.run, code_folder=run.folder, telemetry=EventRecorder())
    dataset = prepare_data(PrepareDataCall(spec=run.spec), place)
    init_or_restore(InitOrRestoreCall(spec=run.spec, dataset=dataset), place)


@pytest.mark.slow
def test_without_evaluations_callbacks_run_at_logged_rows(tmp_path: Path) -> None:
    lab = make_code(tmp_path)
    straight, cut = (run_file(tmp_path, name, callbacks="on_rows", every=None) for name in ("straight", "cut"))
    assert train(straight).exit_reason == train(cut, 8).exit_reason == "finished_early"
    outcome = outcome_of(cut)
    assert outcome == outcome_of(straight)
    assert outcome[1].step == 16
    memory = memory_of(cut, lab)
    assert "EarlyStopping" in memory["ended"]
    assert memory["memories"][0]["begun"] == {"tuple": [0, 1, 2, 3]}
    assert rates_in(cut, lab) == [np.float32(0.01 * 0.5**4)]  # epochs 0 to 3 have begun
    # The last step is evaluated, although it is before the target of the run file.
    assert [step for step, _ in outcome[3]] == [16]
    logged = outcome[-1]
    assert [(each["step"], each["on"]) for each in logged] == [(step, "row") for step in (4, 8, 12, 16)]
    assert_added(logged)
    rows = ApiRun(str(tmp_path / "storage" / "cut")).history()
    assert [row["norm"] for row in rows] == [each["values"]["norm"] for each in logged]


def on_two_replicas(folder: str, cuts: list[int]) -> dict[str, Any]:
    run, lab = run_file(Path(folder), "elastic", "accelerator.replicas=2"), Lab(Path(folder))
    reason = train(run, *cuts).exit_reason
    digest, finished, rows, *_ = outcome_of(run)
    _, recorder, early = memory_of(run, lab)["memories"]
    epochs = [dict(each["dict"])["epoch"] for each in recorder["calls"]]
    end = [reason, finished.step, epochs, early["wait"], *map(float, rates_in(run, lab))]
    return {"end": end, "bits": [digest, rows]}


@pytest.mark.slow
@pytest.mark.parametrize("cut", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_callbacks_continue_on_two_replicas(tmp_path: Path, cut: bool) -> None:
    (folder := tmp_path / "straight").mkdir()
    make_code(folder)
    elastic = run_file(folder, "elastic")
    train_to(OpenedRun.open(elastic), Goal.of(elastic.spec, until_step=14), telemetry=EventRecorder())
    shutil.copytree(folder, tmp_path / "cut", ignore=shutil.ignore_patterns("__pycache__"))
    found = in_fresh_process(on_two_replicas, folder=str(folder), cuts=[])
    assert found["end"] == ["finished_early", 30, [0, 1, 2, 3], 3, np.float32(0.005)]
    if cut:
        assert in_fresh_process(on_two_replicas, folder=str(tmp_path / "cut"), cuts=[29]) == found


def test_warm_trainer_does_not_call_callbacks_twice(tmp_path: Path) -> None:
    lab = make_code(tmp_path)
    run = run_file(tmp_path, "twice", callbacks="scheduled")
    start = lab.begin(run.spec).tip
    assert start is not None
    accelerator = acquire(run.spec.accelerator, None)
    recipe = Recipe(spec=run.spec, dataset=lab.prepare(run.spec), code_folder=lab.code)
    trainer = take_trainer(recipe, storage=lab.storage, accelerator=accelerator)
    home = lab.home(run.spec)
    digests = set()
    for again in (False, True):
        assert trainer.restore(home, start) is again, "step 0 of a new run is in memory"
        assert trainer.state.digest().root == start.state_digest
        assert trainer.begin(lab.log(run.spec), start) is None
        digests.add(trainer.state.digest().root)
    assert len(digests) == 1
    assert start.state_digest not in digests
    later = start.model_copy(update={"step": 1})
    trainer.restore(home, start)
    trainer.begin(lab.log(run.spec), later)
    assert not trainer.restore(home, start), "begin changed the state although no callback was due"


def refused(folder: Path, body: str, *extra: str) -> str:
    """Return the message with which a run with these callbacks is refused; assert that nothing is written."""
    path = folder / "code" / "callbacks.py"
    path.write_text(f"import keras\nimport threading\n\n\n{body}\n", encoding="utf-8")
    for name in [name for name in sys.modules if name.startswith("_baton_user_") and name.endswith(".callbacks")]:
        del sys.modules[name]
    forget()
    with pytest.raises(BatonError) as refused:
        train(run_file(folder, "refused", *extra, callbacks="make"))
    assert refused.value.exit_code == 2
    assert not (folder / "storage" / "refused").exists()
    return str(refused.value)


def own(hook: str, body: str = "pass") -> str:
    return f"class Own(keras.callbacks.Callback):\n    {hook}:\n        {body}\n\n\ndef make():\n    return [Own()]"


def made(what: str) -> str:
    return f"def make():\n    return {what}"


@pytest.mark.slow
def test_unsupported_callbacks_are_refused_first(tmp_path: Path) -> None:
    make_code(tmp_path)
    for body, words in (
        (made("[keras.callbacks.EarlyStopping('val_f1', mode='max')]"), "monitor = 'val_f1'; the available metrics"),
        (made("[keras.callbacks.LambdaCallback(on_train_batch_end=print)]"), "has on_train_batch_end: steps run"),
        (
            made("[keras.callbacks.ModelCheckpoint('x.keras', 'loss', save_best_only=True)]"),
            "use monitor='val_loss', or save_best_only=False",
        ),
        (
            made("[keras.callbacks.ModelCheckpoint('x.keras', 'val_f1', mode='max', save_best_only=True)]"),
            "ModelCheckpoint has monitor = 'val_f1'; the available metrics",
        ),
        (
            made(
                "[keras.callbacks.ModelCheckpoint('x.keras', 'val_accuracy', save_best_only=True), "
                "keras.callbacks.EarlyStopping(restore_best_weights=True)]"
            ),
            "different best checkpoints (ModelCheckpoint: accuracy (max), EarlyStopping: loss (min))",
        ),
        (made("[keras.callbacks.CSVLogger('a/x.csv'), keras.callbacks.CSVLogger('b/x.csv')]"), "two CSVLoggers write"),
        (made("[keras.callbacks.CSVLogger('a/x y.csv')]"), "use letters, digits"),
        (
            "class Own(keras.callbacks.CSVLogger):\n    pass\n\n\ndef make():\n    return [Own('x.csv')]",
            "Own is a subclass of CSVLogger, which is not called",
        ),
        (made("keras.callbacks.EarlyStopping()"), "returned EarlyStopping; return a list"),
        (made("[1 / 0]"), "ZeroDivisionError"),
        (own("def on_batch_end(self, batch, logs=None)"), "callback Own has on_batch_end: steps run inside one"),
        (own("def on_test_end(self, logs=None)"), "Own has on_test_end: it is never called"),
        (
            own("def on_train_begin(self, logs=None)", "self.lock = threading.Lock()"),
            "Own: the attribute lock has type lock",
        ),
        (own("def on_train_begin(self, logs=None)", "raise ValueError('no')"), "on_train_begin of Own raised Value"),
        (
            own("def on_train_begin(self, logs=None)", "self.model.compile('sgd', 'mse', metrics=['mae'])"),
            "on_train_begin of Own compiles the model anew, or replaces its optimizer or a metric",
        ),
        (
            own("def set_model(self, model)", "model.optimizer = keras.optimizers.SGD()"),
            "set_model of Own compiles the",
        ),
        (own("def set_params(self, params)", "params['steps'] / 0"), "set_params of Own raised ZeroDivisionError"),
        (own("def get_state(self)", "return {'x': object()}"), "get_state() returned a object"),
        ("def other():\n    return []", "callbacks.py defines no function make"),
    ):
        assert words in refused(tmp_path, body)
    early = made("[keras.callbacks.EarlyStopping('val_loss')]")
    data, periodic = "set data.validation, or a data.validation_fraction above 0", "evaluate.every: epoch, or evaluate"
    epochs = ("train.steps=null", "train.epochs=9", "evaluate.every_steps=null")
    for settings, needs_data, needs_period in (
        (("evaluate.every_steps=null",), False, True),
        (("evaluate.every_steps=null", "data.validation_fraction=0"), True, True),
        (("data.validation_fraction=0",), True, False),
        (epochs, False, True),
        ((*epochs, "data.validation_fraction=0"), True, False),
    ):
        said = refused(tmp_path, early, *settings)
        assert (data in said, periodic in said) == (needs_data, needs_period), said


EACH = """

class Each(keras.metrics.Metric):
    def update_state(self, *_, **__):
        pass

    def result(self):
        return ops.ones((2,))
"""


@pytest.mark.slow
def test_monitor_needs_a_metric_of_one_number(tmp_path: Path) -> None:
    make_code(tmp_path)
    model = tmp_path / "code" / "model.py"
    model.write_text(model.read_text().replace('["accuracy"]', "[Each()]") + EACH)
    assert "able to automatically determine" in refused(tmp_path, made("[keras.callbacks.EarlyStopping('val_each/0')]"))
    callback = "keras.callbacks.{}(monitor='{}', mode='min'{})"
    for kind, monitor, settings, words in (
        ("EarlyStopping", "val_each", "", "or name one of val_each/0 to val_each/1"),
        ("ReduceLROnPlateau", "each", "", "Plateau has monitor = 'each', which is a metric of shape (2), and one"),
        ("EarlyStopping", "val_each", ", restore_best_weights=True", "shape (2), and one number decides; make its"),
    ):
        assert words in refused(tmp_path, made(f"[{callback.format(kind, monitor, settings)}]"))
    best = "checkpoint.keep_best={metric: each, mode: max}"
    assert "keep_best.metric = 'each' is a metric of shape (2)" in refused(tmp_path, made("[]"), best)
    elements = callback.format("EarlyStopping", "val_each/1", "")
    (tmp_path / "code" / "callbacks.py").write_text(f"import keras\n\n\n{made(f'[{elements}]')}\n")
    of_element = "checkpoint.keep_best={metric: each/0, mode: max}"
    run = run_file(tmp_path, "elements", of_element, "train.steps=12", callbacks="make")
    recorder = EventRecorder()
    assert train(run, recorder=recorder).metrics["validation_each/1"] == 1.0
    assert "model.py:build: metric each has shape (2), and is logged as each/0 to each/1" in recorder.notes


def optimizer_of(folder: Path, text: str) -> None:
    """Compile the model with another optimizer; before it is imported."""
    model = folder / "code" / "model.py"
    model.write_text(model.read_text().replace("keras.optimizers.Adam(0.01)", text))


SCHEDULES = "keras.optimizers.schedules"
SGD = "keras.optimizers.SGD"
COSINE = f"{SGD}({SCHEDULES}.CosineDecayRestarts(0.1, 10))"
PLATEAU = "keras.callbacks.ReduceLROnPlateau('val_loss')"
SCHEDULER = "keras.callbacks.LearningRateScheduler(lambda epoch, rate: {})"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "callback", "words"),
    [
        (COSINE, PLATEAU, "ReduceLROnPlateau sets the learning rate, but model.py:build compiles SGD with the sched"),
        (COSINE, f"[keras.callbacks.CallbackList([{PLATEAU}])]", "ReduceLROnPlateau sets the learning rate, but"),
        (COSINE, SCHEDULER.format("rate"), "compiles SGD with the schedule CosineDecayRestarts, which decides the"),
        (f"{SGD}(lambda: 0.1)", PLATEAU, "compiles SGD with the function <lambda>, which decides the rate itself"),
        (f"{SGD}(0.1)", SCHEDULER.format("1"), "should be a float. Got: 1"),
        (f"{SGD}(0.1)", SCHEDULER.format("rate if epoch < 9 else keras.ops.exp(rate)"), "should be a float"),
        (f"{SGD}(0.1)", SCHEDULER.format("1 / epoch"), "on_epoch_begin of LearningRateScheduler raised ZeroDivision"),
    ],
)
def test_rate_that_no_callback_can_set_is_refused_first(
    tmp_path: Path, optimizer: str, callback: str, words: str
) -> None:
    make_code(tmp_path)
    optimizer_of(tmp_path, optimizer)
    assert words in refused(tmp_path, made(f"[{callback}]"))


def test_callback_that_compiles_anew_ends_the_training(tmp_path: Path) -> None:
    """The traced step would not notice, and the new metrics would be 0 for ever."""
    make_code(tmp_path)
    compiles = own("def on_epoch_end(self, epoch, logs=None)", "epoch and self.model.compile('sgd', 'mse')")
    (tmp_path / "code" / "callbacks.py").write_text(f"import keras\n\n\n{compiles}\n")
    with pytest.raises(StepFailed, match="on_epoch_end of Own compiles the model anew") as failed:
        train(run_file(tmp_path, "compiles", callbacks="make"))
    assert "edit that function and continue with --accept compile,callbacks" in str(failed.value)
    assert log_of(run_file(tmp_path, "compiles")).require_head().tip.step == 12  # type: ignore[union-attr]


def test_failed_hook_names_the_way_to_go_on(tmp_path: Path) -> None:
    """Once step 0 is committed, it is a failed step; corrected callbacks continue the run."""
    make_code(tmp_path)
    optimizer_of(tmp_path, COSINE)
    sets = own("def on_epoch_begin(self, epoch, logs=None)", "self.model.optimizer.learning_rate = 0.5")
    (tmp_path / "code" / "callbacks.py").write_text(f"import keras\n\n\n{sets}\n\n\ndef none():\n    return []\n")
    failing = run_file(tmp_path, "sets", "train.steps=12", callbacks="make")
    words = "on_epoch_begin of Own raised TypeError: This optimizer was created with a"
    with pytest.raises(StepFailed, match=words) as failed:
        train(failing)
    assert "go on from the newest checkpoint with --accept callbacks" in str(failed.value)
    corrected = run_file(tmp_path, "sets", "train.steps=12", callbacks="none")
    assert train(corrected, accept=("train.callbacks",)).exit_reason == "complete"


@pytest.mark.slow
def test_other_steps_of_rows_have_the_same_callbacks(tmp_path: Path) -> None:
    """Where callbacks act at evaluations, unless they see rows: in batch hooks, or by a monitor of the training."""
    lab = make_code(tmp_path)
    run = run_file(tmp_path, "paced")
    train_to(OpenedRun.open(run), Goal.of(run.spec, until_step=14), telemetry=EventRecorder())
    assert train(run_file(tmp_path, "paced", "train.log_every_steps=3")).step == 30, "the fifth evaluation"
    recorder = memory_of(run, lab)["memories"][1]
    assert [dict(each["dict"])["epoch"] for each in recorder["calls"]] == [0, 1, 2, 3]
    assert recorder["begun"] == {"tuple": [0, 1, 2, 3, 4]}
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    for callbacks, every, sees in (
        ("both", 6, False), ("batches", 6, True), ("on_rows", 6, True), ("scheduled", None, True)
    ):  # fmt: skip
        rows = run_file(tmp_path, callbacks, callbacks=callbacks, every=every)
        reference = f"callbacks.py:{callbacks}"
        made = load_function(reference, lab.code)()
        treated = treat(made, model, rows.spec, reference=reference)
        assert treated.record.sees_rows == sees
    rows = run_file(tmp_path, "batches", callbacks="batches")
    begin(rows)
    changed = run_file(tmp_path, "batches", "train.log_every_steps=2", callbacks="batches")
    with pytest.raises(IdentityChanged, match=r"  train\.log_every_steps: 4 -> 2"):
        train(changed)


class Keeps(keras.callbacks.Callback):
    """Plain values of every kind."""


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -0.0, 0.1, float("inf"), "text", [1, [2.5]], (1, (2,)), {"a": {1: None}}, {3, 1, 2},
        np.float32(0.1), np.int64(7), np.arange(6, dtype=np.float32).reshape(2, 3), keras.ops.less,
        np.arange(600, dtype=">f4").reshape(20, 30).T, [np.zeros(999), {"deep": (np.ones((9, 99), bool), np.eye(40))}],
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_memory_of_a_callback_is_restored_exactly(value: Any) -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile()
    one, other = Keeps(), Keeps()
    one.set_model(model)
    other.set_model(model)
    fresh = callback_state(other)
    one.value, other.late = value, 1
    kept = HostState("callbacks")
    kept.write({"memories": [fresh, callback_state(one)]})
    restore_callback_state(other, kept.read()["memories"][1], initial=fresh)
    assert repr(other.value) == repr(value)
    assert type(other.value) is type(value)
    assert not hasattr(other, "late")
    restore_callback_state(other, fresh, initial=fresh)
    assert not hasattr(other, "value")


def test_large_memory_is_kept_as_it_is_and_named(tmp_path: Path) -> None:
    class Own(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.images, self.labels, self.count = np.zeros((1000, 250), np.float32), list(range(99_999)), 3

    one, kept = Own(), HostState("callbacks")
    one.set_model(model := keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    model.compile()
    state = callback_state(one)
    size = kept.write({"memories": [state]})
    assert 1_000_000 < size < 2_000_000
    words = large_state_words(one)
    assert "callback Own keeps 1.0 MB in images and 688.9 kB in labels: each checkpoint has them" in words
    assert "define get_state() and set_state(state)" in words
    one.images = one.images[:1]
    assert large_state_words(one) == ""
    # As earlier versions have written it.
    hexadecimal = {"images": {"array": ["<f4", [1000, 250], (b"\1" * 1_000_000).hex()]}}
    restore_callback_state(one, hexadecimal, initial=state)
    assert one.images.tobytes() == b"\1" * 1_000_000
    make_code(tmp_path)
    (tmp_path / "code" / "callbacks.py").write_text(
        "import keras\nimport numpy as np\n\n\n"
        + own("def on_epoch_end(self, epoch, logs=None)", "self.seen = np.full((epoch, 1000, 100), epoch, 'f8')")
    )
    grows = run_file(tmp_path, "grows", "train.steps=30", "train.segment_steps=12", callbacks="make", every=6)
    recorder = EventRecorder()
    train(grows, recorder=recorder)
    warned = [note for note in recorder.notes if "callbacks.py:make: callback Own keeps" in note]
    assert [note.partition(" in seen")[0].rpartition(" keeps ")[2] for note in warned] == ["1.6 MB"]


def test_callback_may_define_its_own_memory() -> None:
    class Own(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.handle, self.count = object(), 0

        def get_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    one, other = Own(), Own()
    one.count = 5
    restore_callback_state(other, callback_state(one), initial={})
    assert other.count == 5


def test_callback_with_unsavable_memory_ends_the_segment(tmp_path: Path) -> None:
    make_code(tmp_path)
    (tmp_path / "code" / "callbacks.py").write_text(
        "import keras\n\n\n" + own("def on_epoch_end(self, epoch, logs=None)", "self.file = object()")
    )
    recorder = EventRecorder()
    late = run_file(tmp_path, "late", "stop.attempts_without_progress=1", callbacks="make", every=None)
    with pytest.raises(StepFailed, match="Own: the attribute file has type object") as failed:
        train(late, recorder=recorder)
    assert failed.value.exit_code == 1
    # What hangs here may take longer than an inner loop.
    waits = [event.on for event in recorder.events if isinstance(event, Waiting)]
    assert waits == ["callbacks", "the save in flight"]
    # Each attempt fails after training, so it counts as an attempt without progress.
    with pytest.raises(NoProgress, match="StepFailed: callback Own: the attribute file"):
        train(late)
