"""The shard format, its verification before TensorFlow reads it, and batches of examples from the records of shards.

Shards are TFRecord files of `tf.train.Example`, one bytes value per feature; text has one per string. The value holds
the array's raw little-endian bytes. So every fixed-width dtype is preserved, and three operations per feature parse a
whole vector of records. Records that other tools wrote may hold lists of values, or JPEG and PNG images; preparation
and training decode them with the same function.

Shards are compared with the manifest, and remote ones are downloaded ahead. TensorFlow asks for a shard in the middle
of its pipeline and wraps what that raises in an error of its own; `original_read_errors` gives Baton's error back.
"""

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from baton.tasks.foundation.contracts.dataset import PREPARE_AGAIN, DatasetManifest, Feature, ShardRecord
from baton.tasks.foundation.dataset import order
from baton.tasks.foundation.dataset.cache import FileRange, Pin, disk_is_full, shared_cache
from baton.tasks.foundation.dataset.features import Array, unflatten
from baton.tasks.foundation.dataset.manifest import Part, positions_of_part
from baton.tasks.foundation.errors import BatonError, DamagedDataset, FileMissing, StorageError
from baton.tasks.foundation.storage.interface import FileStat, Storage
from baton.tasks.foundation.storage.opening import locate_shard
from baton.tasks.foundation.storage.transfers import checksum_file, damage_of, extend_crc32c

# `tf.io.decode_raw` does not support these; their bytes are read as the signed type.
_READ_AS = {"uint32": "int32", "uint64": "int64"}
_READ_BYTES = 8 << 20
# One plan: local paths of its shards; the number of records in them; positions of the part's records among them (empty
# if all records belong to the part); the seed of the permutation; the permuted records to take, from
# the first number up to the second.
Plan = tuple[list[str], int, npt.NDArray[np.int64], order.Seed, tuple[int, int]]
# TensorFlow keeps only the text of an error that a Python generator raised. It reads in its own threads, so the
# errors are kept here, one list for the process.
_KEPT: deque[BatonError] = deque(maxlen=16)
_T = TypeVar("_T")
_FRAME = struct.Struct("<QI")  # the length of a record, and its checksum
# Files that this process has verified: path -> the checksum, and the file's state then. Shared by all readers of the
# process, so that each epoch does not read every file twice.
_VERIFIED: dict[Path, tuple[object, ...]] = {}
_LOCK = threading.Lock()


def decode_image(data: Any, shape: Sequence[int], dtype: str) -> Any:
    """Decode one image to the given shape, on the CPU, with the same result in every process.

    An image of another size is resized (bilinear, with antialiasing); its aspect ratio is not kept. A grey image gets
    equal channels, a color image becomes grey, transparency is dropped, and the EXIF orientation is ignored. JPEG uses
    the accurate integer method, because TensorFlow's default method depends on the machine.

    Args:
        data: string tensor [], a JPEG or PNG file.
        shape: (height, width, channels), channels 1 or 3.
        dtype: uint8, in [0, 255]; or float32, in [0, 1].

    Returns:
        Tensor of that dtype, with a static shape.

    Raises:
        tf.errors.InvalidArgumentError: the image cannot be decoded.
    """
    height, width, channels = shape
    with tf.device("/CPU:0"):
        # decode_jpeg decodes PNG as well.
        image = tf.io.decode_jpeg(data, channels=channels, dct_method="INTEGER_ACCURATE")
        # An image that already has this size keeps every bit; resizing it would take more time than decoding.
        image = tf.cond(
            tf.reduce_all(tf.shape(image)[:2] == (height, width)),
            lambda: tf.cast(image, tf.float32),
            lambda: tf.image.resize(image, (height, width), method="bilinear", antialias=True),
        )
        image = tf.saturate_cast(tf.round(image), tf.uint8) if dtype == "uint8" else image / 255.0
        return tf.ensure_shape(image, (height, width, channels))


def encode(features: Mapping[str, Array]) -> bytes:
    """Encode one example; the same arrays give the same bytes in every process.

    Args:
        features: named arrays as `features.flatten` returns them.
    """
    values = {
        name: tf.train.Feature(bytes_list=tf.train.BytesList(value=_stored(array))) for name, array in features.items()
    }
    example = tf.train.Example(features=tf.train.Features(feature=values))
    # Without this the library chooses the order of map keys.
    return bytes(example.SerializeToString(deterministic=True))


def _stored(array: Array) -> list[bytes]:
    """Return raw numbers as one value, and texts as a value each."""
    return array.ravel().tolist() if array.dtype == object else [array.tobytes()]


