"""All checks in order: the cheap ones first, and nothing that takes long before what fails fast."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.doctor.data_sample import sample_of
from flows.doctor.finding import Checks, Finding
from flows.doctor.input_speed import feeds_fast_enough
from flows.doctor.preemption_cost import preemptions
from flows.doctor.run_file_checks import batch_arithmetic, code_is_there, not_refused, read_run_file, target_of
from flows.doctor.storage_checks import commit_cost, reachable_and_writable
from tasks.foundation.accelerator.tpu_types import TpuType
from tasks.foundation.contracts.run_file import RunFile
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage
from tasks.foundation.storage.temporary_files import DOCTOR, temporary_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the doctor is asked.

    Attributes:
        file: the run file.
        overrides: of its keys, `a.b=c` each.
        tpu: the type to rent; None if none was named.
        step_seconds: how long a step is assumed to last there; None: not known.
        preempted_every_hours: mean time between preemptions.
    """

    file: Path
    overrides: tuple[str, ...] = ()
    tpu: TpuType | None = None
    step_seconds: float | None = None
    preempted_every_hours: float = 4.0


def examine(question: Question, tell: Callable[[Finding], None]) -> Checks:
    """Make all checks. Nothing is written but temporary files, here and below the storage root, which are deleted.

    Args:
        question: what is asked.
        tell: is given each finding as soon as it is known.
    """
    checks = Checks(tell)
    run = checks.make("run file", lambda: read_run_file(question.file, question.overrides))
    target = checks.make("accelerator", lambda run: target_of(run, question.tpu), run).for_others
    batch = checks.make("batch", batch_arithmetic, run, target)
    code = checks.make("code", code_is_there, run)
    storage = checks.make("storage", reachable_and_writable, run)
    checks.make("preflight", lambda run, storage, *_: not_refused(run, storage), run, storage, batch, code)
    with temporary_folder(DOCTOR) as folder:
        sample = checks.make("data", lambda run: _sample(run, storage.value, folder), run)
        _examine_model(checks, question, _Ground(run=run, target=target, code=code, storage=storage, sample=sample))
    return checks


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ground:
    """Findings that the later checks stand on."""

    run: Finding
    target: Finding
    code: Finding
    storage: Finding
    sample: Finding


def _examine_model(checks: Checks, question: Question, ground: _Ground) -> None:
    """What needs TensorFlow, which takes seconds to be imported."""
    run, target, sample = ground.run, ground.target, ground.sample
    begins = _begins(ground.storage)
    model = checks.make(
        "model",
        lambda *given: _modelling().builds(*given[:3], begins=begins(given[0])),
        run,
        target,
        sample,
        ground.code,
    )
    checks.make("dtype", lambda *given: _modelling().dtypes(*given), model, target)
    graph = checks.make("graph", lambda *given: _modelling().static_shapes(*given), model, target)
    xla = checks.make("xla", lambda *given: _compiling().compiles(*given[:3]), run, target, model, graph)
    memory = checks.make("memory", lambda *given: _compiling().fits(*given), model, xla, target)
    checks.make("step", lambda *given: _modelling().one_step(*given, memory.value), run, target, sample, model)
    checks.make(
        "input",
        lambda run, target, sample: feeds_fast_enough(run, target, sample, question.step_seconds),
        run,
        target,
        sample,
    )
    commit = checks.make("commit", lambda storage, built: commit_cost(storage, built.state), ground.storage, model)
    checks.make(
        "preemption",
        lambda run, cost, built: preemptions(
            run,
            cost,
            start_seconds=built.seconds,
            step_seconds=question.step_seconds,
            hours_between=question.preempted_every_hours,
        ),
        run,
        commit,
        model,
    )


def _sample(run: RunFile, storage: Storage | None, folder: Path) -> Finding:
    if ":" in run.spec.data.source:
        _modelling().devices(run)  # first of all, as in a run: importing the user's module may use TensorFlow
    return sample_of(run, storage, folder)


def _begins(storage: Finding) -> Callable[[RunFile], bool]:
    """Whether a run begins, as far as the store tells."""
    return lambda run: not storage.is_usable or RunLog(storage.value.at(run.spec.run)).head() is None


def _modelling() -> Any:
    """Imported by the first check that needs it, so that what fails before does not wait for TensorFlow."""
    from flows.doctor import model_checks

    return model_checks


def _compiling() -> Any:
    """As `_modelling`."""
    from flows.doctor import xla_compile

    return xla_compile
