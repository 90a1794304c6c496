"""The files of `keras.callbacks.CSVLogger`, made from a run's log: one row for each epoch, however the run was cut.

The whole file is written again each time, from the lineage of the tip. So no row repeats after a kill, and rows that a
rewind abandoned are gone.
"""

import csv
import io
from collections.abc import Iterator, Mapping

from tasks.foundation.contracts.identity import CsvFile, recorded_callbacks
from tasks.foundation.contracts.run_spec import RunSpec
from tasks.foundation.contracts.schedule import callbacks_act_at_evaluations, epochs_of_callbacks, needs_examples
from tasks.foundation.runlog.history import History, history_of
from tasks.foundation.runlog.log import RunLog

_FOLDER = "callbacks"
_ABSENT = "NA"  # as Keras writes it


def write_csv_files(log: RunLog, spec: RunSpec) -> None:
    """Write the files that the run's callbacks name into `callbacks/` of its home.

    Args:
        log: the run's.
        spec: the run file, with the number of training examples if it counts in epochs.

    Raises:
        StorageError: the store refuses or fails.
    """
    if spec.train.callbacks is None or needs_examples(spec):
        return
    files = recorded_callbacks(log.require_head().identity).csv_files
    if not files:
        return
    rows = list(rows_of(history_of(log.entries(blocks="written")), spec))
    for file in files:
        log.home.write(f"{_FOLDER}/{file.name}", csv_of(rows, file))


def rows_of(history: History, spec: RunSpec) -> Iterator[tuple[int, Mapping[str, float]]]:
    """Yield each epoch as callbacks count it, from 0, with the metrics that they received."""
    epochs = epochs_of_callbacks(spec)
    if not callbacks_act_at_evaluations(spec):
        for row in history.rows:
            if epochs.ends_at(row.step):
                yield epochs.last(row.step), row.metrics
        return
    rows = iter(history.rows)
    newest, following = None, next(rows, None)
    for evaluation in history.evaluations:
        step = evaluation.checkpoint.step
        while following is not None and following.step <= step:
            newest, following = following, next(rows, None)
        if epochs.ends_at(step) or step == spec.train.target:
            validation = {f"val_{name}": value for name, value in evaluation.metrics.items()}
            yield epochs.last(step), {**({} if newest is None else newest.metrics), **validation}


def csv_of(rows: list[tuple[int, Mapping[str, float]]], file: CsvFile) -> bytes:
    """Return the rows as CSV: the epoch, then all metrics in alphabetical order."""
    names = sorted({name for _, metrics in rows for name in metrics})
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["epoch", *names], restval=_ABSENT, delimiter=file.separator)
    writer.writeheader()
    for epoch, metrics in rows:
        writer.writerow({"epoch": epoch, **metrics})
    return text.getvalue().encode()
