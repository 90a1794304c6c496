"""A part of known length is shuffled as a whole, through a temporary file."""

import os
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.errors import StorageError
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.prepare_data import shard_writers, stage
from baton.tasks.prepare_data.shard_writers import ScatterWriter
from tests.support import forked

NPZ = {"path": "sorted.npz", "y": "y"}
CLASSES = 10


def write_sorted(workshop: Any, examples: int) -> None:
    """Write a sorted source: x is the index, y is the class; first all of class 0, then all of class 1, …"""
    labels = np.arange(examples) * CLASSES // examples
    workshop.write("sorted.npz", {"x": np.arange(examples), "y": labels})


@pytest.fixture
def scattered(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes the buffer small; returns a list that counts writes to the temporary file."""
    times: list[int] = []
    original = ScatterWriter._scatter

    def counted(writer: ScatterWriter) -> None:
        times.append(writer._waiting_bytes)
        original(writer)

    monkeypatch.setattr(shard_writers, "_WAITING_BYTES", 20_000)
    monkeypatch.setattr(ScatterWriter, "_scatter", counted)
    return times


@pytest.mark.slow
def test_every_shard_has_all_classes_of_a_sorted_source(workshop: Any, scattered: list[int]) -> None:
    write_sorted(workshop, 10_000)
    ref = workshop.prepare("npz", NPZ, shard_examples=200, validation_fraction=0, classes=CLASSES)
    assert len(scattered) > 20
    shards = load_manifest(workshop.storage, ref).train
    assert [shard.examples for shard in shards] == [200] * 50
    examples = workshop.examples(ref)
    assert sorted(example["x"].item() for example in examples) == list(range(10_000))
    counts = np.array([np.bincount(labels, minlength=CLASSES) for labels in by_shard(examples, "y", 200)])
    # The expected count is 20, with a standard deviation of 4.2.
    assert counts.min() >= 3
    assert counts.max() <= 42
    assert counts.std() == pytest.approx(4.2, abs=0.5)
    # Neighbors within a shard come from all over the source.
    places = [example["x"].item() for example in examples]
    assert np.mean([abs(one - other) for one, other in pairwise(places)]) == pytest.approx(10_000 / 3, rel=0.05)


def by_shard(examples: list[dict[str, Any]], name: str, shard_examples: int) -> list[list[int]]:
    values = [example[name].item() for example in examples]
    return [values[begin : begin + shard_examples] for begin in range(0, len(values), shard_examples)]


def test_bytes_do_not_depend_on_the_buffer_size(workshop: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sorted(workshop, 1000)
    layout = {"shard_examples": 64, "validation_fraction": 0.3}
    digests = set()
    for index, waiting in enumerate([1 << 20, 20_000, 1]):
        monkeypatch.setattr(shard_writers, "_WAITING_BYTES", waiting)
        place = type(workshop)(workshop.code, LocalStorage(tmp_path / str(index)))
        digests.add(place.prepare("npz", NPZ, **layout).content_digest)
    assert len(digests) == 1
    assert workshop.prepare("npz", NPZ, seed=1, **layout).content_digest not in digests


@pytest.mark.parametrize("examples", [1, 6, 7, 8, 21, 22])
def test_shard_counts_are_equal_except_the_last(workshop: Any, scattered: list[int], examples: int) -> None:
    write_sorted(workshop, examples)
    ref = workshop.prepare("npz", NPZ, shard_examples=7, validation_fraction=0)
    shards = load_manifest(workshop.storage, ref).train
    assert [shard.examples for shard in shards] == [min(7, examples - begin) for begin in range(0, examples, 7)]
    assert [shard.path for shard in shards] == [
        f"train-{index:05d}-of-{len(shards):05d}.tfrecord" for index in range(len(shards))
    ]
    assert sorted(example["x"].item() for example in workshop.examples(ref)) == list(range(examples))
    assert not scattered


def test_error_while_scattering_leaves_nothing(
    workshop: Any, scattered: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    write_sorted(workshop, 2000)
    monkeypatch.setattr(stage, "_REPORT_EVERY_EXAMPLES", 1500)

    def interrupted(_event: object) -> None:
        raise KeyboardInterrupt

    workshop.emit = interrupted
    with pytest.raises(KeyboardInterrupt):
        workshop.prepare("npz", NPZ, shard_examples=10)
    assert scattered
    assert workshop.files() == {}
    assert list((tmp_path / "scratch").iterdir()) == []


def test_too_little_temporary_space_is_refused_before_writing(
    workshop: Any, scattered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sorted(workshop, 2000)
    usage = shard_writers.shutil.disk_usage(workshop.code)

    def disk_usage(folder: Path) -> Any:
        return usage._replace(free=50_000) if folder == shard_writers.scratch_folder() else usage

    monkeypatch.setattr(shard_writers.shutil, "disk_usage", disk_usage)
    with pytest.raises(StorageError, match=r"needs 0\.1 MiB of disk space, but 0\.0 MiB are free.*TMPDIR") as refused:
        workshop.prepare("npz", NPZ)
    assert str(shard_writers.scratch_folder()) in str(refused.value)
    assert workshop.files() == {}
    assert not scattered


def test_missing_temporary_folder_is_reported(workshop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", nowhere)
    with pytest.raises(StorageError, match=r"No usable temporary directory.*TMPDIR"):
        workshop.prepare("digits")
    assert workshop.files() == {}


def test_temporary_disk_that_fills_up_is_reported(
    workshop: Any, scattered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    write_sorted(workshop, 2000)
    monkeypatch.setattr(shard_writers.os, "pwrite", full)
    with pytest.raises(StorageError, match="No space left on device; free some space"):
        workshop.prepare("npz", NPZ)
    assert len(scattered) == 1
    assert workshop.files() == {}


def test_temporary_file_that_lost_records_is_detected(
    workshop: Any, scattered: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = os.pwrite
    # Like a disk that reports success for a lost write.
    monkeypatch.setattr(shard_writers.os, "pwrite", lambda file, data, at: written(file, bytes(len(data)), at))
    write_sorted(workshop, 2000)
    with pytest.raises(StorageError, match=r"shard \d of train .* check the disk"):
        workshop.prepare("npz", NPZ, shard_examples=500)
    assert scattered
    assert workshop.files() == {}


@pytest.mark.slow
def test_thousands_of_shards_need_one_open_file() -> None:
    program = """
import os, resource
from baton.tasks.foundation.storage.memory import MemoryStorage
from baton.tasks.prepare_data import shard_writers
from baton.tasks.prepare_data.shard_writers import ScatterWriter, ShardUploads, scratch_file
import tensorflow as tf

shard_writers._WAITING_BYTES = 100_000
opened = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 10, opened + 10))
with scratch_file() as scratch, ShardUploads(MemoryStorage("store")) as uploads:
    writer = ScatterWriter(
        uploads, scratch, part="train", seed=0, shard_examples=3, examples=9000, record_bytes=4
    )
    for index in range(9000):
        writer.add(index.to_bytes(4, "little"))
    assert scratch.seek(0, 2) > 50_000
    assert [shard.examples for shard in writer.finish()] == [3] * 3000
    assert scratch.seek(0, 2) == 0
