"""One gcsfs file system per process, for Cloud Storage or for a local server."""

import os

import pytest

from baton.tasks.foundation.errors import InvalidInput
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from tests.fakes.gcs.server import FakeGcs


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("http://", "has no host"),
        ("http:///", "has no host"),
        ("no-such-host.invalid", "is not the address of a server"),
        ("http://no-such-host.invalid:80", "is not the address of a server"),
        ("127.0.0.1:port", "is not the address of a server"),
        ("127.0.0.1:99999", "is not the address of a server"),
        ("http://[::1", "is not the address of a server"),
        ("http://a b:80", "is not the address of a server"),
        (f"http://{'x' * 70}.invalid", "is not the address of a server"),
        ("ftp://127.0.0.1:80", "does not begin with http:// or https://"),
    ],
)
def test_address_that_is_no_servers_is_refused(monkeypatch: pytest.MonkeyPatch, address: str, why: str) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
    with pytest.raises(InvalidInput, match=why):
        CloudStorage("bucket", "", RetryPolicy(total_seconds=5, stall_seconds=2, first_wait_seconds=0.01)).exists("x")


def test_local_server_gets_anonymous_requests(monkeypatch: pytest.MonkeyPatch, cloud: FakeGcs) -> None:
    from baton.tasks.foundation.storage.gcs.connection import connect

    monkeypatch.delenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", raising=False)
    files = connect()
    assert files._location == cloud.url
    assert os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] == "false"
    assert files.credentials.credentials is None
    assert connect() is files
