"""Reads every committed byte of a run again: log, code, checkpoints, datasets. Reports damage.

`baton verify` writes nothing. The deployment `verify/weekly` also quarantines what is damaged.

The size of a file is compared before its bytes are read, so a file that is too large costs nothing.
"""

import logging
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from baton.flows.opened_run import OpenedRun, RunHome
from baton.tasks.foundation.checkpoint.verify import find_damage, read_manifest
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.dataset import PREPARE_AGAIN, DatasetManifest, ShardRecord, checked_manifest
from baton.tasks.foundation.contracts.home_files import SAVED_CODE, is_saved_code, saved_code_path
from baton.tasks.foundation.contracts.identity import VALIDATION
from baton.tasks.foundation.contracts.log_entry import Change, Entry, EvaluationOnTest, Origin, StoredEntry
from baton.tasks.foundation.errors import (
    BatonError,
    DamagedCheckpoint,
    DamagedDataset,
    FileMissing,
    FileTooLarge,
    PathRefused,
    RunLogError,
)
from baton.tasks.foundation.log.appends import quarantine_older
from baton.tasks.foundation.log.files import (
    entry_number,
    entry_path,
    false_blocks,
    folder_as_entry,
    folders_in_log,
    require_follows,
)
from baton.tasks.foundation.log.history import KeptForGood, restorable
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import FileStat, Storage
from baton.tasks.foundation.storage.opening import locate_shard
from baton.tasks.foundation.storage.transfers import damage_of, parallel_map
from baton.tasks.foundation.telemetry.formatting import size_words
from baton.tasks.foundation.text import counted
from baton.tasks.prepare_data.sources.source_files import names_file

