"""A full, read-only, deleted or damaged home gives a clear error. Nothing is lost, and a repaired run continues."""

import os
import shutil
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.checkout import CHECKOUT
from tests.support.disks import can_mount, small_disk
from tests.support.homes import (
    commit_count,
    committed_bytes,
    damaged,
    entries_of,
    head_of,
    log_bytes,
    read_history,
    temporary_files,
    tip_of,
)
from tests.support.shipped_runs import Finished
from tests.support.training_child import Child

pytestmark = pytest.mark.slow

# Long enough to interrupt the second half; enough commits for a log with evaluations and retired checkpoints.
RUN = [
    "train.steps=600",
    "train.segment_steps=50",
    "train.log_every_steps=25",
    "evaluate.every_steps=200",
    "checkpoint.keep_last=2",
    "model.options.width=8",
]
HALF = 300
# Larger than a log entry, smaller than a checkpoint of this width.
BETWEEN_BYTES = 40 << 10
CLOCK_BACK = CHECKOUT / "tests" / "support" / "run_with_clock_back.py"


@dataclass(frozen=True)
class Prepared:
    """A complete run, and the same run stopped at step `HALF`."""

    straight: Finished
    half: Path
    folder: Path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("faulty")
    straight = Child("digits", folder / "straight", extra=RUN, notes=folder).finish(0)
    half = Child("digits", folder / "half", "--until-step", str(HALF), extra=RUN, notes=folder)
    half.finish(0)
    return Prepared(straight, folder / "half", folder)


class Case:
    """A copy of the stopped run, and the checks after its fault."""

    def __init__(self, prepared: Prepared, name: str) -> None:
        self.prepared = prepared
        self.notes = prepared.folder / name
        self.notes.mkdir()
        self.storage = self.notes / "storage"
        shutil.copytree(prepared.half, self.storage)
        self.home = self.storage / "digits-cnn"

    def start(self, **settings: object) -> Child:
        return Child("digits", self.storage, extra=RUN, notes=self.notes, **settings)  # type: ignore[arg-type]

    def assert_refused(self, child: Child, *texts: str, code: int = 1) -> None:
        """Assert that the process ended with one error that contains the texts, its hints, and no traceback."""
        done = child.finish(code)
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

    def assert_finishes(self, **settings: object) -> Finished:
        """Train to the end, and assert that the result is that of the straight run."""
        done = self.start(**settings).finish(0)
        assert done.result["state_digest"] == self.prepared.straight.result["state_digest"]
        assert done.result["metrics"] == self.prepared.straight.result["metrics"]
        assert read_history(self.home) == read_history(self.prepared.folder / "straight" / "digits-cnn")
        assert damaged(self.home) == set()
        assert temporary_files(self.home) == []
        return done


@pytest.fixture
def case(prepared: Prepared, request: pytest.FixtureRequest) -> Case:
    return Case(prepared, request.node.name)


def test_disk_that_fills_up_during_training_is_reported(case: Case) -> None:
    """Uses a small disk where one can be mounted, and a file size limit elsewhere."""
    with ExitStack() as stack:
        if can_mount():
            held = case.home.with_name("held")
            case.home.rename(held)
            disk = stack.enter_context(small_disk(case.home, "16m"))
            shutil.copytree(held, case.home, dirs_exist_ok=True)
        child = case.start()
        assert child.until_commits(commit_count(case.home) + 1)
        assert child.stop()
        before = committed_bytes(case.home)
        if can_mount():
            disk.fill()
            remedy = "no space left on the disk; free some and run again"
        else:
            child.limit_files(8 << 10)
            remedy = "run again"
        child.resume()
        case.assert_refused(child, "StorageError", str(case.home) if can_mount() else "", remedy)
        case.assert_kept(before)
        if can_mount():
            disk.free()
        case.assert_finishes()


def test_file_size_limit_is_reported(case: Case) -> None:
    """Needs no mount: the kernel refuses the writes."""
    before = committed_bytes(case.home)
    case.assert_refused(case.start(file_bytes=BETWEEN_BYTES), "StorageError", "ulimit -f", "run again")
    case.assert_kept(before)
    case.assert_finishes()


