"""The fake's modules stand beside its tests; they are imported by their own names."""

import os
from collections.abc import Iterator

import pytest

# gcsfs decides at its import which of its two file systems it offers; the plain one is what Baton uses.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
from tests.fakes.gcs.fake_gcs import FakeGcs
from tests.fakes.gcs.fake_gcs_raw import Raw


@pytest.fixture
def server() -> Iterator[FakeGcs]:
    with FakeGcs(buckets=("bucket", "other")) as fake:
        yield fake
        assert fake.errors == []


@pytest.fixture
def raw(server: FakeGcs) -> Iterator[Raw]:
    with Raw(server.url) as client:
        yield client
