"""Verification of remote shards, and a full local disk."""

import errno
import os
from pathlib import Path

import pytest

from baton.tasks.foundation.contracts.dataset import ShardRecord
from baton.tasks.foundation.dataset.shards import VerifiedShards, _fetch, original_read_errors, records_in
from baton.tasks.foundation.errors import DamagedDataset, StorageError
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.foundation.storage.transfers import checksum_bytes
from tests.support.far_storage import FailOnce, FarStorage, bytes_below, content, put_shards, read, wait_for_threads

pytestmark = pytest.mark.usefixtures("temporary")


def full() -> StorageError:
    fault = StorageError("it could not be written")
    fault.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    return fault


def test_wrong_bytes_are_downloaded_again_before_damage(far: FarStorage) -> None:
    (record,) = put_shards(far, [10])
    far.inner.write("s0", b"x" * 10)
    far.after = lambda method, _: far.inner.write("s0", content(0, 10)) if method == "download" else None
    with VerifiedShards(far) as shards:
        assert read(shards.open([record])) == [content(0, 10)]
    assert far.of("download") == ["s0", "s0"]


@pytest.mark.parametrize("there", [b"x" * 10, content(0, 10)[:9], content(0, 10) + b"x"])
def test_damage_names_address_and_both_checksums(far: FarStorage, temporary: Path, there: bytes) -> None:
    (record,) = put_shards(far, [10])
    far.inner.write("s0", there)
    with VerifiedShards(far) as shards, pytest.raises(DamagedDataset) as damaged:
        shards.open([record])
    for part in (f"{far.uri}/s0", record.crc32c, checksum_bytes(there).crc32c, "delete that folder and run again"):
        assert part in str(damaged.value)
    assert far.of("download") == ["s0", "s0"]
    assert bytes_below(temporary) == 0


class Garbling:
    """Return a hook that replaces the file's bytes during each download, with the next of the given ones."""

    def __init__(self, far: FarStorage, name: str, garbled: list[bytes]) -> None:
        self.far, self.name, self.garbled = far, name, garbled
        self.sound = far.inner.read(name)
        far.before, far.after = self.before, self.put_back

    def before(self, method: str, path: str) -> None:
        if method == "download" and path.endswith(self.name):
            self.far.inner.write(self.name, self.garbled.pop(0))

    def put_back(self, method: str, _path: str) -> None:
        if method == "download":
            self.far.inner.write(self.name, self.sound)


def test_valid_shard_damaged_in_transit_is_not_damage(far: FarStorage, temporary: Path) -> None:
    (record,) = put_shards(far, [10])
    Garbling(far, "s0", [b"x" * 10, b"x" * 10])
    with (
        VerifiedShards(far) as shards,
        pytest.raises(StorageError, match=r"s0: damaged in transit, .*the file is intact") as fault,
    ):
        shards.open([record])
    assert "delete" not in str(fault.value)
    assert bytes_below(temporary) == 0


@pytest.mark.parametrize(
    ("second", "error", "expected"),
    [
        (b"0123456x", StorageError, "two reads returned different bytes"),
        (b"x1234567", DamagedDataset, "restore the original file"),
    ],
)
def test_two_reads_decide_about_part_of_a_file(
    far: FarStorage, temporary: Path, second: bytes, error: type[Exception], expected: str
) -> None:
    """A store has no checksum of a part, but valid bytes arrive the same each time."""
    far.inner.write("all", b"01234567")
    stored = checksum_bytes(b"01234567")
    part = ShardRecord(path="memory://elsewhere/all", size=stored.size, crc32c=stored.crc32c, records=1, examples=1)
    Garbling(far, "all", [b"x1234567", second])
    with pytest.raises(error, match=expected):
        _fetch(far, "all", part, temporary / "here")


def test_missing_shard_is_damage(far: FarStorage) -> None:
    records = put_shards(far, [10, 10])
    far.inner.delete("s1")
    with VerifiedShards(far) as shards:
        shards.open(records[:1], upcoming=[records[1:]])
        with pytest.raises(DamagedDataset, match="s1 is missing"):
            shards.open(records[1:])


def test_missing_local_shard_is_reported_when_opened(far: FarStorage, tmp_path: Path) -> None:
    records = put_shards(far, [10, 10])
    (tmp_path / "s0").write_bytes(content(0, 10))
    with VerifiedShards(LocalStorage(tmp_path)) as shards:
        assert shards.open(records[:1], upcoming=[records[1:]]) == [str(tmp_path / "s0")]
        with pytest.raises(DamagedDataset, match="s1 is missing; delete that folder"):
            shards.open(records[1:])


def test_file_deleted_from_the_cache_is_downloaded_again(far: FarStorage) -> None:
    (record,) = put_shards(far, [10])
    for change in (Path.unlink, lambda file: file.write_bytes(b"short")):
        with VerifiedShards(far) as shards:
            change(Path(shards.open([record])[0]))
        with VerifiedShards(far) as shards:
            assert read(shards.open([record])) == [content(0, 10)]
    assert far.of("download") == ["s0", "s0", "s0"]


