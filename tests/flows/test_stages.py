"""What a stage elsewhere says of its devices, and which of them leave an attempt behind."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from fake_run import FakeRun
from prefect import task
from prefect.logging import disable_run_logger

from flows import stages
from tasks.foundation.accelerator import strategy
from tasks.foundation.contracts.call import StageCall
from tasks.foundation.contracts.log_entry import Head
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import AcceleratorLost
from tasks.foundation.runlog.attempts import read_attempts
from tasks.foundation.telemetry.events import Silent
from tasks.foundation.telemetry.ledger import Ledger


@task
def lost_in_the_middle(**_: Any) -> None:
    raise tf.errors.UnavailableError(None, None, "Socket closed")


@pytest.mark.parametrize(("kind", "error"), [("tpu", AcceleratorLost), ("cpu", tf.errors.UnavailableError)])
def test_devices_that_go_are_a_lost_accelerator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, error: type[Exception]
) -> None:
    monkeypatch.setattr(strategy, "acquire", lambda *_: SimpleNamespace(kind=kind, replicas=8, hosts=1))
    monkeypatch.setattr(stages, "Prefect", lambda: SimpleNamespace(is_there=lambda _: False))
    run = FakeRun(tmp_path)
    place = stages._Place(
        spec=load_run_file(run.run_file()).spec, code_folder=tmp_path, storage=run.root, home=run.home, ledger=Ledger(),
        telemetry=Silent(),
    )  # fmt: skip
    with pytest.raises(error, match="Socket closed"):
        place.do_on_devices(None, lost_in_the_middle, recorded=None)


@pytest.mark.parametrize("attempt", ["a" * 32, None])
def test_only_what_is_part_of_an_attempt_is_one(tmp_path: Path, attempt: str | None) -> None:
    """So that evaluating once more, killed again and again, does not stop the run."""
    run = FakeRun(tmp_path).train(100)
    spec = load_run_file(run.run_file()).spec.model_copy(update={"storage": run.root.uri})
    call = StageCall(spec=spec, code_folder=str(tmp_path), attempt=attempt)
    at_work: list[str | None] = []

    def work(_told: StageCall, place: stages._Place) -> Head:
        at_work.extend(record.within for record in read_attempts(place.home).records)
        return run.head

    with disable_run_logger():
        assert stages._answered(StageCall, call.model_dump_json(), work).is_completed()
    assert at_work == [record.within for record in read_attempts(run.home).records] == [attempt] * (attempt is not None)
