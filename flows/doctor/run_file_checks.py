"""What the run file alone tells: the file itself, devices, batch arithmetic, code, and what `baton run` refuses."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.doctor.finding import Finding
from flows.goal import preflight, require_lasting_storage, require_not_stuck
from tasks.foundation.accelerator.batches import micro_batch_size
from tasks.foundation.accelerator.tpu_padding import LANES, SUBLANES, padding
from tasks.foundation.accelerator.tpu_types import TpuType
from tasks.foundation.contracts.identity import identity_in_run_file, require_same_identity
from tasks.foundation.contracts.run_file import RunFile, load_run_file
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.telemetry.formatting import size_words
from tasks.foundation.user_code import require_function
from tasks.foundation.user_imports import require_imports


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the run is to train on.

    Attributes:
        tpu: its type; None if none was named.
        replicas: model copies.
        hosts: machines that feed them.
        is_tpu: whether it is a TPU, of a named type or not.
    """

    tpu: TpuType | None
    replicas: int
    hosts: int
    is_tpu: bool


def read_run_file(path: Path, overrides: Sequence[str]) -> Finding:
    """Its value is the `RunFile`."""
    run = load_run_file(path, overrides)
    train = run.spec.train
    text = f"{run.spec.run}: {train.steps} steps of {train.global_batch_size} examples"
    return Finding(check="run file", verdict="pass", text=text, value=run)


def target_of(run: RunFile, tpu: TpuType | None) -> Finding:
    """Its value is the `Target`."""
    asked = run.spec.accelerator
    if tpu is None:
        target = Target(tpu=None, replicas=asked.replicas, hosts=1, is_tpu=asked.kind == "tpu")
        text = f"kind {asked.kind}, {_counted(asked.replicas, 'replica')} assumed"
        remedy = "name the TPU type, as --for v5litepod-8, to have batch and memory checked against it"
        return Finding(check="accelerator", verdict="pass", text=text, remedy=remedy, value=target)
    target = Target(tpu=tpu, replicas=tpu.replicas, hosts=tpu.hosts, is_tpu=True)
    text = (
        f"{tpu.name}: {_counted(tpu.chips, 'chip')}, {_counted(tpu.replicas, 'replica')} of "
        f"{size_words(tpu.hbm_bytes)}, {_counted(tpu.hosts, 'host')}"
    )
    if tpu.hosts > 1:
        return Finding(
            check="accelerator",
            verdict="fail",
            text=f"{text}; this version trains on the TPU of one host only",
            remedy="take a type with one host, such as v5litepod-8, v6e-8, v5p-8 or v4-8",
            value=target,
        )
    if asked.kind not in {"auto", "tpu"}:
        return Finding(
            check="accelerator",
            verdict="warn",
            text=f"{text}; the run file says kind: {asked.kind}",
            remedy="say accelerator.kind: tpu (or auto) before it runs there",
            value=target,
        )
    return Finding(check="accelerator", verdict="pass", text=text, value=target)


def batch_arithmetic(run: RunFile, target: Target) -> Finding:
    """How the global batch divides among the replicas, and how much of it a TPU pads.

    Raises:
        AcceleratorError: it does not divide; names the nearest batches that do.
    """
    batch = run.spec.train.global_batch_size
    accumulate = run.spec.train.accumulate
    each = micro_batch_size(batch, target.replicas, accumulate)
    cut = f", in {accumulate} micro-batches of {each}" if accumulate > 1 else ""
    text = f"{batch} examples over {_counted(target.replicas, 'replica')}: {each * accumulate} each{cut}"
    if not target.is_tpu:
        return Finding(check="batch", verdict="pass", text=text)
    parts = target.replicas * accumulate
    padded = padding(each, {})
    if padded.batch:
        good = -(-each // SUBLANES) * SUBLANES
        return Finding(
            check="batch",
            verdict="warn",
            text=f"{text}; a TPU pads them to {good} where the batch is a side of its tiles: {padded.batch:.0%} of "
            "that is padding",
            remedy=f"a multiple of {SUBLANES} at a time, such as train.global_batch_size: {good * parts}",
        )
    wide = padded.batch_on_lanes
    if not wide:
        return Finding(check="batch", verdict="pass", text=f"{text}; no padding")
    text = f"{text}; no padding along the {SUBLANES} of a TPU's tiles of {SUBLANES} x {LANES}"
    good = -(-each // LANES) * LANES * parts
    remedy = f"along the {LANES}, {wide:.0%} would be padding; train.global_batch_size: {good} fills both"
    return Finding(check="batch", verdict="pass", text=text, remedy=remedy)


def examples_each(run: RunFile, target: Target) -> int:
    """Examples a replica, at least 1; rounded up where they do not divide, which `batch_arithmetic` refuses."""
    accumulate = run.spec.train.accumulate
    return -(-run.spec.train.global_batch_size // (target.replicas * accumulate)) * accumulate


def code_is_there(run: RunFile) -> Finding:
    """Files and functions that the run file names, looked at without importing them.

    Raises:
        ModelError: one of them is not there, is no Python, or imports a package that is not installed.
    """
    spec = run.spec
    named = [spec.model.build, spec.data.source, spec.train.callbacks or ""]
    named += [weights.source for weights in spec.init.weights]
    references = [each for each in named if ".py:" in each]
    for reference in references:
        require_function(reference, run.folder)
        require_imports(reference, run.folder)
    return Finding(check="code", verdict="pass", text=", ".join(references) or "none of the run file's own")


def not_refused(run: RunFile, storage: Storage) -> Finding:
    """What `baton run` would refuse before it begins, or goes on. Only reads.

    Raises:
        InvalidInput: it would refuse the run file, or another run is there under this name.
        NoProgress: attempt after attempt did not get further.
        RunLogError: the log of the run cannot be read.
    """
    require_lasting_storage(run)
    preflight(run)
    home = storage.at(run.spec.run)
    head = RunLog(home).head()
    if head is None:
        return Finding(check="preflight", verdict="pass", text="baton run would begin a new run")
    require_same_identity(head.identity, identity_in_run_file(run.spec), home=home.uri)
    require_not_stuck(run, try_again=False)
    step = 0 if head.tip is None else head.tip.step
    return Finding(check="preflight", verdict="pass", text=f"baton run would go on from step {step}")


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
