"""gs:// when the network and the store misbehave: told, tried again, and never taken for what it is not."""

import logging
import os
import re
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.foundation.errors import FileAlreadyThere, FileMissing, StorageError
from tasks.foundation.storage.base import Stored
from tasks.foundation.storage.checksum import checksum_bytes
from tasks.foundation.storage.gcs.retrying import RetryPolicy
from tasks.foundation.storage.gcs.storage import CloudStorage
from tests.fakes.gcs.fake_gcs import FakeGcs, FaultPlan

QUICK = RetryPolicy(total_seconds=20, stall_seconds=0.4, first_wait_seconds=0.01)
LARGE = bytes(range(256)) * (9 << 12)  # 9 MiB: more than one part, and sent by a resumable upload
EVERY_FAULT_OF_A_REQUEST = [
    "status",
    "reset-before-body",
    "reset-in-body",
    "reset-after-body",
    "answer-lost",
    "reset-in-answer",
    "stall",
    "duplicate",
    "expired-token",
    "corrupt-upload",
    "unread",
]


@pytest.fixture
def storage(cloud: FakeGcs) -> CloudStorage:  # noqa: ARG001 - its address is in the environment
    return CloudStorage("bucket", "some/root", QUICK)


def scripted(kind: str, fault: str, *, times: int = 1, **settings: object) -> FaultPlan:
    return FaultPlan.scripted([{"match": {"kind": kind}, "fault": fault, "times": times, **settings}])


# ------------------------------------------------------------------------------------------------ writes


@pytest.mark.parametrize("fault", EVERY_FAULT_OF_A_REQUEST)
def test_a_create_that_meets_a_fault_is_made_once(cloud: FakeGcs, storage: CloudStorage, fault: str) -> None:
    cloud.faults = scripted("object.insert", fault)
    storage.create("log/0", b"mine")
    assert cloud.store.bytes("bucket", "some/root/log/0") == b"mine"
    assert len(cloud.fault_run.log) == 1
    cloud.faults = None
    with pytest.raises(FileAlreadyThere):
        storage.create("log/0", b"mine")


@pytest.mark.parametrize("fault", ["answer-lost", "duplicate", "reset-after-body", "stall"])
@pytest.mark.parametrize("took_effect", [True, False])
def test_a_create_without_an_answer_that_another_won_is_refused(
    cloud: FakeGcs, storage: CloudStorage, fault: str, took_effect: bool
) -> None:
    """Our first try may have been the one that won, or another writer's: only the store knows."""
    if not took_effect:
        storage.create("log/0", b"theirs")
    cloud.faults = scripted("object.insert", fault)
    if took_effect:
        storage.create("log/0", b"ours")
    else:
        with pytest.raises(FileAlreadyThere):
            storage.create("log/0", b"ours")
    assert storage.read("log/0") == (b"ours" if took_effect else b"theirs")


def test_the_same_bytes_of_another_are_not_ours(storage: CloudStorage, cloud: FakeGcs) -> None:
    storage.create("log/0", b"same")
    cloud.faults = scripted("object.insert", "answer-lost")
    with pytest.raises(FileAlreadyThere):
        storage.create("log/0", b"same")


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        *(
            ("upload.initiate", fault)
            for fault in EVERY_FAULT_OF_A_REQUEST
            if fault not in {"corrupt-upload", "unread"}
        ),
        *(("upload.chunk", fault) for fault in [*EVERY_FAULT_OF_A_REQUEST, "short-chunk"]),
    ],
)
def test_a_large_upload_goes_on_where_it_broke_off(
    cloud: FakeGcs, storage: CloudStorage, tmp_path: Path, kind: str, fault: str
) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    cloud.faults = scripted(kind, fault, fraction=0.7)
    assert storage.upload(tmp_path / "large", "ckpt.data") == checksum_bytes(LARGE)
    assert cloud.store.bytes("bucket", "some/root/ckpt.data") == LARGE
    assert len(cloud.fault_run.log) == 1
    if (kind, fault) == ("upload.chunk", "reset-in-body"):
        assert cloud.tally.bytes_in < 1.5 * len(LARGE), "it was sent from the beginning again"


