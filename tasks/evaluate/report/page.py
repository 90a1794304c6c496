"""The pages: the report of a run, and the comparison of several, each one HTML file that refers to no other.

A page has tiles, charts (`charts.py`) and tables (`sections.py`). The report is made from a run's log, attempts, proofs
and audits, so the same files give the same page.
"""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from baton.tasks.evaluate.report.charts import EVENT_WORDS, STYLE, Curves, compared_curves, curves_of, svg_of
from baton.tasks.evaluate.report.sections import (
    Cell,
    Section,
    Table,
    changes_section,
    check_sections,
    checkpoints_section,
    code_changes_section,
    confusion_section,
    cut,
    evaluations_section,
    goodput_words,
    host_words,
    logged_section,
    origin_lines,
    saved_code_sections,
    time_sections,
    with_host_words,
    workers_section,
)
from baton.tasks.foundation.contracts.identity import readable
from baton.tasks.foundation.contracts.log_entry import Entry, Head, MetricRow, Origin
from baton.tasks.foundation.contracts.run_spec import recorded_epoch
from baton.tasks.foundation.errors import BatonError, FileMissing, NoSuchRun
from baton.tasks.foundation.log.accounting import Account, account_of
from baton.tasks.foundation.log.attempts import State, cause_of, last_attempt, read_attempts, state_of
from baton.tasks.foundation.log.history import History, history_of
from baton.tasks.foundation.log.host_history import slow_hosts, summed_stats
from baton.tasks.foundation.log.log import RunLog
from baton.tasks.foundation.masking import masked
from baton.tasks.foundation.storage.interface import Storage
from baton.tasks.foundation.storage.opening import open_home
from baton.tasks.foundation.telemetry.formatting import duration_words, epoch_words, number_words
from baton.tasks.foundation.text import time_words


class Tile(NamedTuple):
    """A value that stands out at the top."""

    label: str
    value: str


class Key(NamedTuple):
    """What a line of the charts means; `kind` is its CSS classes."""

    kind: str
    words: str


