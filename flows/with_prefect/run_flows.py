"""The flows of deployments: train-run, evaluate-best, audit and verify.

train-run is the relay: prepare-data -> init-or-restore -> (train-segment -> checkpoint-to-GCS)* -> evaluate.
evaluate-best evaluates a committed checkpoint again, by default the best one: as a scheduled check, it compares the
metrics in the log with those that the checkpoint's bytes give today. audit executes committed steps again, as `baton
audit` does, and fails if a bit differs: it finds what no checksum sees. verify reads every committed byte again, as
`baton verify` does, and takes damaged checkpoints out of use while older ones are there.

This file is not called flows.py: Prefect loads it by its path, with its folder first in Python's search path.
"""

import functools
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Failed

from baton.flows.evaluating import Chosen, FreshEvaluation, Step, evaluate_again, run_stages
from baton.flows.host_checks import refusals_told
from baton.flows.opened_run import OpenedRun, open_run, require_address, run_of_deployment, write_run_file
from baton.flows.process import mask_library_output
from baton.flows.proof.choose import Choice
from baton.flows.proof.receipt import audit_in_scratch, receipt_lines
from baton.flows.remote_stage import runner_for
from baton.flows.result import RelayResult
from baton.flows.runner import InProcess, StageStopped
from baton.flows.supervisor import trainer_words
from baton.flows.verification import Findings, verify_home
from baton.flows.with_prefect.flow_runs import answer
from baton.flows.with_prefect.record import (
    CANCELLED,
    MACHINE_GOES,
    PrefectRunLogger,
    failed,
    state_of,
    supervise,
    tag_flow_run,
    tags_of,
    target_name,
)
from baton.flows.with_prefect.task_runs import PrefectTasks, logger_of_stage, prefect_responds
from baton.tasks.foundation.contracts.data_spec import SetName
from baton.tasks.foundation.contracts.home_files import AuditReceipt
from baton.tasks.foundation.contracts.identity import accepted_keys
from baton.tasks.foundation.contracts.log_entry import Evaluation
from baton.tasks.foundation.contracts.run_file import load_run_file
from baton.tasks.foundation.contracts.run_spec import RunSpec
from baton.tasks.foundation.errors import BatonError, RunAtWork
from baton.tasks.foundation.log.receipts import store_receipt
from baton.tasks.foundation.machine.environment import quiet_tensorflow
from baton.tasks.foundation.machine.tpu import announce_tpu
from baton.tasks.foundation.telemetry.events import Ended, Note, Several, Sink, warnings_as_notes

quiet_tensorflow()
mask_library_output()
announce_tpu()  # a Prefect worker imports this file first, and the stages import TensorFlow


def train_run_name() -> str:
    """Name of a deployment's flow run; see `target_name` and `run_name`."""
    return _named(lambda spec: target_name(spec, flow_run.parameters.get("until_step")))


def run_name() -> str:
    """Name of a flow run: the training run's, or the file's if the run file is refused.

    Prefect names a flow run before it begins. An error here would be the engine's: the flow run would crash, or stay
    pending. The flow itself meets the same refusal, and fails with its message.
    """
    return _named(lambda spec: spec.run)


def _named(name_of: Callable[[RunSpec], str]) -> str:
    file, overrides = Path(flow_run.parameters["run_file"]), flow_run.parameters.get("overrides")
    try:
        return name_of(load_run_file(file, overrides or []).spec)
    except BatonError:
        return file.name or str(file)


