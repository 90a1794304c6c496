"""Proofs and audits: steps executed again in fresh processes, compared bit by bit, and the receipt of what was found.

A proof trains a run file straight and again with cuts and a kill, and names the likely cause of a difference. An audit
executes committed steps again, each stretch from a copy of its first checkpoint, and compares with the log; the run is
only read. Where a digest differs, the steps are executed once more: what the second execution agrees with tells a
machine that computed wrongly from a training that is not deterministic.
"""

import hashlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING

from baton.flows.admit import preflight
from baton.flows.opened_run import OpenedRun
from baton.flows.proof.choose import (
    Choice,
    Stretch,
    choose,
    cut_length,
    logged_settings,
    require_enough_steps,
    stretches_of,
    training_of,
)
from baton.flows.proof.compare import (
    Outcome,
    SavedState,
    causes_of,
    compare,
    compare_states,
    difference_words,
    read_outcome,
    read_variable,
)
from baton.flows.proof.execute import Execution, FreshProcesses, Laboratory, hosts_of
from baton.tasks.foundation.checkpoint.verify import read_manifest, verify_checkpoint
from baton.tasks.foundation.contracts.base import baton_version
from baton.tasks.foundation.contracts.checkpoint import CheckpointManifest, CheckpointRef, checkpoint_folder
from baton.tasks.foundation.contracts.home_files import Agreement, AuditedStretch, AuditReceipt, ProofReceipt, Receipt
from baton.tasks.foundation.contracts.log_entry import Commit, Environment, Head, Origin
from baton.tasks.foundation.contracts.run_file import RunFile
from baton.tasks.foundation.contracts.run_spec import RunSpec, with_recorded_examples
from baton.tasks.foundation.errors import BatonError, DamagedDataset, FileMissing
from baton.tasks.foundation.log.appends import commit
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.local_files import PROOF_PREFIX, temporary_folder
from baton.tasks.foundation.telemetry.events import Sink
from baton.tasks.foundation.text import counted, shown

if TYPE_CHECKING:
    from baton.tasks.foundation.dataset.features import Array

# A process may finish before it can be killed. Each further try trains twice as many steps.
_TRIES = 5


def prove(
    run: RunFile, overrides: tuple[str, ...], *, steps: int, share_data: bool, laboratory: Laboratory
) -> ProofReceipt:
    """Train straight and cut, in separate processes, and compare.

    Args:
        run: the run file, with the overrides applied.
        overrides: the user's overrides, for the processes.
        steps: steps to train, at least 4. Doubled while the processes finish before they can be killed.
        share_data: whether the dataset is prepared once; otherwise each training has a storage root of its own.
        laboratory: scratch storage, processes and telemetry.

    Returns:
        The receipt, not stored yet; its verdict is "same" or "different".

    Raises:
        InvalidInput: `steps` is below 4, or a process refused its input.
        BatonError: a process failed, or every try finished before its process could be killed.
    """
    require_enough_steps(steps)

    def training(name: str, steps: int, segment_steps: int) -> Execution:
        storage = laboratory.folder / ("shared" if share_data else name)
        return training_of(run, overrides, name=name, storage=storage, steps=steps, segment_steps=segment_steps)

    cut, killed_at = _cut_and_killed(training, steps, laboratory)
    steps = cut.steps
    laboratory.note(f"straight to step {steps}, in one process")
    straight = training("straight", steps, steps)
    finished = laboratory.finish(straight)
    found, one, other = compare(straight.home, cut.home, steps, saved=laboratory.saved)
    repeatable: bool | None = None
    if not found.same and found.same_examples:
        laboratory.note("they differ; training straight once more, to see whether the model is repeatable")
        again = training("again", steps, steps)
        laboratory.finish(again)
        repeatable = compare(straight.home, again.home, steps, saved=laboratory.saved)[0].same
    causes: tuple[str, ...] = ()
    if not found.same:
        causes = causes_of(
            same_examples=found.same_examples,
            same_step=found.same_step,
            repeatable=repeatable,
            operations=finished.stateful_operations,
            source=f"data.source {run.spec.data.source_words}",
        )
    # With callbacks, both trainings also commit for evaluations; those commits are not cuts.
    uncut = {ref.step for ref in one.commits}
    return ProofReceipt(
        **_receipt_of(run.spec, run.path, same=found.same).model_dump(),
        identity=dict(one.head.identity),
        environment=one.head.environment,
        steps=steps,
        cuts=tuple(ref.step for ref in other.commits if 0 < ref.step < steps and ref.step not in uncut),
        killed_at_step=killed_at,
        data_prepared="once" if share_data else "for each trial",
        straight=one.end,
        cut=other.end,
        variables=found.variables,
        differing=found.differing,
        first_difference=found.first,
        metric_rows=found.rows,
        first_differing_step=found.first_step,
        repeatable=repeatable,
        causes=causes,
    )


