"""The report's page: one file that shows the same wherever it is opened."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tasks.evaluate.report.changes import beginnings, changes_section
from tasks.evaluate.report.tables import Cell, code, table, time_words
from tasks.evaluate.report.times import goodput_words, where_the_time_went, workers_section
from tasks.foundation.contracts.log_entry import Commit, Entry, Head, Quarantine
from tasks.foundation.contracts.readable_values import plain
from tasks.foundation.runlog.accounting import Account
from tasks.foundation.runlog.history import History
from tasks.foundation.runlog.worker_stats import workers_of
from tasks.foundation.telemetry.formatting import duration_words, metric_words, number_words, short_path, size_words

_VALUE_CHARACTERS = 140
_DIGEST_CHARACTERS = 12

_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #f6f7f9; color: #1f2933; font: 15px/1.5 system-ui, Helvetica, Arial, sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; font-weight: 650; margin: 0; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { font-size: 17px; font-weight: 650; margin: 40px 0 12px; }
.home { color: #66727f; margin: 2px 0 20px; overflow-wrap: anywhere; }
code, .code { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.tile, figure, .table { background: #fff; border: 1px solid #e3e7ec; border-radius: 8px; }
.tile { padding: 12px 16px; }
.tile b { display: block; font-size: 22px; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile span { color: #66727f; font-size: 13px; overflow-wrap: anywhere; display: block; text-wrap: balance; }
.pictures { display: grid; align-items: start; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
figure { margin: 0; padding: 12px 14px; }
figcaption { font-weight: 600; font-size: 14px; margin-bottom: 6px; overflow-wrap: anywhere; }
img { width: 100%; height: auto; display: block; }
.table { overflow-x: auto; width: fit-content; max-width: 100%; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th, td { text-align: left; padding: 7px 11px; border-bottom: 1px solid #edf0f3; vertical-align: top; }
td { white-space: nowrap; }
tr:last-child td { border-bottom: 0; }
th { color: #66727f; font-weight: 600; font-size: 12.5px; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.wrap { white-space: normal; overflow-wrap: anywhere; }
.mark { border-radius: 9px; padding: 1px 8px; font-size: 12px; background: #edf0f3; color: #52606d; margin-right: 4px; }
.mark.tip { background: #dcebf5; color: #1d4e70; } .mark.best { background: #def0e0; color: #23622b; }
.mark.quarantined { background: #f8dfd7; color: #8f3115; }
.note { color: #66727f; font-size: 13.5px; margin: 8px 2px 0; }
@media print { body { background: #fff; } figure, tr { break-inside: avoid; } }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A PNG and its place on the page."""

    file: str
    caption: str
    png: bytes


def render(
    *,
    title: str,
    address: str,
    entries: Sequence[Entry],
    history: History,
    account: Account | None,
    pictures: Sequence[Picture],
) -> str:
    """The page, a function of the log and of the account of the attempts."""
    head = entries[-1].head
    as_of = f"as of log entry {head.number}, {time_words(entries[-1].time)} UTC"
    as_of += "".join(f"<br>{escape(sentence)}" for sentence in beginnings(entries, history))
    if head.finished is not None:
        as_of += f"<br>ended early, at step {head.finished.step:,}: {escape(head.finished.reason)}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="home"><span class="code">{escape(address)}</span><br>{as_of}</p>',
        _tiles(history, head, account),
        *_pictures(pictures),
        *where_the_time_went(account),
        *workers_section(workers_of(history)),
        "<h2>Checkpoints</h2>",
        _checkpoints(entries, head),
        *_evaluations(history),
        *changes_section(entries),
        "<h2>Environment</h2>",
        _facts({"accelerator": head.environment.accelerator, "replicas": head.environment.replicas,
                "hosts": head.environment.hosts,
                "threads": f"{head.environment.intra_op_threads} within an operation, "
                f"{head.environment.inter_op_threads} operations at a time", **head.environment.versions}),
        "<h2>Identity</h2>",
        _facts(head.identity),
    ]  # fmt: skip
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)} | Baton</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


