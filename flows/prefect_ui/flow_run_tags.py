"""Tags by which Prefect's pages find the flow runs and task runs of a training run."""

from uuid import UUID

from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.telemetry.events import Note, Sink


def tags_of(spec: RunSpec) -> tuple[str, str]:
    """Tags of a training run's flow runs and task runs."""
    return "baton", f"run:{spec.run}"


def tag_flow_run(spec: RunSpec, telemetry: Sink) -> None:
    """Add a training run's tags to the current flow run, if it lacks any: a deployment knows no run.

    One request, not retried: if Prefect refuses it or does not respond, a warning says so, and the flow run goes on.

    Args:
        spec: the run file's content.
        telemetry: receives the warning.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectException
    from prefect.runtime import flow_run
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    has = list(flow_run.tags)
    missing = [tag for tag in tags_of(spec) if tag not in has]
    if not missing or flow_run.id is None:
        return
    try:
        with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run.id), tags=[*has, *missing])
    except (httpx.HTTPError, PrefectException, RuntimeError, OSError) as fault:
        why = f"{type(fault).__name__}: {fault}".splitlines()[0]
        telemetry.emit(Note(text=f"the flow run lacks the tags {', '.join(missing)} in Prefect ({why})", warning=True))
