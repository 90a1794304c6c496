"""The audit: execute committed steps again in processes of their own, and compare with the log."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from flows.admission.checks import preflight
from flows.auditing.scratch import Execution, copy_datasets, execution_of, logged_copy
from flows.auditing.stretches import Choice, Stretch, choose, stretches_of
from flows.proving.comparison import Arrays, compare_arrays, read_arrays, read_outcome
from flows.proving.trial import Trial
from flows.proving.trial_processes import FreshProcesses, Processes, error_of
from flows.run import Run
from tasks.foundation.accelerator.cluster import cluster_of
from tasks.foundation.contracts.audit_receipt import Agreement, AuditedStretch, AuditedVariable, AuditReceipt
from tasks.foundation.contracts.checkpoint import CheckpointRef
from tasks.foundation.contracts.log_entry import Environment
from tasks.foundation.runlog.history import commit_of, history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.local_files import PROOF_PREFIX, temporary_folder
from tasks.foundation.telemetry.events import Note, Sink
from tasks.foundation.version import baton_version


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSetup:
    """The settings of an audit that are not in the run file.

    Attributes:
        folder: scratch storage.
        processes: runs the executions.
        telemetry: receives progress notes.
        read: reads a checkpoint.
    """

    folder: Path
    processes: Processes
    telemetry: Sink
    read: Callable[[Trial, CheckpointRef], Arrays] = read_arrays


def audit_in_scratch(
    run: Run, overrides: tuple[str, ...], *, choice: Choice, count: int, seed: int, telemetry: Sink
) -> AuditReceipt:
    """Audit a run in fresh processes and temporary storage; see `audit_run`."""
    preflight(run)
    hosts = len(cluster_of(os.environ).addresses) if run.spec.accelerator.kind == "multi_worker" else 1
    with temporary_folder(PROOF_PREFIX) as folder:
        setup = AuditSetup(folder=folder, processes=FreshProcesses(folder / "said", hosts=hosts), telemetry=telemetry)
        return audit_run(run, overrides, choice=choice, count=count, seed=seed, setup=setup)


def audit_run(
    run: Run, overrides: tuple[str, ...], *, choice: Choice, count: int, seed: int, setup: AuditSetup
) -> AuditReceipt:
    """Execute the chosen stretches again, and compare every digest with the log. The run is only read.

    Args:
        run: the run.
        overrides: the user's overrides, for the processes.
        choice: which stretches, see `choose`.
        count: size of the sample.
        seed: draws the sample.
        setup: scratch storage, processes and telemetry.

    Returns:
        The receipt, not stored yet.

    Raises:
        InvalidInput: nothing can be executed again, or a process refused its input.
        DamagedCheckpoint: a checkpoint's bytes differ from its manifest.
        BatonError: a process failed.
    """
    found = stretches_of(run.log.entries())
    chosen = choose(found, choice, count=count, seed=seed, home=run.home.uri)
    copy_datasets(run.root, chosen[-1].before, setup.folder)
    results = tuple(_audited(run, overrides, stretch, setup) for stretch in chosen)
    return AuditReceipt(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict="same" if all(each.verdict == "same" for each in results) else "different",
        run=run.spec.run,
        run_file="" if run.file is None else run.file.name,
        spec_digest=hashlib.sha256(run.spec.to_json()).hexdigest(),
        baton=baton_version() or "unknown",
        seed=seed if choice == "sample" else None,
        auditable=len(found.auditable),
        stretches=results,
        left_out=found.left_out,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Executed:
    execution: Execution
    tip: CheckpointRef
    digests: Mapping[int, str]  # by step
    environment: Environment


def _audited(run: Run, overrides: tuple[str, ...], stretch: Stretch, setup: AuditSetup) -> AuditedStretch:
    logged = {ref.step: ref.state_digest for ref in stretch.commits}
    first = _execute(run, overrides, stretch, "first", setup)
    steps = [step for step in logged if step in first.digests]
    differing = [step for step in steps if first.digests[step] != logged[step]]
    result = AuditedStretch(
        start=stretch.start.step,
        end=stretch.end.step,
        verdict="different" if differing else "same",
        commits=len(logged),
        compared=len(steps),
        environment=environment_differences(stretch.before.environment, first.environment),
    )
    if not differing:
        return result
    setup.telemetry.emit(Note(text=f"step {differing[0]} differs from the log; executing the steps once more"))
    second = _execute(run, overrides, stretch, "second", setup)
    found: dict[str, object] = {
        "first_differing_step": differing[0],
        "second_agrees_with": agreement([step for step in steps if step in second.digests], logged, first, second),
    }
    if stretch.end.step in differing:
        copy = logged_copy(run, stretch, first.execution, setup.folder / "logged")
        arrays, others = setup.read(copy, stretch.end), setup.read(first.execution, first.tip)
        keys, unequal, difference = compare_arrays(arrays, others)
        found |= {"variables": len(keys), "differing": len(unequal)}
        if difference is not None:
            found["first_difference"] = AuditedVariable(
                path=difference.path,
                dtype=difference.dtype,
                shape=difference.shape,
                values=difference.values,
                bits=_bits(arrays, others, difference.path),
                largest=difference.largest,
                only_in="" if not difference.only_in else "log" if difference.only_in == "straight" else "execution",
            )
    return result.model_copy(update=found)


def _execute(run: Run, overrides: tuple[str, ...], stretch: Stretch, which: str, setup: AuditSetup) -> _Executed:
    setup.telemetry.emit(Note(text=f"executing steps {stretch.start.step} to {stretch.end.step} ({which})"))
    name = f"{which}-{stretch.end.step}"
    execution = execution_of(run, overrides, stretch, name=name, storage=setup.folder)
    finished = setup.processes.run_to_end(execution)
    if finished.returncode != 0:
        raise error_of(execution, finished)
    outcome = read_outcome(execution)
    commits = [commit_of(entry).checkpoint for entry in history_of(RunLog(execution.home).entries()).commits]
    return _Executed(
        execution=execution,
        tip=outcome.tip,
        digests={ref.step: ref.state_digest for ref in commits},
        environment=outcome.head.environment,
    )


def agreement(steps: Sequence[int], logged: Mapping[int, str], first: "_Executed", second: "_Executed") -> Agreement:
    """Return what the second execution agrees with at every compared step."""
    if all(second.digests[step] == logged[step] for step in steps):
        return "log"
    if all(second.digests[step] == first.digests[step] for step in steps):
        return "first"
    return "neither"


def environment_differences(logged: Environment, now: Environment) -> tuple[str, ...]:
    """Return how the environment of an execution differs from the log's, one line for each key."""
    return tuple(
        f"{key}: the log has {old}, the audit ran with {new}" for key, (old, new) in logged.changes_to(now).items()
    )


def _bits(arrays: Arrays, others: Arrays, key: str) -> int | None:
    one, other = arrays.get(key), others.get(key)
    if one is None or other is None or one.nbytes != other.nbytes:
        return None
    return (int.from_bytes(one.tobytes()) ^ int.from_bytes(other.tobytes())).bit_count()
