"""Where the time went, the attempts and the workers: sections of the report's page."""

import re
from collections.abc import Iterator, Mapping, Sequence

from tasks.evaluate.report.tables import Cell, Section, Table, cut, number, time_words
from tasks.foundation.runlog.accounting import GOOD, LOST, Account, Attempt
from tasks.foundation.runlog.worker_stats import Worker
from tasks.foundation.telemetry.formatting import duration_words, number_words

_ERROR_CHARACTERS = 160
_HOST_CHARACTERS = 40
_ATTEMPTS_SHOWN = 200


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


def workers_section(workers: Sequence[Worker]) -> Iterator[Section]:
    """Statistics of each host; no section if the log has none."""
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
    headings = ("host", "replicas", "examples", "time of a step", "input wait", "loss of its replicas", "")
    yield Section(heading="Workers", table=Table(headings=headings, rows=rows, numbers=frozenset(range(6))))


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
    return Table(headings=("cause", "time", "share", ""), rows=rows, numbers=frozenset({1, 2}))


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
    if account.unrecorded_seconds:
        before = duration_words(account.unrecorded_seconds)
        yield f"Segments committed before attempts were recorded took {before}; they are not included."
    if account.unreadable:
        yield f"Unreadable attempt records, not included: {account.unreadable}."


def _attempts(attempts: tuple[Attempt, ...], *, hosts: bool) -> Section:
    rows = []
    names = dict.fromkeys(attempt.record.host for attempt in attempts)
    words = {} if hosts else {host: f"host {number}" for number, host in enumerate(names, start=1)}
    for attempt in attempts[-_ATTEMPTS_SHOWN:]:
        record = attempt.record
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
        table=Table(headings=headings, rows=rows, numbers=frozenset({2, 3, 4})),
        note=f"{hidden:,} earlier attempts are not shown." if hidden else "",
    )


def _end_words(attempt: Attempt, hosts: Mapping[str, str]) -> str:
    record = attempt.record
    if attempt.alive:
        return f"running: {record.doing}"
    if record.ended is None:
        return f"killed or crashed in {record.doing}"
    reason = record.ended.replace("_", " ")
    message = " ".join((record.message or "").split())
    for host, word in hosts.items():
        if host and host in message:
            message = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", word, message)
    return f"{reason}: {cut(message, _ERROR_CHARACTERS)}" if message else reason
