"""`baton evaluate` on a real tiny run: which set, which checkpoint, and what is written to the log."""

import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.attempt import attempt_path
from baton.tasks.foundation.contracts.log_entry import EvaluationOnTest
from tests.support.checkout import CHECKOUT
from tests.support.homes import entries_of
from tests.support.lab import ZOO, Lab, spec_of
from tests.support.ledger_records import record_of
from tests.support.watched_relay import command

_TRAINING = """
import time
from baton.tasks.foundation.machine.processes import process_name

print(process_name(), flush=True)
time.sleep(60)
"""
TEST = {"source": "data.py:load", "options": {"form": "plain", "examples": 7}}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run file, its code and its home at step 8; the test set was evaluated at the end."""
    folder = tmp_path_factory.mktemp("evaluated")
    code = folder / "code"
    shutil.copytree(ZOO, code, ignore=shutil.ignore_patterns("__pycache__"))
    best = {"metric": "loss", "mode": "max"}
    spec = spec_of(
        "plain", train__steps=8, train__segment_steps=4, evaluate__every_steps=4, data__test=TEST,
        checkpoint__keep_best=best,
    )  # fmt: skip
    command(Lab(folder, code), spec)
    values = spec.model_dump(mode="json") | {"storage": str(folder / "storage")}
    (code / "run.yaml").write_text(yaml.safe_dump(values))
    return folder


def evaluated(capsys: pytest.CaptureFixture[str], trained: Path, *words: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["evaluate", str(trained / "code" / "run.yaml"), *words, "--json"]) == code
    value: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return value


def logged_tests(trained: Path) -> list[tuple[int, int]]:
    bodies = [entry.body for entry in entries_of(trained / "storage" / "plain")]
    return [(each.checkpoint.step, each.examples) for each in bodies if isinstance(each, EvaluationOnTest)]


def test_both_sets_agree_with_the_log_and_add_nothing(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(entries_of(trained / "storage" / "plain"))
    on_test = evaluated(capsys, trained, "--on", "test")
    validation = evaluated(capsys, trained)
    assert (on_test["on"], on_test["step"], on_test["examples"], on_test["agrees"]) == ("test", 8, 7, True)
    assert (validation["on"], validation["agrees"]) == ("validation", True)
    assert on_test["metrics"] != validation["metrics"]
    assert len(entries_of(trained / "storage" / "plain")) == before


def test_servers_of_a_training_are_left_to_it(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_servers = ["--set", "accelerator.kind=tpu", "--set", "accelerator.tpu=grpc://127.0.0.1:9"]
    on_servers += ["--set", "accelerator.connect_seconds=0.1", "--json"]

    def refusals() -> list[str]:
        verbs = ("evaluate", "audit", "prove")
        assert [main([verb, str(trained / "code" / "run.yaml"), *on_servers]) for verb in verbs] == [3, 3, 3]
        return [json.loads(line)["message"] for line in capsys.readouterr().out.splitlines()]

    with subprocess.Popen(
        [sys.executable, "-c", _TRAINING], stdout=subprocess.PIPE, text=True, cwd=CHECKOUT
    ) as training:
        assert training.stdout is not None
        process, now = training.stdout.readline().strip(), datetime.now(UTC).isoformat()
        record = record_of("a" * 32, process=process, pid=training.pid, began=now, alive=now)
        file = trained / "storage" / "plain" / attempt_path("a" * 32)
        file.write_bytes(record.to_json())
        refused = refusals()
        training.kill()
    for message in refused:
        assert message.startswith(f"plain is at work: process {training.pid} on host")
        assert "try again when it has ended, or here, with --set accelerator.kind=cpu" in message
    for message in refusals():
        assert "no TensorFlow server responds at 127.0.0.1:9" in message
    file.unlink()


def test_best_checkpoint_is_tested_and_logged_once(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = evaluated(capsys, trained, "--on", "test", "--step", "best")
    assert (first["step"], first["logged"], first["agrees"]) == (4, None, None)
    again = evaluated(capsys, trained, "--on", "test", "--step", "4")
    assert (again["logged"], again["agrees"]) == (first["metrics"], True)
    assert logged_tests(trained).count((4, 7)) == 1


def test_changed_test_set_is_evaluated_anew(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--on", "test", "--set", "data.test.options.examples=9"]
    assert evaluated(capsys, trained, *words)["agrees"] is None
    assert (8, 9) in logged_tests(trained)
    assert evaluated(capsys, trained, *words)["agrees"] is True


def test_set_is_named_in_text_status_and_log(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(trained / "code" / "run.yaml")
    assert main(["evaluate", str(trained / "storage" / "plain"), "--run-file", file, "--on", "test"]) == 0
    out = capsys.readouterr().out
    assert "test        accuracy" in out or "test        loss" in out, out
    assert main(["status", file]) == 0
    out = capsys.readouterr().out
    assert any(line.startswith("test ") and "examples, step 8)" in line for line in out.splitlines()), out
    assert any(line.startswith("validation ") for line in out.splitlines())
    assert main(["log", file]) == 0
    out = capsys.readouterr().out
    assert "(7 test examples)" in out
    assert "validation examples)" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "training"], "--on training is not a set; use validation or test"),
        (["--step", "last"], "--step last is neither a step nor best"),
        (["--step", "5"], "retains no checkpoint at step 5"),
        (["--on", "test", "--set", "data.test=null"], "data.test is left out, so there is no test set"),
        (["--set", "data.validation_fraction=0", "--set", "checkpoint.keep_best=null"], "no validation examples"),
        (["--set", "train.seed=9"], "train.seed: 0 -> 9"),
    ],
)
def test_wrong_input_is_refused(
    trained: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    refused = evaluated(capsys, trained, *words, code=2)
    assert message in refused["message"]
