"""gs:// under network and store faults: operations are retried, reported and never misread."""

import logging
import re
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.tasks.foundation.errors import FileAlreadyThere, FileMissing, StorageError
from baton.tasks.foundation.storage.gcs.connection import RetryPolicy
from baton.tasks.foundation.storage.gcs.storage import CloudStorage
from baton.tasks.foundation.storage.interface import FileStat
from baton.tasks.foundation.storage.transfers import checksum_bytes
from tests.fakes.gcs.faults import FAULTS_OF_ANY_REQUEST
from tests.fakes.gcs.server import FakeGcs, FaultPlan

QUICK = RetryPolicy(total_seconds=20, stall_seconds=0.4, first_wait_seconds=0.01)
LARGE = bytes(range(256)) * (9 << 12)  # 9 MiB: more than one part, and sent by a resumable upload


@pytest.mark.parametrize("fault", FAULTS_OF_ANY_REQUEST)
def test_create_survives_each_fault_once(cloud: FakeGcs, storage: CloudStorage, fault: str) -> None:
    cloud.faults = FaultPlan.on("object.insert", fault)
    storage.create("log/0", b"mine")
    assert cloud.store.bytes("bucket", "some/root/log/0") == b"mine"
    assert len(cloud.fault_run.log) == 1
    cloud.faults = None
    with pytest.raises(FileAlreadyThere):
        storage.create("log/0", b"mine")


@pytest.mark.parametrize("fault", ["response-lost", "duplicate", "reset-after-body", "stall"])
@pytest.mark.parametrize("took_effect", [True, False])
def test_create_with_lost_response_knows_who_won(
    cloud: FakeGcs, storage: CloudStorage, fault: str, took_effect: bool
) -> None:
    """The object may be from the first attempt or from another writer; only the store has the answer."""
    if not took_effect:
        storage.create("log/0", b"theirs")
    cloud.faults = FaultPlan.on("object.insert", fault)
    if took_effect:
        storage.create("log/0", b"ours")
    else:
        with pytest.raises(FileAlreadyThere):
            storage.create("log/0", b"ours")
    assert storage.read("log/0") == (b"ours" if took_effect else b"theirs")


def test_equal_bytes_of_another_writer_are_refused(storage: CloudStorage, cloud: FakeGcs) -> None:
    storage.create("log/0", b"same")
    cloud.faults = FaultPlan.on("object.insert", "response-lost")
    with pytest.raises(FileAlreadyThere):
        storage.create("log/0", b"same")


