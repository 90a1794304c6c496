"""Proofs and audits of a run: a section of the report's page."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic_core import from_json

from tasks.evaluate.report.tables import Cell, Mark, Section, Table, cut, number, time_words
from tasks.foundation.errors import FileMissing, FileTooLarge
from tasks.foundation.runlog.receipts import audit_words, last_audit
from tasks.foundation.storage.base import Storage

_SHOWN = 20
_TEXT_CHARACTERS = 100
# Folder of the receipts -> what made them.
_RECEIPTS = {"proofs": "prove", "audits": "audit"}


def check_sections(home: Storage) -> Iterator[Section]:
    """The newest receipts of `baton prove` and `baton audit`; no section if there are none."""
    rows = []
    for folder, verb in _RECEIPTS.items():
        paths = sorted((path for path in home.files(folder) if path.endswith(".json")), reverse=True)
        rows += [_row(home, path, verb) for path in paths[:_SHOWN]]
    if rows:
        audit = last_audit(home)
        found = "" if audit is None else f"last audit: {audit_words(audit)}. "
        headings = ("time, UTC", "command", "verdict", "steps", "receipt")
        yield Section(
            heading="Proofs and audits",
            table=Table(headings=headings, rows=rows, numbers=frozenset({3})),
            note=f"{found}A proof trains a few steps straight, and again cut and killed; an audit executes committed "
            "steps again. Both compare every bit.",
        )


def _row(home: Storage, path: str, verb: str) -> list[Cell]:
    receipt = _read(home, path)
    verdict = str(receipt.get("verdict", "cannot be read"))
    try:
        steps = (
            sum(each["end"] - each["start"] for each in receipt["stretches"]) if verb == "audit" else receipt["steps"]
        )
    except (KeyError, TypeError):
        steps = None
    return [
        Cell(time_words(str(receipt.get("time", "")))),
        Cell(f"baton {verb}"),
        Cell(marks=(Mark(word=cut(verdict, _TEXT_CHARACTERS)),)),
        number(f"{steps:,}" if isinstance(steps, int) else ""),
        Cell(path, "wrap code"),
    ]


def _read(home: Storage, path: str) -> Mapping[str, Any]:
    """The receipt; empty if it cannot be read: it is informational."""
    try:
        found = from_json(home.read(path))
    except (FileMissing, FileTooLarge, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
