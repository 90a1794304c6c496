"""Checkpoints and evaluations: sections of the report's page."""

from collections.abc import Iterator, Mapping, Sequence

from tasks.evaluate.report.tables import Cell, Mark, Section, Table, number, time_words
from tasks.foundation.contracts.log_entry import Commit, Entry, Evaluation, EvaluationOnTest, Head, Quarantine
from tasks.foundation.runlog.history import History
from tasks.foundation.telemetry.formatting import duration_words, metric_words, number_words, short_path, size_words

_DIGEST_CHARACTERS = 12
_HEADINGS = (
    "step",
    "state",
    "training metrics",
    "size",
    "state digest",
    "ended by",
    "committed, UTC",
    "read whole, UTC",
    "folder",
)


def checkpoints_section(entries: Sequence[Entry], head: Head) -> Section:
    """Every committed checkpoint, with its state today."""
    reasons = {entry.body.path: entry.body.reason for entry in entries if isinstance(entry.body, Quarantine)}
    reads = {read.path: read.time for entry in entries for read in getattr(entry.body, "read_whole", ())}
    rows = [
        _row(entry.body, entry.time, reads, _marks(entry.body.checkpoint.path, head, reasons))
        for entry in entries
        if isinstance(entry.body, Commit)
    ]
    if not rows:
        return Section(heading="Checkpoints", note="No checkpoint is committed yet.")
    return Section(heading="Checkpoints", table=Table(headings=_HEADINGS, rows=rows, numbers=frozenset({0, 3})))


def evaluations_section(history: History) -> Iterator[Section]:
    """Every evaluation with its metrics, a section for each set; none for a set without evaluations."""
    yield from _section_of("Evaluations on the validation set", history.evaluations)
    yield from _section_of("Evaluations on the test set", history.tests)


def _section_of(heading: str, evaluations: Sequence[Evaluation | EvaluationOnTest]) -> Iterator[Section]:
    if not evaluations:
        return
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics))
    rows = [
        [
            number(f"{evaluation.checkpoint.step:,}"),
            *(number(number_words(evaluation.metrics[name]) if name in evaluation.metrics else "") for name in names),
            number(f"{evaluation.examples:,}"),
            number(duration_words(evaluation.seconds), evaluation.seconds),
        ]
        for evaluation in evaluations
    ]
    headings = ("step", *names, "examples", "time")
    yield Section(heading=heading, table=Table(headings=headings, rows=rows, numbers=frozenset(range(len(headings)))))


def _row(commit: Commit, time: str, reads: Mapping[str, str], marks: tuple[Mark, ...]) -> list[Cell]:
    ref = commit.checkpoint
    metrics = metric_words(commit.history[-1].metrics) if commit.history else ""
    return [
        number(f"{ref.step:,}"),
        Cell(marks=marks),
        Cell(metrics.replace("  ", ", ")),
        number(size_words(ref.size), ref.size),
        Cell(ref.state_digest[:_DIGEST_CHARACTERS], full_text=ref.state_digest),
        Cell(commit.exit_reason.replace("_", " ")),
        Cell(time_words(time)),
        Cell(time_words(reads[ref.path]) if ref.path in reads else ""),
        Cell(short_path(ref.path).removeprefix("checkpoints/"), full_text=ref.path),
    ]


def _marks(path: str, head: Head, reasons: dict[str, str]) -> tuple[Mark, ...]:
    """The state of a checkpoint today."""
    marks = []
    if head.tip is not None and path == head.tip.path:
        marks.append(Mark(word="tip"))
    if head.best is not None and path == head.best.checkpoint.path:
        marks.append(Mark(word="best"))
    if path in {ref.path for ref in head.quarantined}:
        marks.append(Mark(word="quarantined", reason=reasons.get(path, "")))
    elif path in {ref.path for ref in head.retained}:
        marks += [] if marks else [Mark(word="retained")]
    else:
        marks.append(Mark(word="retired" if path in {old.path for old in head.retired} else "deleted"))
    return tuple(marks)
