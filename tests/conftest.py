"""Settings and fixtures of all tests: fork servers, the fake Cloud Storage, one accelerator for the process."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.checkout import CHECKOUT

if TYPE_CHECKING:
    from tests.fakes.gcs.server import FakeGcs

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# A shell's background process ignores SIGINT, and its children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No test contacts Google for credentials.
os.environ.setdefault("NO_GCE_CHECK", "true")
# Processes of the tests import `tests.support` from any working folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))

from tests.support import forked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, so that both workers end at about the same time."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_sessionfinish() -> None:
    """End the fork servers."""
    forked.end()


@pytest.fixture(scope="session", autouse=True)
def _threads_before_tensorflow_is_used() -> None:
    """Set TensorFlow's thread counts; its first operation fixes them."""
    if "tensorflow" in sys.modules:
        from tasks.foundation.accelerator.strategy import acquire
        from tasks.foundation.contracts.placement import AcceleratorSpec

        acquire(AcceleratorSpec(), None)


@pytest.fixture(autouse=True)
def _no_exit_deadline() -> Iterator[None]:
    """Clear the exit deadline that a test may have set for this process."""
    yield
    from tasks.foundation.storage.deadline import PROCESS_DEADLINE

    PROCESS_DEADLINE.clear()


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> "Iterator[FakeGcs]":
    """A fake Cloud Storage with the bucket "bucket", used for gs:// addresses."""
    from tests.fakes.gcs.server import FakeGcs

    with FakeGcs(buckets=("bucket",)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server
        assert server.errors == []
