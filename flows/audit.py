"""Every committed byte of a run, read again: log, retained checkpoints, dataset. Reports; never writes."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from flows.commands.address import OpenedRun
from tasks.foundation.checkpoint.verify import read_manifest
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.dataset import DatasetManifest, ShardRecord
from tasks.foundation.contracts.log_entry import Entry, Head
from tasks.foundation.dataset.shard_location import located
from tasks.foundation.errors import DamagedCheckpoint, DamagedDataset, FileMissing, FileTooShort, RunLogError
from tasks.foundation.runlog.folding import fold
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage, Stored
from tasks.foundation.storage.download import side_by_side
from tasks.foundation.storage.transit_damage import require_damage_in_store
from tasks.foundation.telemetry.formatting import size_words

_READ_TOGETHER = 64
_ENTRY = re.compile(r"log/(\d{8})\.json")


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged or missing file."""

    file: str
    what: str


@dataclass(slots=True)
class Findings:
    """What was read, and what is wrong with it."""

    entries: int = 0
    checkpoints: int = 0
    files: int = 0
    bytes: int = 0
    quarantined: int = 0
    dataset: str | None = None
    damages: list[Damage] = field(default_factory=list)


def examine(opened: OpenedRun, tell: Callable[[str], None] = lambda _: None) -> Findings:
    """Read everything that the run's log vouches for.

    Args:
        opened: the run.
        tell: is told how far it is, a line at a time.

    Raises:
        StorageError: the store refused or failed; that says nothing about the bytes.
    """
    findings = Findings()
    head = _examine_log(opened.log, findings)
    if head is not None:
        findings.quarantined = len(head.quarantined)
        tell(f"verified {findings.entries} log entries")
        for number, ref in enumerate(head.retained, start=1):
            _examine_checkpoint(opened.log, ref, findings)
            tell(f"verified {ref.path}  {size_words(ref.size)}  ({number} of {len(head.retained)} checkpoints)")
        folder = head.identity.get("data.folder")
        if isinstance(folder, str):
            _examine_dataset(opened.root, folder, head.identity, findings, tell)
    return findings


def _examine_log(log: RunLog, findings: Findings) -> Head | None:
    """Read and refold all entries; returns the newest readable state."""
    head: Head | None = None
    whole = True  # whether the state before the next entry is known
    for number, entry in enumerate(_entries(log, _count(log))):
        if isinstance(entry, RunLogError):
            findings.damages.append(Damage(f"log/{number:08d}.json", str(entry)))
            whole = False
            continue
        findings.entries += 1
        findings.bytes += len(entry.to_json())
        if whole:
            fault_text = _refold(head, entry)
            if fault_text is not None:
                findings.damages.append(Damage(f"log/{number:08d}.json", f"{log.home.uri}/{fault_text}"))
        head, whole = entry.head, True
    return head


def _entries(log: RunLog, count: int) -> Iterator[Entry | RunLogError]:
    """Entry by entry, or what is wrong with it."""

    def read(number: int) -> Entry | RunLogError:
        try:
            return log.entry(number)
        except RunLogError as fault:
            return fault

    yield from log.read_all(read, count)


def _count(log: RunLog) -> int:
    """One more than the highest number of an entry, by listing and by probing: a gap may hide later entries."""
    listed = [int(match[1]) for path in log.home.files("log") if (match := _ENTRY.fullmatch(path))]
    try:
        head = log.head()
        probed = -1 if head is None else head.number
    except RunLogError:
        probed = -1  # unreadable, so it is there, and listed
    return max([*listed, probed]) + 1


def _refold(before: Head | None, entry: Entry) -> str | None:
    path = f"log/{entry.number:08d}.json"
    try:
        expected = fold(before, entry.body)
    except RunLogError as fault:
        return f"{path} does not follow from the entries before it: {fault}"
    # Compared as text: NaN differs from itself.
    if expected.to_json() != entry.head.to_json():
        keys = [key for key in Head.model_fields if repr(getattr(expected, key)) != repr(getattr(entry.head, key))]
        return f"{path} records a state that does not follow from the entries before it ({', '.join(keys)})"
    return None


