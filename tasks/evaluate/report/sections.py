"""The sections of the report's page and their tables, as plain text; the template turns them into HTML.

A table is shaped once: `Table.texts` is what a terminal prints of it, and what an artifact in Prefect has as Markdown.

They are the start of the run and its changes, with what these did to run file and code; where the time went, attempts
and workers; checkpoints and evaluations; the newest confusion matrix; the model and the code as the home has them;
proofs and audits.
"""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import yaml
from pydantic_core import from_json

from baton.tasks.evaluate.report.charts import usage_pictures
from baton.tasks.foundation.contracts.home_files import (
    CONFUSION,
    SAVED_CODE,
    ConfusionMatrix,
    ModelSummary,
    confusion_path,
)
from baton.tasks.foundation.contracts.identity import differences
from baton.tasks.foundation.contracts.log_entry import (
    Change,
    Commit,
    Entry,
    Environment,
    Evaluation,
    EvaluationOnTest,
    Head,
    Origin,
    Quarantine,
    Rewind,
    WorkerStats,
)
from baton.tasks.foundation.errors import AnotherVersion, FileMissing, FileTooLarge, RunLogError
from baton.tasks.foundation.log.accounting import GOOD, LOST, Account, Attempt
from baton.tasks.foundation.log.attempts import end_words
from baton.tasks.foundation.log.history import History, KeptForGood, commit_of
from baton.tasks.foundation.log.host_history import SlowHost
from baton.tasks.foundation.log.receipts import audit_words, last_audit
from baton.tasks.foundation.model.code_changes import read_saved_code
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.telemetry.formatting import (
    duration_words,
    metric_words,
    number_words,
    plain_words,
    short_path,
    size_words,
)
from baton.tasks.foundation.text import counted, time_words


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A coloured word, such as `tip`; `reason` shows on hovering."""

    word: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: its first line.
        kind: CSS class; numbers are aligned to the right.
        strong: whether the text is bold.
        full_text: shown on hovering, if `text` is only a part of it.
        more_lines: the lines below the first one.
        marks: coloured words before the text.
        sort: what the column is sorted by, if not by the text.
        share: length of a bar after the text, from 0 to 1; None: no bar.
        bar: CSS class of the bar's color.
    """

    text: str = ""
    kind: Literal["", "number", "wrap", "wrap code"] = ""
    strong: bool = False
    full_text: str = ""
    more_lines: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    sort: float | None = None
    share: float | None = None
    bar: Literal["training", "kill", "quiet"] = "quiet"


_MANY_COLUMNS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows below optional headings. On a narrow screen, `stacks` puts the cells of a row below each other."""

    headings: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]]
    is_matrix: bool = False

    @property
    def stacks(self) -> bool:
        """Whether the columns do not fit on a narrow screen; a matrix is scrolled."""
        return len(self.headings) >= _MANY_COLUMNS and not self.is_matrix

    @property
    def numbers(self) -> set[int]:
        """The columns whose headings are aligned to the right, as the cells of the first row are."""
        return {place for place, cell in enumerate(self.rows[0] if self.rows else ()) if cell.kind == "number"}

    @property
    def texts(self) -> list[Sequence[str]]:
        """The headings and the rows as plain text, for a terminal and for Markdown."""
        return [self.headings, *([cell.text for cell in row] for row in self.rows)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading with a table, a note below it, and texts of files, which are folded.

    Attributes:
        heading: of the section.
        table: None: no table.
        note: below the table.
        pictures: captions and SVG, above the texts.
        texts: names and contents of files.
        unfolded: how many of the texts are shown at once, from the first.
    """

    heading: str
    table: Table | None = None
    note: str = ""
    pictures: tuple[tuple[str, str], ...] = ()
    texts: tuple[tuple[str, str], ...] = ()
    unfolded: int = 0


def number(text: str, sort: float | None = None) -> Cell:
    """A cell aligned to the right; `sort` is its number, if the text has a unit."""
    return Cell(text, "number", sort=sort)


def cut(text: str, characters: int) -> str:
    """The first `characters` of a text, and an ellipsis if there are more."""
    return text if len(text) <= characters else f"{text[:characters]}…"


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
        table=Table(headings=headings, rows=rows[-_ENTRIES_SHOWN:]),
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


