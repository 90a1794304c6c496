"""Measure what a commit and a restore take, with the writer and the reader that training uses."""

import dataclasses
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.doctor.finding import Finding
from flows.doctor.storage_checks import scratch_folder
from tasks.foundation.checkpoint.cadence import CommitCadence
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.run_spec import CheckpointSpec
from tasks.foundation.host_memory import enough_memory_for_snapshot
from tasks.foundation.runlog.entry_paths import FIRST_ENTRY
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.local_files import DOCTOR_PREFIX, temporary_folder
from tasks.foundation.telemetry.formatting import duration_words, size_words

if TYPE_CHECKING:
    from tasks.foundation.checkpoint.snapshot import Snapshot
    from tasks.foundation.state.train_state import TrainState

# Only this part of a checkpoint is transferred; the rest is assumed to be as fast.
_SENT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCost:
    """The measured cost of a checkpoint.

    Attributes:
        commit_seconds: until its files are written and compared with what was sent.
        training_seconds: what it takes from the training: the wait, and the share of the processors.
        restore_seconds: to read it back.
        state_bytes: size of the train state.
    """

    commit_seconds: float
    training_seconds: float
    restore_seconds: float
    state_bytes: int


def check_commit(storage: Storage, state: "TrainState") -> Finding:
    """Measure a commit and a restore of the train state; the finding's value is the `CommitCost`.

    The files go to a temporary folder of the storage root, beside the runs, and are then deleted. Only about the first
    256 MiB of a large state are transferred.

    Args:
        storage: the storage root.
        state: the train state; it keeps its values.
    """
    from tasks.foundation.checkpoint.snapshot import snapshot_bytes, take_snapshot
    from tasks.foundation.checkpoint.write import write_snapshot

    size = snapshot_bytes(state)
    beside = enough_memory_for_snapshot(size)
    if beside and (first := take_snapshot(state)) is not None:
        first.release()  # later snapshots use its memory, and are faster
    began = time.monotonic()
    snapshot = take_snapshot(state, copy=beside)
    if snapshot is None:
        raise AssertionError("the doctor runs on one host")
    stall = time.monotonic() - began
    sample, share = _first_values(snapshot)
    processor_seconds: list[float] = []
    with scratch_folder(storage) as home:
        home.create(FIRST_ENTRY, b"")  # nothing is written to a home without a log
        began = time.monotonic()
        attempt = uuid.uuid4().hex
        staged = write_snapshot(sample, home, base=0, attempt=attempt, processed=processor_seconds.append)
        commit = stall + (time.monotonic() - began) * share
        restore = _seconds_to_restore(home, staged, sample, state, share)
    cadence = CommitCadence(CheckpointSpec(), state_bytes=size)
    cadence.stalled(stall if beside else commit)
    if beside:
        cadence.processed(sum(processor_seconds) * share)
    cost = CommitCost(
        commit_seconds=commit, training_seconds=cadence.cost_seconds, restore_seconds=restore, state_bytes=size
    )
    sampled = "" if share == 1 else f" ({size_words(size / share)} of it measured, the rest assumed as fast)"
    text = (
        f"{size_words(size)}{sampled}: {duration_words(commit)} to commit, {duration_words(restore)} to restore, from "
        f"this machine; to save beside the training takes {size_words(size)} of memory"
    )
    if beside:
        text = f"{text}, and training waits {duration_words(stall)}"
        return Finding(check="commit", verdict="pass", text=text, value=cost)
    return Finding(
        check="commit",
        verdict="warn",
        text=f"{text}, which this machine does not have, so training waits for each commit",
        remedy="train on a machine with more memory, or commit less often",
        value=cost,
    )


def _first_values(snapshot: "Snapshot") -> tuple["Snapshot", float]:
    """The first values of a snapshot, at least one variable, and the size of all as a multiple of theirs."""
    sizes = [value.array.nbytes for value in snapshot.values]
    count = 2  # TensorFlow's graph and one variable
    while count < len(sizes) and sum(sizes[: count + 1]) <= _SENT_BYTES:
        count += 1
    values = snapshot.values[:count]
    # None is checked for NaN: after a step whose loss is not finite, which the check "step" reports, a commit is
    # measured all the same.
    return dataclasses.replace(snapshot, values=values, trainable=()), sum(sizes) / sum(sizes[:count])


def _seconds_to_restore(
    home: Storage, staged: CheckpointRef, sample: "Snapshot", state: "TrainState", share: float
) -> float:
    """Seconds to fetch and verify the files, to read their values into the variables, and to compare the digest."""
    import tensorflow as tf

    from tasks.foundation.checkpoint.bundle import PREFIX
    from tasks.foundation.checkpoint.verify import fetch, read_manifest
    from tasks.foundation.state.layout import tree_of

    checkpoint = tf.train.Checkpoint(
        **tree_of({value.key: state.saved[value.key] for value in sample.values if value.key in state.saved})
    )
    with temporary_folder(DOCTOR_PREFIX) as folder:
        began = time.monotonic()
        fetch(home, staged, read_manifest(home, staged), folder)
        status = checkpoint.read(str(folder / PREFIX))
        status.assert_existing_objects_matched()
        status.expect_partial()
        seconds = (time.monotonic() - began) * share
    began = time.monotonic()
    state.digest()
    return seconds + time.monotonic() - began
