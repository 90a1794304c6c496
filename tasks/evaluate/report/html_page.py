"""A page of tiles, charts and tables: one HTML file without references to other files."""

import base64
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any, NamedTuple

from tasks.evaluate.report.curves import Curves
from tasks.evaluate.report.svg import STYLE, svg_of
from tasks.evaluate.report.tables import Section
from tasks.foundation.masking import masked


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
        clean: returns a text without what does not belong into the page.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # not while a command starts

    script = (files("tasks.evaluate.report") / "curves.js").read_text("utf-8")
    environment = Environment(
        loader=PackageLoader("tasks.evaluate.report", ""),
        autoescape=True,  # names of metrics and layers are the user's
        undefined=StrictUndefined,
        keep_trailing_newline=True,
        finalize=lambda value: clean(value) if type(value) is str else value,  # not what the page itself has as HTML
    )
    curves = replace(curves.thinned(), events=tuple(replace(event, text=clean(event.text)) for event in curves.events))
    return environment.get_template("page.html.jinja").render(
        title=title,
        address=address,
        introduction=introduction,
        tiles=tiles,
        charts=[{"caption": chart.caption, "svg": svg_of(chart, curves)} for chart in curves.charts],
        keys=keys,
        sections=sections,
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