def _cut_and_killed(
    training: Callable[[str, int, int], Execution], steps: int, laboratory: Laboratory
) -> tuple[Execution, int]:
    """Train with cuts, kill the first process and finish in a second one.

    Returns:
        The finished execution, and the step of the tip when its first process was killed.
    """
    length = cut_length(steps)
    for number in range(1, _TRIES + 1):
        execution = training("cut" if number == 1 else f"cut-{number}", steps, length)
        again = "" if number == 1 else "finished before it could be killed; again, "
        laboratory.note(f"{again}to step {steps} in segments of {length}, until it is killed")
        # The kill comes at the second border, so that a warm process has crossed the first one.
        finished = laboratory.processes.kill_after(execution, 2 * length)
        head = RunLog(execution.home).head()
        tip = 0 if head is None or head.tip is None else head.tip.step
        if finished.killed and finished.returncode == -SIGKILL:
            if 0 < tip < steps:
                laboratory.note(f"killed at step {tip}; continuing to step {steps} in a new process")
                laboratory.finish(execution)
                return execution, tip
        elif finished.returncode != 0:
            raise finished.error(f"the training {execution.name}")
        steps *= 2
    raise BatonError(
        f"nothing is proved: in {_TRIES} tries, the last with {steps // 2} steps, the run finished before it could be "
        f"killed; use more steps: --steps {steps}"
    )


# These settings could stop the process early, or commit by the clock. None of them changes the bits.
_SWITCHED_OFF = ("stages={}", "train.stop_after_seconds=null", "checkpoint.every_seconds=null")
_DATASETS = ("data.folder", "data.validation_folder")
_CHARACTERS = 1000


def audit_in_scratch(
    run: OpenedRun, overrides: tuple[str, ...], *, choice: Choice, count: int, seed: int, telemetry: Sink
) -> AuditReceipt:
    """Execute the chosen stretches again, in fresh processes and temporary storage, and compare every digest.

    Args:
        overrides: the user's overrides, for the processes.
        choice: which stretches, see `choose`.
        count: size of the sample.
        seed: draws the sample.
        telemetry: receives progress notes.

    Returns:
        The receipt, not stored yet.

    Raises:
        InvalidInput: nothing can be executed again, or a process refused its input.
        DamagedCheckpoint: a checkpoint's bytes differ from its manifest.
        BatonError: a process failed.
    """
    preflight(run)
    with temporary_folder(PROOF_PREFIX) as folder:
        processes = FreshProcesses(hosts=hosts_of(run.spec))
        laboratory = Laboratory(folder=folder, processes=processes, telemetry=telemetry)
        found = stretches_of(run.log.entries())
        chosen = choose(found, choice, count=count, seed=seed, home=run.home.uri)
        _copy_datasets(run.root, chosen[-1].before, folder)
        results = tuple(_audited(run, overrides, stretch, laboratory) for stretch in chosen)
    return AuditReceipt(
        **_receipt_of(run.spec, run.file, same=all(each.verdict == "same" for each in results)).model_dump(),
        seed=seed if choice == "sample" else None,
        auditable=len(found.auditable),
        stretches=results,
        left_out=found.left_out,
    )


