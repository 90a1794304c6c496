"""Homes that are full, locked, gone or damaged: a clear word, nothing lost, and after the repair the same bytes."""

import errno
import os
import shutil
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.checkout import CHECKOUT
from tests.support.disks import may_mount, small_disk
from tests.support.homes import (
    commits_of,
    committed_bytes,
    damaged,
    entries_of,
    head_of,
    log_bytes,
    temporary_files,
    tip_of,
    told_by,
)
from tests.support.shipped_runs import Finished
from tests.support.training_child import Child

pytestmark = pytest.mark.slow

# So long that a run in its middle has still some way to go; as many commits as make a log with all kinds of entries.
RUN = [
    "train.steps=600",
    "train.segment_steps=50",
    "train.log_every_steps=25",
    "evaluate.every_steps=200",
    "checkpoint.keep_last=2",
    "model.options.width=8",
]
HALF = 300
# More than an entry of the log takes, less than a checkpoint of that width.
BETWEEN_BYTES = 40 << 10
CLOCK_BACK = CHECKOUT / "tests" / "support" / "run_with_clock_back.py"


@dataclass(frozen=True)
class Prepared:
    """A run to its end, and the same run half way."""

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
    """A copy of the half-way run, and what is to be said of it in the end."""

    def __init__(self, prepared: Prepared, name: str) -> None:
        self.prepared = prepared
        self.notes = prepared.folder / name
        self.notes.mkdir()
        self.storage = self.notes / "storage"
        shutil.copytree(prepared.half, self.storage)
        self.home = self.storage / "digits-cnn"

    def start(self, **settings: object) -> Child:
        return Child("digits", self.storage, extra=RUN, notes=self.notes, **settings)  # type: ignore[arg-type]

    def refused(self, child: Child, *texts: str, code: int = 1) -> None:
        """It ended with one clear message, and not with a traceback."""
        done = child.finish(code)
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.stderr[-3000:]
        assert done.stderr.rstrip().splitlines()[-1] == errors[0]
        for text in texts:
            assert text in errors[0], errors[0]
        assert "Traceback" not in done.stderr
        assert len(errors[0]) < 800

    def kept(self, before: dict[str, bytes], home: Path | None = None) -> None:
        """Every byte that was committed before is as it was, unless its checkpoint was retired in order since."""
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

    def ends_well(self, **settings: object) -> Finished:
        """Go on to the end; it is the end of the straight run."""
        done = self.start(**settings).finish(0)
        assert done.result["state_digest"] == self.prepared.straight.result["state_digest"]
        assert done.result["metrics"] == self.prepared.straight.result["metrics"]
        assert told_by(self.home) == told_by(self.prepared.folder / "straight" / "digits-cnn")
        assert damaged(self.home) == set()
        assert temporary_files(self.home) == []
        return done


@pytest.fixture
def case(prepared: Prepared, request: pytest.FixtureRequest) -> Case:
    return Case(prepared, request.node.name)


def test_a_disk_that_fills_up_in_the_middle(case: Case) -> None:
    """A real full disk where one can be mounted; elsewhere a limit to the size of files, which no disk has more of."""
    with ExitStack() as stack:
        if may_mount():
            held = case.home.with_name("held")
            case.home.rename(held)
            disk = stack.enter_context(small_disk(case.home, "16m"))
            shutil.copytree(held, case.home, dirs_exist_ok=True)
        child = case.start()
        assert child.until_commits(commits_of(case.home) + 1)
        assert child.stop()
        before = committed_bytes(case.home)
        if may_mount():
            disk.fill()
            said = "no space left on the disk; free some and run again"
        else:
            child.limit_files(8 << 10)
            said = "run again"
        child.go_on()
        case.refused(child, "StorageError", str(case.home) if may_mount() else "", said)
        case.kept(before)
        if may_mount():
            disk.free()
        case.ends_well()


def test_files_that_may_not_grow(case: Case) -> None:
    """Needs no mount: the kernel refuses to write more, to TensorFlow and to Baton alike."""
    before = committed_bytes(case.home)
    case.refused(case.start(file_bytes=BETWEEN_BYTES), "StorageError", os.strerror(errno.EFBIG), "run again")
    case.kept(before)
    case.ends_well()


