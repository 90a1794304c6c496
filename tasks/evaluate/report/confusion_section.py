"""The newest confusion matrix: a section of the report's page."""

from collections.abc import Iterator

from tasks.evaluate.report.tables import Cell, Section, Table
from tasks.foundation.contracts.confusion_matrix import CONFUSION, ConfusionMatrix, confusion_path
from tasks.foundation.errors import AnotherVersion, FileMissing, FileTooLarge, RunLogError
from tasks.foundation.runlog.history import History
from tasks.foundation.storage.base import Storage


def confusion_section(home: Storage, history: History) -> Iterator[Section]:
    """The matrix as a table; no section if the home has none, or none that can be read.

    Args:
        home: the run's.
        history: its log, with its evaluations. The others were rewound.
    """
    saved = set(home.files(CONFUSION))
    paths = (confusion_path(each.checkpoint.path) for each in reversed(history.evaluations))
    path = next((path for path in paths if path in saved), None)
    if path is None:
        return
    try:
        matrix = ConfusionMatrix.from_json(home.read(path), where=f"{home.uri}/{path}", error=RunLogError)
    except (AnotherVersion, FileMissing, FileTooLarge, RunLogError):  # informational
        return
    classes = range(len(matrix.counts))
    total, right = sum(map(sum, matrix.counts)), sum(matrix.counts[each][each] for each in classes)
    yield Section(
        heading="Confusion matrix",
        table=Table(
            headings=("label", *(str(each) for each in classes)),
            rows=[[Cell(str(label), strong=True), *_cells(matrix.counts[label], label)] for label in classes],
            numbers=frozenset(range(1, len(matrix.counts) + 1)),
        ),
        note=f"Validation examples at step {matrix.step:,}: a row for each label, a column for each predicted class. "
        f"{right:,} of {total:,} are predicted right. Sample weights do not count.",
    )


def _cells(counts: tuple[int, ...], label: int) -> Iterator[Cell]:
    """The counts of one label; bold where label and prediction are the same."""
    for predicted, count in enumerate(counts):
        yield Cell(f"{count:,}" if count else "·", "number", strong=predicted == label, sort=count)
