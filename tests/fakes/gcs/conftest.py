"""The fake's modules stand beside its tests; they are imported by their own names."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# gcsfs decides at its import which of its two file systems it offers; the plain one is what Baton uses.
os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
sys.path.insert(0, str(Path(__file__).parent))

from fake_gcs import FakeGcs
from fake_gcs_raw import Raw


@pytest.fixture
def server() -> Iterator[FakeGcs]:
    with FakeGcs(buckets=("bucket", "other")) as fake:
        yield fake
        assert fake.errors == []


@pytest.fixture
def raw(server: FakeGcs) -> Iterator[Raw]:
    with Raw(server.url) as client:
        yield client