_SHOWN = 20
_TEXT_CHARACTERS = 100
# Folder of the receipts -> what made them.
_RECEIPTS = {"proofs": "prove", "audits": "audit"}


def check_sections(home: Storage) -> Iterator[Section]:
    """The newest receipts of `baton prove` and `baton audit`; no section if there are none."""
    rows = []
    for folder, verb in _RECEIPTS.items():
        paths = sorted((path for path in home.files(folder) if path.endswith(".json")), reverse=True)
        rows += [_row(home, path, verb) for path in paths[:_SHOWN]]
    if rows:
        audit = last_audit(home)
        found = "" if audit is None else f"last audit: {audit_words(audit)}. "
        headings = ("time, UTC", "command", "verdict", "steps", "receipt")
        yield Section(
            heading="Proofs and audits",
            table=Table(headings=headings, rows=rows),
            note=f"{found}A proof trains a few steps straight, and again cut and killed; an audit executes committed "
            "steps again. Both compare every bit.",
        )


def _row(home: Storage, path: str, verb: str) -> list[Cell]:
    receipt = _read(home, path)
    verdict = str(receipt.get("verdict", "cannot be read"))
    try:
        steps = (
            sum(each["end"] - each["start"] for each in receipt["stretches"]) if verb == "audit" else receipt["steps"]
        )
    except (KeyError, TypeError):
        steps = None
    return [
        Cell(time_words(str(receipt.get("time", "")))),
        Cell(f"baton {verb}"),
        Cell(marks=(Mark(word=cut(verdict, _TEXT_CHARACTERS)),)),
        number(f"{steps:,}" if isinstance(steps, int) else ""),
        Cell(path, "wrap code"),
    ]


