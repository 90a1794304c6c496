"""`baton log`: prints the entries of a run's log, newest last, and where attempts failed between them."""

import json
import sys
from datetime import UTC, datetime

from baton.flows.commands.options import RUN_FILE, Address, AsJson, Overrides, Verbose
from baton.flows.commands.output import Output, say_json, status
from baton.flows.facts import hung_words
from baton.flows.opened_run import open_run
from baton.tasks.foundation.contracts.attempt import HUNG, AttemptRecord, utc_time
from baton.tasks.foundation.contracts.identity import difference_words, differences
from baton.tasks.foundation.contracts.log_entry import (
    Body,
    Change,
    Commit,
    Entry,
    Environment,
    Evaluation,
    EvaluationOnTest,
    Finish,
    Head,
    Origin,
    Quarantine,
    Retire,
    Rewind,
)
from baton.tasks.foundation.log.attempts import end_words, failed
from baton.tasks.foundation.telemetry.formatting import epoch_words, metric_words, plain_words, size_words
from baton.tasks.foundation.text import counted


def log(
    address: Address = RUN_FILE, overrides: Overrides = None, *, verbose: Verbose = False, as_json: AsJson = False
) -> None:
    """Print the entries of a run's log, newest last."""
    opened = open_run(address, overrides)
    entries = list(opened.log.entries(blocks="read"))
    if not entries:
        opened.require_head()  # its error names a lost entry
    records = [record for record in opened.attempts.read().records if failed(record) and record.within is None]
    if as_json:
        facts = {"run": opened.name, "home": opened.home.uri, "entries": [_facts(entry) for entry in entries]}
        hung = [_failed_facts(record) for record in records if record.ended == HUNG]
        say_json({**facts, "hung": hung, "failed": [_failed_facts(record) for record in records]})
        return
    before = [None, *(entry.head for entry in entries)]
    out = Output.to(sys.stdout, verbose=verbose)
    rows = [(_time(entry.time), _words(entry, head, out)) for entry, head in zip(entries, before, strict=False)]
    for record in records:
        ended = utc_time(record.alive)
        after = max((place for place, (time, _) in enumerate(rows, 1) if time <= ended), default=0)
        rows.insert(after, (ended, _failed_row(record, out)))
    out.table([words for _, words in rows], right=(0, 3))


def _time(text: str) -> datetime:
    """The time of an entry, which is informational; an invalid one is as early as can be."""
    try:
        return utc_time(text)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)


def _failed_facts(record: AttemptRecord) -> dict[str, object]:
    keys = {"attempt", "host", "pid", "began", "from_step", "step", "committed_step", "doing", "ended", "message"}
    return {"time": record.alive, **record.model_dump(include=keys)}


def _failed_row(record: AttemptRecord, out: Output) -> tuple[str, ...]:
    word, why = (HUNG, hung_words(record)) if record.ended == HUNG else ("failed", end_words(record))
    return ("", out.time(record.alive), status(word), str(record.step), "", why)


def _facts(entry: Entry) -> dict[str, object]:
    # The folded state is left out, because it repeats the earlier entries.
    return {
        "number": entry.number,
        "time": entry.time,
        "attempt": entry.attempt,
        "step": _step(entry),
        "epoch": _epoch(entry),
        "base": entry.head.base,
        **entry.body.model_dump(exclude={"format"}),
    }


def _words(entry: Entry, before: Head | None, out: Output) -> tuple[str, ...]:
    step = "" if (found := _step(entry)) is None else str(found)
    epoch = "" if (done := _epoch(entry)) is None else epoch_words(done)
    what = "; ".join(words for words in (_what(entry, before, out), _read_words(entry.body, out)) if words)
    return (str(entry.number), out.time(entry.time), status(entry.body.kind), step, epoch, what)


def _read_words(body: Body, out: Output) -> str:
    """Which checkpoints were read whole before an entry; empty if it names none."""
    reads = getattr(body, "read", ())
    return f"read whole: {', '.join(out.path(path) for path in reads)}" if reads else ""


def _step(entry: Entry) -> int | None:
    """The step of an entry; None for kinds that have none."""
    match entry.body:
        case Commit() | Evaluation() | EvaluationOnTest() | Finish():
            return entry.body.checkpoint.step
        case Rewind():
            return entry.body.to.step
    return None


def _epoch(entry: Entry) -> float | None:
    """The epochs that were done at an entry's step; None if it has no step, or the log does not know."""
    step, totals = _step(entry), entry.totals
    return None if step is None or totals is None or totals.epoch is None else totals.epoch.after(step)


def _what(entry: Entry, before: Head | None, out: Output) -> str:  # noqa: PLR0911 - one return per kind
    match entry.body:
        case Origin(environment=environment, forked_from=lineage):
            source = "" if lineage is None else f"forked from {lineage.home} at step {lineage.step}; "
            return source + _environment_words(environment)
        case Change() as change:
            changed = "" if change.identity is None else f"{_accepted_words(change, before)}; "
            return changed + _environment_words(change.environment)
        case Rewind() as rewind:
            skipped = f"skips {counted(rewind.skip_batches, 'batch', 'batches')}"
            return f"back to {out.path(rewind.to.path)}, {skipped}; step {rewind.blown_up_at}: {rewind.reason}"
        case Commit() as commit:
            row = commit.shown_row
            metrics = "" if row is None else metric_words(row.metrics, partial=row is commit.partial)
            weights = commit.initialized_from
            begun = "" if weights is None else f"with weights from {', '.join(each.place for each in weights.sources)}"
            words = (
                out.path(commit.checkpoint.path),
                size_words(commit.checkpoint.size),
                commit.exit_reason,
                begun,
                metrics,
                plain_words(commit.logged[-1].values) if commit.logged else "",
                "" if commit.metadata is None else f"metadata {json.dumps(commit.metadata, ensure_ascii=False)}",
            )
            return "  ".join(word for word in words if word)
        case Evaluation() as evaluation:
            values = f"{metric_words(evaluation.metrics)}  {plain_words(evaluation.logged)}".rstrip()
            return f"{values}  ({counted(evaluation.examples, 'validation example')})"
        case EvaluationOnTest() as test:
            return f"{metric_words(test.metrics)}  ({counted(test.examples, 'test example')})"
        case Finish() as finish:
            return f"ended early: {finish.reason}"
        case Quarantine() as quarantine:
            return f"{out.path(quarantine.path)}  {quarantine.reason}"
        case Retire() as retire:
            kept = [each.ref.path for each in retire.kept]
            parts = (("retired", retire.paths), ("deleted", retire.deleted), ("kept for good", kept))
            return "; ".join(f"{verb} {', '.join(map(out.path, paths))}" for verb, paths in parts if paths)


def _accepted_words(change: Change, before: Head | None) -> str:
    found = differences(before.identity if before else {}, change.identity or {})
    variables = "" if change.variables is None else f"; {change.variables.words}"
    return f"accepted {', '.join(change.accepted)}: {difference_words(found)}{variables}"


def _environment_words(environment: Environment) -> str:
    return (
        f"{environment.devices}, threads {environment.intra_op_threads}/{environment.inter_op_threads}"
        f"{', deterministic operations' if environment.deterministic else ''}"
    )
