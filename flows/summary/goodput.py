"""Goodput and badput of a run, as JSON values and as text."""

from tasks.foundation.contracts.attempt import UNATTRIBUTED, AttemptRecord
from tasks.foundation.messages import counted
from tasks.foundation.runlog.accounting import Account, Attempt
from tasks.foundation.telemetry.formatting import duration_words


def account_facts(account: Account) -> dict[str, object]:
    """Return the account as JSON values: seconds, and shares of the total in [0, 1]."""
    return {
        "total_seconds": account.total_seconds,
        "goodput_seconds": account.good_seconds,
        "goodput_share": account.share(account.good_seconds),
        "badput_seconds": account.bad_seconds,
        "unattributed_share": account.share(account.unattributed_seconds),
        "away_seconds": account.away_seconds,
        "unrecorded_seconds": account.unrecorded_seconds,
        "alive": sum(attempt.alive for attempt in account.attempts),
        "died_without_a_word": sum(attempt.silent for attempt in account.attempts),
        "hung": sum(attempt.hung for attempt in account.attempts),
        "unreadable": account.unreadable,
        "attempts": [_attempt_facts(attempt) for attempt in account.attempts],
    }


def account_words(account: Account) -> list[tuple[str, str]]:
    """Return the account as lines of (label, text)."""

    def words(cause: str, amount: float) -> str:
        return f"{cause} {duration_words(amount)} ({account.share(amount):.1%})"

    count, total = len(account.attempts), duration_words(account.total_seconds)
    alive = sum(attempt.alive for attempt in account.attempts)
    silent = sum(attempt.silent for attempt in account.attempts)
    hung = [attempt for attempt in account.attempts if attempt.hung]
    states = ((alive, "at work"), (silent, "killed or crashed"), (len(hung), "hung"))
    standing = ", ".join(f"{number} {state}" for number, state in states if number)
    bad = {cause: amount for cause, amount in account.bad_seconds.items() if amount > 0 or cause == UNATTRIBUTED}
    attempts = counted(count, "attempt") + (f" ({standing})" if standing else "")
    good = duration_words(account.good_seconds)
    lines = [
        ("time", f"{total} in {attempts}"),
        (
            "goodput",
            f"{account.share(account.good_seconds):.1%}  {good} of training that counts",
        ),
        ("badput", "  ".join(words(cause, amount) for cause, amount in bad.items())),
    ]
    if hung:
        newest = hung[-1].record
        lines.append(("hung", f"{newest.alive[:19].replace('T', ' ')}  {hung_words(newest)}"))
    if account.away_seconds:
        lines.append(("away", f"{duration_words(account.away_seconds)} between attempts, no process at work"))
    if account.unrecorded_seconds:
        before = duration_words(account.unrecorded_seconds)
        lines.append(("unrecorded", f"{before} in segments committed before attempts were recorded"))
    if account.unreadable:
        are = "is" if account.unreadable == 1 else "are"
        lines.append(("left out", f"{counted(account.unreadable, 'file')} below attempts/ {are} no attempt's record"))
    return lines


def hung_words(record: AttemptRecord) -> str:
    """Return where and why an attempt hung, on one line."""
    where = f"process {record.pid} on {record.host}, attempt {record.attempt[:8]}"
    return f"{record.message or 'no message'}  ({where}; its record has the stacks of all threads)"


def _attempt_facts(attempt: Attempt) -> dict[str, object]:
    kept = attempt.record.model_dump(exclude={"format", "process"})
    return {**kept, "lost_seconds": attempt.lost_seconds, "is_alive": attempt.alive}
