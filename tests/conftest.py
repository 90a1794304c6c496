"""Settings and fixtures of all tests: fork servers, the fake Cloud Storage, one accelerator for the process."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tasks.foundation.child_imports import process_folder
from tests.support.checkout import CHECKOUT

if TYPE_CHECKING:
    from tests.fakes.gcs.server import FakeGcs

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# A shell's background process ignores SIGINT, and its children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests compare plain output.
os.environ.pop("FORCE_COLOR", None)
os.environ.pop("CLICOLOR_FORCE", None)
# No test contacts Google for credentials.
os.environ.setdefault("NO_GCE_CHECK", "true")
# Processes of the tests import `tests.support` from any working folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))

from tests.support import forked

# No test asserts a time: an example takes as long as a busy machine needs. All examples of a test share its fixtures.
settings.register_profile(
    "baton", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
settings.load_profile("baton")

gc.disable()  # until all tests are collected: imports leave next to no garbage


# They take a minute or more. Those that mostly wait alternate with those that compute.
_LONGEST = (
    "test_five_stages", "test_strategies", "test_readme", "test_faulty_homes", "test_remote_stages", "test_exactness",
    "test_supervisor", "test_any_cut", "test_prefect", "test_callbacks", "test_prefect_ui", "test_multi_worker",
    "test_prefect_worker", "test_save_in_flight", "test_prove", "test_carried_changes", "test_built_images",
    "test_benchmarks", "test_chaos", "test_own_model", "test_rivals", "test_stops", "test_state_beside_variables",
    "test_cloud_runs", "test_deploying", "test_data_forms", "test_hung_processes", "test_guide",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, then others with slow tests, so that both workers end at about the same time.

    A worker runs whole files (`--dist loadfile` in the Makefile), because the tests of one share what takes long.
    """
    with_slow = {item.path for item in items if item.get_closest_marker("slow")}
    ranks = {name: rank for rank, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: (ranks.get(item.path.stem, len(ranks)), item.path not in with_slow))


def pytest_collection_finish() -> None:
    """Collect garbage again, but not among the modules of all tests, which takes long."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """End the fork servers."""
    forked.end()


@pytest.fixture(scope="session", autouse=True)
def _threads_before_tensorflow_is_used() -> None:
    """Set TensorFlow's thread counts; its first operation fixes them."""
    if "tensorflow" in sys.modules:
        from tasks.foundation.contracts.placement import AcceleratorSpec
        from tasks.foundation.machine.devices import acquire

        acquire(AcceleratorSpec(), None)


@pytest.fixture(scope="session", autouse=True)
def _process_folder_before_a_test_moves_temporary_files() -> None:
    """Make the folder of this process now: not in a test's own folder, which is looked at and removed."""
    process_folder()


@pytest.fixture(scope="module", autouse=True)
def _collect_new_objects_only() -> None:
    """Exempt what exists from garbage collection, as `fast_imports` does in a command.

    Otherwise each collection searches everything that earlier files have left: half of the time of some tests.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_exit_deadline() -> Iterator[None]:
    """Clear the exit deadline that a test may have set for this process."""
    yield
    from tasks.foundation.storage.transfers import PROCESS_DEADLINE

    PROCESS_DEADLINE.clear()


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> "Iterator[FakeGcs]":
    """A fake Cloud Storage with the bucket "bucket", used for gs:// addresses."""
    from tests.fakes.gcs.server import FakeGcs

    with FakeGcs(buckets=("bucket",)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server
        assert server.errors == []
