"""Writes `report/index.html` from a run's log, attempts, proofs and audits."""

import re
from datetime import UTC, datetime

from tasks.evaluate.report.charts import curves_of
from tasks.evaluate.report.page import render
from tasks.evaluate.report.sections import check_sections, code_changes_section, confusion_section, saved_code_sections
from tasks.foundation.errors import FileMissing, NoSuchRun
from tasks.foundation.runlog.accounting import account_of
from tasks.foundation.runlog.attempts import read_attempts
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage

_FOLDER = "report"
PAGE = f"{_FOLDER}/index.html"  # relative to the run's home
_FIRST_BYTES = 64
_ENTRY = re.compile(rb"<!-- log entry (\d{1,12}) -->")


def write_report(log: RunLog, *, title: str, now: datetime | None = None, places: bool = False) -> str:
    """Write the report of a run. The same log, attempts and audits give the same page.

    Args:
        log: the run's log, which remembers the entries that this process has read.
        title: the page's title, such as the run's name.
        now: current time in UTC, to decide which attempts are still running; None for the machine's clock.
        places: see `render`.

    Returns:
        Address of the page.

    Raises:
        NoSuchRun: the home has no log.
    """
    home = log.home
    entries = tuple(log.entries(blocks="written"))
    if not entries:
        raise NoSuchRun(f"no run is at {home.uri}; start it with `baton run`")
    history = history_of(entries)
    account = account_of(read_attempts(home), entries, history, now=now or datetime.now(UTC))
    page = render(
        title=title,
        address=home.uri,
        entries=entries,
        history=history,
        account=account,
        curves=curves_of(history, entries, account),
        confusion=list(confusion_section(home, history)),
        more=[
            *check_sections(home),
            *code_changes_section(home, entries),
            *saved_code_sections(home, entries[-1].head),
        ],
        places=places,
    )
    home.write(PAGE, f"<!-- log entry {entries[-1].number} -->\n{page}".encode())
    return f"{home.uri}/{PAGE}"


def reported_entry(home: Storage) -> int | None:
    """Return the number of the newest log entry in the report; None if there is no report, or it does not say."""
    try:
        found = _ENTRY.match(home.read_range(PAGE, 0, _FIRST_BYTES))
    except FileMissing:
        return None
    return None if found is None else int(found[1])
