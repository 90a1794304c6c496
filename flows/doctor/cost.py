"""What a commit, a restore and a preemption cost, and so how often to commit.

Commit and restore are measured with the writer and the reader that training uses.
"""

import dataclasses
import math
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flows.doctor.run_file_checks import Finding, Target, scratch_folder
from tasks.foundation.checkpoint.cadence import CommitCadence, young_interval
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.contracts.run_spec import CheckpointSpec
from tasks.foundation.log.files import FIRST_ENTRY
from tasks.foundation.machine.processes import enough_memory_for_snapshot
from tasks.foundation.storage.interface import Storage
from tasks.foundation.storage.local_files import DOCTOR_PREFIX, temporary_folder
from tasks.foundation.telemetry.formatting import duration_words, size_words

if TYPE_CHECKING:
    from tasks.foundation.checkpoint.snapshot import Snapshot
    from tasks.foundation.state.train_state import TrainState


_ONE_HOST = "the doctor runs on one host"
# Only this part of a checkpoint is transferred; the rest is assumed to be as fast.
_SENT_BYTES = 256 << 20
# Between a client and TensorFlow servers. Processes of one machine, medians for variables of 1 to 256 MB: the client
# fetches 600 to 1,450 MB/s, and sends 260 to 510 MB/s, to each host in turn.
_FETCHED_BYTES_PER_SECOND, _SENT_BYTES_PER_SECOND = 500e6, 250e6


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
        storage: the storage root.
        state: the train state; it keeps its values.
        target: the accelerator to train on. From and to TensorFlow servers, all values cross the network.
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
        raise AssertionError(_ONE_HOST)
    stall = time.monotonic() - began
    sending, network = 0.0, ""
    if target.has_servers:
        fetching, sending = size / _FETCHED_BYTES_PER_SECOND, size * target.hosts / _SENT_BYTES_PER_SECOND
        stall += fetching
        network = (
            f"; {duration_words(fetching)} of the commit and {duration_words(sending)} of the restore are the network, "
            f"assuming {size_words(_FETCHED_BYTES_PER_SECOND)}/s from the TensorFlow servers and "
            f"{size_words(_SENT_BYTES_PER_SECOND)}/s to each host in turn, which was not measured on TPUs"
        )
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
        restore = _seconds_to_restore(home, staged, sample, state, share) + sending
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

    from tasks.foundation.checkpoint.tensor_bundle import PREFIX
    from tasks.foundation.checkpoint.verify import fetch, read_manifest
    from tasks.foundation.state.digest import tree_of

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


# The configured interval passes if it costs at most this multiple of the best interval, or this share of the time.
_TOLERATED_TIMES = 2.0
_TOLERATED_SHARE = 0.01


def check_preemption(
    run: RunFile, cost: CommitCost, *, start_seconds: float, step_seconds: float | None, hours_between: float
) -> Finding:
    """Estimate what one preemption without notice costs, and suggest the segment length.

    A preemption is equally likely at any time of an interval, so it loses half an interval on average. It also costs a
    restore and a start-up.

    Args:
        run: the run file.
        cost: measured cost of a commit and a restore.
        start_seconds: measured time to build and trace the model on this machine.
        step_seconds: assumed duration of one step; None if unknown.
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
    remedy = _suggestion(run, best, step_seconds)
    if cost.commit_seconds > run.spec.stop.grace_seconds:
        return Finding(
            verdict="warn",
            text=f"{text}; a commit takes longer than stop.grace_seconds = {run.spec.stop.grace_seconds:g}, so a "
            "preemption notice is too late for one",
            remedy=f"{remedy}; or use storage that is closer",
        )
    configured = configured_interval_seconds(run, step_seconds)
    if run.spec.checkpoint.every_seconds == "auto" and (configured is None or configured > best):
        text += "; checkpoint.every_seconds is auto, so commits within a segment follow what they cost"
        return Finding(verdict="pass", text=text, remedy=remedy if configured is None else "")
    if configured is None:
        return Finding(verdict="pass", text=text, remedy=remedy)
    # A short run needs no advice about commits, unless a commit takes longer than the work it saves.
    run_seconds = math.inf if step_seconds is None else _target(run) * step_seconds
    if run_seconds <= best and (configured >= run_seconds or configured >= cost.commit_seconds):
        text += f"; the whole run takes {duration_words(run_seconds)}"
        return Finding(verdict="pass", text=text)
    text += f"; the run file commits every {duration_words(configured)}"
    wasted, least = (_wasted_share(each, cost.training_seconds, hours_between) for each in (configured, best))
    if wasted <= max(_TOLERATED_TIMES * least, _TOLERATED_SHARE):
        return Finding(verdict="pass", text=text)
    return Finding(
        verdict="warn",
        text=f"{text}, which wastes {min(wasted, 1):.0%} of the time instead of {least:.1%}",
        remedy=remedy,
    )


def configured_interval_seconds(run: RunFile, step_seconds: float | None) -> float | None:
    """Return the seconds between two commits as configured; None if they depend on an unknown step time."""
    train = run.spec.train
    steps: float = train.segment_steps or _target(run)
    if train.segment_epochs is not None and train.epoch_examples is not None:
        steps = train.epoch.period(train.segment_epochs).steps
    in_steps = None if step_seconds is None else min(steps, _target(run)) * step_seconds
    every = run.spec.checkpoint.every_seconds
    in_seconds = None if every == "auto" else every  # auto follows what commits cost
    return min((each for each in (in_steps, train.segment_seconds, in_seconds) if each is not None), default=None)


def _target(run: RunFile) -> float:
    """The step to train to; infinite if it follows from an unknown number of training examples."""
    target = run.spec.train.known_target
    return math.inf if target is None else target


def _wasted_share(interval: float, commit_seconds: float, hours_between: float) -> float:
    """Return the share of the time spent on commits and lost work."""
    return commit_seconds / interval + interval / (2 * hours_between * 3600)


def _suggestion(run: RunFile, best: float, step_seconds: float | None) -> str:
    if step_seconds is None:
        return f"train.segment_seconds: {_round(best)}; for the same in steps, give --step-seconds"
    steps = _round(best / step_seconds)
    if steps >= _target(run):
        return "one segment is enough: the run is shorter than the best interval"
    return f"train.segment_steps: {steps}"


def _round(value: float) -> int:
    """Round to two significant digits, at least 1."""
    unit = 10.0 ** max(0, math.floor(math.log10(max(value, 1))) - 1)
    return max(1, int(round(value / unit) * unit))
