"""Write a train state into a run's home: TensorFlow's files first, the manifest last.

A checkpoint whose manifest is there is *staged*: all of its files are complete. A log entry makes it *committed*, see
`save.py`. `write_snapshot` writes a copy of the state, from any thread: it needs neither TensorFlow nor the model.
`stage_checkpoint` writes the state itself, while the training waits.

Of several linked hosts, each writes the files of its share and tells the chief what they hold. The chief writes the
index and the manifest when it knows of all shares, so a host that fails or dies leaves nothing that is staged.

A frozen backbone, or an embedding that no batch touched, is neither written nor uploaded at each commit. On a local
disk the checkpoints share the file by hard links, on Cloud Storage the bucket copies the object. So each checkpoint
still has all of its files, and deleting one takes nothing from another. If the earlier file is deleted meanwhile, the
bytes are written.
"""

import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

import google_crc32c
from pydantic import Field

from baton.tasks.foundation.checkpoint.save import found_by_chief
from baton.tasks.foundation.checkpoint.snapshot import Snapshot, StoredValue, require_finite, take_snapshot
from baton.tasks.foundation.checkpoint.tensor_bundle import PREFIX, BundleEntry, data_file, index_of
from baton.tasks.foundation.contracts.base import Contract
from baton.tasks.foundation.contracts.checkpoint import (
    CheckpointManifest,
    CheckpointRef,
    FileRecord,
    checkpoint_folder,
)
from baton.tasks.foundation.contracts.stage_calls import ErrorReport
from baton.tasks.foundation.errors import (
    AcceleratorLost,
    BatonError,
    FileMissing,
    NonFinite,
    RunLogError,
    StorageError,
)
from baton.tasks.foundation.log.appends import stale_writer
from baton.tasks.foundation.log.files import require_entry
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.host_link import HostLink
from baton.tasks.foundation.state.digest import DIGEST_THREADS, OBJECT_GRAPH, LeafHasher, digest_of_leaves
from baton.tasks.foundation.state.host_shares import HostShares
from baton.tasks.foundation.state.train_state import EarlierFiles, TrainState
from baton.tasks.foundation.storage.interface import FileStat, Storage, discard
from baton.tasks.foundation.storage.transfers import PROCESS_DEADLINE, as_array, parallel_map


def write_or_share(
    home: Storage,
    folder: str,
    name: str,
    buffers: Sequence[memoryview],
    *,
    earlier: EarlierFiles,
    resting: bool,
) -> FileRecord:
    """Put one data file into a checkpoint's folder, and return its record.

    A checksum of 32 bits is too short to prove that bytes are the same, so the sha256 of both is compared. It is known
    of files that training does not change, and of those that stayed the same once.

    Args:
        earlier: the files of the checkpoint before.
        resting: whether training does not update what is in the file.

    Raises:
        StorageError: the store failed, or holds other bytes than were sent.
    """
    path = f"{folder}/{name}"
    like = earlier.of_size(sum(buffer.nbytes for buffer in buffers))
    crc32c = _crc32c(buffers) if like else ""
    like = [found for found in like if found[1].crc32c == crc32c]
    sha256 = _sha256(buffers) if resting or like else None
    for earlier_path, record in like:
        if record.sha256 == sha256 and _share(home, earlier_path, path, record):
            return FileRecord(name=name, size=record.size, crc32c=record.crc32c, sha256=sha256)
    stored = home.write_buffers(path, buffers)
    return FileRecord(name=name, size=stored.size, crc32c=stored.crc32c, sha256=sha256)


def _share(home: Storage, earlier: str, path: str, record: FileRecord) -> bool:
    """Link or copy a file within the store. False if it is gone or damaged; then the bytes are to be written.

    A damaged file is not shared: all checkpoints that share it would be lost with it.
    """
    try:
        home.copy(earlier, path)
        return home.stat(path) == FileStat(size=record.size, crc32c=record.crc32c)
    except StorageError:  # what stays wrong is raised when the bytes are written
        return False


def _crc32c(buffers: Sequence[memoryview]) -> str:
    crc = 0
    for buffer in buffers:
        crc = google_crc32c.extend(crc, as_array(buffer))
    return f"{crc:08x}"