def html_page(
    *,
    title: str,
    address: str,
    introduction: Sequence[str],
    tiles: Sequence[Tile],
    curves: Curves,
    keys: Sequence[Key],
    sections: Sequence[Section],
    lead: Sequence[Section] = (),
    clean: Callable[[str], str] = masked,
) -> str:
    """The page as HTML. The same arguments give the same page; all text is escaped.

    Args:
        title: the page's title.
        address: below the title.
        introduction: lines below the address.
        tiles: the values at the top.
        curves: what the charts show.
        keys: of the charts.
        sections: tables and notes.
        lead: the same, above the charts.
        clean: returns a text without what does not belong into the page.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # not while a command starts

    script = (files("baton.tasks.evaluate.report") / "curves.js").read_text("utf-8")
    environment = Environment(
        loader=PackageLoader("baton.tasks.evaluate.report", ""),
        autoescape=True,  # names of metrics and layers are the user's
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: clean(value) if isinstance(value, str) and not hasattr(value, "__html__") else value,
    )
    curves = replace(curves.thinned(), events=tuple(replace(event, text=clean(event.text)) for event in curves.events))
    return environment.get_template("page.html.jinja").render(
        title=title,
        address=address,
        introduction=introduction,
        tiles=tiles,
        charts=[
            {"caption": chart.caption, "unit": chart.unit, "svg": svg_of(chart, curves)} for chart in curves.charts
        ],
        keys=keys,
        sections=sections,
        lead=lead,
        chart_style=STYLE,
        data=_json(curves.facts()),
        script=script,
        # The browser runs this script, and nothing that may have come from the run.
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}",
    )


def _json(facts: Mapping[str, Any]) -> str:
    """JSON that stands in HTML: no text in it can end the element or begin another one."""
    text = json.dumps(facts, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


_VALUE_CHARACTERS = 140
_USERS_FOLDER = re.compile(r"(?<![\w.~-])/(?:(?:home|Users)/[^/\s\"'<>:]+|root(?![\w.-]))")
# A shorter run is mostly its start, which says nothing about the machines.
_GOODPUT_FROM_SECONDS = 3600.0


def _keys(curves: Curves) -> Iterator[Key]:
    """What the lines of the charts mean, of those that are there."""
    words = {
        "training": "training",
        "before": "the training that it was forked from",
        "validation": "validation",
        "partial": "window that is not complete yet",
        "quiet": "throughput of the training alone",
    }
    shown = [curve for chart in curves.charts for curve in chart.curves]
    kinds = {curve.kind for curve in shown if curve.host is None}
    yield from (Key(kind, said) for kind, said in words.items() if kind in kinds)
    yield from (Key(curve.color, curve.label) for curve in shown if curve.host is not None)
    if curves.borders:
        yield Key("quiet event", "border of a segment")
    happened = {event.kind for event in curves.events}
    yield from (Key(f"event {kind}", said) for kind, said in EVENT_WORDS.items() if kind in happened)


def _introduction(entries: Sequence[Entry], history: History, cause: str) -> Iterator[str]:
    head = entries[-1].head
    if cause:
        yield cause
    yield f"as of log entry {head.number}, {time_words(entries[-1].time)} UTC"
    yield from origin_lines(entries, history)
    if head.finished is not None:
        yield f"ended early, at step {head.finished.step:,}: {head.finished.reason}"


def _tiles(history: History, head: Head, account: Account | None, state: State, target: int | None) -> Iterator[Tile]:
    if state != "unknown":
        yield Tile("state", state)
    yield Tile("step" if target is None else f"step, of {target:,}", f"{head.tip.step:,}" if head.tip else "none")
    if head.tip and (length := recorded_epoch(head.identity)) is not None:
        yield Tile("epoch", epoch_words(length.after(head.tip.step)).removeprefix("epoch "))
    yield Tile("segments", f"{history.segments:,}")
    if history.evaluations:
        newest = history.evaluations[-1]
        yield from (Tile(f"validation {name}", number_words(value)) for name, value in newest.metrics.items())
    elif history.rows:
        yield from (Tile(name, number_words(value)) for name, value in history.rows[-1].metrics.items())
    if history.tests:
        newest_test = history.tests[-1]
        yield from (Tile(f"test {name}", number_words(value)) for name, value in newest_test.metrics.items())
    if head.best is not None:
        yield Tile(
            f"best validation {head.best.metric}, step {head.best.checkpoint.step:,}", number_words(head.best.value)
        )
    if account is None:
        yield Tile("in committed segments", duration_words(sum(history.seconds.values())))
    elif account.total_seconds < _GOODPUT_FROM_SECONDS:
        yield Tile("of all processes", duration_words(account.total_seconds))
    else:
        yield Tile(f"goodput, of {duration_words(account.total_seconds)}", goodput_words(account))


def _sections(
    home: Storage, entries: Sequence[Entry], history: History, account: Account | None, *, places: bool
) -> Iterator[Section]:
    head = entries[-1].head
    yield from time_sections(account, hosts=places)
    workers = summed_stats(history)
    yield from workers_section(workers, slow_hosts(workers))
    yield checkpoints_section(entries, head)
    yield from evaluations_section(history)
    yield from logged_section(history)
    yield from confusion_section(home, history)
    yield from changes_section(entries)
    if history.metadata:
        yield Section(heading="Metadata", table=_facts(history.metadata))
    yield Section(heading="Environment", table=_facts(_environment(head)))
    identity = {key: value for key, value in head.identity.items() if value is not None}
    yield Section(heading="Identity", table=_facts(identity))
    yield from check_sections(home)
    yield from code_changes_section(home, entries)
    yield from saved_code_sections(home, head)


def _without_places(text: str, *, home: str) -> str:
    """A text without secrets, with HOME, STORAGE and ~ for the folders of the home, its storage and of users."""
    text = masked(text)
    for place, word in ((home, "HOME"), (home.rpartition("/")[0], "STORAGE")):
        if place.strip(":/") and place in text:
            text = re.sub(rf"{re.escape(place)}(?![\w.-])", word, text)
    return _USERS_FOLDER.sub("~", text)


def _elsewhere(run: str, address: str) -> Section:
    """Where else the run is shown."""
    home = shlex.quote(address)
    places = {
        "in TensorBoard": f"tensorboard --logdir {shlex.quote(f'{address}/tensorboard')}",
        "in Prefect": f"the flow runs with the tag run:{run}",
        "in a terminal": f"baton status {home}; baton log {home}",
    }
    return Section(
        heading="Elsewhere", table=Table(rows=[[Cell(key), Cell(text, "wrap code")] for key, text in places.items()])
    )


def _environment(head: Head) -> dict[str, Any]:
    environment = head.environment
    return {
        "accelerator": environment.accelerator,
        "replicas": environment.replicas,
        "hosts": environment.servers or environment.hosts,
        "threads": f"{environment.intra_op_threads} within an operation, "
        f"{environment.inter_op_threads} operations at a time",
        **environment.versions,
        **environment.model_dump(include={"processor", "cpu_features"}, exclude_none=True),
        **(environment.variables or {}),
        **({} if environment.keras is None else {"Keras": environment.keras.model_dump()}),
    }


def _facts(facts: Mapping[str, Any]) -> Table:
    return Table(rows=[[Cell(key), Cell(_value(value), "wrap code")] for key, value in facts.items()])


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(readable(value), ensure_ascii=False)
    return cut(text, _VALUE_CHARACTERS)


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
        places: whether to name hosts, and the folders of the home and its storage; a page is often sent to others.

    Returns:
        Address of the page.

    Raises:
        NoSuchRun: the home has no log.
    """
    home = log.home
    entries = tuple(log.entries(blocks="written"))
    if not entries:
        raise NoSuchRun(f"no run is at {home.uri}; start it with `baton run`")
    history, newest = history_of(entries), entries[-1]
    account, target = (
        account_of(read_attempts(home), log, newest, now=now or datetime.now(UTC)),
        log.totals(newest).target,
    )
    attempts = () if account is None else account.attempts
    last = last_attempt(each.record for each in attempts)
    at_work, early = any(each.alive for each in attempts), newest.head.finished is not None
    step = 0 if newest.head.tip is None else newest.head.tip.step
    state = state_of(at_work=at_work, ended_early=early, step=step, target=target, last=last)
    cause = with_host_words(cause_of(state, last), {} if places else host_words(attempts))
    curves = curves_of(history, entries, account, _rows_before(home, entries))
    page = html_page(
        title=title,
        address=home.uri if places else "",
        introduction=list(_introduction(entries, history, cause)),
        tiles=list(_tiles(history, newest.head, account, state, target)),
        curves=curves,
        keys=list(_keys(curves)),
        sections=[*_sections(home, entries, history, account, places=places), _elsewhere(title, home.uri)],
        clean=masked if places else partial(_without_places, home=home.uri),
    )
    home.write(PAGE, f"<!-- log entry {newest.number} -->\n{page}".encode())
    return f"{home.uri}/{PAGE}"