def _read(home: Storage, path: str) -> Mapping[str, Any]:
    """The receipt; empty if it cannot be read: it is informational."""
    try:
        found = from_json(home.read(path))
    except (FileMissing, FileTooLarge, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


_DIGEST_CHARACTERS = 12


def checkpoints_section(entries: Sequence[Entry], head: Head) -> Section:
    """Every committed checkpoint, with its state today."""
    reasons = {entry.body.path: entry.body.reason for entry in entries if isinstance(entry.body, Quarantine)}
    kept = KeptForGood()
    for entry in entries:
        kept.follow(entry.body)
    retained = {*(ref.path for ref in head.retained), *(each.ref.path for each in kept.checkpoints)}
    reads = {path: entry.time for entry in entries for path in getattr(entry.body, "read", ())}
    rows = [
        checkpoint_cells(entry, _marks(path, head, retained, reasons), read=reads.get(path, ""))
        for entry in entries
        if isinstance(entry.body, Commit)
        for path in [entry.body.checkpoint.path]
    ]
    if not rows:
        return Section(heading="Checkpoints", note="No checkpoint is committed yet.")
    return Section(heading="Checkpoints", table=Table(headings=tuple(rows[0]), rows=[[*row.values()] for row in rows]))


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
    yield Section(heading=heading, table=Table(headings=headings, rows=rows))


_LOGGED_SHOWN = 200


def logged_section(history: History) -> Iterator[Section]:
    """What callbacks logged besides numbers, which are in the charts; no section if there is nothing."""
    found = [
        (each, {name: value for name, value in each.values.items() if not each.numbers(name)})
        for each in history.logged
    ]
    rows = [
        [number(f"{each.step:,}"), Cell(each.on), Cell(plain_words(values, between=", "), "wrap")]
        for each, values in found
        if values
    ]
    if rows:
        hidden = len(rows) - _LOGGED_SHOWN
        yield Section(
            heading="Logged by callbacks",
            table=Table(headings=("step", "at", "values"), rows=rows[-_LOGGED_SHOWN:]),
            note=f"{hidden:,} earlier rows are not shown." if hidden > 0 else "",
        )


def checkpoint_cells(entry: Entry, marks: tuple[Mark, ...] = (), *, read: str = "") -> dict[str, Cell]:
    """What a table says of a commit, by column; `read` is when the checkpoint was read whole."""
    commit = commit_of(entry)
    ref, row = commit.checkpoint, commit.shown_row
    metrics = "" if row is None else metric_words(row.metrics, between=", ", partial=row is commit.partial)
    return {
        "step": number(f"{ref.step:,}"),
        "state": Cell(marks=marks),
        "training metrics": Cell(metrics),
        "size": number(size_words(ref.size), ref.size),
        "state digest": Cell(ref.state_digest[:_DIGEST_CHARACTERS], full_text=ref.state_digest),
        "ended by": Cell(commit.exit_reason.replace("_", " ")),
        "committed, UTC": Cell(time_words(entry.time)),
        "read whole, UTC": Cell(time_words(read)),
        "folder": Cell(short_path(ref.path).removeprefix("checkpoints/"), full_text=ref.path),
    }


def _marks(path: str, head: Head, retained: set[str], reasons: dict[str, str]) -> tuple[Mark, ...]:
    """The state of a checkpoint today."""
    marks = []
    if head.tip is not None and path == head.tip.path:
        marks.append(Mark(word="tip"))
    if head.best is not None and path == head.best.checkpoint.path:
        marks.append(Mark(word="best"))
    if path in {ref.path for ref in head.quarantined}:
        marks.append(Mark(word="quarantined", reason=reasons.get(path, "")))
    elif path in retained:
        marks += [] if marks else [Mark(word="retained")]
    else:
        marks.append(Mark(word="retired" if path in {old.path for old in head.retired} else "deleted"))
    return tuple(marks)


def confusion_section(home: Storage, history: History) -> Iterator[Section]:
    """The matrix as a table; no section if the home has none, or none that can be read.

    Args:
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
    names = matrix.class_names or tuple(map(str, classes))
    total, right = sum(map(sum, matrix.counts)), sum(matrix.counts[each][each] for each in classes)
    yield Section(
        heading="Confusion matrix",
        table=Table(
            headings=("label", *names),
            rows=[[Cell(names[label], strong=True), *_cells(matrix.counts[label], label)] for label in classes],
            is_matrix=True,
        ),
        note=f"Validation examples at step {matrix.step:,}: a row for each label, a column for each predicted class. "
        f"{right:,} of {total:,} are predicted right. Sample weights do not count.",
    )


def _cells(counts: tuple[int, ...], label: int) -> Iterator[Cell]:
    """The counts of one label; bold where label and prediction are the same."""
    for predicted, count in enumerate(counts):
        yield Cell(f"{count:,}" if count else "·", "number", strong=predicted == label, sort=count)


_MOST_CHARACTERS = 200_000
_MOST_LAYERS = 500


def saved_code_sections(home: Storage, head: Head) -> Iterator[Section]:
    """The newest model, run file and code; no section if the home has none, or none that can be read.

    Args:
        head: the newest state, which names them.
    """
    path = head.identity.get(SAVED_CODE)
    saved = read_saved_code(home, path)
    if saved is None:
        return
    if saved.model is not None:
        yield _model_section(saved.model)
    spec = saved.run_file
    shown = [
        (
            "run file, the keys that differ from their defaults",
            yaml_text(spec.model_dump(mode="json", exclude_defaults=True)),
        ),
        (
            "run file, all keys",
            yaml_text(spec.model_dump(mode="json")),
        ),
        *saved.text_files.items(),
    ]
    yield Section(
        heading="Run file and code",
        note=f"As of the last accepted change, from {path} in the home."
        + ("" if saved.revision is None else f" Git revision {saved.revision}."),
        texts=tuple((name, cut_text(text)) for name, text in shown),
    )


def _model_section(model: ModelSummary) -> Section:
    rows = [
        [
            Cell(layer.name),
            Cell(layer.kind),
            Cell(layer.output_shape or "", "wrap code"),
            number(f"{layer.parameters:,}"),
        ]
        for layer in model.layers[:_MOST_LAYERS]
    ]
    more = len(model.layers) - len(rows)
    return Section(
        heading="Model",
        table=Table(headings=("layer", "class", "output shape", "parameters"), rows=rows),
        note=(f"{counted(more, 'more layer', thousands=',')}. " if more else "")
        + f"{model.parameters:,} parameters, {model.trainable:,} of them trainable; the optimizer has "
        f"{model.optimizer:,} numbers of its own.",
    )


def yaml_text(value: object) -> str:
    """The value as YAML, keys in their order."""
    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))


def cut_text(text: str) -> str:
    """The beginning of a text that is too long for a page."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}\n…"


_CHANGES_SHOWN = 50
_RUN_FILE = "run file, all keys"


def code_changes_section(home: Storage, entries: Sequence[Entry]) -> Iterator[Section]:
    """Differences of the saved code at each accepted change, newest last; no section if there are none.

    Args:
        entries: its log, oldest first.
    """
    changed = [
        (before.head, entry)
        for before, entry in pairwise(entries)
        if isinstance(entry.body, Change)
        and before.head.identity.get(SAVED_CODE) != entry.head.identity.get(SAVED_CODE)
    ]

    @functools.cache  # what one change leaves is where the next begins
    def files(path: object) -> Mapping[str, str] | None:
        return _files(home, path)

    texts = []
    for before, entry in changed[-_CHANGES_SHOWN:]:
        old, new = files(before.identity.get(SAVED_CODE)), files(entry.head.identity.get(SAVED_CODE))
        if old is None or new is None:
            continue
        step = 0 if entry.head.tip is None else entry.head.tip.step
        for name, diff in code_diffs(old, new, "before", "after"):
            texts.append((f"entry {entry.number:,}, from step {step:,} on: {name}", cut_text(diff)))
    if texts:
        yield Section(heading="What accepted changes changed", texts=tuple(texts))


def code_diffs(
    before: Mapping[str, str], after: Mapping[str, str], before_name: str, after_name: str
) -> Iterator[tuple[str, str]]:
    """Yield the files that differ, each with its unified diff.

    Args:
        after: the same of the other side.
        before_name: of that side, in the diff's first line.
        after_name: in its second line.
    """
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, "").splitlines(), after.get(name, "").splitlines()
        if found := "\n".join(difflib.unified_diff(old, new, before_name, after_name, lineterm="")):
            yield name, found