def _receipt_of(spec: RunSpec, file: Path | None, *, same: bool) -> Receipt:
    """What every receipt says."""
    return Receipt(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        verdict="same" if same else "different",
        run=spec.run,
        run_file="" if file is None else file.name,
        spec_digest=hashlib.sha256(spec.to_json()).hexdigest(),
        baton=baton_version() or "unknown",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Executed:
    home: LocalStorage
    outcome: Outcome
    digests: Mapping[int, str]  # by step


def _audited(run: OpenedRun, overrides: tuple[str, ...], stretch: Stretch, laboratory: Laboratory) -> AuditedStretch:
    logged = {ref.step: ref.state_digest for ref in stretch.commits}
    first = _execute(run, overrides, stretch, "first", laboratory)
    steps = [step for step in logged if step in first.digests]
    differing = [step for step in steps if first.digests[step] != logged[step]]
    result = AuditedStretch(
        start=stretch.start.step,
        end=stretch.end.step,
        verdict="different" if differing else "same",
        commits=len(logged),
        compared=len(steps),
        environment=environment_differences(stretch.before.environment, first.outcome.head.environment),
    )
    if not differing:
        return result
    laboratory.note(f"step {differing[0]} differs from the log; executing the steps once more")
    second = _execute(run, overrides, stretch, "second", laboratory)
    found: dict[str, object] = {
        "first_differing_step": differing[0],
        "second_agrees_with": agreement([step for step in steps if step in second.digests], logged, first, second),
    }
    if stretch.end.step in differing:
        variables, unequal, difference = compare_states(
            _logged_state(run.home, stretch.end, laboratory.folder / "logged" / first.home.root.name),
            laboratory.saved(first.home, first.outcome.tip),
            names=("log", "execution"),
        )
        found |= {"variables": variables, "differing": unequal, "first_difference": difference}
    return result.model_copy(update=found)


def _logged_state(home: Storage, ref: CheckpointRef, scratch: Path) -> SavedState:
    """The state in a checkpoint of the run, which is copied to where TensorFlow can read it if it has to be read."""

    def read(key: str) -> "Array":
        manifest = _copy_checkpoint(home, ref, scratch / ref.path)
        return read_variable(LocalStorage(scratch), ref, manifest, key)

    return SavedState(leaves=read_manifest(home, ref).leaves, read=read)


def _execute(
    run: OpenedRun, overrides: tuple[str, ...], stretch: Stretch, which: str, laboratory: Laboratory
) -> _Executed:
    laboratory.note(f"executing steps {stretch.start.step} to {stretch.end.step} ({which})")
    if run.file is None:
        raise AssertionError("an audit needs the run file")
    spec = with_recorded_examples(run.spec, stretch.before.identity)
    execution = Execution(
        name=f"{which}-{stretch.end.step}",
        storage=laboratory.folder,
        file=run.file,
        # What says when to evaluate and to log stays as it is.
        settings=(*overrides, *logged_settings(spec, stretch), *_SWITCHED_OFF),
        steps=stretch.end.step,
        cuts=tuple(ref.step for ref in stretch.commits[:-1]),
    )
    _begin_home(execution.home, run.home, stretch)
    laboratory.finish(execution)
    outcome = read_outcome(execution.home, execution.steps)
    digests = {ref.step: ref.state_digest for ref in outcome.commits}
    return _Executed(home=execution.home, outcome=outcome, digests=digests)


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


def _begin_home(home: LocalStorage, logged: Storage, stretch: Stretch) -> None:
    """Begin a scratch home with a copy of the checkpoint at the start of a stretch.

    Raises:
        DamagedCheckpoint: the checkpoint's bytes differ from its manifest.
    """
    log, attempt = RunLog(home), uuid.uuid4().hex
    # Before the checkpoint: entry 0 is its base.
    origin = Origin(
        skipped_batches=stretch.before.skipped_batches,
        identity=dict(stretch.before.identity),
        environment=stretch.before.environment,
    )
    log.append(lambda head: origin if head is None else None, attempt=attempt)
    folder = checkpoint_folder(step=stretch.start.step, base=0, attempt=attempt)
    logged_manifest = _copy_checkpoint(logged, stretch.start, home.root / folder)
    manifest = logged_manifest.model_copy(update={"base": 0, "attempt": attempt})
    data = manifest.to_json()
    home.create(f"{folder}/manifest.json", data)
    staged = CheckpointRef.of(manifest, data)
    verify_checkpoint(home, staged)
    commit(log, Commit(checkpoint=staged, parent=None, exit_reason="forked"))


def _copy_checkpoint(home: Storage, ref: CheckpointRef, target: Path) -> CheckpointManifest:
    """Copy the files of a verified checkpoint, all but its manifest, which is returned."""
    manifest = verify_checkpoint(home, ref)
    target.mkdir(parents=True, exist_ok=True)
    for file in manifest.files:
        home.download(f"{ref.path}/{file.name}", target / file.name)
    return manifest


def _copy_datasets(root: Storage, head: Head, storage: Path) -> None:
    """Copy the run's datasets below a scratch storage root, so that what is executed reads the run's own shards.

    Files that Baton reads in place are not copied. A dataset that is not there is left to the process to prepare.

    Raises:
        DamagedDataset: a manifest does not match its shards, or a shard its manifest.
    """
    for key in _DATASETS:
        folder = head.identity.get(key)
        if isinstance(folder, str):
            _copy_dataset(root, folder, storage)


def _copy_dataset(root: Storage, folder: str, storage: Path) -> None:
    path = f"{folder}/manifest.json"
    if (storage / path).exists():
        return
    from baton.tasks.foundation.dataset.manifest import read_manifest as read_dataset  # imports NumPy

    try:
        manifest = read_dataset(root, folder)
    except DamagedDataset as fault:
        if isinstance(fault.__cause__, FileMissing):
            return
        raise
    if manifest.mixture is not None:
        for source in manifest.mixture.sources:
            _copy_dataset(root, source.folder, storage)
    copy = LocalStorage(storage)
    for shard in (*manifest.train, *manifest.validation):
        name = f"{folder}/{shard.path}"
        if shard.is_external or (storage / name).exists():
            continue
        (storage / name).parent.mkdir(parents=True, exist_ok=True)
        on_disk = root.local_path(name)
        if on_disk is not None and on_disk.stat().st_size != shard.size:
            raise DamagedDataset(f"{root.uri}/{name}: its size differs from the manifest; see: baton verify")
        root.download(name, storage / name)
        if copy.checksum(name).crc32c != shard.crc32c:
            raise DamagedDataset(f"{root.uri}/{name}: its bytes differ from the manifest; see: baton verify")
    copy.create(path, root.read(path))  # last: its existence means that the shards are complete


# What each result of the second execution suggests. None of them is a proof.
_SUGGESTS = {
    "log": "a second execution agrees with the log: this machine computed the first one wrongly, or the training is "
    "rarely not deterministic; test this machine's memory and processor, and audit again on another one",
    "first": "a second execution agrees with the first: the logged commit was computed wrongly, or something outside "
    "the identity has changed since: code, files that it reads, data, libraries, devices; audit on another machine, "
    "and compare the code with that of the training",
    "neither": "a second execution agrees with neither: the training is not deterministic; `baton prove` names usual "
    "causes. A machine that often computes wrongly looks the same",
}


def receipt_lines(receipt: AuditReceipt) -> Iterator[str]:
    """What an audit found, one line each."""
    for part in receipt_parts(receipt):
        if isinstance(part, str):
            yield part
        else:
            width = max(len(label) for label, _ in part)
            yield from (f"{label:<{width}}  {shown(text, _CHARACTERS)}" for label, text in part)


def receipt_parts(receipt: AuditReceipt) -> Iterator[str | list[tuple[str, str]]]:
    """What an audit found: lines, and facts of a label and a text for each stretch.

    The environment comes first, because it explains most differences.
    """
    for line in dict.fromkeys(line for stretch in receipt.stretches for line in stretch.environment):
        yield f"warning: another environment: {line}"
    how = (
        f"{len(receipt.stretches)} of {counted(receipt.auditable, 'stretch', 'stretches')} between retained checkpoints"
    )
    drawn = "" if receipt.seed is None else f", drawn with --seed {receipt.seed}"
    verdict = "the same bits" if receipt.verdict == "same" else "NOT the same bits"
    yield f"audited: {receipt.run}: {how}{drawn}: {verdict}"
    yield from map(_facts, receipt.stretches)
    for text in receipt.left_out:
        yield f"cannot be executed again: {text}"


def _facts(stretch: AuditedStretch) -> list[tuple[str, str]]:
    what = f"{stretch.start} to {stretch.end}, {stretch.compared} of {counted(stretch.commits, 'commit')} compared"
    facts = [("steps", f"{what}: {stretch.verdict}")]
    if stretch.second_agrees_with is None:
        return facts
    facts.append(("differs", f"first at the commit of step {stretch.first_differing_step}"))
    found = stretch.first_difference
    if found is not None:
        facts.append(("variables", f"{stretch.differing} of {stretch.variables} differ at step {stretch.end}"))
        facts.append(("first", difference_words(found)))
        if found.path.startswith("metrics/"):
            facts.append(("", "only sums of metrics differ: was train.log_every_steps changed since?"))
    facts.append(("suggests", _SUGGESTS[stretch.second_agrees_with]))
    return facts
