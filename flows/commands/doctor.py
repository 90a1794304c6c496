"""`baton doctor`: checks a run file before an accelerator is rented.

Cheap checks come first, and TensorFlow is imported only if they pass. Each finding is printed as soon as it is known.
"""

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from baton.flows.commands.options import RUN_FILE, AsJson, Overrides, RunFilePath
from baton.flows.commands.output import Output, Painted, say_json, status
from baton.flows.doctor.cost import check_commit, check_preemption
from baton.flows.doctor.data_checks import check_data, check_input
from baton.flows.doctor.run_file_checks import (
    Checks,
    Finding,
    check_accelerator,
    check_batch,
    check_code,
    check_preflight,
    check_run_file,
    check_storage,
)
from baton.flows.opened_run import OpenedRun
from baton.flows.process_start import fast_imports, keep_hash_seed
from baton.tasks.foundation.contracts.run_file import RunFile, load_run_file
from baton.tasks.foundation.contracts.run_spec import with_examples
from baton.tasks.foundation.errors import BatonError, InvalidInput
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.machine.environment import quiet_tensorflow
from baton.tasks.foundation.machine.tpu import TpuType, tpu_type
from baton.tasks.foundation.storage.local_files import DOCTOR_PREFIX, temporary_folder
from baton.tasks.foundation.telemetry.formatting import BAD, GOOD, NOTICE


def run_checks(
    file: Path,
    overrides: Sequence[str],
    on_finding: Callable[[Finding], None],
    *,
    tpu: TpuType | None = None,
    step_seconds: float | None = None,
    hours_between: float = 4.0,
) -> Checks:
    """Run all checks. Temporary files are written on this machine and below the storage root, and then deleted.

    Args:
        overrides: changes to keys of the run file, `key=value` each, such as train.steps=100.
        on_finding: called with each finding as soon as it is known.
        tpu: TPU type to check for; None if the user names none.
        step_seconds: assumed duration of one step on that TPU; None if unknown.
        hours_between: mean time between preemptions.
    """
    checks = Checks(on_finding)
    run = checks.run("run file", lambda: check_run_file(file, overrides))
    target = checks.run("accelerator", lambda run: check_accelerator(run, tpu, overrides), run).as_passed
    batch = checks.run("batch", check_batch, run, target)
    code = checks.run("code", check_code, run)
    storage = checks.run("storage", check_storage, run)
    checks.run("preflight", lambda run, storage, *_: check_preflight(run, storage), run, storage, batch, code)
    with temporary_folder(DOCTOR_PREFIX) as folder:
        sample = checks.run("data", lambda run: _check_data(run, storage, folder), run)
        run = _with_examples(run, sample)
        # What needs TensorFlow, whose import takes seconds.
        model = checks.run(
            "model",
            lambda run, target, sample, _: _model_checks().check_model(run, target, sample, log=_log_of(run, storage)),
            run,
            target,
            sample,
            code,
        )
        checks.run("dtype", lambda *values: _model_checks().check_dtype(*values), model, target)
        graph = checks.run("graph", lambda *values: _model_checks().check_graph(*values), model, target)
        compiled = (run, target, model)
        checks.run("xla", lambda *values: _xla_checks().check_xla(*values[:3]), *compiled, graph)
        memory = checks.run("memory", lambda *values: _xla_checks().check_memory(*values), model, target)
        stepped = (run, target, sample)
        checks.run("step", lambda *values: _model_checks().check_step(*values, memory.value), *stepped, model)
        checks.run("input", lambda run, target, sample: check_input(run, target, sample, step_seconds), *stepped)
        saved = (storage, model, target)
        commit = checks.run("commit", lambda storage, model, target: check_commit(storage, model.state, target), *saved)
        checks.run(
            "preemption",
            lambda run, cost, model: check_preemption(
                run, cost, start_seconds=model.seconds, hours_between=hours_between
            ),
            run,
            commit,
            model,
        )
    return checks


def _with_examples(run: Finding, sample: Finding) -> Finding:
    """The run file with the number of training examples, from which epochs follow, if the sample knows it."""
    examples = sample.value.train_examples if run.is_usable and sample.is_usable else None
    if examples is None:
        return run
    return replace(run, value=replace(run.value, spec=with_examples(run.value.spec, examples)))


