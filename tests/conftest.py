"""Settings and fixtures of all tests: fork servers, the fake Cloud Storage, one accelerator for the process."""

import gc
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from baton.tasks.foundation.child_imports import process_folder
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


# Seconds of each test file that takes some, written by `pytest --record-durations`.
_DURATIONS = Path(__file__).with_name("durations.json")
_RECORDED_FROM_SECONDS = 2.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help=f"write {_DURATIONS.name} after all tests")
    parser.addoption("--fast", action="store_true", help="only files that fast_selection.py chooses")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what is not fast, before it is imported."""
    if not config.getoption("--fast") or not collection_path.name.startswith("test_"):
        return None
    from tests.support.fast_selection import fast_files

    return collection_path.relative_to(CHECKOUT).as_posix() not in fast_files() or None


def pytest_configure(config: pytest.Config) -> None:
    # With several processes, only the one that has no tests of its own hears of all.
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Durations(), "durations")


class _Durations:
    """Adds up how long each file's tests take."""

    def __init__(self) -> None:
        self._seconds = Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        kept = {file: round(each) for file, each in self._seconds.items() if each >= _RECORDED_FROM_SECONDS}
        _DURATIONS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n", encoding="utf-8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest files first, so that all processes end at about the same time.

    A process runs whole files (`--dist loadfile` in the Makefile), because the tests of one share what takes long.
    """
    seconds = json.loads(_DURATIONS.read_text(encoding="utf-8"))
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))


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
        from baton.tasks.foundation.contracts.placement import AcceleratorSpec
        from baton.tasks.foundation.machine.devices import acquire

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
    from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE

    PROCESS_DEADLINE.clear()


@pytest.fixture(scope="module", autouse=True)
def _no_variable_stays_that_later_forks_lack() -> Iterator[None]:
    """No file leaves a variable in this process that makes the processes of all later ones fresh, and so slow."""
    before = forked.read_early(dict(os.environ))
    yield
    left = forked.read_early(dict(os.environ)) - before
    for name in left:
        value = os.environ.pop(name, None)
        pytest.fail(f"{name}={value} was left in the environment by this file's tests, or by what they imported")


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> "Iterator[FakeGcs]":
    """A fake Cloud Storage with the bucket "bucket", used for gs:// addresses."""
    from tests.fakes.gcs.server import FakeGcs

    with FakeGcs(buckets=("bucket",)) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server.url)
        yield server
        assert server.errors == []