def _files(home: Storage, path: object) -> Mapping[str, str] | None:
    """The run file and the files of the code that are text, by name."""
    saved = read_saved_code(home, path)
    if saved is None:
        return None
    run_file = yaml_text(saved.run_file.model_dump(mode="json"))
    return {_RUN_FILE: run_file, **saved.text_files}


_ERROR_CHARACTERS = 200
_HOST_CHARACTERS = 40
_ATTEMPTS_SHOWN = 200
_OUTPUTS_SHOWN = 20


def time_sections(account: Account | None, *, hosts: bool = False) -> Iterator[Section]:
    """The time by cause and the attempts; a note if no attempts are recorded.

    Args:
        account: where the time went; None if no attempts are recorded.
        hosts: whether to name the hosts; otherwise they are numbered.
    """
    heading = "Where the time went"
    if account is None:
        yield Section(
            heading=heading,
            note="Attempts are not recorded for this run, so start-ups, lost work and time away are not known; the "
            "picture shows the committed segments.",
        )
        return
    yield Section(heading=heading, table=_causes(account), note=" ".join(_sentences(account)))
    yield _attempts(account.attempts, hosts=hosts)


def goodput_words(account: Account) -> str:
    """`83.1%`: the share of the time that trained steps which the run kept."""
    return f"{account.share(account.good_seconds):.1%}"


def workers_section(workers: Sequence[WorkerStats], slow: Sequence[SlowHost]) -> Iterator[Section]:
    """Statistics of each host, and which are slow; no section if the log has none."""
    if not workers:
        return
    rows = [worker_cells(worker) for worker in workers]
    table = Table(headings=tuple(rows[0]), rows=[[*row.values()] for row in rows])
    yield Section(heading="Workers", table=table, note="; ".join(each.words for each in slow))