def _examine_checkpoint(log: RunLog, ref: CheckpointRef, findings: Findings) -> None:
    damages: list[Damage] = []
    files = size = 0
    try:
        manifest = read_manifest(log.home, ref)
    except DamagedCheckpoint as fault:
        damages.append(Damage(f"{ref.path}/manifest.json", str(fault)))
    else:
        for key in ("step", "base", "attempt", "state_digest"):
            if getattr(manifest, key) != getattr(ref, key):
                what = f"{log.home.uri}/{ref.path}: {key} is {getattr(manifest, key)}, the log says {getattr(ref, key)}"
                damages.append(Damage(f"{ref.path}/manifest.json", what))
        faults = side_by_side(
            lambda file: _file_fault(log.home, f"{ref.path}/{file.name}", file.size, file.crc32c),
            manifest.files,
            workers=log.home.transfers,
        )
        for file, fault_text in zip(manifest.files, faults, strict=True):
            if fault_text is not None:
                damages.append(Damage(f"{ref.path}/{file.name}", fault_text))
            files, size = files + 1, size + file.size
    if damages and _retired_meanwhile(log, ref):
        return
    findings.checkpoints += 1
    findings.files += files
    findings.bytes += size
    findings.damages += damages


def _retired_meanwhile(log: RunLog, ref: CheckpointRef) -> bool:
    """Whether a writer retired the checkpoint, and perhaps deleted it, while it was being read."""
    try:
        head = log.head()
    except RunLogError:
        return False
    return head is not None and ref not in head.retained


def _examine_dataset(
    root: Storage, folder: str, identity: dict[str, object], findings: Findings, tell: Callable[[str], None]
) -> None:
    findings.dataset = folder
    path = f"{folder}/manifest.json"
    where = f"{root.uri}/{path}"
    again = "`baton run` prepares the dataset again"
    try:
        data = root.read(path)
        manifest = DatasetManifest.from_json(data, where=where, error=DamagedDataset)
    except FileMissing:
        findings.damages.append(Damage(path, f"{where} is missing; {again}"))
        return
    except DamagedDataset as fault:
        findings.damages.append(Damage(path, str(fault)))
        return
    findings.bytes += len(data)
    recorded = identity.get("data.content_digest", manifest.content_digest)
    if manifest.content_digest != recorded:
        what = f"{where} is of content {manifest.content_digest}, the run was trained on {recorded}"
        findings.damages.append(Damage(path, what))
    # A range of somebody else's file holds examples of both parts.
    shards = list({(shard.path, shard.begin): shard for shard in (*manifest.train, *manifest.validation)}.values())
    for begin in range(0, len(shards), _READ_TOGETHER):
        some = shards[begin : begin + _READ_TOGETHER]
        faults = side_by_side(lambda shard: _shard_fault(root.at(folder), shard), some, workers=root.transfers)
        for shard, fault_text in zip(some, faults, strict=True):
            if fault_text is not None:
                name = shard.path if shard.is_elsewhere else f"{folder}/{shard.path}"
                findings.damages.append(Damage(name, fault_text))
            findings.files += 1
            findings.bytes += shard.size
        tell(f"verified {folder}  ({begin + len(some)} of {len(shards)} shards)")


def _shard_fault(dataset: Storage, shard: ShardRecord) -> str | None:
    storage, name = located(dataset, shard)
    part = shard.is_elsewhere
    return _file_fault(storage, name, shard.size, shard.crc32c, begin=shard.begin, part=part)


def _file_fault(
    storage: Storage, path: str, size: int, crc32c: str, *, begin: int = 0, part: bool = False
) -> str | None:
    """What is wrong with a file, or with `size` bytes of it from `begin` on, after two reads.

    Raises:
        StorageError: nothing is wrong with it, and its bytes are damaged on the way here.
    """

    def read() -> None:
        try:
            stored = storage.checksum(path, begin=begin, size=size if part else None)
        except FileMissing as fault:
            raise DamagedDataset(f"{storage.uri}/{path} is missing") from fault
        except FileTooShort as fault:
            raise DamagedDataset(str(fault)) from fault
        if (stored.size, stored.crc32c) != (size, crc32c):
            raise DamagedDataset(
                f"{storage.uri}/{path} has {stored.size} bytes and crc32c {stored.crc32c}, "
                f"its manifest says {size} and {crc32c}"
            )

    verdict = None
    for _ in range(2):  # one bad read may be the wire's; only a second one is the file's
        try:
            read()
        except DamagedDataset as fault:
            verdict = str(fault)
        else:
            return None
    if not part:
        with suppress(FileMissing):
            require_damage_in_store(storage, path, Stored(size=size, crc32c=crc32c))
    return verdict
