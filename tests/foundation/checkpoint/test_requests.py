"""On Cloud Storage a commit takes few requests, however long the log is, and few of them wait for each other."""

from typing import Any

import pytest

from baton.tasks.foundation.checkpoint import tensor_bundle as module
from baton.tasks.foundation.checkpoint.save import commit_staged
from baton.tasks.foundation.checkpoint.snapshot import take_snapshot
from baton.tasks.foundation.checkpoint.write import write_snapshot
from baton.tasks.foundation.contracts.log_entry import Head
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.log.files import Hint
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.telemetry.events import Silent
from tests.fakes.gcs.server import FakeGcs
from tests.support.sent_requests import Requests, requests_of, responding_together
from tests.support.small_logs import assert_sound, begin, committing, evaluation, folders, head_of, stage

# The check that the home is still there, and the manifest.
_OF_WRITING = 2


def spec_of(keep_last: int) -> RunSpec:
    return RunSpec.model_validate(
        {
            "run": "run",
            "storage": "gs://bucket/runs",
            "data": {"source": "digits"},
            "model": "model.py:build_model",
            "train": {"steps": 1, "global_batch_size": 1},
            "checkpoint": {"keep_last": keep_last},
        }
    )


def commit_at(log: RunLog, step: int, cloud: FakeGcs, *, keep_last: int) -> Requests:
    """The requests that commit a checkpoint which this process has just staged."""
    head = log.head_seen()
    assert isinstance(head, Head)
    staged = stage(log.home, step, head.base, "a")
    with requests_of(cloud) as requests:
        body = committing(staged, parent=head.tip.path if head.tip else None)
        commit_staged(log, body, spec=spec_of(keep_last), telemetry=Silent(), verified=True)
    return requests


@pytest.fixture(params=[10, 300])
def log(cloud: FakeGcs, request: pytest.FixtureRequest) -> RunLog:  # noqa: ARG001 - its address is in use
    """A log with this number of entries, as a process knows it after its first commit."""
    log = begin(CloudStorage("bucket", "runs/run"))
    for number in range(head_of(log).number + 1, request.param):
        tip = head_of(log).tip
        assert tip is not None
        body = evaluation(tip, accuracy=float(number))
        log.append(lambda _, body=body: body, attempt="a")  # type: ignore[misc]
    return RunLog(log.home)


def test_a_commit_takes_six_requests(cloud: FakeGcs, log: RunLog) -> None:
    commit_at(log, 10, cloud, keep_last=9)
    requests = commit_at(log, 20, cloud, keep_last=9)
    assert len(requests.sent) + _OF_WRITING <= 6, requests.words()
    assert not requests.of("object.list")
    assert len(requests.of("object.insert", r"/log/\d")) == 1, requests.words()
    assert_sound(log.home)


def test_a_commit_with_retirement_takes_ten_requests(cloud: FakeGcs, log: RunLog) -> None:
    for step in (10, 20, 30):
        commit_at(log, step, cloud, keep_last=1)
    requests = commit_at(log, 40, cloud, keep_last=1)
    assert requests.of("batch"), requests.words()
    assert len(requests.of("object.insert", r"/log/\d")) == 2, requests.words()
    assert len(requests.sent) + _OF_WRITING <= 10, requests.words()
    assert_sound(log.home)


def test_three_requests_in_series_follow_the_last_byte(
    cloud: FakeGcs, state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Manifest, entry, and the entry that retires; the index, listings, deletions and HINT go beside them."""
    monkeypatch.setattr(module, "SHARD_BYTES", 400)
    log = begin(CloudStorage("bucket", "runs/run"))
    for step in (10, 20, 30):
        commit_at(log, step, cloud, keep_last=1)
    head = head_of(log)
    assert head.tip is not None
    snapshot = take_snapshot(state)
    assert snapshot is not None
    entry = head.number + 1
    together = (
        [
            ("object.insert", "/ckpt.index"),
            ("object.insert", "/ckpt.data-00000"),
            ("object.insert", "/ckpt.data-00001"),
        ],
        [("object.insert", f"/log/{entry:08}"), ("object.get", f"/log/{entry - 1:08}"), *[("object.list", "")] * 2],
        [
            ("object.insert", f"/log/{entry + 1:08}"),
            ("object.get", f"/log/{entry:08}"),
            ("object.insert", "/log/HINT"),
            ("batch", ""),
        ],
    )
    with requests_of(cloud) as requests, responding_together(cloud, *together):
        staged = write_snapshot(snapshot, log.home, base=head.base, attempt="a")
        commit_staged(log, committing(staged), spec=spec_of(1), telemetry=Silent(), verified=True)
    later = requests.after("object.insert", "/ckpt.data")
    assert later.in_series() == 3, requests.words()
    assert len(later.sent) == 1 + sum(map(len, together[1:])), later.words()
    assert Hint(log.home).read() == entry + 1
    assert_sound(log.home)


def test_garbage_is_looked_for_until_none_can_come(cloud: FakeGcs, log: RunLog) -> None:
    killed = stage(log.home, 5, head_of(log).base, "killed")
    first = commit_at(log, 10, cloud, keep_last=9)
    assert killed.path not in folders(log.home)
    assert len(first.of("object.list", "")) > 0
    rival = stage(log.home, 15, head_of(log).base, "rival")
    fresh = RunLog(log.home)
    commit_at(fresh, 20, cloud, keep_last=9)
    assert rival.path not in folders(log.home)
    assert commit_at(fresh, 30, cloud, keep_last=9).of("object.list") == []
