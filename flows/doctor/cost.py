"""What a commit, a restore and a preemption cost, and so how often to commit.

Commit and restore are measured with the writer and the reader that training uses.
"""

import dataclasses
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton.flows.doctor.run_file_checks import Finding, Target, scratch_folder
from baton.tasks.foundation.checkpoint.cadence import CommitCadence, young_interval
from baton.tasks.foundation.contracts.checkpoint import CheckpointRef
from baton.tasks.foundation.contracts.run_file import RunFile
from baton.tasks.foundation.contracts.run_spec import CheckpointSpec
from baton.tasks.foundation.log.files import FIRST_ENTRY
from baton.tasks.foundation.machine.processes import enough_memory_for_snapshot
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local_files import DOCTOR_PREFIX, temporary_folder
from baton.tasks.foundation.telemetry.formatting import duration_words, size_words

if TYPE_CHECKING:
    from baton.tasks.foundation.checkpoint.snapshot import Snapshot
    from baton.tasks.foundation.state.train_state import TrainState


_ONE_HOST = "the doctor runs on one host"
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


def check_commit(storage: Storage, state: "TrainState", target: Target) -> Finding:
    """Measure a commit and a restore of the train state; the finding's value is the `CommitCost`.

    The files go to a temporary folder of the storage root, beside the runs, and are then deleted. Only about the first
    256 MiB of a large state are transferred.

    Args:
        state: the train state; it keeps its values.
        target: the accelerator to train on. From and to TensorFlow servers all values cross the network, which is not
            measured.
    """
    from baton.tasks.foundation.checkpoint.snapshot import snapshot_bytes, take_snapshot
    from baton.tasks.foundation.checkpoint.write import write_snapshot

    size = snapshot_bytes(state)
    beside = enough_memory_for_snapshot(size)
    if beside and (first := take_snapshot(state)) is not None:
        first.release()  # later snapshots use its memory, and are faster
    began = time.monotonic()
    snapshot = take_snapshot(state, copy=beside)
    if snapshot is None:
        raise AssertionError(_ONE_HOST)
    stall = time.monotonic() - began
    network = "; the network from and to the TensorFlow servers is not measured" if target.has_servers else ""
    sample, share = _first_values(snapshot)
    processor_seconds: list[float] = []
    with scratch_folder(storage) as home:
        home.create(FIRST_ENTRY, b"")  # nothing is written to a home without a log
        began = time.monotonic()
        attempt = uuid.uuid4().hex
        staged = write_snapshot(sample, home, base=0, attempt=attempt, processed=processor_seconds.append)
        commit = stall + (time.monotonic() - began) * share
        if staged is None:
            raise AssertionError(_ONE_HOST)
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
        text = f"{text}, and training waits {duration_words(stall)}{network}"
        return Finding(verdict="pass", text=text, value=cost)
    return Finding(
        verdict="warn",
        text=f"{text}, which this machine does not have, so training waits for each commit{network}",
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
    layout = dataclasses.replace(snapshot.layout, files_of=(range(values[-1].location.shard + 1),))
    sample = dataclasses.replace(snapshot, values=values, trainable=(), layout=layout)
    return sample, sum(sizes) / sum(sizes[:count])


def _seconds_to_restore(
    home: Storage, staged: CheckpointRef, sample: "Snapshot", state: "TrainState", share: float
) -> float:
    """Seconds to fetch and verify the files, to read their values into the variables, and to compare the digest."""
    import tensorflow as tf

    from baton.tasks.foundation.checkpoint.tensor_bundle import PREFIX
    from baton.tasks.foundation.checkpoint.verify import fetch, read_manifest
    from baton.tasks.foundation.state.digest import tree_of

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


def check_preemption(run: RunFile, cost: CommitCost, *, start_seconds: float, hours_between: float) -> Finding:
    """Estimate what one preemption without notice costs.

    A preemption is equally likely at any time of an interval, so it loses half an interval on average. It also costs a
    restore and a start-up.

    Args:
        cost: measured cost of a commit and a restore.
        start_seconds: measured time to build and trace the model on this machine.
        hours_between: mean time between preemptions.
    """
    best = young_interval(cost.training_seconds, hours_between * 3600, max_overhead=run.spec.checkpoint.max_overhead)
    restart_seconds = cost.restore_seconds + start_seconds
    restoring = duration_words(cost.restore_seconds)
    text = (
        f"with a preemption every {hours_between:g} h and a commit every {duration_words(best)}, each preemption costs "
        f"about {duration_words(best / 2 + restart_seconds)}: half an interval, {restoring} to restore, and "
        f"{duration_words(start_seconds)} to build and trace, plus the start of a new machine"
    )
    if cost.commit_seconds > run.spec.stop.grace_seconds:
        return Finding(
            verdict="warn",
            text=f"{text}; a commit takes longer than stop.grace_seconds = {run.spec.stop.grace_seconds:g}, so a "
            "preemption notice is too late for one",
            remedy="use storage that is closer",
        )
    if run.spec.checkpoint.every_seconds == "auto":
        text += "; checkpoint.every_seconds is auto, so commits within a segment follow what they cost"
        return Finding(verdict="pass", text=text)
    return Finding(verdict="pass", text=text, remedy="checkpoint.every_seconds: auto commits as often as it pays")