def parse(records: Any, features: Sequence[Feature]) -> dict[str, Any]:
    """Parse a vector of records into batched tensors.

    Args:
        records: string tensor [n], or what `extract` returns of them; a static n gives static shapes.

    Returns:
        Name -> tensor [n, *feature.shape] of the feature's dtype.
    """
    found = records if isinstance(records, dict) else extract(records, features)
    return {feature.name: decode(found[feature.name], feature) for feature in features}


def extract(records: Any, features: Sequence[Feature]) -> dict[str, Any]:
    """Extract the values from a vector of records, without decoding them.

    Args:
        records: string tensor [n].

    Returns:
        Name -> string tensor [n] for the encodings raw and image; string, int64 or float32 tensor [n, *feature.shape]
        for all others.

    Raises:
        tf.errors.InvalidArgumentError: a record lacks a feature, or has values of another type or number.
    """
    found = tf.io.parse_example(records, {feature.record_key: _wanted(feature) for feature in features})
    return {feature.name: found[feature.record_key] for feature in features}


def decode(found: Any, feature: Feature) -> Any:
    """Decode a tensor that `extract` returned to [n, *feature.shape] of the feature's dtype."""
    if feature.encoding == "raw":
        return _numbers(found, feature)
    if feature.encoding == "text":
        return found
    if feature.encoding != "image":
        return tf.cast(found, tf.as_dtype(feature.dtype))
    if found.shape[0] == 1:
        return decode_image(found[0], feature.shape, feature.dtype)[tf.newaxis]
    return tf.map_fn(
        lambda data: decode_image(data, feature.shape, feature.dtype),
        found,
        fn_output_signature=tf.TensorSpec(feature.shape, tf.as_dtype(feature.dtype)),
    )


def _wanted(feature: Feature) -> Any:
    if feature.encoding == "int64":
        return tf.io.FixedLenFeature(feature.shape, tf.int64)
    if feature.encoding == "float":
        return tf.io.FixedLenFeature(feature.shape, tf.float32)
    return tf.io.FixedLenFeature(feature.shape if feature.encoding == "text" else [], tf.string)


def _numbers(raw: Any, feature: Feature) -> Any:
    dtype = tf.as_dtype(feature.dtype)
    if 0 in feature.shape:
        return tf.zeros([tf.size(raw), *feature.shape], dtype)
    values = tf.io.decode_raw(raw, tf.as_dtype(_READ_AS.get(feature.dtype, feature.dtype)))
    if feature.dtype in _READ_AS:
        values = tf.bitcast(values, dtype)
    return tf.reshape(values, [-1 if raw.shape[0] is None else raw.shape[0], *feature.shape])


def part_of(manifest: DatasetManifest, shards: Sequence[ShardRecord], part: Part) -> tuple[int, npt.NDArray[np.int64]]:
    """Return the number of records in shards, and the positions of the part's records; empty if all belong to it."""
    records = sum(shard.records_held for shard in shards)
    if manifest.held_out is None:
        return records, np.empty(0, np.int64)
    return records, positions_of_part(part, manifest.held_out, shards)


def windows_of(plans: Callable[[], Iterator[Plan]]) -> Any:
    """Return a dataset of plans, made one by one."""
    signature = (
        tf.TensorSpec([None], tf.string),
        tf.TensorSpec([], tf.int64),
        tf.TensorSpec([None], tf.int64),
        tf.TensorSpec([2], tf.int64),
        tf.TensorSpec([2], tf.int64),
    )
    return tf.data.Dataset.from_generator(plans, output_signature=signature)


def records_in(paths: Any) -> Any:
    """Return a dataset of the serialized examples in local files."""
    return tf.data.TFRecordDataset(paths, buffer_size=_READ_BYTES)


