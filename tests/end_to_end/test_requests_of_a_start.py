"""On Cloud Storage, a resumed run asks for little before it trains."""

import re
from pathlib import Path

import pytest

from tests.fakes.gcs.server import FakeGcs, Sent
from tests.support.cloud_runs import CloudChild
from tests.support.sent_requests import requests_of

pytestmark = pytest.mark.slow

SEGMENTS = ["train.segment_steps=20", "checkpoint.keep_last=2", "checkpoint.every_seconds=null"]
# What it downloads, and its signs of life: one a second at the beginning, with a look for a request of `baton profile`.
_NOT_COUNTED = r"/checkpoints/[^/]+/ckpt\.|/datasets/[^/]+/[^/]+\.tfrecord|/profile\.json$"


def before_first_checkpoint(sent: list[Sent]) -> list[Sent]:
    """The requests before the first file of a new checkpoint is sent, without those that are not counted."""
    first = next(at for at, one in enumerate(sent) if one.kind.startswith(("object.insert", "upload")) and is_file(one))
    heartbeats = [one for one in sent[:first] if one.kind == "object.insert" and "/attempts/" in one.path]
    return [one for one in sent[:first] if not re.search(_NOT_COUNTED, one.path) and one not in heartbeats[1:]]


def is_file(one: Sent) -> bool:
    return "/checkpoints/" in one.path


def test_a_resumed_run_starts_with_twenty_requests(cloud: FakeGcs, tmp_path: Path) -> None:
    words = ["--max-segments", "1"]
    CloudChild(cloud, "digits", *words, root="runs", disk=tmp_path / "first", extra=SEGMENTS).finish()
    with requests_of(cloud) as requests:
        CloudChild(cloud, "digits", *words, root="runs", disk=tmp_path / "second", extra=SEGMENTS).finish()
    counted = before_first_checkpoint(requests.sent)
    assert len(counted) <= 20, [f"{one.kind} {one.path}" for one in counted]
