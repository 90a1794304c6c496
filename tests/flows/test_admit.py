"""What is refused before Prefect or TensorFlow is imported, among it a run that another process trains."""

import sys
import textwrap
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import yaml
from prefect.client.schemas.objects import State
from prefect.logging import disable_run_logger

from baton.flows import admit as admission
from baton.flows import result as results
from baton.flows.admit import Admitted, LivenessProbe, admit, require_idle, require_still_idle
from baton.flows.commands.main import main
from baton.flows.opened_run import OpenedRun
from baton.flows.result import Goal
from baton.flows.train import train
from baton.flows.with_prefect import run_flows
from baton.tasks.foundation.contracts.home_files import SAVED_CODE, SavedCode, saved_code_path
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import RunAtWork
from baton.tasks.foundation.machine.processes import is_running, process_name
from tests.support.clock import NOON, FakeClock
from tests.support.event_recorder import EventRecorder
from tests.support.fake_run import FakeRun

RUN = """
run: small
storage: ./runs
data: {source: "data.py:load"}
model: model.py:build
train: {steps: 2, global_batch_size: 8}
"""
SETTINGS = yaml.safe_load(RUN)
REFUSED = {
    "an unknown built-in source": (["data={source: digit}"], ["data.source: 'digit'", "did you mean digits?"]),
    "a former source": (
        ["data={source: csv, options: {path: t.csv, label: y, features: [a, ü], delimiter: '|', fill: 0}}"],
        ["data.source: csv is part of table now; write source: table, with y in place of label, x in place of"],
    ),
    "an unknown option of a source": (
        ["data={source: table, options: {path: t.csv, stacked: true}}"],
        ["data.options.stacked: True", "did you mean stack?"],
    ),
    "a missing file": (
        ["data={source: table, options: {path: t.csv, y: y}}"],
        ["data.options.path: 't.csv'", "t.csv does not exist", "model.py"],
    ),
    "a key of another source": (
        ["data={source: digits, examples: 5}"],
        ["data.examples: 5: the source digits does not use it", "remove it"],
    ),
    "a batch that does not divide among the replicas": (
        ["accelerator={kind: cpu, replicas: 3}"],
        ["train.global_batch_size = 8 is not divisible by 3 replicas", "try 6 or 9"],
    ),
    "a missing package of the model": (["model=other.py:build"], ["other.py, line 1, imports no_such_package"]),
    "a missing package of the data": (["data.source=other.py:load"], ["other.py:load: other.py, line 1"]),
    "a missing package of the callbacks": (["train.callbacks=other.py:build"], ["other.py:build: other.py, line 1"]),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    good = "def load(): ...\ndef build(): ...\n"
    for name, text in (("run.yaml", RUN), ("model.py", good), ("data.py", good)):
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    (tmp_path / "other.py").write_text(f"import no_such_package\n{good}", encoding="utf-8")
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("name", REFUSED)
def test_input_is_refused_before_prefect_and_tensorflow_import(
    name: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Importing these modules now fails, so the command must end before it.
    monkeypatch.setitem(sys.modules, "prefect", None)
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    overrides, words = REFUSED[name]
    assert main(["run", str(file), *(word for override in overrides for word in ("--set", override))]) == 2
    stderr = " ".join(capsys.readouterr().err.split())
    assert [word for word in words if word not in stderr] == [], stderr
    assert not (file.parent / "runs").exists()


@pytest.mark.parametrize("kind", ["auto", "tpu"])
def test_host_of_a_tpu_slice_is_refused_before_tensorflow(
    kind: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v4-32")
    assert main(["run", str(file), "--set", f"accelerator.kind={kind}"]) == 2
    assert "TPU slice (TPU_ACCELERATOR_TYPE = v4-32, which has 4 hosts)" in " ".join(capsys.readouterr().err.split())


def test_requirements_of_remote_stages_are_not_checked(file: Path) -> None:
    from baton.flows.admit import require_packages_and_source
    from baton.flows.opened_run import OpenedRun

    overrides = ["data={source: table, options: {path: t.csv, y: y}}", "model=other.py:build"]
    places = [f"stages.{stage}=a/b" for stage in ("prepare_data", "init_or_restore", "train_segment")]
    require_packages_and_source(OpenedRun.open(load_run_file(file, [*overrides, *places])))


def test_a_mistyped_key_is_reported_before_the_missing_key(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(RUN.replace("global_batch_size:", "global_batch_sise:"), encoding="utf-8")
    assert main(["run", str(file)]) == 2
    stderr = capsys.readouterr().err
    assert "did you mean train.global_batch_size?" in stderr
    assert stderr.index("did you mean train.global_batch_size?") < stderr.index("train.global_batch_size is missing")


def test_changed_identity_is_refused_before_imports(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prefect", "tensorflow"):
        monkeypatch.setitem(sys.modules, name, None)
    (file.parent / "model.py").write_text("def build_model(): ...\n", encoding="utf-8")
    run = FakeRun(file.parent).train(100)
    assert main(["run", str(run.run_file()), "--set", "train.seed=1"]) == 2
    assert "train.seed: 0 -> 1" in capsys.readouterr().err


SAVED = """
import keras


class Block(keras.layers.Layer):
    def call(self, x):
        return x * 2.0


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = epoch == 3


def build_model(units=4):
    return keras.Sequential([Block(), keras.layers.Dense(units)])


def callbacks():
    return [Stop()]
"""
_CALLBACKS = {
    "function": "callbacks",
    "code": {"model.Stop": "b" * 16, "model.callbacks": "c" * 16},
    "evaluate.every_steps": None,
    "train.log_every_steps": 100,
}
WITH_CALLBACKS = ["train.callbacks=model.py:callbacks", "train.log_every_steps=100"]
TYPED = " ".join(f"--set {override}" for override in WITH_CALLBACKS)
# An edit of model.py, --set, and what the refusal says, with the commands to paste.
CHANGED: dict[str, tuple[tuple[str, str], list[str], list[str]]] = {
    "a layer": (
        ("x * 2.0", "x * 3.0"),
        [],
        [
            "  model.code.model.Block: changed\n",
            "  model.py:7, in Block.call:\n      def call(self, x):\n",
            "\n    -     return x * 2.0\n    +     return x * 3.0\n",
            "baton run {file} {typed} --accept model.code\n",
            "--as NEW && baton run {file} {typed} --set run=NEW --accept model.code\n",
            "baton run {file} {typed} --set run=NEW (with",
        ],
    ),
    "a callback": (
        ("== 3", "== 4"),
        [],
        [
            "train.callbacks.code.model.Stop: changed\n  model.py:12, in Stop.on_epoch_end:\n",
            "baton run {file} {typed} --accept callbacks\n",
        ],
    ),
    "the steps of callbacks": (
        ("", ""),
        ["train.log_every_steps=10"],
        [
            "  train.log_every_steps: 100 -> 10\n",
            "hint: restore train.log_every_steps: 100 in the run file, or for this command: baton run {file} {typed}\n",
        ],
    ),
    "an option of the model": (
        ("", ""),
        ["model.options.units=8"],
        [
            "  model.options.units: 4 -> 8\n",
            "--set model.options.units=4\n",
            "--set model.options.units=8 --accept model,compile\n",
        ],
    ),
    "the batch": (
        ("", ""),
        ["train.global_batch_size=16"],
        [
            "  train.global_batch_size: 32 -> 16\n",
            "hint: restore train.global_batch_size: 32 in the run file",
            "--set train.global_batch_size=16 --accept global_batch_size\n",
        ],
    ),
}


@pytest.mark.parametrize("change", CHANGED)
def test_changed_code_is_shown_before_imports_with_a_command_to_paste(
    change: str, file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prefect", "tensorflow", "keras"):
        monkeypatch.setitem(sys.modules, name, None)
    (old, new), sets, words = CHANGED[change]
    overrides = [*WITH_CALLBACKS, *sets]
    written = SavedCode.of(RunSpec.model_validate(SETTINGS), {"model.py": SAVED.encode()}).to_json()
    identity = {
        SAVED_CODE: saved_code_path(written),
        "model.code": {"model.Block": "a" * 16},
        "model.options": {"units": 4},
        "train.callbacks": _CALLBACKS,
        "train.global_batch_size": 32,
    }
    run = FakeRun(file.parent, identity=identity).train(100)
    run.home.write(saved_code_path(written), written)
    (file.parent / "model.py").write_text(SAVED.replace(old, new) if old else SAVED, encoding="utf-8")
    path = str(run.run_file())
    assert main(["run", path, *(word for each in overrides for word in ("--set", each))]) == 2
    stderr = capsys.readouterr().err
    assert [word for word in words if word.format(file=path, typed=TYPED) not in stderr] == [], stderr


def test_a_function_that_builds_the_model_is_told_before_imports_and_not_refused(file: Path) -> None:
    """It may build the same model."""
    written = SavedCode.of(RunSpec.model_validate(SETTINGS), {"model.py": SAVED.encode()}).to_json()
    identity = {SAVED_CODE: saved_code_path(written), "model.code": {"model.Block": "a" * 16}}
    run = FakeRun(file.parent, identity=identity).train(100)
    run.home.write(saved_code_path(written), written)
    (file.parent / "model.py").write_text(SAVED.replace("Dense(units)", "Dense(units=units)"), encoding="utf-8")
    recorder = EventRecorder()
    opened = OpenedRun.open(load_run_file(run.run_file()))
    assert isinstance(admit(opened, Goal.of(opened.spec), telemetry=recorder), Admitted)
    (note,) = [event.text for event in recorder.events if "changed since" in event.text]
    assert "model.py:16" in note


def test_run_without_progress_is_refused_before_imports(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("prefect", "tensorflow"):
        monkeypatch.setitem(sys.modules, name, None)
    (file.parent / "model.py").write_text("def build_model(): ...\n", encoding="utf-8")
    run = FakeRun(file.parent).train(100)
    for number in range(2):
        run.attempt(f"{number}" * 32, process="gone", ended="error")
    assert main(["run", str(run.run_file()), "--set", "stop.attempts_without_progress=2"]) == 1
    assert "2 attempts in a row" in capsys.readouterr().err


HERE = "boot/1/4711/99"


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    (tmp_path / "model.py").write_text("def build_model():\n    pass\n")
    return FakeRun(tmp_path).train(100)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def check_idle(run: FakeRun, clock: FakeClock) -> Callable[..., list[str]]:
    """A function that looks for other processes and returns the emitted notes. It calls `on_sleep` after each sleep."""

    def check_idle(*, take_over: bool = False, on_sleep: Callable[[], None] = lambda: None) -> list[str]:
        def sleep(seconds: float) -> None:
            clock.advance(seconds)
            on_sleep()

        probe = LivenessProbe(
            now=clock.now,
            clock=clock,
            sleep=sleep,
            is_running=lambda name: name == HERE,
            is_gone=lambda name: name == "gone",
        )
        recorder = EventRecorder()
        opened = OpenedRun.open(load_run_file(run.run_file()))
        require_idle(opened, take_over=take_over, telemetry=recorder, probe=probe)
        return [event.text for event in recorder.events]

    return check_idle


def test_a_live_process_of_this_machine_is_refused_at_once(
    run: FakeRun, clock: FakeClock, check_idle: Callable[..., list[str]]
) -> None:
    run.attempt("a" * 32, process=HERE, host="tpu-vm", pid=4711)
    clock.advance(7)
    before = run.files()
    with pytest.raises(RunAtWork) as caught:
        check_idle()
    headline, *hints = str(caught.value).splitlines()
    assert headline == "digits is at work: process 4711 on tpu-vm, step 130, last heartbeat 7.0 s ago"
    assert ["--take-over" in hint for hint in hints] == [False, True]
    assert caught.value.exit_code == 3
    assert check_idle(take_over=True) == []
    assert run.files() == before
    assert clock.seconds == 1007.0, "there was no wait"


@pytest.mark.parametrize(
    "changes",
    [
        {"process": "gone"},
        {"ended": "sigterm", "process": HERE},
        {"within": "b" * 32, "process": HERE},
        {"alive": (NOON - timedelta(seconds=91)).isoformat(), "process": HERE},
        {"process": process_name()},
    ],
    ids=["dead", "ended", "stage", "silent", "this"],
)
def test_ended_and_own_attempts_do_not_block(
    run: FakeRun, clock: FakeClock, check_idle: Callable[..., list[str]], changes: dict[str, str]
) -> None:
    run.attempt("a" * 32, **changes)
    assert check_idle() == []
    assert clock.seconds == 1000.0, "there was no wait"


def test_a_remote_process_is_refused_after_its_next_heartbeat(
    run: FakeRun, check_idle: Callable[..., list[str]]
) -> None:
    run.attempt("a" * 32, process="elsewhere")

    def heartbeat() -> None:
        run.attempt("a" * 32, process="elsewhere", alive=(NOON + timedelta(seconds=1)).isoformat())

    with pytest.raises(RunAtWork, match="process 1 on host, step 130"):
        check_idle(on_sleep=heartbeat)


@pytest.mark.parametrize(("age", "longest"), [(60, 4.0), (100_000, 47.5)])
def test_a_silent_remote_process_delays_but_does_not_block(
    run: FakeRun, clock: FakeClock, check_idle: Callable[..., list[str]], age: float, longest: float
) -> None:
    run.attempt("a" * 32, process="elsewhere", began=(NOON - timedelta(seconds=age)).isoformat())
    (note,) = check_idle()
    assert "another process may be at work: process 1 on host, step 130" in note
    assert 0 < clock.seconds - 1000.0 <= longest


def test_the_wait_ends_when_the_remote_process_ends(
    run: FakeRun, clock: FakeClock, check_idle: Callable[..., list[str]]
) -> None:
    run.attempt("a" * 32, process="elsewhere", began=(NOON - timedelta(days=1)).isoformat())
    check_idle(on_sleep=lambda: run.attempt("a" * 32, process="elsewhere", ended="sigterm"))
    assert clock.seconds - 1000.0 < 1


@pytest.fixture
def rival(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """A run that a live process of this machine is training."""
    monkeypatch.setattr(admission, "process_name", lambda: "")  # otherwise it is this process
    now = datetime.now().astimezone()
    run.attempt("a" * 32, process=process_name(), began=now.isoformat(), alive=now.isoformat())
    assert is_running(process_name())
    return run


def test_relay_and_command_refuse_before_anything_starts(rival: FakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    file = load_run_file(rival.run_file())
    before = rival.files()
    with pytest.raises(RunAtWork):
        train(OpenedRun.open(file), Goal.of(file.spec), telemetry=EventRecorder())
    assert main(["run", str(rival.run_file())]) == 3
    assert "error: digits is at work: process 1 on host" in capsys.readouterr().err
    assert rival.files() == before


def test_a_scheduled_run_beside_a_run_at_work_does_not_fail(rival: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_flows, "prefect_responds", lambda: True)
    with disable_run_logger():
        ended = run_flows.train_run.fn(str(rival.run_file()))
    assert isinstance(ended, State)
    assert (ended.is_completed(), ended.name) == (True, "Stopped")
    assert ended.message is not None
    assert "is at work: process 1 on host" in ended.message


def test_a_complete_run_does_not_check_for_other_processes(rival: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "write_report", lambda *_given, **_named: None)
    file = load_run_file(rival.run_file(100))
    rival.evaluate(0.5)
    assert train(OpenedRun.open(file), Goal.of(file.spec), telemetry=EventRecorder()).exit_reason == "nothing_to_do"


def test_a_rival_that_starts_after_admission_is_refused(run: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = OpenedRun.open(load_run_file(run.run_file()))
    admitted = admit(opened, Goal.of(opened.spec), telemetry=EventRecorder())
    assert isinstance(admitted, Admitted)
    monkeypatch.setattr(admission, "process_name", lambda: "")  # otherwise it is this process
    now = datetime.now().astimezone()
    run.attempt("a" * 32, process=process_name(), began=now.isoformat(), alive=now.isoformat())
    with pytest.raises(RunAtWork):
        require_still_idle(admitted, telemetry=EventRecorder())