def test_full_disk_evicts_unused_shards_and_retries(far: FarStorage, temporary: Path) -> None:
    old, in_use, new = put_shards(far, [10, 20, 30])
    with VerifiedShards(far) as before:
        before.open([old])
    with VerifiedShards(far) as shards:
        kept = shards.open([in_use])
        far.before = FailOnce("s2", full())
        assert read(shards.open([new])) == [content(2, 30)]
        assert read(kept) == [content(1, 20)]
        assert bytes_below(temporary) == 50
        far.before = FailOnce("s0", full())
        with pytest.raises(StorageError, match="could not be written"), VerifiedShards(far) as other:
            other.open([old])  # every cached shard is in use
    assert bytes_below(temporary) == 50


def test_read_ahead_retries_after_disk_full(far: FarStorage) -> None:
    records = put_shards(far, [10] * 3)
    with VerifiedShards(far) as shards:
        shards.open(records[:1])
        shards.open(records[1:2])
        far.before = FailOnce("s2", full())
        shards._prefetch([records[2:]])
        wait_for_threads()
        assert read(shards.open(records[2:])) == [content(2, 10)]


def test_range_of_an_external_file_is_verified(far: FarStorage, tmp_path: Path) -> None:
    data = bytes(range(256))
    MemoryStorage("cache-test-elsewhere/deep").write("all.bin", data)
    (tmp_path / "all.bin").write_bytes(data)
    for place in ("memory://cache-test-elsewhere/deep/all.bin", f"{tmp_path}/all.bin"):
        ranges = [data[:100], data[100:101], data[101:]]
        begins = [0, 100, 101]
        records = [
            ShardRecord(path=place, examples=1, begin=begin, size=len(part), crc32c=checksum_bytes(part).crc32c)
            for begin, part in zip(begins, ranges, strict=True)
        ]
        with VerifiedShards(far) as shards:
            assert read(shards.open(records)) == ranges
    assert far.calls == []


def test_complete_local_file_is_used_in_place(far: FarStorage, temporary: Path, tmp_path: Path) -> None:
    file = tmp_path / "whole.bin"
    file.write_bytes(b"whole")
    record = ShardRecord(path=str(file), examples=1, size=5, crc32c=checksum_bytes(b"whole").crc32c)
    with VerifiedShards(far) as shards:
        assert shards.open([record], upcoming=[[record]]) == [str(file)]
    assert list(temporary.iterdir()) == []


def test_changed_external_file_is_never_advised_to_be_deleted(far: FarStorage, tmp_path: Path) -> None:
    file = tmp_path / "others.bin"
    file.write_bytes(b"others!")
    wrong = ShardRecord(path=str(file), examples=1, begin=1, size=5, crc32c="00000000")
    gone = ShardRecord(path=f"{file}.gone", examples=1, size=5, crc32c="00000000")
    cut = ShardRecord(path=str(file), examples=1, begin=5, size=5, crc32c="00000000")
    with VerifiedShards(far) as shards:
        for record, error, expected in (
            (wrong, DamagedDataset, "restore the original file"),
            (gone, DamagedDataset, "is missing; restore the original file"),
            (cut, DamagedDataset, "has 7 bytes, its manifest says 10; restore the original file"),
        ):
            with pytest.raises(error, match=expected) as fault:
                shards.open([record])
            assert "delete" not in str(fault.value)


def test_shard_rewritten_with_equal_size_and_time_is_refused(far: FarStorage, tmp_path: Path) -> None:
    """As a new process would: the one that has verified the file before must not read other values."""
    file = tmp_path / "whole.bin"
    file.write_bytes(b"whole")
    copied = ShardRecord(path="whole.bin", examples=1, size=5, crc32c=checksum_bytes(b"whole").crc32c)
    for record in (copied.model_copy(update={"path": str(file)}), copied):
        file.write_bytes(b"whole")
        before = file.stat()
        with VerifiedShards(far if record.is_external else LocalStorage(tmp_path)) as shards:
            assert read(shards.open([record])) == [b"whole"]
            file.write_bytes(b"WHOLE")
            os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
            with pytest.raises(DamagedDataset, match=r"whole\.bin has 5 bytes and crc32c .*, its manifest says 5"):
                shards.open([record])


@pytest.mark.parametrize("path", ["/proc/self/mem", "mem"])
def test_shard_that_cannot_be_read_is_named(far: FarStorage, path: str) -> None:
    """The kernel answers with EIO; it must not be taken for an error of the model."""
    record = ShardRecord(path=path, examples=1, size=0, crc32c="00000000")
    storage = far if record.is_external else LocalStorage(Path("/proc/self"), guarded=False)
    with (
        VerifiedShards(storage) as shards,
        pytest.raises(StorageError, match=r"^/proc/\w+/mem: cannot be read: Input/output error; check the disk"),
    ):
        shards.open([record])


def test_file_that_tensorflow_cannot_read_is_named(far: FarStorage, tmp_path: Path) -> None:
    file = tmp_path / "whole.bin"
    file.write_bytes(b"whole")
    record = ShardRecord(path=str(file), examples=1, size=5, crc32c=checksum_bytes(b"whole").crc32c)
    with VerifiedShards(far) as shards:
        paths = shards.open([record])
    file.unlink()
    file.mkdir()
    with pytest.raises(StorageError, match=rf"^{file}: cannot be read: .*; check the disk"), original_read_errors():
        list(records_in(paths))
