"""From a run's log and attempts to `report/index.html` and its pictures."""

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
    """Write the report of the run whose home this is. The same log and the same attempts give the same page.

    Args:
        home: the run's home; its log and its attempts are read.
        title: the page's title, such as the run's name.
        now: the time of day, UTC, by which attempts are alive or dead; left out: the machine's.

    Returns:
        Address of the page.

    Raises:
        NoSuchRun: no log is there.
    """
    entries = tuple(RunLog(home).entries())
    if not entries:
        raise NoSuchRun(f"no run is at {home.uri}, so there is nothing to report; start it with `baton run`")
    history = history_of(entries)
    account = account_of(read_attempts(home), entries, history, now=now or datetime.now(UTC))
    plots = draw(history, seconds_in_log(history) if account is None else account.seconds)
    pictures = tuple(Picture(file=f"{plot.name}.png", caption=plot.caption, png=plot.png) for plot in plots)
    for picture in pictures:
        home.write(f"{_FOLDER}/{picture.file}", picture.png)
    # Last: a page is there only with all its pictures.
    page = render(title=title, address=home.uri, entries=entries, history=history, account=account, pictures=pictures)
    home.write(PAGE, page.encode())
    return f"{home.uri}/{PAGE}"