def test_full_temporary_disk_at_start_is_reported(case: Case) -> None:
    before = committed_bytes(case.home)
    folder = case.notes / "tmp"
    where = [str(folder), "TMPDIR"]
    with ExitStack() as stack:
        if can_mount():
            stack.enter_context(small_disk(folder, "64k"))
            child = case.start(env={"TMPDIR": str(folder)})
        else:
            folder.mkdir()
            child = case.start(env={"TMPDIR": str(folder)}, file_bytes=BETWEEN_BYTES)
        case.assert_refused(child, "StorageError", *(where if can_mount() else ["ulimit -f"]), "run again")
        assert list(folder.glob("baton-*")) == []
    case.assert_kept(before)
    case.assert_finishes()


def test_temporary_disk_that_fills_up_is_reported(case: Case) -> None:
    folder = case.notes / "tmp"
    where = [str(folder), "TMPDIR"]
    with ExitStack() as stack:
        if can_mount():
            disk = stack.enter_context(small_disk(folder, "4m"))
        else:
            folder.mkdir()
        child = case.start(env={"TMPDIR": str(folder)})
        assert child.until_commits(commit_count(case.home) + 1)
        assert child.stop()
        before = committed_bytes(case.home)
        if can_mount():
            disk.fill()
        else:
            child.limit_files(BETWEEN_BYTES)
        child.resume()
        case.assert_refused(child, "StorageError", *(where if can_mount() else ["ulimit -f"]), "run again")
        assert list(folder.glob("baton-*")) == []
    case.assert_kept(before)
    case.assert_finishes()


