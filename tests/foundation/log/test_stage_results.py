"""A stage's result counts even if the store refuses to delete its file."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.dataset import DatasetRef
from baton.tasks.foundation.contracts.log_entry import SegmentRequest, SegmentResult
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.errors import StoreRefused
from baton.tasks.foundation.log.stage_results import drop_segment, find_segment, hand_on, take_answer, write_answer
from baton.tasks.foundation.storage.local import LocalStorage
from tests.support.fake_run import FakeRun

DATASET = DatasetRef(
    folder="datasets/a", content_digest="c", train_examples=1, validation_examples=0, already_prepared=True
)


class StoreWithoutDelete(LocalStorage):
    def delete(self, folder: str, *, files: Sequence[str] | None = None) -> None:  # noqa: ARG002 - as in `Storage`
        raise StoreRefused(f"403: {folder} is under a hold")


def test_result_that_cannot_be_deleted_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = FakeRun(tmp_path).train(100)
    home = StoreWithoutDelete(run.home.root)
    write_answer(home, "prepared", DATASET)
    assert take_answer(home, "prepared", DatasetRef) == DATASET
    stale = SegmentResult(
        staged=run.tip, parent=run.tip.path, exit_reason="segment_end", history=(), examples=1, seconds={}
    )
    hand_on(home, stale)
    drop_segment(home, stale)
    request = SegmentRequest(
        spec=load_run_file(run.run_file()).spec, dataset=DATASET, start=run.tip, base=run.head.base,
        skipped_batches=0, until_step=300, number=1,
    )  # fmt: skip
    assert find_segment(home, request) is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2, "once for each"
