"""Go back to a segment border after a blow-up, and say so."""

import uuid

from tasks.foundation.contracts.log_entry import Rewind
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.errors import BlowUp
from tasks.foundation.runlog.commits import rewind
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.telemetry.events import Note, Sink


def rewind_run(log: RunLog, fault: BlowUp, *, base: int, spec: RunSpec, telemetry: Sink) -> None:
    """Log a rewind, see `runlog.commits.rewind`. Only the chief calls it.

    Args:
        log: the run's.
        fault: the blow-up and its step.
        base: number of the log entry that the work started from.
        spec: the run file.
        telemetry: receives a note.

    Raises:
        BlowUp: no rewind is left, see `train.rewind_tries`, or no border.
        StaleWriter: another writer moved the tip first.
    """
    entry = rewind(log, fault, base=base, spec=spec, attempt=uuid.uuid4().hex)
    if isinstance(entry.body, Rewind):
        telemetry.emit(
            Note(
                text=f"{fault}. Rewound to step {entry.body.to.step}, skipping {entry.body.skip_batches} global "
                f"batches (rewind {entry.head.rewinds} of at most {spec.train.rewind_tries} in a row)",
                warning=True,
            )
        )