def _tiles(history: History, head: Head, account: Account | None) -> str:
    tiles = [
        ("step", f"{head.tip.step:,}" if head.tip else "none"),
        ("segments", f"{history.segments:,}"),
    ]
    if history.evaluations:
        newest = history.evaluations[-1]
        tiles += [(f"validation {name}", number_words(value)) for name, value in newest.metrics.items()]
    elif history.rows:
        tiles += [(name, number_words(value)) for name, value in history.rows[-1].metrics.items()]
    if head.best is not None:
        tiles.append((f"best {head.best.metric}, step {head.best.checkpoint.step:,}", number_words(head.best.value)))
    if account is None:
        tiles.append(("in committed segments", duration_words(sum(history.seconds.values()))))
    else:
        tiles.append((f"goodput, of {duration_words(account.total_seconds)}", goodput_words(account)))
    cells = (f"<div class=tile><b>{escape(value)}</b><span>{escape(label)}</span></div>" for label, value in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>'


def _pictures(pictures: Sequence[Picture]) -> Iterable[str]:
    yield "<h2>Curves</h2>"
    if not pictures:
        yield '<p class="note">No training has been committed yet.</p>'
        return
    figures = (
        f"<figure><figcaption>{escape(picture.caption)}</figcaption>"
        f'<img alt="{escape(picture.caption)}" src="data:image/png;base64,{base64.b64encode(picture.png).decode()}">'
        "</figure>"
        for picture in pictures
    )
    yield f'<div class="pictures">{"".join(figures)}</div>'
    yield '<p class="note">Dotted lines are the borders of segments.</p>'


def _checkpoints(entries: Sequence[Entry], head: Head) -> str:
    reasons = {entry.body.path: entry.body.reason for entry in entries if isinstance(entry.body, Quarantine)}
    rows = []
    for entry in entries:
        if isinstance(entry.body, Commit):
            ref = entry.body.checkpoint
            metrics = metric_words(entry.body.history[-1].metrics) if entry.body.history else ""
            rows.append(
                [
                    Cell(f"{ref.step:,}", "number"),
                    Cell("".join(_mark(word, reasons.get(ref.path, "")) for word in _standing(ref.path, head))),
                    Cell(escape(metrics.replace("  ", ", "))),
                    Cell(escape(size_words(ref.size)), "number"),
                    Cell(code(ref.state_digest[:_DIGEST_CHARACTERS], whole=ref.state_digest)),
                    Cell(escape(entry.body.exit_reason.replace("_", " "))),
                    Cell(time_words(entry.time)),
                    Cell(code(short_path(ref.path).removeprefix("checkpoints/"), whole=ref.path)),
                ]
            )
    headings = ("step", "state", "training metrics", "size", "state digest", "ended by", "committed, UTC", "folder")
    return table(headings, rows, numbers={0, 3}) if rows else '<p class="note">None is committed yet.</p>'


def _standing(path: str, head: Head) -> list[str]:
    """What became of a checkpoint."""
    words = []
    if head.tip is not None and path == head.tip.path:
        words.append("tip")
    if head.best is not None and path == head.best.checkpoint.path:
        words.append("best")
    if path in {ref.path for ref in head.quarantined}:
        words.append("quarantined")
    elif path in {ref.path for ref in head.retained}:
        words += [] if words else ["retained"]
    else:
        words.append("retired" if path in {old.path for old in head.retired} else "deleted")
    return words


def _mark(word: str, reason: str) -> str:
    why = f' title="{escape(reason)}"' if word == "quarantined" and reason else ""
    return f'<span class="mark {word}"{why}>{word}</span>'


def _evaluations(history: History) -> Iterable[str]:
    if not history.evaluations:
        return
    names = list(dict.fromkeys(name for evaluation in history.evaluations for name in evaluation.metrics))
    rows = [
        [
            Cell(f"{evaluation.checkpoint.step:,}", "number"),
            *(
                Cell(number_words(evaluation.metrics[name]) if name in evaluation.metrics else "", "number")
                for name in names
            ),
            Cell(f"{evaluation.examples:,}", "number"),
            Cell(escape(duration_words(evaluation.seconds)), "number"),
        ]
        for evaluation in history.evaluations
    ]
    yield "<h2>Evaluations</h2>"
    yield table(("step", *names, "examples", "time"), rows, numbers=set(range(len(names) + 3)))


def _facts(facts: Mapping[str, Any]) -> str:
    body = "\n".join(
        f'<tr><td>{escape(key)}</td><td class="wrap code">{escape(_short(value))}</td></tr>'
        for key, value in facts.items()
    )
    return f'<div class="table"><table><tbody>\n{body}\n</tbody></table></div>'


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(plain(value), ensure_ascii=False)
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}…"
