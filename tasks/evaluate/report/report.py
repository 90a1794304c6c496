"""From a run's log to `report/index.html` and its pictures."""

from tasks.evaluate.report.page import Picture, render
from tasks.evaluate.report.plots import draw
from tasks.foundation.errors import NoSuchRun
from tasks.foundation.runlog.history import history_of
from tasks.foundation.runlog.log import RunLog
from tasks.foundation.storage.base import Storage

_FOLDER = "report"
PAGE = f"{_FOLDER}/index.html"  # relative to the run's home


def write_report(home: Storage, *, title: str) -> str:
    """Write the report of the run whose home this is. The same log gives the same page.

    Args:
        home: the run's home; only its log is read.
        title: the page's title, such as the run's name.

    Returns:
        Address of the page.

    Raises:
        NoSuchRun: no log is there.
    """
    entries = tuple(RunLog(home).entries())
    if not entries:
        raise NoSuchRun(f"no run is at {home.uri}, so there is nothing to report; start it with `baton run`")
    history = history_of(entries)
    pictures = tuple(Picture(file=f"{plot.name}.png", caption=plot.caption, png=plot.png) for plot in draw(history))
    for picture in pictures:
        home.write(f"{_FOLDER}/{picture.file}", picture.png)
    # Last: a page is there only with all its pictures.
    page = render(title=title, address=home.uri, entries=entries, history=history, pictures=pictures)
    home.write(PAGE, page.encode())
    return f"{home.uri}/{PAGE}"