def test_no_room_for_temporary_files(case: Case) -> None:
    before = committed_bytes(case.home)
    folder = case.notes / "tmp"
    with ExitStack() as stack:
        if may_mount():
            stack.enter_context(small_disk(folder, "64k"))
            child = case.start(env={"TMPDIR": str(folder)})
        else:
            folder.mkdir()
            child = case.start(env={"TMPDIR": str(folder)}, file_bytes=BETWEEN_BYTES)
        case.refused(child, "StorageError", str(folder), "TMPDIR", "run again")
        assert list(folder.glob("baton-*")) == []
    case.kept(before)
    case.ends_well()


def test_temporary_files_that_find_no_more_room(case: Case) -> None:
    folder = case.notes / "tmp"
    with ExitStack() as stack:
        if may_mount():
            disk = stack.enter_context(small_disk(folder, "4m"))
        else:
            folder.mkdir()
        child = case.start(env={"TMPDIR": str(folder)})
        assert child.until_commits(commits_of(case.home) + 1)
        assert child.stop()
        before = committed_bytes(case.home)
        if may_mount():
            disk.fill()
        else:
            child.limit_files(BETWEEN_BYTES)
        child.go_on()
        case.refused(child, "StorageError", str(folder), "TMPDIR", "run again")
        assert list(folder.glob("baton-*")) == []
    case.kept(before)
    case.ends_well()


