"""What a person reads in Prefect's log of a flow run."""

from prefect import get_run_logger
from prefect.exceptions import MissingContextError

from tasks.foundation.messages import shown, shown_lines
from tasks.foundation.telemetry.events import Committed, Evaluated, Event, Note


class PrefectRunLogger:
    """What a person reads in Prefect's log of the run: the milestones, not every step."""

    def __init__(self) -> None:
        """Within a flow run."""
        self._of_flow = get_run_logger()

    def emit(self, event: Event) -> None:
        """Log one event."""
        try:
            logger = get_run_logger()
        except MissingContextError:  # a thread of the store's, or of the ledger's
            logger = self._of_flow
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