@pytest.mark.parametrize("compares", [True, False], ids=["refuses", "keeps"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_repeated_upload_corruption_is_an_error(
    cloud: FakeGcs,
    storage: CloudStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    large: bool,
    compares: bool,
) -> None:
    (tmp_path / "file").write_bytes(LARGE if large else b"small")
    if not compares:  # without a checksum, the store keeps what arrives
        monkeypatch.setattr("baton.tasks.foundation.storage.gcs.uploads._base64_of", lambda _: None)
    message = (
        "the store received other bytes than were sent"
        if compares
        else r"sent \d+ bytes with crc32c \w+, the store has"
    )
    cloud.faults = FaultPlan.on("", "corrupt-upload", times=None)
    with pytest.raises(StorageError, match=f"some/root/x: {message}.*4 times"):
        storage.upload(tmp_path / "file", "x")
    with pytest.raises(StorageError, match=message):
        storage.create("log/0", b"entry")
    assert "some/root/log/0" not in cloud.store.names("bucket"), "corrupt bytes must not be readable"
    assert len(cloud.fault_run.log) < 12


def test_store_refuses_bytes_corrupted_in_transit(cloud: FakeGcs, storage: CloudStorage) -> None:
    """The store itself refuses corrupt bytes, before anyone can read them."""
    cloud.faults = FaultPlan.on("object.insert", "corrupt-upload")
    storage.create("log/0", b"mine")
    assert cloud.tally.statuses[400] == 1
    assert storage.read("log/0") == b"mine"


def test_memory_does_not_grow_with_file_size(cloud: FakeGcs, patient: CloudStorage, tmp_path: Path) -> None:
    size = 96 << 20
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    patient.exists("connected")
    tracemalloc.start()
    try:
        sent = patient.upload(tmp_path / "large", "large")
        _, up = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The fake keeps the object in this process, so its copy is not counted.
    assert up < size + (48 << 20)
    tracemalloc.start()
    try:
        assert patient.download("large", tmp_path / "here") == sent
        _, down = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert down < 72 << 20
    assert cloud.counts["GET", "object.media"] == 12


def test_nothing_is_cached(cloud: FakeGcs, storage: CloudStorage) -> None:
    storage.write("folder/a", b"1")
    assert list(storage.files("folder")) == ["folder/a"]
    cloud.store.put("bucket", "some/root/folder/b", b"2")
    cloud.store.put("bucket", "some/root/folder/a", b"3")
    assert sorted(storage.files("folder")) == ["folder/a", "folder/b"]
    assert storage.read("folder/a") == b"3"


def test_listing_of_many_pages_is_complete(cloud: FakeGcs, storage: CloudStorage) -> None:
    for number in range(2345):
        cloud.store.put("bucket", f"some/root/log/{number:08d}.json", b"")
    cloud.store.put("bucket", "some/root/log/", b"")  # the Cloud console's marker of a folder
    cloud.store.put("bucket", "some/root/logs/foreign", b"")
    assert sorted(storage.files("log")) == [f"log/{number:08d}.json" for number in range(2345)]
    assert sorted(storage.folders("")) == ["log", "logs"]
    assert cloud.count("object.list") == 4


def test_copy_moves_no_bytes_out_of_the_bucket(cloud: FakeGcs, storage: CloudStorage) -> None:
    storage.write("x", LARGE)
    cloud.service.rewrite_bytes_per_call = 4 << 20
    storage.copy("x", "y/z")
    assert cloud.tally.bytes_out < 10_000
    assert cloud.tally.bytes_in < 1.01 * len(LARGE)
    assert storage.stat("y/z") == storage.stat("x") == checksum_bytes(LARGE)
    with pytest.raises(FileMissing):
        storage.copy("nothing", "y")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="baton.tasks.foundation.storage"):
        yield caplog


def test_each_wait_is_logged(cloud: FakeGcs, storage: CloudStorage, warnings: pytest.LogCaptureFixture) -> None:
    cloud.faults = FaultPlan.on("object.insert", "status", times=3, code=503)
    storage.write("x", b"1")
    assert len(warnings.messages) == 3
    for number, line in enumerate(warnings.messages, start=2):
        assert re.fullmatch(rf"gs://bucket/some/root/x: .*503.*; retrying in \d\.\d s \(attempt {number}\)", line), line


def test_one_time_limit_covers_all_attempts(cloud: FakeGcs, warnings: pytest.LogCaptureFixture) -> None:
    policy = RetryPolicy(total_seconds=0.3, stall_seconds=0.4, first_wait_seconds=0.05)
    cloud.faults = FaultPlan.on("", "status", code=503, times=None)
    with pytest.raises(
        StorageError,
        match=r"gs://bucket/x: .*503.*gave up after \d+ attempts in 0\.\d s \(BATON_STORAGE_PATIENCE_SECONDS=0\.3\)",
    ) as error:
        CloudStorage("bucket", "", policy).read("x")
    assert type(error.value) is StorageError
    assert warnings.messages


def test_best_effort_gives_up_early_without_warnings(cloud: FakeGcs, warnings: pytest.LogCaptureFixture) -> None:
    """A hint or a heartbeat must not delay a process that has to stop."""
    storage = CloudStorage("bucket", "", RetryPolicy(first_wait_seconds=0.01))
    cloud.faults = FaultPlan.on("", "status", code=503, times=None)
    with pytest.raises(StorageError, match="gave up after"):
        storage.with_deadline(0.2).write("log/HINT", b"1")
    assert warnings.messages == []
    cloud.faults = None
    storage.with_deadline(0.2).at("log").write("HINT", b"1")
    assert storage.read("log/HINT") == b"1"


def test_unreachable_store_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    nowhere = CloudStorage("bucket", "", RetryPolicy(total_seconds=0.2, stall_seconds=0.2, first_wait_seconds=0.05))
    with pytest.raises(StorageError, match=r"gs://bucket/x: Cannot connect to host .*gave up after"):
        nowhere.exists("x")


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
def test_invalid_patience_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    from baton.tasks.foundation.errors import InvalidInput

    monkeypatch.setenv("BATON_STORAGE_PATIENCE_SECONDS", value)
    with pytest.raises(InvalidInput, match=f"BATON_STORAGE_PATIENCE_SECONDS={re.escape(value)} is not a number"):
        RetryPolicy.of_environment()


def test_one_of_sixteen_racing_creates_wins_despite_faults(cloud: FakeGcs) -> None:
    cloud.faults = FaultPlan.random(
        11,
        {"status": 0.05, "response-lost": 0.1, "duplicate": 0.1, "reset-after-body": 0.05, "reset-in-response": 0.05},
    )
    writers, rounds = 16, 50
    begin = threading.Barrier(writers, timeout=120)
    won: dict[int, list[int]] = {number: [] for number in range(rounds)}
    errors: list[BaseException] = []

    def race(writer: int) -> None:
        try:
            storage = CloudStorage("bucket", "race", QUICK)
            for number in range(rounds):
                begin.wait()
                try:
                    storage.create(f"log/{number:08d}.json", b"the same bytes of all")
                except FileAlreadyThere:
                    continue
                won[number].append(writer)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            begin.abort()

    threads = [threading.Thread(target=race, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert {number: len(winners) for number, winners in won.items()} == dict.fromkeys(range(rounds), 1)
    assert len(cloud.fault_run.log) > 100


def test_stat_downloads_no_bytes(cloud: FakeGcs, storage: CloudStorage) -> None:
    storage.write("x", b"123456789")
    assert storage.stat("x") == FileStat(size=9, crc32c="e3069283")
    assert cloud.count("object.media") == 0
