"""What all tests share: the helpers of support/, the fake Cloud Storage, and one accelerator for the process."""

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.checkout import CHECKOUT

if TYPE_CHECKING:
    from tests.fakes.gcs.fake_gcs import FakeGcs

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Started in the background of a shell, this process ignores Ctrl-C, and so would all that it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No test asks the real Cloud Storage, or Google for credentials.
os.environ.setdefault("NO_GCE_CHECK", "true")
# Programs that tests start import `tests.support` too, from any working folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))

from tests.support import forked


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first: at the end, when one process has nothing left to take over, only short ones are running."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_sessionfinish() -> None:
    """The fork servers end with the tests that they served."""
    forked.end()


@pytest.fixture(scope="session", autouse=True)
def _threads_before_tensorflow_is_used() -> None:
    """The first operation fixes TensorFlow's threads, so whatever test comes first, they are set before."""
    if "tensorflow" in sys.modules:
        from tasks.foundation.accelerator.strategy import acquire
        from tasks.foundation.contracts.placement import AcceleratorSpec

        acquire(AcceleratorSpec(), None)


@pytest.fixture(autouse=True)
def _nobody_leaves() -> Iterator[None]:
    """What a test asks of this process, to go, is over with the test."""
    yield
    from tasks.foundation.storage.deadline import LEAVING

    LEAVING.lift()


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> "Iterator[FakeGcs]":
    """A fake Cloud Storage with a bucket "bucket", which gs:// addresses of this test lead to."""
    from tests.fakes.gcs.fake_gcs import FakeGcs

    with FakeGcs(buckets=("bucket",)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server
        assert server.errors == []