_LOGGER = logging.getLogger(__name__)
_READ_TOGETHER = 64
_CODE_REMEDY = "restore it from a backup; until then, name the run file: --run-file FILE"


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged or missing file."""

    file: str
    what: str


@dataclass(slots=True)
class Findings:
    """What was read, and the damage that was found."""

    entries: int = 0
    checkpoints: int = 0
    files: int = 0
    bytes: int = 0
    quarantined: int = 0
    dataset: str | None = None
    not_read: int = 0  # shards in files outside of the storage, where no run file names them
    damages: list[Damage] = field(default_factory=list)

    def words(self, home: str) -> str:
        """Say in a line what was read.

        Args:
            home: the address of the run's home.
        """
        dataset = f", and {self.dataset}" if self.dataset else ""
        earlier = f"; {self.quarantined} quarantined earlier, not read" if self.quarantined else ""
        return (
            f"{home}: read {counted(self.entries, 'log entry', 'log entries')}, "
            f"{counted(self.checkpoints, 'checkpoint')}{dataset}: {counted(self.files, 'file')}, "
            f"{size_words(self.bytes)}{earlier}"
        )


def verify_home(
    run: RunHome,
    on_progress: Callable[[str], None] = lambda _: None,
    *,
    path_words: Callable[[str], str] = str,
    quarantine: bool = False,
) -> Findings:
    """Read every file that the run's log names, and compare it with its manifest.

    Args:
        quarantine: whether to take a damaged checkpoint of the head out of use, if two more reads agree. Never the tip:
            a run at work continues from its state in memory, and the next start quarantines it.
        on_progress: receives a line for each part that was read.
        path_words: how these lines write a checkpoint's path.

    Raises:
        StorageError: the store refused a request or failed; the bytes may be good.
    """
    findings = Findings()
    newest, kept, test, code = _verify_log(run.log, findings)
    _verify_code(run.home, code, findings)
    if newest is not None:
        head, identity = newest.head, newest.head.identity if isinstance(newest, Entry) else {}
        findings.quarantined = len(head.quarantined)
        _verify_blocks(run.log.home, newest.number + 1, findings)
        on_progress(f"verified {counted(findings.entries, 'log entry', 'log entries')}")
        refs = (*(each.ref for each in kept.checkpoints), *head.retained)
        for number, ref in enumerate(refs, start=1):
            _verify_checkpoint(run.log, ref, findings, of_entry=newest.number, quarantine=quarantine)
            count = f"({number} of {counted(len(refs), 'checkpoint')})"
            on_progress(f"verified {path_words(ref.path)}  {size_words(ref.size)}  {count}")
        sets = [
            (identity.get("data.folder"), identity.get("data.content_digest")),
            (identity.get("data.validation_folder"), identity.get(VALIDATION)),
        ]
        if test is not None:
            sets.append((test.folder, test.content_digest))
        for folder, digest in sets:
            if isinstance(folder, str):
                findings.dataset = findings.dataset or folder
                _verify_dataset(run, folder, digest, findings, on_progress)
    return findings


def _verify_log(
    log: RunLog, findings: Findings
) -> tuple[Entry | StoredEntry | None, KeptForGood, EvaluationOnTest | None, dict[str, int]]:
    """Read and fold all entries again.

    Returns:
        The newest readable entry; what is kept for good; the newest evaluation on a test set, because earlier test sets
        may be gone; None if there is none. And the paths of the saved code, with the entry that names each.
    """
    newest: Entry | StoredEntry | None = None
    test: EvaluationOnTest | None = None
    code: dict[str, int] = {}
    kept = KeptForGood()
    for path in folders_in_log(log.home):
        findings.damages.append(Damage(path, str(folder_as_entry(log.home, path))))
    state_is_known = True  # whether the state before the next entry is known
    for number, found in enumerate(_entries(log, _count(log))):
        if isinstance(found, RunLogError):
            findings.damages.append(Damage(entry_path(number), str(found)))
            state_is_known = False
            continue
        entry, size = found
        findings.entries += 1
        findings.bytes += size
        if state_is_known and isinstance(entry, Entry) and not isinstance(newest, StoredEntry):
            try:
                require_follows(log.home, None if newest is None else newest.head, entry)
            except RunLogError as fault:
                findings.damages.append(Damage(entry_path(number), str(fault)))
        newest, state_is_known = entry, True
        kept.follow(entry.body)
        if isinstance(entry.body, EvaluationOnTest):
            test = entry.body
        identity = entry.body.identity if isinstance(entry.body, Origin | Change) else None
        if identity is not None and is_saved_code(identity.get(SAVED_CODE)):
            code[identity[SAVED_CODE]] = number
    return newest, kept, test, code


def _verify_code(home: Storage, named: dict[str, int], findings: Findings) -> None:
    """Compare the saved run files and code with their names, which have the digest of their bytes."""
    there = set(home.files("code"))
    for path in sorted({*named, *filter(is_saved_code, there)}):
        try:
            data = home.read(path)
        except FileTooLarge:
            text: str | None = "is larger than any such file"
        except PathRefused as fault:
            text = f"cannot be read: {fault}"
        except FileMissing:
            text = f"is missing, and {entry_path(named[path])} names it" if path in named else None
        else:
            findings.files, findings.bytes = findings.files + 1, findings.bytes + len(data)
            text = None if path == saved_code_path(data) else "does not have the digest in its name"
        if text is not None:
            findings.damages.append(Damage(path, f"{home.uri}/{path} {text}; {_CODE_REMEDY}"))


def _verify_blocks(home: Storage, entries: int, findings: Findings) -> None:
    """Compare the blocks of entries, which only reports and the like read, with the entries."""
    for path in false_blocks(home, entries):
        findings.damages.append(Damage(path, f"{home.uri}/{path} does not hold the entries of the log; delete it"))


def _entries(log: RunLog, count: int) -> Iterator[tuple[Entry | StoredEntry, int] | RunLogError]:
    """Each entry and its bytes, or the error of reading it."""

    def read(number: int) -> tuple[Entry | StoredEntry, int] | RunLogError:
        try:
            return log.entry_and_size(number)
        except RunLogError as fault:
            return fault
        except PathRefused as fault:  # a link or a pipe in the place of an entry
            return RunLogError(str(fault))

    yield from log.read_all(read, count)


def _count(log: RunLog) -> int:
    """One more than the highest entry number. Found by listing and by probing, because a gap may hide later entries."""
    listed = [number for path in log.home.files("log") if (number := entry_number(path)) is not None]
    try:
        head = log.head()
        probed = -1 if head is None else head.number
    except (RunLogError, PathRefused):
        probed = -1  # the entry exists but is unreadable, so the listing has it
    return max([*listed, probed]) + 1


def _verify_checkpoint(log: RunLog, ref: CheckpointRef, findings: Findings, *, of_entry: int, quarantine: bool) -> None:
    """Compare a checkpoint's manifest with the log and its files with the manifest."""
    damages: list[Damage] = []
    files = size = 0
    try:
        manifest = read_manifest(log.home, ref)
    except (DamagedCheckpoint, FileTooLarge, PathRefused) as fault:
        damages.append(Damage(f"{ref.path}/manifest.json", str(fault)))
    else:
        for key in ("step", "base", "attempt", "state_digest"):
            if getattr(manifest, key) != getattr(ref, key):
                text = (
                    f"{log.home.uri}/{ref.path}: {key} is {getattr(manifest, key)}, but the log has {getattr(ref, key)}"
                )
                damages.append(Damage(f"{ref.path}/manifest.json", text))
        faults = parallel_map(
            lambda file: _file_fault(log.home, f"{ref.path}/{file.name}", FileStat(size=file.size, crc32c=file.crc32c)),
            manifest.files,
            workers=log.home.transfers,
        )
        for file, fault_text in zip(manifest.files, faults, strict=True):
            if fault_text is not None:
                damages.append(Damage(f"{ref.path}/{file.name}", fault_text))
            files, size = files + 1, size + file.size
    if damages and _retired_meanwhile(log, ref, of_entry):
        return
    findings.checkpoints += 1
    findings.files += files
    findings.bytes += size
    if damages and quarantine and _quarantine(log, ref):
        damages = [replace(each, what=f"{each.what}; the checkpoint is quarantined now") for each in damages]
    findings.damages += damages


