"""How far a run is trained where the run file, and what earlier commands aimed at, differ."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.flows.api import Run
from baton.flows.commands.main import main
from baton.flows.result import override_to_continue
from baton.tasks.foundation.contracts.home_files import SAVED_CODE, SavedCode, saved_code_path
from baton.tasks.foundation.contracts.run_spec import RunSpec
from tests.support.fake_run import FakeRun

MODEL = "def build_model():\n    return 1\n"


def settings(**train: int) -> RunSpec:
    common = {"run": "r", "storage": "s", "data": {"source": "digits"}, "model": "model.py:build"}
    return RunSpec.model_validate({**common, "train": {"global_batch_size": 10, **train}})


STEPS = settings(steps=1500)
EPOCHS = settings(epochs=3, epoch_examples=45)  # 4.5 steps each, so the target is step 14


@pytest.mark.parametrize(
    ("spec", "step", "logged", "target", "override"),
    [
        (STEPS, 100, 1500, 1500, None),
        (STEPS, 100, None, 1500, None),
        (STEPS, 1500, 1500, 1500, "train.steps=3000"),
        (STEPS, 1500, None, 1500, "train.steps=3000"),
        (STEPS, 40_000, 200_000, 200_000, "train.steps=200000"),
        (STEPS, 200_000, 200_000, 200_000, "train.steps=400000"),
        (STEPS, 1500, 200_000, 200_000, "train.steps=200000"),
        (STEPS, 1000, 200_000, 1500, None),
        (STEPS, 900, 900, 1500, None),
        (EPOCHS, 14, 14, 14, "train.epochs=6"),
        (EPOCHS, 20, 45, 45, "train.epochs=10"),
        (EPOCHS, 14, 15, 15, "train.epochs=4"),
        (settings(epochs=3), 14, 45, 45, None),
        (settings(epochs=3), 14, None, None, None),
    ],
)
def test_target_and_override(
    spec: RunSpec, step: int, logged: int | None, target: int | None, override: str | None
) -> None:
    assert spec.train.target_ahead(step, logged) == target
    assert override_to_continue(spec, step, target) == override


@pytest.fixture
def killed(tmp_path: Path) -> FakeRun:
    """A run that a command with --set train.steps=2000 was killed at, past the target of its run file."""
    (tmp_path / "model.py").write_text(MODEL)
    run = FakeRun(tmp_path, target=2000).train(100, 600)
    run.evaluate(0.5)
    return run


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("steps", [400, 600, 2000, 5000])
def test_every_verb_has_the_same_target(killed: FakeRun, capsys: pytest.CaptureFixture[str], steps: int) -> None:
    file = str(killed.run_file(steps=steps))
    [listed] = json.loads(printed(capsys, "list", killed.root.uri, "--json"))["runs"]
    found = [listed, *(json.loads(printed(capsys, "status", at, "--json")) for at in (killed.address, file))]
    found += [Run(killed.address).status(), Run(file).status()]
    assert {(facts["target"], facts["state"]) for facts in found} == {(2000, "incomplete")}
    text = printed(capsys, "status", file)
    assert re.search(r"\nstate       incomplete\nhome .*\nstep        600 of 2000\n", text)
    assert (f"run file    its target is step {steps}\n" in text) == (steps != 2000)


def test_nothing_to_do_names_the_target_of_an_earlier_command(
    killed: FakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(killed.run_file(steps=400))
    text = printed(capsys, "run", file, "--set", "checkpoint.keep_last=4", "--set", "train.steps=500")
    assert "Nothing to do up to step 500: an earlier command aimed further, and digits is at step 600 of 2000." in text
    assert f"continue    baton run {file} --set checkpoint.keep_last=4 --set train.steps=2000\n" in text
    assert json.loads(printed(capsys, "run", file, "--json"))["target"] == 2000
    killed.train(2000).evaluate(0.5)  # what the command that was killed would have reached
    text = printed(capsys, "run", file)
    assert "Nothing to do: digits is at step 2000 of 2000." in text
    assert f"continue    baton run {file} --set train.steps=4000\n" in text


@pytest.mark.parametrize(
    ("steps", "at_step", "more"), [(400, 600, " --set train.steps=2000"), (400, 100, ""), (2000, 600, "")]
)
def test_next_command_of_a_fork_has_steps_left(
    killed: FakeRun, capsys: pytest.CaptureFixture[str], steps: int, at_step: int, more: str
) -> None:
    file = str(killed.run_file(steps=steps))
    step = ["--at-step", str(at_step)]
    text = printed(capsys, "fork", file, *step, "--as", "new", "--set", "train.seed=0")
    assert f"next        baton run {file} --set train.seed=0 --set run=new{more}\n" in text
    text = printed(capsys, "fork", killed.address, *step, "--as", "other")
    assert "next        baton run FILE --set run=other\n" in text
    assert f"if FILE ends at step {at_step} or earlier, say how far it goes: --set train.steps=2000\n" in text
    listed = json.loads(printed(capsys, "list", killed.root.uri, "--json"))["runs"]
    assert {facts["run"]: (facts["target"], facts["state"]) for facts in listed} == dict.fromkeys(
        ("digits", "new", "other"), (2000, "incomplete")
    )


CHANGES: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "nothing": (lambda _: None, None),
    "a comment": (lambda folder: (folder / "model.py").write_text(f"# faster\n{MODEL}"), None),
    "a line": (lambda folder: (folder / "model.py").write_text(MODEL.replace("1", "2")), "model.py:2"),
    "another file": (
        lambda folder: (folder / "model.py").write_text(f"from . import layers\n{MODEL}"),
        "layers.py:1, model.py:1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_edited_code_of_a_finished_run_is_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    """Nothing is left to train, so nothing builds the model, and nothing compares it."""
    for name in ("model.py", "layers.py"):
        (tmp_path / name).write_text(MODEL)
    saved = SavedCode.of(STEPS, {"model.py": MODEL.encode()}).to_json()
    run = FakeRun(tmp_path, target=100, identity={SAVED_CODE: saved_code_path(saved)}).train(100)
    run.home.write(saved_code_path(saved), saved)
    run.evaluate(0.5)
    harm, named = CHANGES[change]
    harm(tmp_path)
    text = " ".join(printed(capsys, "run", str(run.run_file(steps=100))).split())
    assert ("changed since the run saved its code" in text) == (named is not None)
    assert named is None or f"{named} changed" in text
    assert "Nothing to do: digits is at step 100 of 100." in text
