"""The start of a run and its changes: sections of the report's page."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from tasks.evaluate.report.tables import Cell, Section, Table, number, time_words
from tasks.foundation.contracts.identity import differences
from tasks.foundation.contracts.log_entry import Change, Entry, Environment, Head, Origin, Rewind
from tasks.foundation.runlog.history import History, commit_of

_ENTRIES_SHOWN = 200
_DIFFERENCES_SHOWN = 100


def origin_lines(entries: Sequence[Entry], history: History) -> Iterator[str]:
    """Sentences about the run that this one was forked from and about its initial weights."""
    origin = entries[0].body
    if isinstance(origin, Origin) and origin.forked_from is not None:
        for number, parent in enumerate(origin.forked_from.generations):
            yield f"{'which was ' if number else ''}forked from step {parent.step:,} of {parent.home} ({parent.path})"
    weights = commit_of(history.commits[0]).initialized_from if history.commits else None
    for source in () if weights is None else weights.sources:
        yield f"began with {len(source.loaded):,} variables from {source.place}"


def changes_section(entries: Sequence[Entry]) -> Iterator[Section]:
    """Accepted changes, changes of the environment and rewinds; no section if there are none."""
    rows = []
    for before, entry in pairwise(entries):
        lines = _lines(entry, before.head)
        if lines:
            step = 0 if entry.head.tip is None else entry.head.tip.step
            rows.append(
                [
                    number(f"{entry.number:,}"),
                    Cell(time_words(entry.time)),
                    number(f"{step:,}"),
                    Cell(lines[0], "wrap", more_lines=tuple(lines[1:])),
                ]
            )
    if not rows:
        return
    headings = ("entry", "time, UTC", "from step", "what changed")
    hidden = len(rows) - _ENTRIES_SHOWN
    yield Section(
        heading="Changes",
        table=Table(headings=headings, rows=rows[-_ENTRIES_SHOWN:], numbers=frozenset({0, 2})),
        note=f"{hidden:,} earlier changes are not shown." if hidden > 0 else "",
    )


def _lines(entry: Entry, before: Head) -> list[str]:
    match entry.body:
        case Change() as change:
            lines = []
            if change.identity is not None:
                found = differences(before.identity, change.identity)
                lines.append(f"accepted {', '.join(change.accepted)}:")
                lines += [str(difference) for difference in found[:_DIFFERENCES_SHOWN]]
                if len(found) > _DIFFERENCES_SHOWN:
                    lines.append(f"and {len(found) - _DIFFERENCES_SHOWN:,} more")
            if change.environment != before.environment:
                lines.append(f"environment: {_environment_words(before.environment, change.environment)}")
            return lines
        case Rewind() as rewind:
            return [
                f"rewound to step {rewind.to.step:,}, skipping {rewind.skip_batches:,} global batches: {rewind.reason}"
            ]
    return []


def _environment_words(before: Environment, after: Environment) -> str:
    names = {
        "intra_op_threads": "threads within an operation",
        "inter_op_threads": "operations at a time",
        "deterministic": "deterministic operations only",
    }
    return "; ".join(f"{names.get(key, key)}: {old} -> {new}" for key, (old, new) in before.changes_to(after).items())