def parsed(dataset: Any, manifest: DatasetManifest, batch_size: int, *, at_once: int = tf.data.AUTOTUNE) -> Any:
    """Convert vectors of records, or what `extract` returns of them, to batches, `at_once` of them side by side."""
    together = 1 if has_images(manifest) else batch_size

    def batch(records: Any) -> tuple[Any, ...]:
        fixed = tf.nest.map_structure(lambda each: tf.ensure_shape(each, [together, *each.shape[1:]]), records)
        return unflatten(parse(fixed, manifest.features))

    def squeezed(record: Any) -> tuple[Any, ...]:
        one = tf.nest.map_structure(lambda each: each[tf.newaxis], record)
        return tuple(tf.nest.map_structure(lambda values: values[0], batch(one)))

    # The functions are plain Python; AutoGraph cannot convert them correctly.
    if together == batch_size:
        work = tf.autograph.experimental.do_not_convert(batch)
        return dataset.map(work, num_parallel_calls=at_once, deterministic=True)
    # Decoding an image is slow, so each example is decoded in its own parallel call; the order stays.
    work = tf.autograph.experimental.do_not_convert(squeezed)
    decoded = dataset.unbatch().map(work, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return decoded.batch(batch_size, drop_remainder=True)


def has_images(manifest: DatasetManifest) -> bool:
    """Whether examples have encoded images, which are decoded when they are read."""
    return any(feature.encoding == "image" for feature in manifest.features)


def finished(dataset: Any, *, autotuned: bool = True) -> Any:
    """Return the dataset with a buffer of batches, in its order, and never sliced by a strategy.

    An autotuned iterator can take a minute to delete, and the process stands still: TensorFlow waits for its tuning
    thread to wake by itself. Another one maps on all threads from its first batch, where no number is given.
    """
    dataset = dataset.prefetch(tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = autotuned
    if not autotuned:
        options.autotune.initial_parallelism = 1024  # TensorFlow takes what the machine has
    # The dataset is already sliced by host; a strategy must not slice it again.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)


@contextmanager
def remember_read_errors() -> Iterator[None]:
    """Use around code that runs inside a tf.data generator: keeps the error for `original_read_errors`."""
    try:
        yield
    except BatonError as fault:
        _KEPT.append(fault)
        raise


@contextmanager
def original_read_errors() -> Iterator[None]:
    """Use around iteration over a dataset of `reader`.

    Raises:
        BatonError: the error that made reading fail, such as DamagedDataset, in place of TensorFlow's error.
    """
    try:
        yield
    except tf.errors.OpError as fault:
        text = str(fault)
        for kept in reversed(_KEPT):
            if str(kept) in text:
                raise kept from fault
        # The shard matched the manifest when it was opened, but changed since.
        if isinstance(fault, tf.errors.DataLossError):
            raise DamagedDataset(f"a shard changed while it was being read: {fault.message}") from fault
        # A TensorFlow server reads shards itself, and names the one that is missing or that it may not read.
        if ".tfrecord" in text and isinstance(fault, tf.errors.NotFoundError | tf.errors.PermissionDeniedError):
            raise StorageError(f"a TensorFlow server cannot read its examples: {fault.message}") from fault
        if named := next((file for file in list(_VERIFIED) if str(file) in text), None):
            raise StorageError(f"{named}: cannot be read: {fault.message}; check the disk, and run again") from fault
        raise


class VerifiedShards:
    """Opens verified shards, and keeps those of the last two plans on this machine.

    Two plans are enough: TensorFlow asks for the next plan only after it has read the current one. A complete local
    file is used in place; everything else comes through the cache of the process.
    """

    def __init__(self, storage: Storage, *, plans_ahead: int = 1) -> None:
        """Create a reader; nothing is read yet.

        Args:
            storage: store rooted at the dataset's folder.
            plans_ahead: plans to download while TensorFlow reads the current one, if there is room.
        """
        self._storage = storage
        self._plans_ahead = plans_ahead
        self._used: deque[Pin | None] = deque()
        self._ahead: dict[tuple[FileRange, ...], Pin] = {}

    def __enter__(self) -> "VerifiedShards":
        return self

    def __exit__(self, *_: object) -> None:
        self._release_old(0)
        while self._ahead:
            self._ahead.popitem()[1].release()

    def read_ahead(
        self, plans: Iterable[tuple[Sequence[ShardRecord], _T]]
    ) -> Iterator[tuple[list[str], Sequence[ShardRecord], _T]]:
        """Call `open` for each plan, while the shards of the next plans are downloaded.

        Args:
            plans: the shards of each plan, with any value; may be infinite, and is consumed ahead.

        Returns:
            For each plan: the local paths of its shards, the shards, and the value.
        """
        rest = iter(plans)
        coming = deque(islice(rest, 1 + self._plans_ahead))
        while coming:
            records, plan = coming.popleft()
            yield self.open(records, upcoming=[later for later, _ in coming]), records, plan
            coming.extend(islice(rest, 1))

    def open(self, records: Sequence[ShardRecord], upcoming: Sequence[Sequence[ShardRecord]] = ()) -> list[str]:
        """Return local paths of verified shards, and release those of the plan before the last.

        Args:
            records: shards of one plan.
            upcoming: shards of the next plans. Errors with these are raised when they are opened.

        Raises:
            DamagedDataset: a shard is missing or differs from the manifest.
            StorageError: the store failed, or the shards of one plan do not fit.
        """
        with remember_read_errors():
            self._release_old(1)
            locations = [self._locate(record) for record in records]
            ranges = tuple(location for location in locations if isinstance(location, FileRange))
            fetched = iter(self._local_files(ranges, upcoming))
            paths = []
            for location, record in zip(locations, records, strict=True):
                if isinstance(location, FileRange):
                    paths.append(str(next(fetched)))
                else:
                    verify(location, record, where=str(location))
                    paths.append(str(location))
        return paths

    def _release_old(self, plans: int) -> None:
        while len(self._used) > plans:
            if (pin := self._used.popleft()) is not None:
                pin.release()

    def _locate(self, record: ShardRecord) -> Path | FileRange:
        """Return the shard's local file, or the range to download."""
        storage, name = locate_shard(self._storage, record)
        try:
            file = storage.local_path(name)
        except FileMissing as fault:
            raise _missing(f"{storage.uri}/{name}", record) from fault
        # A range at offset 0 is a complete file only if the sizes agree.
        if file is not None and not record.begin:
            with _storage_errors(str(file), record):
                if not record.is_external or file.stat().st_size == record.size:
                    return file
        return _file_range(storage, name, record)

    def _local_files(self, ranges: tuple[FileRange, ...], upcoming: Sequence[Sequence[ShardRecord]]) -> list[Path]:
        """Return the local files of ranges; ranges of the next plans are requested meanwhile."""
        if not ranges:
            self._used.append(None)
            self._prefetch(upcoming)
            return []
        ahead = self._ahead.pop(ranges, None)
        self._used.append(ahead or shared_cache().pin(ranges))
        self._prefetch(upcoming)
        try:
            return self._files_in_use()
        except StorageError as fault:
            if ahead is None or not disk_is_full(fault):
                raise
        # The disk was full when this was read ahead; the plan before the last has been released since.
        ahead.release()
        self._used[-1] = shared_cache().pin(ranges)
        return self._files_in_use()

    def _files_in_use(self) -> list[Path]:
        pin = self._used[-1]
        return [] if pin is None else pin.files()

    def _prefetch(self, plans: Sequence[Sequence[ShardRecord]]) -> None:
        for records in plans:
            try:
                ranges = tuple(location for location in map(self._locate, records) if isinstance(location, FileRange))
                if not ranges or ranges in self._ahead:
                    continue
                pin = shared_cache().prefetch(ranges)
            except BatonError:
                return  # raised when that plan is opened
            if pin is None:
                return  # later plans must not take the room
            self._ahead[ranges] = pin


@dataclass(frozen=True, slots=True)
class LocalBytes:
    """Where the bytes of a range are on this machine."""

    file: Path
    begin: int
    record: ShardRecord

    def read_verified(self, buffer: memoryview) -> memoryview:
        """Read the bytes into a buffer of their size, and compare them with the manifest.

        Raises:
            DamagedDataset: they differ from the manifest, or the file is gone.
            StorageError: they cannot be read.
        """
        where = self.record.path if self.record.is_external else str(self.file)
        with _storage_errors(where, self.record), self.file.open("rb") as opened:
            opened.seek(self.begin)
            data = buffer[: opened.readinto(buffer)]
        found = FileStat(size=len(data), crc32c=f"{extend_crc32c(0, data):08x}")
        if not _agrees(found, self.record):
            raise DamagedDataset(
                f"{where} has other bytes than when the dataset was prepared: {found.size} bytes from byte "
                f"{self.record.begin} on have crc32c {found.crc32c}, the manifest says {self.record.size} and "
                f"{self.record.crc32c}; {_remedy(self.record)}"
            )
        return data


def framed(data: memoryview) -> list[bytes]:
    """Return the records of a TFRecord file whose bytes are verified."""
    found: list[bytes] = []
    at = 0
    while at < len(data):
        begin = at + _FRAME.size
        end = begin + _FRAME.unpack_from(data, at)[0]
        found.append(bytes(data[begin:end]))
        at = end + 4
    return found


@contextmanager
def fetched(storage: Storage, records: Sequence[ShardRecord]) -> Iterator[list[tuple[LocalBytes, LocalBytes | None]]]:
    """Fetch the ranges of one window, with their heads; they stay on this machine within the context.

    Args:
        storage: store rooted at the dataset's folder.
        records: the ranges.

    Returns:
        For each range where its bytes are, and those of its head if it has one. Read them with `read_verified`.

    Raises:
        DamagedDataset: a file is missing, or differs from the manifest.
        StorageError: the store failed, or the ranges do not fit.
    """
    wanted = [part for record in records for part in (record, record.head) if part is not None]
    places: dict[int, LocalBytes] = {}
    ranges: dict[int, FileRange] = {}
    for index, record in enumerate(wanted):
        store, name = locate_shard(storage, record)
        try:
            file = store.local_path(name)
        except FileMissing as fault:
            raise _missing(f"{store.uri}/{name}", record) from fault
        if file is None:
            ranges[index] = _file_range(store, name, record)
        else:
            places[index] = LocalBytes(file, record.begin, record)
    pin = shared_cache().pin(tuple(ranges.values())) if ranges else None
    try:
        for index, file in zip(ranges, [] if pin is None else pin.files(), strict=True):
            places[index] = LocalBytes(file, 0, wanted[index])
        found = iter(places[index] for index in range(len(wanted)))
        yield [(next(found), None if record.head is None else next(found)) for record in records]
    finally:
        if pin is not None:
            pin.release()


def _file_range(storage: Storage, name: str, record: ShardRecord) -> FileRange:
    return FileRange(
        address=f"{storage.uri}/{name}",
        begin=record.begin,
        size=record.size,
        crc32c=record.crc32c,
        fetch=partial(_fetch, storage, name, record),
        transfers=storage.transfers,
    )


def verify(file: Path, record: ShardRecord, *, where: str) -> None:
    """Compare a shard's size and checksum with the manifest, once per process for each file and content.

    Args:
        file: the local shard.
        record: the manifest's entry for it.
        where: its address, for messages.

    Raises:
        DamagedDataset: the shard is missing, or differs from the manifest.
        StorageError: it cannot be read.
    """
    with _storage_errors(where, record):
        state = file.stat()
        # No program can set the time of the last change back, as it can the modification time.
        stamp = (record.crc32c, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
        with _LOCK:
            if _VERIFIED.get(file) == stamp:
                return
        if state.st_size != record.size:  # known without reading, however large the file is
            raise DamagedDataset(
                f"{where} has {state.st_size} bytes, its manifest says {record.size}; {_remedy(record)}"
            )
        _require_agreement(where, checksum_file(file), record)
    with _LOCK:
        _VERIFIED[file] = stamp


def require_intact(at: Storage, record: ShardRecord) -> None:
    """Compare a shard that another host reads with the manifest, once per process; in a bucket, by its own checksum.

    Raises:
        DamagedDataset: the shard is missing or differs from the manifest.
    """
    where = f"{at.uri}/{record.path}"
    try:
        stamp = (record.crc32c, record.size)
        if (file := at.local_path(record.path)) is not None:
            verify(file, record, where=where)
        elif _VERIFIED.get(Path(where)) != stamp:
            _require_agreement(where, at.stat(record.path), record)
            _VERIFIED[Path(where)] = stamp
    except FileMissing as fault:
        raise _missing(where, record) from fault


def _fetch(storage: Storage, name: str, record: ShardRecord, target: Path) -> None:
    """Download a shard; download it once more if the bytes differ from the manifest.

    Raises:
        DamagedDataset: the shard is missing, or differs from the manifest.
        StorageError: the store or the local disk failed.
    """
    # A shard that Baton wrote is fetched whole, so that one of another length counts as damaged.
    size, end = (record.size, record.begin + record.size) if record.is_external else (None, None)
    expected = FileStat(size=record.size, crc32c=record.crc32c)
    damage = damage_of(
        storage, name, expected, lambda: storage.download(name, target, begin=record.begin, size=size), part_end=end
    )
    if damage is not None:
        raise DamagedDataset(f"{damage}; {_remedy(record)}")


def _agrees(found: FileStat, record: ShardRecord) -> bool:
    return (found.size, found.crc32c) == (record.size, record.crc32c)


@contextmanager
def _storage_errors(where: str, record: ShardRecord) -> Iterator[None]:
    """Raise what the disk says as an error that names the file; a bare one would be taken for the model's."""
    try:
        yield
    except FileNotFoundError as fault:
        raise _missing(where, record) from fault
    except OSError as fault:
        raise StorageError(
            f"{where}: cannot be read: {fault.strerror}; check the disk and the file's permissions, and run again"
        ) from fault


def _missing(where: str, record: ShardRecord) -> DamagedDataset:
    return DamagedDataset(f"{where} is missing; {_remedy(record)}")


def _require_agreement(where: str, found: FileStat, record: ShardRecord) -> None:
    if not _agrees(found, record):
        raise DamagedDataset(
            f"{where} has {found.size} bytes and crc32c {found.crc32c}, its manifest says {record.size} and "
            f"{record.crc32c}; {_remedy(record)}"
        )


def _remedy(record: ShardRecord) -> str:
    # Never advise deleting a folder with files that Baton did not write.
    return "restore the original file, or start a new run" if record.is_external else PREPARE_AGAIN
