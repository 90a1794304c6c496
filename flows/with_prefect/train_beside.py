"""A run that the command trains in its main thread, beside the flow run that Prefect records.

It does not wait for Prefect, which is imported when the first steps are trained.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flows.admit import Admitted, require_still_idle
from flows.result import RelayResult
from flows.with_prefect.record import BeginsWithTraining, FlowRunBeside, PrefectRunLogger, recorded_relay
from flows.with_prefect.task_runs import logger_of_stage
from tasks.foundation.telemetry.events import Several, Sink

if TYPE_CHECKING:
    from prefect.client.schemas.objects import State


def flow_run_of_command(
    admitted: Admitted, parameters: Mapping[str, object], *, connect: Callable[[], None], notes: Sink
) -> FlowRunBeside[RelayResult]:
    """The flow run of a run that the command has opened and admitted.

    Args:
        admitted: the run.
        parameters: those of `train_run`, which are shown on Prefect's page and not read again.
        connect: returns when Prefect's server responds.
        notes: receives a note of what Prefect does not record.
    """

    def engine(body: "Callable[[], State[RelayResult]]") -> None:
        # The tasks' threads use this later. Prefect's modules import each other in circles: if two threads import them
        # at once, Python breaks the deadlock by giving one of them half a module.
        import prefect.task_engine  # noqa: F401
        from prefect import flow, tags

        from flows.with_prefect.record import tags_of
        from flows.with_prefect.run_flows import target_name, train_run

        @functools.wraps(train_run.fn)
        def work(*_args: object, **_parameters: object) -> "State[RelayResult]":
            return body()

        # A flow run gets its tags when it is created, so they are set before.
        spec, name = admitted.run.spec, target_name(admitted.run.spec, admitted.goal.until_step)
        with tags(*tags_of(spec)):
            flow(name=train_run.name, flow_run_name=name, validate_parameters=True)(work)(**parameters)

    # Stages in other processes are children of the flow run.
    return FlowRunBeside(connect, engine, notes=notes, required=bool(admitted.run.spec.stages.remote()))


def train_beside(
    admitted: Admitted,
    flow_run: FlowRunBeside[RelayResult],
    *,
    console: Sink,
    on_result: Callable[[RelayResult], None],
) -> None:
    """Train a run that the command has opened and admitted, beside the flow run that Prefect records.

    Args:
        admitted: the run.
        flow_run: of `flow_run_of_command`; it is ended with the run's last state.
        console: receives every event, besides Prefect.
        on_result: called with the result before Prefect records it, since Prefect may be unreachable by then.
    """
    logger = PrefectRunLogger(logger_of_stage, flow_logger=lambda: flow_run.logger)
    sinks = Several((console, logger, BeginsWithTraining(flow_run)))
    require_still_idle(admitted, telemetry=sinks)

    def last_state(result: RelayResult) -> "State[RelayResult]":
        from flows.with_prefect.run_flows import final_state

        return final_state(result, admitted.run.spec)

    def end(result: RelayResult) -> None:
        """Let Prefect record the last state while the last artifacts are made."""
        on_result(result)
        flow_run.wait_at_end()
        logger.flush()
        flow_run.end(lambda: last_state(result))

    def train() -> None:
        recorded_relay(
            admitted.run, lambda _: admitted, telemetry=sinks, whole_process=True, on_result=end,
            context=flow_run.context,
        )  # fmt: skip

    if flow_run.required:
        flow_run.context().run(train)
    else:
        train()