def worker_cells(worker: WorkerStats) -> dict[str, Cell]:
    """What is said of a host, by column."""
    speed = worker.examples / worker.train_seconds if worker.train_seconds > 0 else 0.0
    return {
        "host": number(str(worker.host)),
        "replicas": number(str(worker.replicas)),
        "examples": number(f"{worker.examples:,}"),
        "examples/s": number(f"{speed:,.0f}"),
        "time of a step": number(f"{1000 * worker.step_seconds:.3g} ms"),
        "input wait": number(f"{worker.input_wait_share:.1%}"),
        "loss of its replicas": number(", ".join(map(number_words, worker.losses))),
    }


def _causes(account: Account) -> Table:
    rows = [
        [
            Cell(cause, strong=cause == GOOD),
            number(duration_words(amount), amount),
            number(f"{account.share(amount):.1%}"),
            Cell(
                "goodput" if cause == GOOD else "badput",
                share=account.share(amount),
                bar="training" if cause == GOOD else "kill" if cause == LOST else "quiet",
            ),
        ]
        for cause, amount in account.seconds.items()
    ]
    rows.append(
        [
            Cell("all", strong=True),
            number(duration_words(account.total_seconds)),
            number("100%" if account.total_seconds > 0 else ""),
            Cell(),
        ]
    )
    return Table(headings=("cause", "time", "share", ""), rows=rows)


def _sentences(account: Account) -> Iterator[str]:
    yield (
        f"Goodput is {goodput_words(account)} of {duration_words(account.total_seconds)}: the share of the processes' "
        "time in which steps were trained that the run kept. The rest is badput, by cause."
    )
    silent = sum(attempt.silent for attempt in account.attempts)
    if silent:
        yield f"{silent} of the attempts were killed or crashed; their time counts up to their last heartbeat."
    hung = sum(attempt.hung for attempt in account.attempts)
    if hung:
        yield f"{hung} of the attempts hung, and ended themselves."
    if account.away_seconds:
        yield f"Between attempts no process was running for {duration_words(account.away_seconds)}."
    if account.unreadable:
        yield f"Unreadable attempt records, not included: {account.unreadable}."


def _attempts(attempts: tuple[Attempt, ...], *, hosts: bool) -> Section:
    rows = []
    words = {} if hosts else host_words(attempts)
    texts = []
    for attempt in attempts[-_ATTEMPTS_SHOWN:]:
        record = attempt.record
        if record.last_lines:
            host = words.get(record.host) or cut(record.host, _HOST_CHARACTERS)
            name = f"last lines of the attempt of {time_words(record.began)} on {host}, {_end_words(attempt, words)}"
            texts.append((name, with_host_words(cut_text("\n".join(record.last_lines)), words)))
        rows.append(
            [
                Cell(time_words(record.began)),
                Cell(words.get(record.host) or cut(record.host, _HOST_CHARACTERS)),
                number(duration_words(record.wall_seconds), record.wall_seconds),
                number(f"{record.from_step:,} → {max(record.step, record.committed_step):,}", record.from_step),
                number(duration_words(attempt.lost_seconds) if attempt.lost_seconds else "", attempt.lost_seconds),
                Cell(_end_words(attempt, words), "wrap"),
            ]
        )
    headings = ("began, UTC", "host", "lived", "steps", "lost", "ended")
    hidden = len(attempts) - len(rows)
    return Section(
        heading="Attempts",
        table=Table(headings=headings, rows=rows),
        note=f"{hidden:,} earlier attempts are not shown." if hidden else "",
        pictures=tuple(usage_pictures([attempt.record for attempt in attempts])),
        texts=tuple(texts[-_OUTPUTS_SHOWN:]),
    )


def host_words(attempts: Sequence[Attempt]) -> dict[str, str]:
    """What a page calls the hosts of attempts: `host 1` for the first."""
    names = dict.fromkeys(attempt.record.host for attempt in attempts)
    return {host: f"host {number}" for number, host in enumerate(names, start=1)}


def with_host_words(text: str, hosts: Mapping[str, str]) -> str:
    """A text with other words for hosts."""
    for host, word in hosts.items():
        if host and host in text:
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", word, text)
    return text


def _end_words(attempt: Attempt, hosts: Mapping[str, str]) -> str:
    if attempt.alive:
        return f"running: {attempt.record.doing}"
    return cut(with_host_words(end_words(attempt.record), hosts), _ERROR_CHARACTERS)
