"""A full, read-only, deleted or unmounted home gives a clear error. Nothing is lost, and the repaired run continues.

All faults happen to one run, one after another. The last test trains it to its end, which is that of a straight run.
"""

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.checkout import CHECKOUT
from tests.support.disks import SmallDisk, can_mount, small_disk
from tests.support.homes import (
    commit_count,
    committed_bytes,
    damaged,
    entries_of,
    head_of,
    log_bytes,
    read_history,
    temporary_files,
)
from tests.support.training_child import Child

pytestmark = pytest.mark.slow

# Long enough for all faults; enough commits for a log with evaluations and retired checkpoints.
RUN = [
    "train.steps=2000",
    "train.segment_steps=50",
    "train.log_every_steps=25",
    "evaluate.every_steps=400",
    "checkpoint.keep_last=2",
    "model.options.width=8",
]
# Larger than a log entry, smaller than a checkpoint of this width.
BETWEEN_BYTES = 40 << 10
CLOCK_BACK = CHECKOUT / "tests" / "support" / "run_with_clock_back.py"


@dataclass(frozen=True)
class Faulty:
    """The run, and the checks after each fault."""

    notes: Path
    disk: SmallDisk | None  # what the storage is on, where one can be mounted

    @property
    def storage(self) -> Path:
        return self.notes / "storage"

    @property
    def home(self) -> Path:
        return self.storage / "digits-cnn"

    def start(self, **settings: object) -> Child:
        return Child("digits", self.storage, extra=RUN, notes=self.notes, **settings)  # type: ignore[arg-type]

    def stopped(self, **settings: object) -> Child:
        """A process that has committed twice, and is stopped in mid-training."""
        child = self.start(**settings)
        assert child.until_commits(commit_count(self.home) + 2)
        assert child.stop()
        return child

    def assert_refused(self, child: Child, *texts: str) -> None:
        """Assert that the process ended with one error that contains the texts, its hints, and no traceback."""
        done = child.finish(1)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.stderr[-3000:]
        told = done.stderr[done.stderr.index(errors[0]) :]
        assert all(line.startswith("hint: ") for line in told.splitlines()[1:]), told
        for text in texts:
            assert text in told, told
        assert "Traceback" not in done.stderr
        assert len(errors[0]) < 800

    def assert_kept(self, before: dict[str, bytes], home: Path | None = None) -> None:
        """Assert that no committed byte has changed, except in checkpoints that were retired since."""
        home = home or self.home
        for path, data in before.items():
            if path.startswith("log/"):
                assert (home / path).read_bytes() == data, path
        head = head_of(home)
        assert head is not None
        for ref in head.retained:
            for path in (path for path in before if path.startswith(ref.path)):
                assert (home / path).read_bytes() == before[path], path
        assert damaged(home) == set()
        assert [entry.number for entry in entries_of(home)] == list(range(head.number + 1))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faulty]:
    folder = tmp_path_factory.mktemp("faulty")
    with ExitStack() as stack:
        yield Faulty(folder, stack.enter_context(small_disk(folder / "storage", "16m")) if can_mount() else None)


def test_disk_that_fills_up_during_training_is_reported(run: Faulty) -> None:
    """Uses a small disk where one can be mounted, and a file size limit elsewhere."""
    child = run.stopped()
    before = committed_bytes(run.home)
    if run.disk:
        run.disk.fill()
        remedy = "no space left on the disk; free some and run again"
    else:
        child.limit_files(8 << 10)
        remedy = "run again"
    child.resume()
    run.assert_refused(child, "StorageError", str(run.home) if run.disk else "", remedy)
    if run.disk:
        run.disk.free()
    run.assert_kept(before)


@contextmanager
def temporary_disk(run: Faulty, name: str, size: str) -> Iterator[tuple[Path, SmallDisk | None]]:
    """A folder for temporary files, on a small disk where one can be mounted."""
    folder = run.notes / name
    folder.mkdir()
    with ExitStack() as stack:
        yield folder, stack.enter_context(small_disk(folder, size)) if can_mount() else None
        assert list(folder.glob("baton-*")) == []


def test_full_temporary_disk_at_start_is_reported(run: Faulty) -> None:
    before = committed_bytes(run.home)
    with temporary_disk(run, "full", "64k") as (folder, disk):
        child = run.start(env={"TMPDIR": str(folder)}, file_bytes=None if disk else BETWEEN_BYTES)
        run.assert_refused(child, "StorageError", *([str(folder), "TMPDIR"] if disk else ["ulimit -f"]), "run again")
    run.assert_kept(before)


