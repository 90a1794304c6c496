"""Small runs for tests of the log."""

import json
from collections.abc import Callable
from typing import Any

from baton.tasks.foundation.contracts.checkpoint import (
    CheckpointManifest,
    CheckpointRef,
    FileRecord,
    checkpoint_folder,
    manifest_digest,
)
from baton.tasks.foundation.contracts.log_entry import (
    Body,
    Change,
    Commit,
    Entry,
    Environment,
    Evaluation,
    EvaluationOnTest,
    Head,
    MetricRow,
    Origin,
    Quarantine,
    Rewind,
)
from baton.tasks.foundation.contracts.run_spec import KeepBest
from baton.tasks.foundation.log.appends import commit
from baton.tasks.foundation.log.files import Decoded, decode, entry_number, entry_path, with_digest
from baton.tasks.foundation.log.fold import fold
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.transfers import checksum_bytes

ENVIRONMENT = Environment(accelerator="cpu", replicas=1, intra_op_threads=1, inter_op_threads=1, versions={})
ACCURACY = KeepBest(metric="accuracy", mode="max")


def origin() -> Origin:
    return Origin(identity={"seed": 0}, environment=ENVIRONMENT)


def ref(step: int, base: int = 0, attempt: str = "a") -> CheckpointRef:
    """A reference without files, for folding."""
    return CheckpointRef(
        path=checkpoint_folder(step=step, base=base, attempt=attempt),
        step=step,
        base=base,
        attempt=attempt,
        state_digest="d",
        manifest_digest="m",
        size=8,
    )


def staged_content(step: int, attempt: str) -> bytes:
    """What `stage` writes."""
    return f"state at {step} by {attempt}".encode()


def stage(home: Storage, step: int, base: int, attempt: str) -> CheckpointRef:
    """Stage a whole checkpoint: one file, and the manifest last."""
    folder = checkpoint_folder(step=step, base=base, attempt=attempt)
    data = staged_content(step, attempt)
    home.write(f"{folder}/ckpt.data", data)
    stored = checksum_bytes(data)
    manifest = CheckpointManifest(
        step=step,
        base=base,
        attempt=attempt,
        replicas=1,
        state_digest=f"digest of {step}",
        signature=(),
        leaf_digests={},
        files=(FileRecord(name="ckpt.data", size=stored.size, crc32c=stored.crc32c),),
    ).to_json()
    home.write(f"{folder}/manifest.json", manifest)
    return CheckpointRef(
        path=folder,
        step=step,
        base=base,
        attempt=attempt,
        state_digest=f"digest of {step}",
        manifest_digest=manifest_digest(manifest),
        size=stored.size,
    )


def committing(
    checkpoint: CheckpointRef, parent: str | None = None, history: tuple[MetricRow, ...] = (), **seconds: float
) -> Commit:
    return Commit(
        checkpoint=checkpoint, parent=parent, exit_reason="segment_end", history=history, examples=8, seconds=seconds
    )


def evaluation(checkpoint: CheckpointRef, keep_best: KeepBest | None = ACCURACY, **metrics: float) -> Evaluation:
    return Evaluation(checkpoint=checkpoint, metrics=metrics, examples=3, seconds=0.5, keep_best=keep_best)


def on_test(checkpoint: CheckpointRef, **metrics: float) -> EvaluationOnTest:
    return EvaluationOnTest(checkpoint=checkpoint, metrics=metrics, examples=4, seconds=0.25, content_digest="t")


def change_of_seed(head: Head | None) -> Body | None:
    """Accept another seed, as `init_or_restore` does; this moves the base."""
    if head is None or head.identity == {"seed": 1}:
        return None
    return Change(environment=ENVIRONMENT, identity={"seed": 1}, accepted=("seed",))