def _check_data(run: RunFile, storage: Finding, folder: Path) -> Finding:
    # The user's module may use TensorFlow at import time, and the first use fixes the devices.
    found = check_data(
        run, storage.value, folder, set_up=lambda: _model_checks().acquire_cpu(run, _log_of(run, storage))
    )
    if found.value.train_examples is not None:
        with_examples(run.spec, found.value.train_examples)  # refuses an epoch without a whole batch
    return found


def _log_of(run: RunFile, storage: Finding) -> RunLog | None:
    """The log of the run; None if it has none yet, or its storage cannot be read."""
    log = RunLog(storage.value.at(run.spec.run)) if storage.is_usable else None
    return None if log is None or log.head() is None else log


def _model_checks() -> ModuleType:
    """Import TensorFlow late, so that the cheap checks do not wait for it."""
    with fast_imports():
        from baton.flows.doctor import model_checks

    return model_checks


def _xla_checks() -> ModuleType:
    """Import TensorFlow late, as `_model_checks` does."""
    from baton.flows.doctor import device_checks

    return device_checks


_FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
_WIDTH = {"verdict": 7, "check": 11}


def doctor(
    file: RunFilePath = Path(RUN_FILE),
    overrides: Overrides = None,
    *,
    for_type: Annotated[
        str | None, typer.Option("--for", metavar="TPU", help="the TPU type to be rented, as v5litepod-8")
    ] = None,
    step_seconds: Annotated[
        float | None, typer.Option(help="assumed duration of a step there", metavar="SECONDS")
    ] = None,
    preempted_every_hours: Annotated[float, typer.Option(help="mean time between preemptions", metavar="HOURS")] = 4.0,
    as_json: AsJson = False,
) -> int:
    """Check a run file, its code, data and store; start nothing.

    Each check passes, warns, fails or is skipped. Exits 2 if one fails.
    """
    for name, value in (("--step-seconds", step_seconds), ("--preempted-every-hours", preempted_every_hours)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InvalidInput(f"{name} = {value} must be more than 0, and finite")

    tpu = None if for_type is None else tpu_type(for_type)
    _take_hash_seed(file, overrides or ())
    quiet_tensorflow()
    _speed_up_xla()
    checks = run_checks(
        file,
        overrides or (),
        (lambda _: None) if as_json else _say,
        tpu=tpu,
        step_seconds=step_seconds,
        hours_between=preempted_every_hours,
    )
    if as_json:
        findings = [
            {"check": each.check, "verdict": each.verdict, "text": each.text, "remedy": each.remedy}
            for each in checks.findings
        ]
        say_json({"file": str(file), "for": for_type, "ok": not checks.failed, "findings": findings})
    else:
        counts = [(word, sum(each.verdict == word for each in checks.findings)) for word in ("fail", "warn", "skipped")]
        text = ", ".join(f"{count} {word}" for word, count in counts if count)
        style = BAD if checks.failed else NOTICE if text else GOOD
        Output.to(sys.stdout).line(Painted(text or "all checks passed", style))
    return InvalidInput.exit_code if checks.failed else 0


def _take_hash_seed(file: Path, overrides: Sequence[str]) -> None:
    """Go on with the hash seed of the run, if it has begun: its model may depend on the order of a set."""
    with suppress(BatonError):  # what cannot be read, a check says
        head = OpenedRun.open(load_run_file(file, overrides)).log.head()
        if head is not None:
            keep_hash_seed(head.environment.hash_seed)


def _speed_up_xla() -> None:
    """Make XLA compile in a third of the time; the program is only analysed. XLA reads the flags at its first use."""
    # The user's own flags come last and take precedence.
    os.environ["XLA_FLAGS"] = f"{_FAST_COMPILE} {os.environ.get('XLA_FLAGS', '')}".strip()


def _say(finding: Finding) -> None:
    """Print one finding: its text, and the remedy below it."""
    # Padded, because each finding is printed as soon as it is known.
    verdict, check = status(finding.verdict.ljust(_WIDTH["verdict"])), finding.check.ljust(_WIDTH["check"])
    lines = finding.text.splitlines() or [""]
    if finding.remedy:
        lines.append(f"{'hint' if finding.verdict == 'pass' else 'remedy'}: {finding.remedy}")
    blank = " " * _WIDTH["verdict"], " " * _WIDTH["check"]
    Output.to(sys.stdout).table([(verdict, check, lines[0]), *((*blank, line) for line in lines[1:])])
