"""The relay as Prefect records it: its stages as task runs, its state as artifacts.

Prefect is imported where it records something, in threads beside the work.
"""

import contextvars
import uuid
from collections.abc import Callable

from flows.admit import Admitted
from flows.launching.launcher import runner_for
from flows.opened_run import Run
from flows.prefect_compat.prefect_offline import PrefectTasks
from flows.prefect_ui.artifact_publisher import ArtifactPublisher
from flows.relay import relay
from flows.result import RelayResult, leaves_time
from tasks.foundation.telemetry.events import Several, Sink


def recorded_relay(
    run: Run,
    admission: Callable[[Sink], Admitted | RelayResult],
    *,
    telemetry: Sink,
    whole_process: bool,
    on_result: Callable[[RelayResult], None] = lambda _: None,
    context: Callable[[], contextvars.Context] | None = None,
) -> RelayResult:
    """Train a run as the current flow run, or beside the one whose context `context` waits for.

    Args:
        run: the opened run.
        admission: admits it; a result in place of the admitted run ends the flow run at once.
        telemetry: receives every event.
        whole_process: whether the process runs only this.
        on_result: called with the result before the last artifacts are made.
        context: waits for the context of the flow run; None: the current one.
    """
    attempt = uuid.uuid4().hex
    with (
        ArtifactPublisher(run.spec, run.log, notes=telemetry, context=context) as publisher,
        PrefectTasks(context=context) as tasks,
    ):
        sinks = Several((telemetry, publisher))
        admitted = admission(sinks)
        if isinstance(admitted, RelayResult):
            return admitted
        runner = runner_for(run.spec, tasks, attempt=attempt, telemetry=sinks, max_seconds=admitted.goal.max_seconds)
        result = relay(admitted, runner, telemetry=sinks, attempt=attempt, whole_process=whole_process)
        on_result(result)
        if leaves_time(result.exit_reason):
            publisher.draw_curves()
        return result
