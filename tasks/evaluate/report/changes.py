"""What the run came from, and what was changed on its way: parts of the report's page."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise

from tasks.evaluate.report.tables import Cell, number, table, time_words
from tasks.foundation.contracts.identity import differences, in_words
from tasks.foundation.contracts.log_entry import Change, Entry, Environment, Head, Origin, Rewind
from tasks.foundation.runlog.history import History, commit_of

_ENTRIES_SHOWN = 200


def beginnings(entries: Sequence[Entry], history: History) -> Iterator[str]:
    """Sentences, as plain text: the run that this one was forked from, and where its initial weights come from."""
    origin = entries[0].body
    if isinstance(origin, Origin) and origin.forked_from is not None:
        parent = origin.forked_from
        yield f"forked from step {parent.step:,} of {parent.home} ({parent.path})"
    weights = commit_of(history.commits[0]).initialized_from if history.commits else None
    for source in () if weights is None else weights.sources:
        yield f"began with {len(source.loaded):,} variables from {source.place}"


def changes_section(entries: Sequence[Entry]) -> Iterable[str]:
    """Accepted changes, changes of the environment and rewinds; nothing where there are none."""
    rows = []
    for before, entry in pairwise(entries):
        words = _words(entry, before.head)
        if words:
            step = 0 if entry.head.tip is None else entry.head.tip.step
            rows.append(
                [
                    number(f"{entry.number:,}"),
                    Cell(time_words(entry.time)),
                    number(f"{step:,}"),
                    Cell("<br>".join(map(escape, words)), "wrap"),
                ]
            )
    if not rows:
        return
    yield "<h2>Changes</h2>"
    yield table(("entry", "time, UTC", "from step", "what changed"), rows[-_ENTRIES_SHOWN:], numbers={0, 2})
    if len(rows) > _ENTRIES_SHOWN:
        yield f'<p class="note">{len(rows) - _ENTRIES_SHOWN:,} earlier changes are not shown.</p>'


def _words(entry: Entry, before: Head) -> list[str]:
    match entry.body:
        case Change() as change:
            words = []
            if change.identity is not None:
                found = in_words(differences(before.identity, change.identity))
                words.append(f"accepted {', '.join(change.accepted)}: {found}")
            if change.environment != before.environment:
                words.append(f"environment: {_environment_words(before.environment, change.environment)}")
            return words
        case Rewind() as rewind:
            return [
                f"rewound to step {rewind.to.step:,}, skipping {rewind.skip_batches:,} global batches: {rewind.reason}"
            ]
    return []


def _environment_words(before: Environment, after: Environment) -> str:
    old, new = before.model_dump(), after.model_dump()
    versions = {f"version of {name}": version for name, version in new.pop("versions").items()}
    known = {f"version of {name}": version for name, version in old.pop("versions").items()}
    new, old = new | versions, old | known
    names = {
        "intra_op_threads": "threads within an operation",
        "inter_op_threads": "operations at a time",
        "deterministic": "deterministic operations only",
    }
    return "; ".join(
        f"{names.get(key, key)}: {old.get(key, 'none')} -> {new.get(key, 'none')}"
        for key in dict.fromkeys([*new, *old])
        if new.get(key) != old.get(key)
    )
