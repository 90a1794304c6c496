"""The files of CSVLogger: one row for each epoch in the lineage of the tip."""

import csv
import uuid
from pathlib import Path
from typing import Any

from baton.tasks.foundation.contracts.identity import CALLBACK_RECORD, CallbackRecord, CsvFile, recorded_callbacks
from baton.tasks.foundation.contracts.log_entry import MetricRow, Origin, Rewind
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.telemetry.trackers import write_csv_files
from tests.support.fake_run import FakeRun


def spec_of(*, evaluate: dict[str, Any]) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": "digits",
            "storage": "runs",
            "data": {"source": "digits", "validation_fraction": 0.1},
            "model": "model.py:build_model",
            "train": {"steps": 25, "global_batch_size": 4, "log_every_steps": 10, "callbacks": "callbacks.py:make"},
            "evaluate": evaluate,
        }
    )


def run_with(folder: Path, record: CallbackRecord) -> FakeRun:
    run = FakeRun(folder)
    head = run.head
    identity = {**head.identity, CALLBACK_RECORD: record.model_dump(mode="json")}
    body = Origin(identity=identity, environment=head.environment)
    again = FakeRun.__new__(FakeRun)
    again.__dict__ |= run.__dict__ | {"home": run.root.at("other"), "name": "other"}
    again.log = type(run.log)(again.home)
    again.log.append(lambda _: body, attempt=uuid.uuid4().hex)
    again.commit(0)
    return again


def table(run: FakeRun, separator: str = ",") -> list[list[str]]:
    return list(csv.reader(run.home.read("callbacks/log.csv").decode().splitlines(), delimiter=separator))


def test_rows_of_a_rewound_run_appear_once(tmp_path: Path) -> None:
    run = run_with(tmp_path, CallbackRecord(csv_files=(CsvFile(name="log.csv", separator=";"),)))
    spec = spec_of(evaluate={})
    back = run.tip
    run.commit(20, [MetricRow(step=10, metrics={"loss": 9.0}), MetricRow(step=20, metrics={"loss": 8.0})])
    write_csv_files(run.log, spec)
    assert table(run, ";") == [["epoch", "loss"], ["0", "9.0"], ["1", "8.0"]]
    body = Rewind(to=back, blown_up_at=20, reason="up", skip_batches=20)
    run.log.append(lambda _: body, attempt=uuid.uuid4().hex)
    run.commit(10, [MetricRow(step=10, metrics={"loss": 7.0})])
    write_csv_files(run.log, spec)
    write_csv_files(run.log, spec)
    assert table(run, ";") == [["epoch", "loss"], ["0", "7.0"]]


def test_rows_of_evaluations_have_both_metrics(tmp_path: Path) -> None:
    run = run_with(tmp_path, CallbackRecord(csv_files=(CsvFile(name="log.csv"),)))
    for step in (12, 15, 24, 25):
        run.commit(step, [MetricRow(step=step, metrics={"loss": float(step)})] if step != 24 else [])
        if step != 15:
            run.evaluate(step / 100)
    write_csv_files(run.log, spec_of(evaluate={"every_steps": 12}))
    # The last epoch is shorter: it ends with the run.
    assert table(run) == [
        ["epoch", "loss", "val_accuracy"],
        ["0", "12.0", "0.12"],
        ["1", "15.0", "0.24"],
        ["2", "25.0", "0.25"],
    ]


def test_log_without_a_record_has_no_files(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    assert recorded_callbacks(run.head.identity) == CallbackRecord()
    write_csv_files(run.log, spec_of(evaluate={}))
    assert not run.home.exists("callbacks/log.csv")
