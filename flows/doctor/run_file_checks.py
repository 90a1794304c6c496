"""Checks that need only the run file: the file, accelerator, batch size, code, storage, preflight of `baton run`."""

import os
import secrets
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from baton.flows.admit import preflight, require_advancing, require_lasting_storage
from baton.flows.opened_run import OpenedRun, storage_of
from baton.tasks.foundation.contracts.identity import identity_in_run_file, require_same_identity
from baton.tasks.foundation.contracts.placement import micro_batch_size
from baton.tasks.foundation.contracts.run_file import RunFile, load_run_file
from baton.tasks.foundation.errors import BatonError, RunFileError, StorageError
from baton.tasks.foundation.machine.tpu import SLICE, TpuType
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.storage.local_files import temporary_folder
from baton.tasks.foundation.telemetry.formatting import size_words
from baton.tasks.foundation.text import counted
from baton.tasks.foundation.user_functions import require_function, require_imports
from baton.tasks.foundation.user_traceback import describe_with_place

Verdict = Literal["pass", "warn", "fail", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        verdict: pass, warn or fail; skipped if the check could not run.
        text: what the check found, with figures.
        remedy: how to fix or improve it; empty if there is nothing to do or the text says it.
        check: name of the check, which `Checks` adds.
        value: result for later checks to use.
    """

    verdict: Verdict
    text: str
    remedy: str = ""
    check: str = ""
    value: Any = field(default=None, repr=False, compare=False)

    @property
    def is_usable(self) -> bool:
        """Whether later checks can use the value: the check passed or warned."""
        return self.verdict in {"pass", "warn"}

    @property
    def as_passed(self) -> "Finding":
        """The finding with verdict `pass` if it has a value, so that checks can use the value of a failed check."""
        return self if self.value is None else replace(self, verdict="pass")


class Checks:
    """Runs checks in order. An exception in one check becomes its finding; the other checks still run."""

    def __init__(self, on_finding: Callable[[Finding], None]) -> None:
        """Start without findings.

        Args:
            on_finding: called with each finding as soon as it is known.
        """
        self._on_finding = on_finding
        self.findings: list[Finding] = []

    def run(self, check: str, work: Callable[..., Finding], *needs: Finding) -> Finding:
        """Run one check, or skip it if a finding that it needs is not usable.

        Args:
            work: called with the values of `needs`.
            needs: findings of earlier checks.

        Returns:
            The finding, after `on_finding` has received it.
        """
        finding = self._find(check, work, needs)
        self.findings.append(finding)
        self._on_finding(finding)
        return finding

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return any(finding.verdict == "fail" for finding in self.findings)

    def _find(self, check: str, work: Callable[..., Finding], needs: tuple[Finding, ...]) -> Finding:
        missing = [need.check for need in needs if not need.is_usable]
        if missing:
            return Finding(check=check, verdict="skipped", text=f"needs {' and '.join(missing)}, which did not pass")
        try:
            return replace(work(*(need.value for need in needs)), check=check)
        except BatonError as error:
            return Finding(check=check, verdict="fail", text=str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - an unexpected error in one check must not hide the others
            if os.environ.get("BATON_DEBUG"):
                traceback.print_exception(error)
            return Finding(check=check, verdict="fail", text=f"unexpected: {describe_with_place(error)}")


_SUBLANES, _LANES = 8, 128
_OF_A_SLICE = ("accelerator.kind=tpu", f"accelerator.tpu={SLICE}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The accelerator to train on.

    Attributes:
        tpu: TPU type; None if the user names none.
        replicas: number of model copies.
        hosts: number of machines that feed the replicas.
        is_tpu: whether it is a TPU, with or without a named type.
        has_servers: whether the replicas belong to TensorFlow servers.
    """

    tpu: TpuType | None
    replicas: int
    hosts: int
    is_tpu: bool
    has_servers: bool


def check_run_file(path: Path, overrides: Sequence[str]) -> Finding:
    """Load the run file; the finding's value is the `RunFile`."""
    run = load_run_file(path, overrides)
    train = run.spec.train
    length = counted(train.steps or 0, "step") if train.epochs is None else f"{counted(train.epochs, 'epoch')} in steps"
    text = f"{run.spec.run}: {length} of {counted(train.global_batch_size, 'example')}"
    return Finding(verdict="pass", text=text, value=run)


def check_accelerator(run: RunFile, tpu: TpuType | None, overrides: Sequence[str] = ()) -> Finding:
    """Determine the accelerator that the run trains on; the finding's value is the `Target`.

    Args:
        tpu: TPU type to check for; None if the user names none.
        overrides: with which the run file was loaded.
    """
    spec = run.spec.accelerator
    has_servers = spec.tpu != "local" or (tpu is not None and tpu.hosts > 1)
    if tpu is None:
        is_tpu = spec.kind == "tpu"
        target = Target(tpu=None, replicas=spec.replicas, hosts=1, is_tpu=is_tpu, has_servers=has_servers)
        text = f"accelerator.kind: {spec.kind}, assuming {counted(spec.replicas, 'replica')}"
        remedy = "name the TPU type to check batch and memory for it, such as --for v5litepod-8"
        return Finding(verdict="pass", text=text, remedy=remedy, value=target)
    target = Target(tpu=tpu, replicas=tpu.replicas, hosts=tpu.hosts, is_tpu=True, has_servers=has_servers)
    text = (
        f"{tpu.name}: {counted(tpu.chips, 'chip')}, {counted(tpu.replicas, 'replica')} of "
        f"{size_words(tpu.hbm_bytes)}, {counted(tpu.hosts, 'host')}"
    )
    if tpu.hosts > 1 and spec.tpu == "local":
        try:
            load_run_file(run.path, [*overrides, *_OF_A_SLICE])
        except RunFileError as error:
            return Finding(verdict="fail", text=f"{text}: {error}", value=target)
        remedy = f"on worker 0 of the slice, add --set {' --set '.join(_OF_A_SLICE)}"
        return Finding(verdict="pass", text=text, remedy=remedy, value=target)
    if spec.kind not in {"auto", "tpu"}:
        return Finding(
            verdict="warn",
            text=f"{text}; the run file has accelerator.kind: {spec.kind}",
            remedy="set accelerator.kind: tpu (or auto) before you run it there",
            value=target,
        )
    return Finding(verdict="pass", text=text, value=target)


def check_batch(run: RunFile, target: Target) -> Finding:
    """Check that the global batch divides among the replicas, and that a TPU does not pad it.

    A tile of 32-bit values has 8 sublanes and 128 lanes (Google Cloud's TPU performance guide).

    Raises:
        AcceleratorError: the batch does not divide; the message names the nearest sizes that do.
    """
    batch = run.spec.train.global_batch_size
    accumulate = run.spec.train.accumulate
    each = micro_batch_size(batch, target.replicas, accumulate)
    split = f", in {accumulate} micro-batches of {each}" if accumulate > 1 else ""
    text = f"{counted(batch, 'example')} over {counted(target.replicas, 'replica')}: {each * accumulate} each{split}"
    if not target.is_tpu:
        return Finding(verdict="pass", text=text)
    good = -(-each // _SUBLANES) * _SUBLANES
    if each == good:
        return Finding(verdict="pass", text=text)
    return Finding(
        verdict="warn",
        text=f"{text}; a TPU computes in tiles of {_SUBLANES} x {_LANES} and pads them to {good}",
        remedy=f"use a multiple of {_SUBLANES} per replica (of {_LANES} is best), such as "
        f"train.global_batch_size: {good * target.replicas * accumulate}",
    )


def examples_per_replica(run: RunFile, target: Target) -> int:
    """Return the examples per replica, at least 1, rounded up if the batch does not divide."""
    accumulate = run.spec.train.accumulate
    return -(-run.spec.train.global_batch_size // (target.replicas * accumulate)) * accumulate


def check_code(run: RunFile) -> Finding:
    """Check the files and functions that the run file names, without importing them.

    Raises:
        ModelError: a file or function is missing, or a file is not valid Python or imports a package that is not
            installed.
    """
    spec = run.spec
    names = [spec.model.build, *spec.data.all_sources, spec.train.callbacks or "", *spec.data.transforms]
    names += [weights.source for weights in spec.init.weights]
    references = [each for each in dict.fromkeys(names) if ".py:" in each]
    for reference in references:
        require_function(reference, run.folder)
        require_imports(reference, run.folder)
    return Finding(verdict="pass", text=", ".join(references) or "the run file names no Python files")


def check_preflight(run: RunFile, storage: Storage) -> Finding:
    """Make the checks that `baton run` makes before it starts or continues the run. Writes nothing.

    Raises:
        InvalidInput: `baton run` would refuse the run file, or another run has this name.
        NoProgress: the last attempts made no progress.
        RunLogError: the run's log cannot be read.
    """
    opened = OpenedRun.of(run.spec, run.folder, root=storage, file=run.path)
    require_lasting_storage(opened)
    preflight(opened)
    head = opened.log.head()
    if head is None:
        return Finding(verdict="pass", text="baton run would start a new run")
    require_same_identity(head.identity, identity_in_run_file(run.spec), home=opened.home.uri)
    require_advancing(opened, head)
    step = 0 if head.tip is None else head.tip.step
    return Finding(verdict="pass", text=f"baton run would continue from step {step}")


# Not a valid run name.
_PREFIX = ".baton-doctor-"
_PROBE = b"written by baton doctor, which deletes it again\n"


def check_storage(run: RunFile) -> Finding:
    """Write, read and delete a small file below the storage root; the finding's value is the `Storage`.

    Raises:
        InvalidInput: the address is not a supported storage.
        StorageError: the storage refuses or fails.
    """
    storage = storage_of(run)
    notes = storage.probe(run.spec.run)
    with scratch_folder(storage) as scratch:
        scratch.create("file", _PROBE)
        if scratch.read("file") != _PROBE:
            raise StorageError(f"{scratch.uri}/file: read back other bytes than were written; check this storage")
    text = f"{storage.uri}: wrote, read and deleted a file"
    # The value is a new object, because this one has cached a folder that no longer exists.
    value = storage_of(run)
    if notes:
        return Finding(verdict="warn", text=text, remedy="; ".join(notes), value=value)
    return Finding(verdict="pass", text=text, value=value)


@contextmanager
def scratch_folder(storage: Storage) -> Iterator[Storage]:
    """Make a temporary folder below the storage root, and delete it afterwards with all parents that it created.

    On a local disk the folder is locked, so that the next `baton doctor` can delete the folder of a killed one.
    """
    missing = _missing_folders(storage)
    name = f"{_PREFIX}{secrets.token_hex(8)}"
    try:
        with ExitStack() as locked:
            if isinstance(storage, LocalStorage):
                with suppress(OSError):  # the storage itself reports why it is not writable
                    storage.root.mkdir(parents=True, exist_ok=True)
                    name = locked.enter_context(temporary_folder(_PREFIX, within=storage.root)).name
            try:
                yield storage.at(name)
            finally:
                with suppress(StorageError):  # an error here must not hide the one that ended the check
                    storage.delete(name)
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def _missing_folders(storage: Storage) -> list[Path]:
    """Return the local folders that writing would create: the root and its parents that do not exist yet."""
    if not isinstance(storage, LocalStorage):
        return []
    return [folder for folder in (storage.root, *storage.root.parents) if not folder.exists()]
