"""A fake Cloud Storage and a raw HTTP client for the tests of this folder."""

import os
from collections.abc import Iterator

import pytest

# gcsfs chooses one of its two file systems when it is imported. Baton uses the plain one.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
from tests.fakes.gcs.raw import Raw
from tests.fakes.gcs.server import FakeGcs


@pytest.fixture
def server() -> Iterator[FakeGcs]:
    with FakeGcs(buckets=("bucket", "other")) as fake:
        yield fake
        assert fake.errors == []


@pytest.fixture
def raw(server: FakeGcs) -> Iterator[Raw]:
    with Raw(server.url) as client:
        yield client