@flow(name="train-run", flow_run_name=train_run_name, validate_parameters=True)
def train_run(
    run_file: str,
    overrides: list[str] | None = None,
    *,
    until_step: int | None = None,
    max_segments: int | None = None,
    max_seconds: float | None = None,
    accept: list[str] | None = None,
    try_again: bool = False,
    take_over: bool = False,
) -> State[RelayResult] | State[str]:
    """Train a run to its goal, in segments, from wherever its log says that it is.

    It returns a `RelayResult`. A flow run that ends within its own limits (segments, seconds) with work left is
    `Stopped`, which Prefect counts as completed; one that loses its machine has crashed.

    Args:
        run_file: path of the run file.
        overrides: settings that replace those of the file, each as a.b=c.
        until_step: the absolute step to train to; left out: train.steps, or the end of train.epochs.
        max_segments: stop after this many segments.
        max_seconds: stop after this many seconds; left out: train.stop_after_seconds.
        accept: accepted changes of identity keys, as compile.optimizer.
        try_again: forget earlier attempts without progress.
        take_over: start even if another process trains the run; without it the flow run is `Stopped` at once.
    """
    file, settings = Path(run_file), overrides or []
    try:
        with refusals_told(file, settings, note=lambda text: PrefectRunLogger().emit(Note(text=text))):
            run = OpenedRun.open(load_run_file(file, settings))
        logger = PrefectRunLogger(logger_of_stage)
        tag_flow_run(run.spec, logger)
        words = trainer_words(
            file,
            settings,
            until_step=until_step,
            max_segments=max_segments,
            max_seconds=max_seconds,
            accept=accepted_keys(",".join(accept or [])),
            try_again=try_again,
            take_over=take_over,
        )
        with tags(*tags_of(run.spec)):
            ended = supervise(words, run, logger=logger, answer=answer).end(f"the training {run.name}")
        if ended.error is not None and ended.error.is_expected:
            raise ended.error.to_error()
    except RunAtWork as fault:
        # A scheduled flow run beside a run at work has nothing to do, and has not failed.
        return Completed(name="Stopped", message=str(fault).splitlines()[0], data=str(fault))
    except BatonError as fault:
        return failed(fault)
    if not prefect_responds():
        # The engine tries to record the last state, and then a failure to do so, each for a minute by its settings.
        logger.emit(Note(text="Prefect is not responding; retrying for up to two minutes", warning=True))
    state: State[RelayResult] = state_of(ended, run.spec)
    if ended.stopped not in {"", CANCELLED} or (ended.result and state.is_crashed()):
        raise TerminationSignal(signal=signal.SIGTERM)  # this process ends by it, which Prefect's worker notices
    return state


def run_as_train_run(work: Callable[[], State[object]], spec: RunSpec, parameters: Mapping[str, object]) -> None:
    """Do some work of a command, which returns the last state, as a flow run of train-run.

    Prefect's page shows the parameters, which are those of `train_run`; they are not read again.
    """

    @functools.wraps(train_run.fn)
    def body(*_args: object, **_parameters: object) -> State[object]:
        return work()

    until_step = parameters.get("until_step")
    name = target_name(spec, until_step if isinstance(until_step, int) else None)
    with tags(*tags_of(spec)):  # a flow run gets its tags when it is created
        flow(name=train_run.name, flow_run_name=name)(body)(**parameters, return_state=True)


def train_as_train_run(
    run: OpenedRun, words: Sequence[str], parameters: Mapping[str, object], *, console: Sink
) -> Ended:
    """Have a trainer train a run of a command, as a flow run of train-run, whose children its stages are.

    Args:
        run: what is trained; some of its stages run in other processes.
        words: the trainer's arguments.
        parameters: see `run_as_train_run`.
        console: receives every event, besides Prefect.

    Returns:
        How the training ended.
    """
    reached: list[Ended] = []

    def work() -> State[object]:
        logger = Several((console, PrefectRunLogger(logger_of_stage)))
        outcome = supervise(words, run, logger=logger, answer=answer, of_command=True)
        reached.append(outcome.end(f"the training {run.name}"))
        return state_of(reached[-1], run.spec)

    run_as_train_run(work, run.spec, parameters)
    return reached[-1]


@flow(name="evaluate-best", flow_run_name=run_name, validate_parameters=True)
def evaluate_best(
    run_file: str,
    overrides: list[str] | None = None,
    step: Step = "best",
    on: SetName = "validation",
    *,
    trust_code: bool = False,
) -> State[FreshEvaluation]:
    """Evaluate a committed checkpoint again, on all examples of a set, and compare the metrics with the log.

    It returns a `FreshEvaluation`. If the metrics differ from the log, the flow run logs a warning and ends as
    `Differs`, which Prefect counts as completed. If the stage is a deployment and is cancelled, so is this flow run.

    Args:
        run_file: path of the run file; or the address of the run's home, whose run file and code are used.
        overrides: settings that replace those of the file, each as a.b=c.
        step: "best" (by checkpoint.keep_best; the newest if none was evaluated yet), the step of a retained
            checkpoint, or null for the newest.
        on: the set, validation or test.
        trust_code: run the code of a home that is in a bucket, or that another user can write to.
    """
    notes: list[str] = []
    try:
        run = run_of_deployment(run_file, overrides, trust_code=trust_code, note=notes.append)
        with tags(*tags_of(run.spec)):
            telemetry = PrefectRunLogger(logger_of_stage)
            for text in notes:
                telemetry.emit(Note(text=text))
            tag_flow_run(run.spec, telemetry)
            newest = run.log.head()
            if step == "best" and newest is not None and newest.best is None:
                step = None
            with warnings_as_notes(telemetry):
                done = evaluate_again(run, step, lambda chosen: _evaluate(run, chosen, telemetry), telemetry, on=on)
    except StageStopped as stop:
        return stopped(stop)
    except BatonError as fault:
        return failed(fault)
    return evaluated(done)