def test_a_store_that_takes_little_at_a_time_gets_it_all(cloud: FakeGcs, storage: CloudStorage, tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    cloud.faults = scripted("upload.chunk", "short-chunk", times=9, fraction=0.2)
    assert storage.upload(tmp_path / "large", "ckpt.data") == checksum_bytes(LARGE)
    assert cloud.store.bytes("bucket", "some/root/ckpt.data") == LARGE
    assert len(cloud.fault_run.log) == 9
    assert cloud.count("upload.initiate") == 1


def test_a_file_that_vanishes_on_its_way_up_is_named(
    cloud: FakeGcs, storage: CloudStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "large"
    file.write_bytes(LARGE)
    monkeypatch.setattr(
        "tasks.foundation.storage.gcs.storage.checksum_file", lambda _: (file.unlink(), checksum_bytes(LARGE))[1]
    )
    with pytest.raises(StorageError, match=r"large: cannot be read any more \(No such file"):
        storage.upload(file, "ckpt.data")
    assert cloud.count("upload.chunk") <= 1


def test_an_upload_whose_session_is_forgotten_begins_anew(
    cloud: FakeGcs, storage: CloudStorage, tmp_path: Path
) -> None:
    (tmp_path / "large").write_bytes(LARGE)
    cloud.faults = FaultPlan.scripted(
        [
            {"match": {"kind": "upload.chunk"}, "fault": "reset-in-body", "times": 1},
            {"match": {"kind": "upload.query"}, "fault": "status", "code": 410, "times": 1},
        ]
    )
    storage.upload(tmp_path / "large", "ckpt.data")
    assert cloud.store.bytes("bucket", "some/root/ckpt.data") == LARGE
    assert cloud.count("upload.initiate") == 2


@pytest.mark.parametrize("compares", [True, False], ids=["refuses", "keeps"])
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_a_store_that_always_has_other_bytes_is_told_of_soon(
    cloud: FakeGcs,
    storage: CloudStorage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    large: bool,
    compares: bool,
) -> None:
    (tmp_path / "file").write_bytes(LARGE if large else b"small")
    if not compares:  # it is sent no checksum, so it keeps what arrived
        for module in ("objects", "resumable_upload"):
            monkeypatch.setattr(f"tasks.foundation.storage.gcs.{module}.base64_of", lambda _: None)
    said = "the store got other bytes than were sent" if compares else r"sent \d+ bytes with crc32c \w+, the store has"
    cloud.faults = FaultPlan.scripted([{"match": {"kind": ""}, "fault": "corrupt-upload", "times": None}])
    with pytest.raises(StorageError, match=f"some/root/x: {said}.*4 times"):
        storage.upload(tmp_path / "file", "x")
    with pytest.raises(StorageError, match=said):
        storage.create("log/0", b"entry")
    assert "some/root/log/0" not in cloud.store.names("bucket"), "nobody shall ever read it"
    assert len(cloud.fault_run.log) < 12


def test_checksums_travel_with_the_bytes(
    cloud: FakeGcs, storage: CloudStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was garbled on the way is refused by the store itself, before anybody can see it."""
    from tasks.foundation.storage.gcs import objects

    wrong = iter([checksum_bytes(b"other"), *[checksum_bytes(b"mine")] * 9])
    monkeypatch.setattr(objects, "checksum_bytes", lambda _: next(wrong))
    storage.create("log/0", b"mine")
    assert cloud.tally.statuses[400] == 1
    assert storage.read("log/0") == b"mine"


# ------------------------------------------------------------------------------------------------ reads


@pytest.mark.parametrize(
    "fault",
    ["status", "reset-before-body", "reset-in-answer", "stall", "truncate", "corrupt-download", "expired-token"],
)
def test_a_read_is_tried_again_until_it_is_right(cloud: FakeGcs, storage: CloudStorage, fault: str) -> None:
    storage.write("x", b"content" * 1000)
    cloud.faults = scripted("object.media", fault)
    assert storage.read("x") == b"content" * 1000
    assert len(cloud.fault_run.log) == 1


def test_a_quietly_truncated_read_is_noticed(cloud: FakeGcs, storage: CloudStorage, tmp_path: Path) -> None:
    storage.write("x", b"content" * 1000)
    cloud.faults = scripted("object.media", "truncate-quietly")
    assert storage.read("x") == b"content" * 1000
    cloud.faults = scripted("object.media", "truncate-quietly")
    assert storage.download("x", tmp_path / "here") == checksum_bytes(b"content" * 1000)


def test_a_corrupted_download_says_what_arrived(cloud: FakeGcs, storage: CloudStorage, tmp_path: Path) -> None:
    """Of a part there is no checksum to compare with, so whoever has a manifest compares the whole."""
    storage.write("x", LARGE)
    cloud.faults = scripted("object.media", "corrupt-download")
    arrived = storage.download("x", tmp_path / "here")
    assert arrived == checksum_bytes((tmp_path / "here").read_bytes()) != checksum_bytes(LARGE)
    assert storage.stat("x") == checksum_bytes(LARGE)


def test_a_store_that_garbles_each_read_is_told_of_soon(cloud: FakeGcs, storage: CloudStorage) -> None:
    storage.write("x", b"content")
    cloud.faults = FaultPlan.scripted([{"match": {"kind": "object.media"}, "fault": "corrupt-download", "times": None}])
    with pytest.raises(StorageError, match=r"x: .*another checksum than the store says"):
        storage.read("x")
    assert len(cloud.fault_run.log) == 4


def test_a_large_file_comes_down_in_parts_and_memory_does_not_grow_with_it(
    cloud: FakeGcs, storage: CloudStorage, tmp_path: Path
) -> None:
    size = 96 << 20
    with (tmp_path / "large").open("wb") as file:
        file.truncate(size)
    cloud.service.md5 = False
    storage.exists("connected")
    tracemalloc.start()
    try:
        sent = storage.upload(tmp_path / "large", "large")
        _, up = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # The fake keeps the object in this very process: its copy is not the store's.
    assert up < size + (48 << 20)
    tracemalloc.start()
    try:
        assert storage.download("large", tmp_path / "here") == sent
        _, down = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert down < 40 << 20
    assert cloud.counts["GET", "object.media"] == 12


def test_nothing_is_remembered_of_what_was_there(cloud: FakeGcs, storage: CloudStorage) -> None:
    storage.write("folder/a", b"1")
    assert list(storage.files("folder")) == ["folder/a"]
    cloud.store.put("bucket", "some/root/folder/b", b"2")
    cloud.store.put("bucket", "some/root/folder/a", b"3")
    assert sorted(storage.files("folder")) == ["folder/a", "folder/b"]
    assert storage.read("folder/a") == b"3"


def test_a_listing_of_many_pages_is_whole(cloud: FakeGcs, storage: CloudStorage) -> None:
    for number in range(2345):
        cloud.store.put("bucket", f"some/root/log/{number:08d}.json", b"")
    cloud.store.put("bucket", "some/root/log/", b"")  # the console's mark of a folder
    cloud.store.put("bucket", "some/root/logs/foreign", b"")
    assert sorted(storage.files("log")) == [f"log/{number:08d}.json" for number in range(2345)]
    assert sorted(storage.folders("")) == ["log", "logs"]
    assert cloud.count("object.list") == 4


def test_deleting_a_folder_leaves_what_is_named_alike(cloud: FakeGcs, storage: CloudStorage) -> None:
    for path in ("a/1", "a/b/2", "ab/3", "a.json"):
        storage.write(path, b"x")
    cloud.faults = FaultPlan.random(3, {"status": 0.3, "answer-lost": 0.2})
    storage.delete("a")
    cloud.faults = None
    assert sorted(storage.files("")) == ["a.json", "ab/3"]


def test_a_copy_stays_in_the_bucket(cloud: FakeGcs, storage: CloudStorage) -> None:
    storage.write("x", LARGE)
    cloud.service.rewrite_bytes_per_call = 4 << 20
    storage.copy("x", "y/z")
    assert cloud.tally.bytes_out < 10_000
    assert cloud.tally.bytes_in < 1.01 * len(LARGE)
    assert storage.stat("y/z") == storage.stat("x") == checksum_bytes(LARGE)
    with pytest.raises(FileMissing):
        storage.copy("nothing", "y")


# ------------------------------------------------------------------------------------------------ waits


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="tasks.foundation.storage"):
        yield caplog


def test_each_wait_is_logged(cloud: FakeGcs, storage: CloudStorage, told: pytest.LogCaptureFixture) -> None:
    cloud.faults = scripted("object.insert", "status", times=3, code=503)
    storage.write("x", b"1")
    assert len(told.messages) == 3
    for number, line in enumerate(told.messages, start=2):
        assert re.fullmatch(rf"gs://bucket/some/root/x: .*503.*; trying again in \d\.\d s \(try {number}\)", line), line


def test_there_is_one_limit_on_all_tries_together(cloud: FakeGcs, told: pytest.LogCaptureFixture) -> None:
    impatient = CloudStorage("bucket", "", RetryPolicy(total_seconds=0.3, stall_seconds=0.4, first_wait_seconds=0.05))
    cloud.faults = FaultPlan.scripted([{"match": {"kind": ""}, "fault": "status", "code": 503, "times": None}])
    with pytest.raises(
        StorageError,
        match=r"gs://bucket/x: .*503.*given up after \d+ tries in 0\.\d s \(BATON_STORAGE_PATIENCE_SECONDS is 0\.3\)",
    ) as fault:
        impatient.read("x")
    assert fault.value.retryable
    assert told.messages


def test_what_is_not_worth_waiting_for_is_given_up_soon_and_silently(
    cloud: FakeGcs, told: pytest.LogCaptureFixture
) -> None:
    """A hint, or a sign of life: the process must not be held up by it when it has to go."""
    patient = CloudStorage("bucket", "", RetryPolicy(first_wait_seconds=0.01))
    cloud.faults = FaultPlan.scripted([{"match": {"kind": ""}, "fault": "status", "code": 503, "times": None}])
    with pytest.raises(StorageError, match="given up after"):
        patient.with_deadline(0.2).write("log/HINT", b"1")
    assert told.messages == []
    cloud.faults = None
    patient.with_deadline(0.2).at("log").write("HINT", b"1")
    assert patient.read("log/HINT") == b"1"


def test_an_unreachable_store_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    nowhere = CloudStorage("bucket", "", RetryPolicy(total_seconds=0.2, stall_seconds=0.2, first_wait_seconds=0.05))
    with pytest.raises(StorageError, match=r"gs://bucket/x: Cannot connect to host .*given up after"):
        nowhere.exists("x")


@pytest.mark.parametrize("value", ["soon", "0", "-1", "nan", "inf"])
def test_a_patience_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    from tasks.foundation.errors import InvalidInput

    monkeypatch.setenv("BATON_STORAGE_PATIENCE_SECONDS", value)
    with pytest.raises(InvalidInput, match=f"BATON_STORAGE_PATIENCE_SECONDS={re.escape(value)} is no number"):
        RetryPolicy.of_environment()


# ------------------------------------------------------------------------------------------------ rivals


def test_of_sixteen_that_race_through_faults_one_wins_each_of_fifty_rounds(cloud: FakeGcs) -> None:
    cloud.faults = FaultPlan.random(
        11, {"status": 0.05, "answer-lost": 0.1, "duplicate": 0.1, "reset-after-body": 0.05, "reset-in-answer": 0.05}
    )
    writers, rounds = 16, 50
    begin = threading.Barrier(writers, timeout=120)
    won: dict[int, list[int]] = {number: [] for number in range(rounds)}
    faults: list[BaseException] = []

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
        except BaseException as fault:  # noqa: BLE001 - raised again below
            faults.append(fault)
            begin.abort()

    threads = [threading.Thread(target=race, args=(writer,)) for writer in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert {number: len(winners) for number, winners in won.items()} == dict.fromkeys(range(rounds), 1)
    assert len(cloud.fault_run.log) > 100


def test_only_a_local_server_changes_what_gcsfs_is_told(monkeypatch: pytest.MonkeyPatch, cloud: FakeGcs) -> None:
    from tasks.foundation.storage.gcs.connection import connect

    monkeypatch.delenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", raising=False)
    files = connect()
    assert files._location == cloud.url
    assert os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] == "false"
    assert files.credentials.credentials is None
    assert connect() is files


def test_stat_asks_and_reads_nothing(cloud: FakeGcs, storage: CloudStorage) -> None:
    storage.write("x", b"123456789")
    assert storage.stat("x") == Stored(size=9, crc32c="e3069283")
    assert cloud.count("object.media") == 0
