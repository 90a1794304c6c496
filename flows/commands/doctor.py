"""`baton doctor`: checks a run file before an accelerator is rented."""

import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from flows.commands.options import RUN_FILE, AsJson, Overrides, RunFilePath
from flows.commands.output import Output, Painted, say_json, status
from flows.doctor.run_file_checks import Finding
from flows.opened_run import Run
from flows.process_start import keep_hash_seed
from tasks.foundation.contracts.run_file import load_run_file
from tasks.foundation.errors import BatonError, InvalidInput
from tasks.foundation.machine.environment import quiet_tensorflow
from tasks.foundation.machine.tpu import tpu_type
from tasks.foundation.telemetry.formatting import BAD, GOOD, NOTICE

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
    from flows.doctor.all_checks import DoctorOptions, run_checks

    options = DoctorOptions(
        file=file,
        overrides=tuple(overrides or ()),
        tpu=None if for_type is None else tpu_type(for_type),
        step_seconds=step_seconds,
        preempted_every_hours=preempted_every_hours,
    )
    _take_hash_seed(options.file, options.overrides)
    quiet_tensorflow()
    _speed_up_xla()
    checks = run_checks(options, _ignore if as_json else _say)
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
        head = Run.open(load_run_file(file, overrides)).log.head()
        if head is not None:
            keep_hash_seed(head.environment.hash_seed)


def _speed_up_xla() -> None:
    """Make XLA compile in a third of the time; the program is only analysed. XLA reads the flags at its first use."""
    # The user's own flags come last and take precedence.
    os.environ["XLA_FLAGS"] = f"{_FAST_COMPILE} {os.environ.get('XLA_FLAGS', '')}".strip()


def _ignore(_: Finding) -> None:
    """Print nothing: with --json, all findings are printed at the end."""


def _say(finding: Finding) -> None:
    """Print one finding: its text, and the remedy below it."""
    # Padded, because each finding is printed as soon as it is known.
    verdict, check = status(finding.verdict.ljust(_WIDTH["verdict"])), finding.check.ljust(_WIDTH["check"])
    lines = finding.text.splitlines() or [""]
    if finding.remedy:
        lines.append(f"{'hint' if finding.verdict == 'pass' else 'remedy'}: {finding.remedy}")
    blank = " " * _WIDTH["verdict"], " " * _WIDTH["check"]
    Output.to(sys.stdout).table([(verdict, check, lines[0]), *((*blank, line) for line in lines[1:])])
