"""The flow evaluate-best: evaluates a committed checkpoint again, by default the best one.

As a scheduled check, it compares the metrics in the log with those that the checkpoint's bytes give today.
"""

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.states import Cancelled, Completed

from flows.evaluating import Chosen, FreshEvaluation, Step, evaluate_again, run_stages
from flows.launching.launcher import runner_for
from flows.launching.runner import StageStopped
from flows.opened_run import Run, run_of_deployment
from flows.prefect_compat.flow_run_beside import failed
from flows.prefect_compat.prefect_offline import PrefectTasks, logger_of_stage
from flows.prefect_ui.run_logger import PrefectRunLogger, tag_flow_run, tags_of
from flows.train_run import MACHINE_GOES, MachineIsGoing, run_name
from tasks.foundation.contracts.data_spec import SetName
from tasks.foundation.contracts.log_entry import Evaluation
from tasks.foundation.errors import BatonError
from tasks.foundation.telemetry.events import Note, Sink, warnings_as_notes


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
            with warnings_as_notes(telemetry):
                done = evaluate_again(run, step, lambda chosen: _evaluate(run, chosen, telemetry), telemetry, on=on)
    except StageStopped as stop:
        return stopped(stop)
    except BatonError as fault:
        return failed(fault)
    return ended(done)


def _evaluate(run: Run, chosen: Chosen, telemetry: Sink) -> Evaluation:
    """Evaluate through the stages, in this process or as deployments."""
    with PrefectTasks() as tasks:
        # No attempt: this is not a part of training.
        return run_stages(run, chosen, runner_for(run.spec, tasks, attempt=None, telemetry=telemetry), telemetry)


def ended(result: FreshEvaluation) -> State[FreshEvaluation]:
    """The last state of a flow run that has evaluated; Prefect's pages show its message."""
    metrics = " ".join(f"{name} {value:.4g}" for name, value in result.metrics.items())
    how = {None: "not evaluated before", True: "same as the log", False: "DIFFERS from the log"}[result.agrees]
    name = "Differs" if result.agrees is False else "Completed"
    return Completed(name=name, message=f"step {result.step}, {result.on}: {metrics}; {how}", data=result)


def stopped(stop: StageStopped) -> State[FreshEvaluation]:
    """The last state of a flow run whose stage was stopped.

    Raises:
        MachineIsGoing: this flow run's machine is about to go.
    """
    if stop.reason in MACHINE_GOES:
        raise MachineIsGoing(stop.reason) from stop
    return Cancelled(message=f"nothing was evaluated: {stop}")