def test_temporary_disk_that_fills_up_is_reported(run: Faulty) -> None:
    with temporary_disk(run, "filling", "4m") as (folder, disk):
        child = run.stopped(env={"TMPDIR": str(folder)})
        before = committed_bytes(run.home)
        if disk:
            disk.fill()
        else:
            child.limit_files(BETWEEN_BYTES)
        child.resume()
        run.assert_refused(child, "StorageError", *([str(folder), "TMPDIR"] if disk else ["ulimit -f"]), "run again")
    run.assert_kept(before)


def test_file_size_limit_is_reported(run: Faulty) -> None:
    """Needs no mount: the kernel refuses the writes."""
    before = committed_bytes(run.home)
    run.assert_refused(run.start(file_bytes=BETWEEN_BYTES), "StorageError", "ulimit -f", "run again")
    run.assert_kept(before)


def test_write_permission_lost_during_training_is_reported(run: Faulty) -> None:
    child = run.stopped(without_root_rights=True)
    before = committed_bytes(run.home)
    folders = [run.home, *(path for path in run.home.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    child.resume()
    run.assert_refused(
        child, "StorageError", str(run.home), "permission denied; check who owns the folder", "run again"
    )
    for folder in folders:
        folder.chmod(0o755)
    run.assert_kept(before)


def test_deleted_home_is_not_started_again(run: Faulty) -> None:
    child = run.stopped()
    away = run.storage / "moved-away"
    before = committed_bytes(run.home)
    run.home.rename(away)
    child.resume()
    run.assert_refused(child, str(run.home), "gone", "check whether it was moved or its disk is no longer mounted")
    assert not run.home.exists(), "a new run was started in its place"
    run.assert_kept(before, away)
    away.rename(run.home)


def test_unmounted_home_is_not_started_again(run: Faulty) -> None:
    """After `umount` the mount point is an empty folder."""
    child = run.stopped()
    away = run.storage / "moved-away"
    before = committed_bytes(run.home)
    run.home.rename(away)
    run.home.mkdir()
    child.resume()
    done = child.finish()
    assert done.code in {1, 4}
    assert "Traceback" not in done.stderr
    assert "mounted" in done.stderr.splitlines()[-1]
    assert log_bytes(run.home) == {}, "a new run was started in its place"
    run.assert_kept(before, away)
    shutil.rmtree(run.home)
    away.rename(run.home)


def test_kills_during_a_restore_lose_nothing(run: Faulty) -> None:
    """At another moment of the restore each time; as often as a run may fail in a row without progress."""
    before, folder = committed_bytes(run.home), run.notes / "tmp"
    folder.mkdir()
    for kill in range(4):
        child = run.start(env={"TMPDIR": str(folder)})
        earlier = set(folder.glob("baton-restoring-*"))
        assert child.until(lambda earlier=earlier: set(folder.glob("baton-restoring-*")) - earlier)  # type: ignore[misc]
        threading.Event().wait(0.01 * kill)
        assert child.kill()
        run.assert_kept(before)


def test_run_ends_as_a_straight_one_on_a_clock_that_runs_backwards(run: Faulty) -> None:
    """Later entries get earlier times, and files have times in other decades. Nothing depends on a time."""
    straight = Child("digits", run.notes / "straight", extra=[*RUN, "train.segment_steps=2000"], notes=run.notes)
    expected = straight.finish(0).result
    before, count, folder = committed_bytes(run.home), len(entries_of(run.home)), run.notes / "tmp"
    for number, path in enumerate(sorted(run.home.rglob("*"))):
        seconds = [0, 4_000_000_000][number % 2]
        os.utime(path, (seconds, seconds))
    done = run.start(driver=CLOCK_BACK, env={"TMPDIR": str(folder)}).finish(0)
    assert "Traceback" not in done.stderr
    assert done.result["state_digest"] == expected["state_digest"]
    assert done.result["metrics"] == expected["metrics"]
    assert read_history(run.home) == read_history(straight.home)
    run.assert_kept(before)
    assert temporary_files(run.home) == []
    assert list(folder.glob("baton-restoring-*")) == []  # what the killed processes had left
    entries = entries_of(run.home)
    assert any(later.time < earlier.time for earlier, later in pairwise(entries))
    assert all(entry.time.startswith("1985") for entry in entries[count:])