def _rows_before(home: Storage, entries: Sequence[Entry]) -> list[MetricRow]:
    """Rows of the runs that a fork came from, up to where it began; of those beside it that can be read."""
    origin, storage, rows = entries[0].body, home.uri.rpartition("/")[0], list[MetricRow]()
    lineage = origin.forked_from if isinstance(origin, Origin) else None
    # An address in the log of a stranger's home may be any; only a run in the same storage is read.
    while lineage is not None and lineage.home.rpartition("/")[0] == storage:
        try:
            log = RunLog(open_home(lineage.home, relative_to=Path.cwd())[1])
            history = history_of([each for each in log.entries(blocks="read") if each.number <= lineage.entry])
        except BatonError:  # it was deleted, or is damaged
            break
        rows = [*(row for row in history.rows if row.step <= lineage.step), *rows]
        lineage = lineage.parent
    return rows


def reported_entry(home: Storage) -> int | None:
    """Return the number of the newest log entry in the report; None if there is no report, or it does not say."""
    try:
        found = _ENTRY.match(home.read_range(PAGE, 0, _FIRST_BYTES))
    except FileMissing:
        return None
    return None if found is None else int(found[1])


def comparison_page(
    *,
    title: str,
    address: str,
    storage: str = "",
    runs: Mapping[str, History],
    metrics: Sequence[str],
    lead: Sequence[Section],
    sections: Sequence[Section] = (),
) -> str:
    """The page as HTML.

    Args:
        title: of the page.
        address: below the title.
        storage: address of the folder that holds the runs, which the page does not name.
        runs: by name, those with curves.
        metrics: those whose curves are drawn.
        lead: what is said of the runs, above the charts.
        sections: where they differ.
    """
    return html_page(
        title=title,
        address=address,
        introduction=["Lines are the training, dots joined by dashes the validation set."],
        tiles=[],
        curves=compared_curves(runs, metrics),
        keys=[Key(f"run{place}", run) for place, run in enumerate(runs)],
        sections=sections,
        lead=lead,
        clean=partial(_without_places, home=f"{storage}/*") if storage else masked,
    )