def _sha256(buffers: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()


_R = TypeVar("_R")

# Between two blocks, a digest that nobody needs is given up.
_BLOCK_BYTES = 1 << 20
# A host that lives may upload for long; one that does not is noticed by the link.
_SHARE_SECONDS = 24 * 3600.0


class WorkerSeconds:
    """Seconds of a processor that work in other threads takes."""

    def __init__(self) -> None:
        self._spent: list[float] = []

    @property
    def seconds(self) -> float:
        """The sum."""
        return sum(self._spent)

    def of(self, work: Callable[[], _R]) -> _R:
        """Run work, and add its seconds."""
        began = time.thread_time()
        try:
            return work()
        finally:
            self._spent.append(time.thread_time() - began)


class _GivenUp(Exception):
    """The files cannot be written, so nobody needs a digest. A large state takes seconds."""


def write_snapshot(
    snapshot: Snapshot,
    home: Storage,
    *,
    base: int,
    attempt: str,
    processed: Callable[[float], None] | None = None,
) -> CheckpointRef | None:
    """Write the files of a snapshot, which the store compares with what was sent, and then the manifest.

    With several linked hosts, all of them call it. It returns when the chief needs no host any more.

    The snapshot's memory is given back, whether or not this succeeds.

    Args:
        snapshot: what to write.
        base: number of the log entry that the work started from.
        attempt: the writer, a uuid4.
        processed: gets the seconds of a processor that this takes, without those of parallel uploads.

    Returns:
        The staged checkpoint; None on hosts other than the chief.

    Raises:
        NonFinite: a trainable variable holds NaN or infinity; nothing is written.
        StaleWriter: another writer moved the tip first, and deleted what was being staged.
        StorageError: the store failed, or holds other bytes than were sent.
        RunLogError: the run's log is gone.
        BatonError: on the chief, also what failed on another host.
        AcceleratorLost: another host is gone.
    """
    began = time.thread_time()
    beside = WorkerSeconds()
    with _other_hosts_told(snapshot.shares, attempt):
        try:
            require_finite(snapshot)
            return _write(snapshot, home, base=base, attempt=attempt, beside=beside)
        except FileMissing as fault:
            # A writer that moves the tip deletes what others have staged. The store is not at fault then.
            log = RunLog(home)
            head = log.head()
            if head is None or head.base == base:
                raise
            raise stale_writer(log, head, step=snapshot.step, base=base) from fault
        finally:
            snapshot.release()
            if processed is not None:
                processed(time.thread_time() - began + beside.seconds)


def stage_checkpoint(
    state: TrainState, home: Storage, *, base: int, attempt: str, where: str = ""
) -> CheckpointRef | None:
    """Write the train state to a run's home. With several hosts, all of them call it at the same step.

    Args:
        base: number of the log entry that the work started from.
        attempt: the writer, a uuid4; of linked hosts, the chief's counts.
        where: added to the step in an error message, for example ", in segment 2".

    Returns:
        The staged checkpoint; None on hosts other than the chief, because only the chief writes the manifest.

    Raises:
        HostsDiffer: hosts hold different values; raised on every host.
        NonFinite: a trainable variable holds NaN or infinity; raised on every host.
        ModelError: the random streams of the replicas could not be restored.
        StaleWriter: another writer moved the tip first, and deleted what was being staged.
        StorageError: the store failed, or holds other bytes than were sent.
        RunLogError: the run's log is gone.
    """
    attempt = state.shares.from_chief("attempt", attempt) or attempt
    snapshot = take_snapshot(state, where=where, copy=False)
    staged, fault = None, None
    try:
        if snapshot is not None:
            staged = write_snapshot(snapshot, home, base=base, attempt=attempt)
    except NonFinite as error:
        fault = error  # raised below, once the other hosts know
    if not state.accelerator.all_agree(fault is None):
        raise fault or found_by_chief(state.step, where=where)
    return staged


class HostReport(Contract):
    """What a host tells the chief of its share."""

    files: tuple[FileRecord, ...] = ()
    entries: tuple[BundleEntry, ...] = ()
    leaves: dict[str, tuple[str, str]] = Field(default_factory=dict, description="see `LeafHasher.leaves`")
    error: ErrorReport | None = Field(default=None, description="why there is no share")


@contextmanager
def _other_hosts_told(shares: HostShares, attempt: str) -> Iterator[None]:
    """Tell the chief what fails in the body on another host, which stays until the chief needs it no more."""
    link, over = shares.link, f"over {attempt}"
    if link is None:
        yield
        return
    try:
        yield
    except Exception as fault:
        with suppress(AcceleratorLost):
            if shares.host == 0:
                link.send(over, b"")
            else:
                error = fault if isinstance(fault, BatonError) else BatonError(f"{type(fault).__name__}: {fault}")
                link.send(f"share {attempt}", HostReport(error=ErrorReport.of(error)).to_json())
        raise
    if shares.host == 0:
        link.send(over, b"")
    else:
        link.receive(over, 0, seconds=_longest_wait())


def _reports_of_others(link: HostLink, attempt: str, *, hosts: int) -> list[HostReport]:
    """The reports of all hosts but the chief, which waits for them.

    Raises:
        BatonError: what failed on another host.
    """
    reports = []
    for host in range(1, hosts):
        data = link.receive(f"share {attempt}", host, seconds=_longest_wait())
        report = HostReport.model_validate_json(data)
        if report.error is not None:
            text = f"host {host}: {report.error.message}"
            raise report.error.model_copy(update={"message": text}).to_error()
        reports.append(report)
    return reports


def _longest_wait() -> float:
    return min(_SHARE_SECONDS, PROCESS_DEADLINE.remaining())


def _write(
    snapshot: Snapshot, home: Storage, *, base: int, attempt: str, beside: WorkerSeconds
) -> CheckpointRef | None:
    folder = checkpoint_folder(step=snapshot.step, base=base, attempt=attempt)
    shards, shares = snapshot.shards(), snapshot.shares
    given_up = threading.Event()

    def write_index(entries: Sequence[BundleEntry]) -> FileRecord:
        index = index_of(entries, shards=snapshot.layout.files)
        return _write_file(home, folder, f"{PREFIX}.index", [memoryview(index)])

    def sum_up() -> tuple[list[BundleEntry], list[FileRecord]]:
        entries = _entries(snapshot.values, _checksums(snapshot.values, given_up))
        return entries, [write_index(entries)] if shares.link is None else []

    def hash_leaves() -> None:
        hasher.hash_leaves(lambda data: _blocks(data, given_up))

    hasher = _hasher(snapshot.values)
    with ThreadPoolExecutor(2 + DIGEST_THREADS, thread_name_prefix="baton-digest") as pool:
        checked = pool.submit(require_entry, home, base)
        if home.transfers == 1:  # a home that was moved, or whose disk is not mounted, must not be made again
            checked.result()
        # The index is known before the digest, so its file goes up beside the data, and not after them.
        indexed = pool.submit(beside.of, sum_up)
        digested = [pool.submit(beside.of, hash_leaves) for _ in range(DIGEST_THREADS)]
        try:
            files = _write_data(home, folder, shards, snapshot)
            entries, index = indexed.result()
            checked.result()
        except BaseException as fault:
            given_up.set()
            if isinstance(fault, RunLogError):
                discard(home, folder)
            raise
        for done in digested:
            done.result()
    leaves = hasher.leaves
    if shares.link is not None:
        own = HostReport(files=tuple(files), entries=tuple(entries), leaves=leaves)
        if shares.host != 0:
            snapshot.earlier_files.remember(folder, files)
            shares.link.send(f"share {attempt}", own.to_json())
            return None
        reports = [own, *_reports_of_others(shares.link, attempt, hosts=shares.hosts)]
        files = [file for report in reports for file in report.files]
        leaves = {key: leaf for report in reports for key, leaf in report.leaves.items()}
        index = [write_index([entry for report in reports for entry in report.entries])]
    digest = digest_of_leaves(leaves)
    manifest = CheckpointManifest(
        step=snapshot.step,
        base=base,
        attempt=attempt,
        replicas=snapshot.replicas,
        state_digest=digest.root,
        signature=snapshot.signature,
        leaf_digests=dict(digest.leaves),
        configured=dict(snapshot.compiled_learning_rates),
        optimizers=dict(snapshot.optimizers),
        files=(*files, *index),
    )
    data = manifest.to_json()
    home.create(f"{folder}/manifest.json", data)
    snapshot.earlier_files.remember(folder, files)
    return CheckpointRef.of(manifest, data)


def _write_data(
    home: Storage, folder: str, shards: Sequence[Sequence[memoryview]], snapshot: Snapshot
) -> list[FileRecord]:
    def write(index: int) -> FileRecord:
        return write_or_share(
            home,
            folder,
            data_file(index, snapshot.layout.files),
            shards[index - snapshot.files.start],
            earlier=snapshot.earlier_files,
            resting=index in snapshot.layout.resting_files,
        )

    return parallel_map(write, snapshot.files, workers=home.transfers)


def _write_file(home: Storage, folder: str, name: str, buffers: Sequence[memoryview]) -> FileRecord:
    stored = home.write_buffers(f"{folder}/{name}", buffers)
    return FileRecord(name=name, size=stored.size, crc32c=stored.crc32c)


def _hasher(values: Sequence[StoredValue]) -> LeafHasher:
    """Hashes the state, the largest leaf first. TensorFlow's graph, whose checksum is known, is not part of it."""
    arrays = {value.key: value.array for value in values if value.key != OBJECT_GRAPH}
    return LeafHasher(sorted(arrays, key=lambda key: -int(arrays[key].nbytes)), arrays.__getitem__)


def _checksums(values: Sequence[StoredValue], given_up: threading.Event) -> dict[str, int]:
    """The crc32c of each value by its name."""
    checksums: dict[str, int] = {}
    for value in values:
        crc = value.crc32c
        if crc is None:
            crc = 0
            for block in _blocks(value.data, given_up):
                crc = google_crc32c.extend(crc, as_array(block))
        checksums[value.name] = crc
    return checksums


def _blocks(data: memoryview, given_up: threading.Event) -> Iterator[memoryview]:
    for begin in range(0, len(data), _BLOCK_BYTES):
        if given_up.is_set():
            raise _GivenUp
        yield data[begin : begin + _BLOCK_BYTES]


def _entries(values: Sequence[StoredValue], checksums: Mapping[str, int]) -> list[BundleEntry]:
    return [
        BundleEntry(
            name=value.name,
            dtype=value.dtype,
            shape=() if value.key == OBJECT_GRAPH else value.array.shape,
            shard=value.location.shard,
            offset=value.location.offset,
            size=value.array.nbytes,
            crc32c=checksums[value.name],
        )
        for value in values
    ]
