"""Writes `report/index.html` and its pictures from a run's log and attempts."""

from datetime import UTC, datetime

from tasks.evaluate.report.page import Picture, render
from tasks.evaluate.report.plots import draw
from tasks.foundation.errors import NoSuchRun
from tasks.foundation.runlog.accounting import account_of, seconds_in_log
from tasks.foundation.runlog.attempts import read_attempts
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage

_FOLDER = "report"
PAGE = f"{_FOLDER}/index.html"  # relative to the run's home


def write_report(home: Storage, *, title: str, now: datetime | None = None) -> str:
    """Write the report of a run. The same log and the same attempts give the same page.

    Args:
        home: the run's home.
        title: the page's title, such as the run's name.
        now: current time in UTC, to decide which attempts are still running; None for the machine's clock.

    Returns:
        Address of the page.

    Raises:
        NoSuchRun: the home has no log.
    """
    entries = tuple(RunLog(home).entries())
    if not entries:
        raise NoSuchRun(f"no run is at {home.uri}; start it with `baton run`")
    history = history_of(entries)
    account = account_of(read_attempts(home), entries, history, now=now or datetime.now(UTC))
    plots = draw(history, seconds_in_log(history) if account is None else account.seconds)
    pictures = tuple(Picture(file=f"{plot.name}.png", caption=plot.caption, png=plot.png) for plot in plots)
    for picture in pictures:
        home.write(f"{_FOLDER}/{picture.file}", picture.png)
    # The page is written last, so if it exists, its pictures do too.
    page = render(title=title, address=home.uri, entries=entries, history=history, account=account, pictures=pictures)
    home.write(PAGE, page.encode())
    return f"{home.uri}/{PAGE}"