def moves_base(body: Body, before: Head | None = None) -> bool:
    """Whether an entry moves the base; of a quarantine, the state before it says whether the tip is meant."""
    if isinstance(body, Quarantine) and before is not None and before.tip is not None:
        return before.tip.path == body.path
    return isinstance(body, Origin | Commit | Quarantine | Rewind) or (
        isinstance(body, Change) and body.identity is not None
    )


def begin(home: Storage) -> RunLog:
    """A run with its origin and step 0 committed."""
    log = RunLog(home)
    log.append(lambda head: origin() if head is None else None, attempt="a0")
    commit(log, committing(stage(home, 0, 0, "a0")))
    return log


def train(log: RunLog, to_step: int, attempt: str = "a") -> Entry:
    """Stage a checkpoint on the tip and commit it."""
    head = log.head()
    assert head is not None
    staged = stage(log.home, to_step, head.base, attempt)
    row = (MetricRow(step=to_step, metrics={"loss": 1.0}),) if to_step else ()
    return commit(log, committing(staged, parent=head.tip.path if head.tip else None, history=row))


def head_of(log: RunLog) -> Head:
    head = log.head()
    assert head is not None
    return head


def log_numbers(home: Storage) -> list[int]:
    return sorted(number for path in home.files("log") if (number := entry_number(path)) is not None)


def signed(entry: dict[str, Any]) -> bytes:
    """The file of an entry of which a test has changed the JSON, with the digest of its bytes."""
    return with_digest(json.dumps({key: value for key, value in entry.items() if key != "sha256"}).encode())


def edit_entry(home: Storage, number: int, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON of an entry as a version of Baton would write it: with the digest of its bytes."""
    entry = json.loads(home.read(entry_path(number)))
    change(entry)
    home.write(entry_path(number), signed(entry))


def folders(home: Storage) -> set[str]:
    return {path.rsplit("/", 1)[0] for path in home.files("checkpoints")}


# Thousands of logs begin with the same entries.
_READ: dict[tuple[int, bytes], Decoded] = {}


def _read(home: Storage, log: RunLog, number: int) -> Entry:
    data = home.read(entry_path(number))
    known = _READ.get((number, data))
    if known is not None:
        return known.entry
    found = decode(data, where=str(number), number=number, resolve=log._require)
    _READ[number, data] = found
    return found.entry


_REPLAYED: dict[tuple[int, int], tuple[Entry, Head | None]] = {}


def _replays(entry: Entry, before: Head | None) -> bool:
    if (id(entry), id(before)) not in _REPLAYED:
        if repr(entry.head) != repr(fold(before, entry.body)):
            return False
        _REPLAYED[id(entry), id(before)] = (entry, before)  # keeps the objects alive, so that their ids stay unique
    return True


def assert_sound(home: Storage) -> list[Entry]:
    """Assert what holds for every log, and return its entries."""
    numbers = log_numbers(home)
    assert numbers == list(range(len(numbers))), "the log has gaps"
    log = RunLog(home)
    newest = log.head()
    assert newest is not None
    assert newest.number == len(numbers) - 1, "the head is not the newest entry"
    entries: list[Entry] = []
    before: Head | None = None
    for number in numbers:
        entry = _read(home, log, number)
        entries.append(entry)
        assert entry.head.number == entry.number == number
        assert _replays(entry, before), "the log does not replay"
        assert entry.head.base == (entry.number if moves_base(entry.body, before) else before.base if before else None)
        if isinstance(entry.body, Commit):
            assert before is not None
            assert entry.body.checkpoint.base == before.base, "committed on a base that was no longer current"
        kept = entry.head.retained
        assert entry.head.tip == (kept[-1] if kept else None), "the tip is not retained"
        assert entry.head.best is None or entry.head.best.checkpoint in kept, "the best is not retained"
        before = entry.head
    on_disk = folders(home)
    if before is not None:
        assert {kept.path for kept in before.retained} <= on_disk, "files of a retained checkpoint are missing"
    return entries


Act = Callable[[Storage], object]
