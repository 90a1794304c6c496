"""Where the time went: a section of the report's page."""

from collections.abc import Iterable, Sequence
from html import escape

from tasks.evaluate.report.tables import Cell, number, table, time_words
from tasks.foundation.runlog.accounting import GOOD, Account, Attempt
from tasks.foundation.runlog.worker_stats import Worker
from tasks.foundation.telemetry.formatting import duration_words, number_words

_ERROR_CHARACTERS = 160
_HOST_CHARACTERS = 40
_ATTEMPTS_SHOWN = 200


def where_the_time_went(account: Account | None) -> Iterable[str]:
    """The section's markup; without recorded attempts, a line that says so."""
    yield "<h2>Where the time went</h2>"
    if account is None:
        yield (
            '<p class="note">Attempts are not recorded for this run, so start-ups, lost work and time away are not '
            "known; the picture shows the committed segments.</p>"
        )
        return
    yield _causes(account)
    yield f'<p class="note">{escape(" ".join(_sentences(account)))}</p>'
    yield "<h2>Attempts</h2>"
    yield _attempts(account.attempts)


def goodput_words(account: Account) -> str:
    """`83.1%`: the share of the time that trained what the run is made of."""
    return f"{account.share(account.good_seconds):.1%}"


def _causes(account: Account) -> str:
    rows = [
        [
            Cell(f"<strong>{escape(cause)}</strong>" if cause == GOOD else escape(cause)),
            number(duration_words(amount)),
            number(f"{account.share(amount):.1%}"),
            Cell("goodput" if cause == GOOD else "badput"),
        ]
        for cause, amount in account.seconds.items()
    ]
    rows.append(
        [
            Cell("<strong>all</strong>"),
            number(duration_words(account.total_seconds)),
            number("100%" if account.total_seconds > 0 else ""),
            Cell(""),
        ]
    )
    return table(("cause", "time", "share", ""), rows, numbers={1, 2})


def _sentences(account: Account) -> Iterable[str]:
    yield f"Goodput is {goodput_words(account)} of {duration_words(account.total_seconds)}."
    silent = sum(attempt.silent for attempt in account.attempts)
    if silent:
        yield f"{silent} of the attempts died without a word; their time is counted up to their last sign of life."
    if account.away_seconds:
        yield f"Between attempts no process was at work for {duration_words(account.away_seconds)}."
    if account.unrecorded_seconds:
        before = duration_words(account.unrecorded_seconds)
        yield f"Before attempts were recorded, committed segments took {before}, which are not in here."
    if account.unreadable:
        yield f"Files that are no attempt's record, and left out: {account.unreadable}."


def _attempts(attempts: tuple[Attempt, ...]) -> str:
    rows = []
    for attempt in attempts[-_ATTEMPTS_SHOWN:]:
        record = attempt.record
        rows.append(
            [
                Cell(time_words(record.began)),
                Cell(escape(_cut(record.host, _HOST_CHARACTERS))),
                number(duration_words(record.wall_seconds)),
                number(f"{record.from_step:,} → {max(record.step, record.committed_step):,}"),
                number(duration_words(attempt.lost_seconds) if attempt.lost_seconds else ""),
                Cell(escape(_ended(attempt)), "wrap"),
            ]
        )
    headings = ("began, UTC", "host", "lived", "steps", "lost", "ended")
    left_out = len(attempts) - len(rows)
    earlier = f'<p class="note">{left_out:,} earlier attempts are not shown.</p>' if left_out else ""
    return table(headings, rows, numbers={2, 3, 4}) + earlier


def _ended(attempt: Attempt) -> str:
    record = attempt.record
    if attempt.alive:
        return f"at work: {record.doing}"
    if record.ended is None:
        return f"died without a word in {record.doing}"
    reason = record.ended.replace("_", " ")
    message = " ".join((record.message or "").split())
    return f"{reason}: {_cut(message, _ERROR_CHARACTERS)}" if message else reason


def workers_section(workers: Sequence[Worker]) -> Iterable[str]:
    """What each host did; nothing where the log does not tell."""
    if not workers:
        return
    rows = [
        [
            number(str(worker.host)),
            number(str(worker.replicas)),
            number(f"{worker.examples:,}"),
            number(f"{1000 * worker.step_seconds:.3g} ms"),
            number(f"{worker.input_wait_share:.1%}"),
            number(", ".join(map(number_words, worker.losses))),
            Cell("the others wait for its input" if worker.straggles else ""),
        ]
        for worker in workers
    ]
    yield "<h2>Workers</h2>"
    headings = ("host", "replicas", "examples", "time of a step", "input wait", "loss of its replicas", "")
    yield table(headings, rows, numbers=set(range(6)))


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]}…"