def test_a_home_that_may_only_be_read(case: Case) -> None:
    before = committed_bytes(case.home)
    folders = [case.home, *(path for path in case.home.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    case.refused(
        case.start(obedient=True), "StorageError", str(case.home), "permission denied; see who owns the folder", "again"
    )
    assert committed_bytes(case.home) == before
    for folder in folders:
        folder.chmod(0o755)
    case.ends_well()


def test_a_disk_that_may_only_be_read(case: Case) -> None:
    if not may_mount():
        # The same refusal from the same places, by the folders' modes.
        pytest.skip("no disk can be mounted here; test_a_home_that_may_only_be_read shows the same by permissions")
    held = case.home.with_name("held")
    case.home.rename(held)
    with small_disk(case.home, "16m") as disk:
        shutil.copytree(held, case.home, dirs_exist_ok=True)
        before = committed_bytes(case.home)
        disk.remount("ro")
        case.refused(case.start(), "StorageError", str(case.home), "mounted read-only; make it writable and run again")
        assert committed_bytes(case.home) == before
        disk.remount("rw")
        case.ends_well()


def test_permission_that_is_lost_in_the_middle(case: Case) -> None:
    child = case.start(obedient=True)
    assert child.until_commits(commits_of(case.home) + 1)
    assert child.stop()
    before = committed_bytes(case.home)
    folders = [case.home, *(path for path in case.home.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    child.go_on()
    case.refused(child, "StorageError", str(case.home), "permission denied; see who owns the folder", "run again")
    for folder in folders:
        folder.chmod(0o755)
    case.kept(before)
    case.ends_well()


def test_a_home_that_vanishes_in_the_middle_is_not_begun_anew(case: Case) -> None:
    child = case.start()
    assert child.until_commits(commits_of(case.home) + 1)
    assert child.stop()
    away = case.storage / "moved-away"
    before = committed_bytes(case.home)
    case.home.rename(away)
    child.go_on()
    case.refused(child, str(case.home), "gone", "see whether it was moved or its disk is no longer mounted")
    assert not case.home.exists(), "something was begun in its place"
    case.kept(before, away)
    away.rename(case.home)
    case.ends_well()


def test_a_disk_that_is_unmounted_in_the_middle_is_not_begun_anew(case: Case) -> None:
    """What is left then is an empty folder, the mount point."""
    child = case.start()
    assert child.until_commits(commits_of(case.home) + 1)
    assert child.stop()
    away = case.storage / "moved-away"
    before = committed_bytes(case.home)
    case.home.rename(away)
    case.home.mkdir()
    child.go_on()
    done = child.finish()
    assert done.code in {1, 4}
    assert "Traceback" not in done.stderr
    assert "mounted" in done.stderr.splitlines()[-1]
    assert log_bytes(case.home) == {}, "something was begun in its place"
    case.kept(before, away)
    shutil.rmtree(case.home)
    away.rename(case.home)
    case.ends_well()


@pytest.mark.parametrize("harm", ["torn", "garbage"])
def test_a_newest_entry_that_cannot_be_read(case: Case, harm: str) -> None:
    newest = max((case.home / "log").glob("0*.json"))
    whole = newest.read_bytes()
    newest.write_bytes({"torn": whole[: len(whole) // 2], "garbage": bytes(range(256))}[harm])
    others = {path: path.read_bytes() for path in case.home.rglob("*") if path.is_file()}
    case.refused(case.start(), "RunLogError", str(newest), "restore the file from a backup", code=4)
    assert {path: path.read_bytes() for path in case.home.rglob("*") if path.is_file()} == others
    if harm == "torn":
        newest.write_bytes(whole)
    else:
        newest.unlink()  # what the message says to do without a backup
    case.ends_well()


def test_a_log_entry_that_may_not_be_read(case: Case) -> None:
    newest = max((case.home / "log").glob("0*.json"))
    before = committed_bytes(case.home)
    newest.chmod(0)
    case.refused(case.start(obedient=True), "StorageError", str(newest), "permission denied; see who owns the folder")
    newest.chmod(stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
    assert committed_bytes(case.home) == before
    case.ends_well()


@pytest.mark.parametrize("number", [0, 3])
def test_a_log_that_has_lost_an_entry(case: Case, number: int) -> None:
    lost = case.home / "log" / f"{number:08d}.json"
    before = log_bytes(case.home)
    held = lost.rename(case.notes / "held")
    (case.home / "log" / "HINT").unlink()  # without it the search for the newest entry may stop at the gap
    case.refused(case.start(), "RunLogError", str(lost), "restore it from a backup", code=4)
    assert log_bytes(case.home) == {name: data for name, data in before.items() if name != lost.name}
    held.rename(lost)
    case.ends_well()


def test_a_log_that_is_gone_altogether_is_not_begun_anew(case: Case) -> None:
    held = (case.home / "log").rename(case.notes / "held")
    files = {path for path in case.home.rglob("*") if path.is_file()}
    case.refused(case.start(), "RunLogError", str(case.home), "no log; restore log/ from a backup", code=4)
    assert {path for path in case.home.rglob("*") if path.is_file()} == files
    shutil.rmtree(case.home / "log", ignore_errors=True)
    held.rename(case.home / "log")
    case.ends_well()


def test_a_manifest_that_is_missing(case: Case) -> None:
    tip = tip_of(case.home)
    log, before = log_bytes(case.home), committed_bytes(case.home)
    (case.home / tip.path / "manifest.json").unlink()
    done = case.ends_well()
    assert f"{tip.path}/manifest.json is missing" in done.stderr
    assert "quarantined" in done.stderr
    assert {name: data for name, data in log_bytes(case.home).items() if name in log} == log
    # What is left of it stays for whoever wants to look.
    data = next(path for path in before if path.startswith(f"{tip.path}/ckpt.data"))
    assert (case.home / data).read_bytes() == before[data]


def test_a_backup_is_all_that_is_needed_when_every_checkpoint_is_damaged(case: Case) -> None:
    head = head_of(case.home)
    assert head is not None
    held = case.notes / "held"
    for ref in head.retained:
        shutil.copytree(case.home / ref.path, held / ref.path)
        (case.home / ref.path / "ckpt.index").write_bytes(b"torn")
    case.refused(case.start(), "NothingToRestore", "from a backup", head.retained[0].path, code=4)
    shutil.copytree(held, case.home, dirs_exist_ok=True)
    case.ends_well()


def test_a_clock_that_goes_back(case: Case) -> None:
    """Entries become older as their numbers grow, and every file is from another century: nothing reads a time."""
    before = committed_bytes(case.home)
    for number, path in enumerate(sorted(case.home.rglob("*"))):
        seconds = [0, 4_000_000_000][number % 2]
        os.utime(path, (seconds, seconds))
    done = case.ends_well(driver=CLOCK_BACK)
    assert "Traceback" not in done.stderr
    case.kept(before)
    entries = entries_of(case.home)
    new = [entry.time for entry in entries[len(before) :]]
    assert any(later.time < earlier.time for earlier, later in pairwise(entries))
    assert all(time.startswith("1985") for time in new)