def test_home_without_write_permission_is_refused(case: Case) -> None:
    before = committed_bytes(case.home)
    folders = [case.home, *(path for path in case.home.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    case.assert_refused(
        case.start(without_root_rights=True),
        f"StoreRefused: {case.home}: no permission to create files",
        "check who owns the folder",
        code=2,
    )
    assert committed_bytes(case.home) == before
    for folder in folders:
        folder.chmod(0o755)
    case.assert_finishes()


def test_read_only_disk_is_refused(case: Case) -> None:
    if not can_mount():
        pytest.skip("no disk can be mounted; test_home_without_write_permission_is_refused does the same")
    held = case.home.with_name("held")
    case.home.rename(held)
    with small_disk(case.home, "16m") as disk:
        shutil.copytree(held, case.home, dirs_exist_ok=True)
        before = committed_bytes(case.home)
        disk.remount("ro")
        case.assert_refused(case.start(), f"StoreRefused: {case.home}", "mounted read-only; make it writable", code=2)
        assert committed_bytes(case.home) == before


def test_write_permission_lost_during_training_is_reported(case: Case) -> None:
    child = case.start(without_root_rights=True)
    assert child.until_commits(commit_count(case.home) + 1)
    assert child.stop()
    before = committed_bytes(case.home)
    folders = [case.home, *(path for path in case.home.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    child.resume()
    case.assert_refused(
        child, "StorageError", str(case.home), "permission denied; check who owns the folder", "run again"
    )
    for folder in folders:
        folder.chmod(0o755)
    case.assert_kept(before)
    case.assert_finishes()


def test_deleted_home_is_not_started_again(case: Case) -> None:
    child = case.start()
    assert child.until_commits(commit_count(case.home) + 1)
    assert child.stop()
    away = case.storage / "moved-away"
    before = committed_bytes(case.home)
    case.home.rename(away)
    child.resume()
    case.assert_refused(child, str(case.home), "gone", "check whether it was moved or its disk is no longer mounted")
    assert not case.home.exists(), "a new run was started in its place"
    case.assert_kept(before, away)
    away.rename(case.home)
    case.assert_finishes()


def test_unmounted_home_is_not_started_again(case: Case) -> None:
    """After `umount` the mount point is an empty folder."""
    child = case.start()
    assert child.until_commits(commit_count(case.home) + 1)
    assert child.stop()
    away = case.storage / "moved-away"
    before = committed_bytes(case.home)
    case.home.rename(away)
    case.home.mkdir()
    child.resume()
    done = child.finish()
    assert done.code in {1, 4}
    assert "Traceback" not in done.stderr
    assert "mounted" in done.stderr.splitlines()[-1]
    assert log_bytes(case.home) == {}, "a new run was started in its place"
    case.assert_kept(before, away)
    shutil.rmtree(case.home)
    away.rename(case.home)
    case.assert_finishes()


@pytest.mark.parametrize("harm", ["torn", "garbage"])
def test_unreadable_newest_entry_is_named(case: Case, harm: str) -> None:
    newest = max((case.home / "log").glob("0*.json"))
    whole = newest.read_bytes()
    newest.write_bytes({"torn": whole[: len(whole) // 2], "garbage": bytes(range(256))}[harm])
    others = {path: path.read_bytes() for path in case.home.rglob("*") if path.is_file()}
    case.assert_refused(case.start(), "RunLogError", str(newest), "restore the file from a backup", code=4)
    assert {path: path.read_bytes() for path in case.home.rglob("*") if path.is_file()} == others
    if harm == "garbage":
        newest.unlink()  # the remedy in the message if there is no backup
        case.assert_finishes()


def test_log_entry_without_read_permission_is_named(case: Case) -> None:
    newest = max((case.home / "log").glob("0*.json"))
    before = committed_bytes(case.home)
    newest.chmod(0)
    case.assert_refused(
        case.start(without_root_rights=True),
        "StorageError",
        str(newest),
        "permission denied; check who owns the folder",
    )
    newest.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    assert committed_bytes(case.home) == before


@pytest.mark.parametrize("number", [0, 3])
def test_lost_log_entry_is_named(case: Case, number: int) -> None:
    lost = case.home / "log" / f"{number:08d}.json"
    before = log_bytes(case.home)
    lost.unlink()
    (case.home / "log" / "HINT").unlink()  # without it the search for the newest entry may stop at the gap
    case.assert_refused(case.start(), "RunLogError", str(lost), "restore it from a backup", code=4)
    assert log_bytes(case.home) == {name: data for name, data in before.items() if name != lost.name}


def test_home_with_a_deleted_log_is_not_started_again(case: Case) -> None:
    shutil.rmtree(case.home / "log")
    files = {path for path in case.home.rglob("*") if path.is_file()}
    case.assert_refused(case.start(), "RunLogError", str(case.home), "no log; restore log/ from a backup", code=4)
    assert {path for path in case.home.rglob("*") if path.is_file()} == files


def test_checkpoint_without_manifest_is_quarantined(case: Case) -> None:
    tip = tip_of(case.home)
    log, before = log_bytes(case.home), committed_bytes(case.home)
    (case.home / tip.path / "manifest.json").unlink()
    done = case.assert_finishes()
    assert f"{tip.path}/manifest.json is missing" in done.stderr
    assert "quarantined" in done.stderr
    assert {name: data for name, data in log_bytes(case.home).items() if name in log} == log
    # The other files of the checkpoint are kept for inspection.
    data = next(path for path in before if path.startswith(f"{tip.path}/ckpt.data"))
    assert (case.home / data).read_bytes() == before[data]


def test_backup_repairs_a_run_without_sound_checkpoints(case: Case) -> None:
    head = head_of(case.home)
    assert head is not None
    held = case.notes / "held"
    for ref in head.retained:
        shutil.copytree(case.home / ref.path, held / ref.path)
        (case.home / ref.path / "ckpt.index").write_bytes(b"torn")
    case.assert_refused(case.start(), "NothingToRestore", "from a backup", head.retained[0].path, code=4)
    shutil.copytree(held, case.home, dirs_exist_ok=True)
    case.assert_finishes()


def test_wall_clock_that_runs_backwards_changes_nothing(case: Case) -> None:
    """Later entries get earlier times, and files have times in other decades. Nothing depends on a time."""
    before = committed_bytes(case.home)
    for number, path in enumerate(sorted(case.home.rglob("*"))):
        seconds = [0, 4_000_000_000][number % 2]
        os.utime(path, (seconds, seconds))
    done = case.assert_finishes(driver=CLOCK_BACK)
    assert "Traceback" not in done.stderr
    case.assert_kept(before)
    entries = entries_of(case.home)
    new = [entry.time for entry in entries[len(before) :]]
    assert any(later.time < earlier.time for earlier, later in pairwise(entries))
    assert all(time.startswith("1985") for time in new)