"""
    forked.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_large_source_is_never_whole_in_memory(workshop: Any) -> None:
    """Of known length, through a temporary file; and of unknown length, in blocks."""
    for name, examples in (("small", 16), ("large", 400)):
        images = np.broadcast_to(np.float32(1), (examples, 1 << 18))
        workshop.write(f"{name}.npz", {"x": images, "y": np.arange(examples)})
    workshop.write(
        "data.py",
        "import numpy as np\ndef load(n):\n    for number in range(n):\n"
        "        yield np.full(1 << 18, number, np.float32), number\n",
    )
    program = f"""
import resource, sys
from pathlib import Path
from tests.prepare_data.conftest import LocalStorage, Workshop
workshop = Workshop(Path({str(workshop.code)!r}), LocalStorage(Path({str(workshop.storage.root)!r})))
def most():
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
workshop.prepare("data.py:load", {{"n": 16}})
workshop.prepare("npz", {{"path": "small.npz", "y": "y"}})
most()
workshop.prepare("npz", {{"path": "large.npz", "y": "y"}})
most()
workshop.prepare("data.py:load", {{"n": 400}})
most()
"""
    done = forked.run([sys.executable, "-c", program], check=True, capture_output=True)
    small, scattered, blocks = map(int, done.stdout.split())
    # 400 MiB are written each time. Each part buffers 64 MiB, a block is four shards of 32 MiB, and a shard is copied a
    # few times.
    assert scattered - small < 250, (small, scattered)
    assert blocks - small < 250, (small, blocks)