def _quarantine(log: RunLog, ref: CheckpointRef) -> bool:
    """Take a damaged checkpoint out of use; whether it was."""
    try:
        reason = find_damage(log.home, ref, read_bytes=True)
        return reason is not None and quarantine_older(log, ref, reason, attempt=uuid.uuid4().hex)
    except BatonError as fault:
        _LOGGER.warning("%s: not quarantined: %s", ref.path, fault)  # what was found is reported all the same
        return False


def _retired_meanwhile(log: RunLog, ref: CheckpointRef, number: int) -> bool:
    """Whether a writer retired the checkpoint, and perhaps deleted it, after entry `number`, which retains it."""
    try:
        head = log.head()
    except (RunLogError, PathRefused):
        return False
    return head is not None and head.number > number and ref not in restorable(log, head)


def _verify_dataset(
    run: RunHome, folder: str, digest: object, findings: Findings, on_progress: Callable[[str], None]
) -> None:
    root = run.root
    path = f"{folder}/manifest.json"
    uri = f"{root.uri}/{path}"
    try:
        data = root.read(path)
        manifest = checked_manifest(data, where=uri)
    except FileMissing:
        findings.damages.append(Damage(path, f"{uri} is missing; `baton run` prepares the dataset again"))
        return
    except (FileTooLarge, PathRefused) as fault:
        findings.damages.append(Damage(path, f"{fault}; {PREPARE_AGAIN}"))
        return
    except DamagedDataset as fault:
        findings.damages.append(Damage(path, str(fault)))
        return
    findings.bytes += len(data)
    if digest is not None and manifest.content_digest != digest:
        text = f"{uri} has content {manifest.content_digest}, but the log has {digest}; {PREPARE_AGAIN}"
        findings.damages.append(Damage(path, text))
        return  # it names other files than the run's; a mixture could name itself
    if manifest.mixture is not None:
        for source in manifest.mixture.sources:
            _verify_dataset(run, source.folder, source.content_digest, findings, on_progress)
        return
    shards = _shards_to_read(run, manifest, findings)
    for begin in range(0, len(shards), _READ_TOGETHER):
        batch = shards[begin : begin + _READ_TOGETHER]
        faults = parallel_map(lambda shard: _shard_fault(run, folder, shard), batch, workers=root.transfers)
        for shard, fault_text in zip(batch, faults, strict=True):
            if fault_text is not None:
                name = shard.path if shard.is_external else f"{folder}/{shard.path}"
                findings.damages.append(Damage(name, fault_text))
            findings.files += 1
            findings.bytes += shard.size
        on_progress(f"verified {folder}  ({begin + len(batch)} of {counted(len(shards), 'shard')})")


def _shards_to_read(run: RunHome, manifest: DatasetManifest, findings: Findings) -> list[ShardRecord]:
    """The shards of a dataset; without a run file, those in the storage.

    A manifest may come from a stranger: it does not decide which of this user's files are read.
    """
    # A file that Baton reads in place may hold examples of both training and validation.
    listed_shards = [part for shard in (*manifest.train, *manifest.validation) for part in (shard, shard.head)]
    shards = list({(shard.path, shard.begin): shard for shard in listed_shards if shard is not None}.values())
    if isinstance(run, OpenedRun):
        return shards
    inside = [shard for shard in shards if not shard.is_external]
    findings.not_read += len(shards) - len(inside)
    return inside


def _shard_fault(run: RunHome, folder: str, shard: ShardRecord) -> str | None:
    if shard.is_external and not (isinstance(run, OpenedRun) and _is_named(run, shard.path)):
        return f"{shard.path} is outside of the storage, and data.options.path does not name it; it was not read"
    storage, name = locate_shard(run.root.at(folder), shard)
    expected = FileStat(size=shard.size, crc32c=shard.crc32c)
    fault = _file_fault(storage, name, expected, begin=shard.begin, part=shard.is_external)
    remedy = "restore the original file" if shard.is_external else PREPARE_AGAIN
    return None if fault is None else f"{fault}; {remedy}"


def _is_named(run: OpenedRun, path: str) -> bool:
    """Whether the user's run file names a file outside of the storage."""
    return any(names_file(named, run.folder, path) for named in run.spec.data.paths_in_place)


def _file_fault(storage: Storage, path: str, expected: FileStat, *, begin: int = 0, part: bool = False) -> str | None:
    """The damage of a file, or of the part of it that begins at an offset; None if the bytes are good.

    Raises:
        StorageError: the stored bytes are good, but the transfer damages them.
    """

    def read() -> FileStat:
        if not part and storage.local_path(path) is None:
            stored = storage.stat(path)
            if stored.size != expected.size:
                return stored
        return storage.checksum(path, begin=begin, size=expected.size if part else None)

    try:
        return damage_of(storage, path, expected, read, part_end=begin + expected.size if part else None)
    except PathRefused as fault:  # a link that leads out, or a pipe
        return f"{storage.uri}/{path} cannot be read: {fault}"