def _evaluate(run: OpenedRun, chosen: Chosen, telemetry: Sink) -> Evaluation:
    """Evaluate through the stages, in this process or as deployments."""
    with PrefectTasks(telemetry) as tasks:
        # No attempt: this is not a part of training.
        runner = runner_for(run.spec, InProcess(), ask=answer, attempt=None, telemetry=telemetry)
        return run_stages(run, chosen, runner, Several((tasks, telemetry)))


def evaluated(result: FreshEvaluation) -> State[FreshEvaluation]:
    """The last state of a flow run that has evaluated; Prefect's pages show its message."""
    metrics = " ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
    how = {None: "not evaluated before", True: "same as the log", False: "DIFFERS from the log"}[result.agrees]
    name = "Differs" if result.agrees is False else "Completed"
    return Completed(name=name, message=f"step {result.step}, {result.on}: {metrics}; {how}", data=result)


def stopped(stop: StageStopped) -> State[FreshEvaluation]:
    """The last state of a flow run whose stage was stopped.

    Raises:
        TerminationSignal: this flow run's machine is about to go.
    """
    if stop.reason in MACHINE_GOES:
        raise TerminationSignal(signal=signal.SIGTERM) from stop
    return Cancelled(message=f"nothing was evaluated: {stop}")


@flow(name="audit", flow_run_name=run_name, validate_parameters=True)
def audit(
    run_file: str,
    overrides: list[str] | None = None,
    choice: Choice = "sample",
    count: int = 1,
    seed: int | None = None,
    *,
    trust_code: bool = False,
) -> State[AuditReceipt]:
    """Execute committed steps again in processes of this machine, and compare every bit with the log.

    A receipt goes into the run's home, whatever the audit finds. If a bit differs, the flow run ends as `Differs`,
    which Prefect counts as failed; its message is what `baton audit` prints.

    Args:
        run_file: path of the run file; or the address of the run's home, whose run file and code are used.
        overrides: settings that replace those of the file, each as a.b=c.
        choice: "sample", "last" or "all", as `baton audit` has them.
        count: size of the sample.
        seed: draws the sample; null: a new one each time.
        trust_code: run the code of a home that is in a bucket, or that another user can write to.
    """
    notes: list[str] = []
    try:
        run = run_of_deployment(run_file, overrides, trust_code=trust_code, note=notes.append)
        with tags(*tags_of(run.spec)):
            telemetry = PrefectRunLogger()
            for text in notes:
                telemetry.emit(Note(text=text))
            tag_flow_run(run.spec, telemetry)
            with warnings_as_notes(telemetry):
                write_run_file(run)  # for the processes that execute it
                receipt = audit_in_scratch(
                    run,
                    tuple(overrides or ()),
                    choice=choice,
                    count=count,
                    seed=secrets.randbelow(2**31) if seed is None else seed,
                    telemetry=telemetry,
                )
            address = store_receipt(receipt, run.home)
    except BatonError as fault:
        return failed(fault)
    return audited(receipt, address)


def audited(receipt: AuditReceipt, address: str) -> State[AuditReceipt]:
    """The last state of a flow run that has audited; Prefect's pages show its message."""
    message = "\n".join([*receipt_lines(receipt), f"receipt: {address}"])
    if receipt.verdict == "same":
        return Completed(message=message, data=receipt)
    return Failed(name="Differs", message=message)


@flow(name="verify", flow_run_name=run_name, validate_parameters=True)
def verify(run_file: str, overrides: list[str] | None = None) -> State[str]:
    """Read every committed byte of a run again, and quarantine damaged checkpoints.

    A checkpoint is quarantined if two more reads find it damaged, and never if it is the tip: a run at work goes on
    from memory, and the next start quarantines it. If anything is damaged, the flow run ends as `Damaged`, which
    Prefect counts as failed.

    Args:
        run_file: path of the run file; or the address of the run's home.
        overrides: settings that replace those of the file, each as a.b=c.
    """
    try:
        require_address(run_file)
        opened = open_run(run_file, overrides)
        if isinstance(opened, OpenedRun):
            tag_flow_run(opened.spec, PrefectRunLogger())
        return verified(verify_home(opened, quarantine=True), opened.home.uri)
    except BatonError as fault:
        return failed(fault)


def verified(findings: Findings, home: str) -> State[str]:
    """The last state of a flow run that has verified; Prefect's pages show its message."""
    words = findings.words(home)
    if not findings.damages:
        return Completed(message=f"all bytes agree with their manifests and the log: {words}", data=words)
    return Failed(name="Damaged", message="\n".join([*(damage.what for damage in findings.damages), words]))
