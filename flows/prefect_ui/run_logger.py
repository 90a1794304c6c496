"""A sink that writes to a flow run's log in Prefect."""

from prefect import get_run_logger
from prefect.exceptions import MissingContextError

from tasks.foundation.messages import shown, shown_lines
from tasks.foundation.telemetry.events import Committed, Evaluated, Event, Note


class PrefectRunLogger:
    """A `Sink` that logs notes, commits and evaluations in Prefect, but not every step."""

    def __init__(self) -> None:
        """Take the logger of the current flow run.

        Raises:
            MissingContextError: called outside a flow run.
        """
        self._flow_logger = get_run_logger()

    def emit(self, event: Event) -> None:
        """Log one event."""
        try:
            logger = get_run_logger()
        except MissingContextError:  # threads of the storage and the ledger have no flow run context
            logger = self._flow_logger
        match event:
            case Note(text=text, warning=True):
                logger.warning(shown_lines(text))
            case Note(text=text):
                logger.info(shown_lines(text))
            case Committed(step=step, path=path, metrics=metrics):
                logger.info("step %d committed as %s %s", step, path, _text(metrics))
            case Evaluated(step=step, metrics=metrics, examples=examples):
                logger.info("step %d evaluated on %d examples: %s", step, examples, _text(metrics))
            case _:
                pass


def _text(metrics: object) -> str:
    items = metrics.items() if isinstance(metrics, dict) else ()
    return shown(" ".join(f"{name} {value:.4g}" for name, value in items))
