"""A store on the fake Cloud Storage, for the tests of this folder."""

import pytest

from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from tests.fakes.gcs.server import FakeGcs


@pytest.fixture
def storage(cloud: FakeGcs) -> CloudStorage:  # noqa: ARG001 - its address is in the environment
    return CloudStorage(
        "bucket", "some/root", RetryPolicy(total_seconds=20, stall_seconds=0.4, first_wait_seconds=0.01)
    )


@pytest.fixture
def patient(cloud: FakeGcs) -> CloudStorage:  # noqa: ARG001 - its address is in the environment
    """For tests that count requests: none is cancelled because this machine is busy."""
    return CloudStorage("bucket", "some/root", RetryPolicy(stall_seconds=60, first_wait_seconds=0.01))
