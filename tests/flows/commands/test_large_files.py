"""Files in the place of small ones: gigabytes, a million values, or JSON nested 10,000 deep. They cost no memory.

Light verbs say what they refuse, in a process below 500 MB, whatever lies in a home.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.tasks.foundation.contracts.home_files import SAVED_CODE
from baton.tasks.foundation.log.files import entry_path, with_digest
from tests.support.fake_run import DATASET, FakeRun
from tests.support.light_verbs import VERBS, run_light_verbs

LARGEST_MEGABYTES = 500
SPARSE_BYTES = 3 << 30
CODE = "code/0123456789abcdef.json"
DEEP = "[" * 10_000 + "]" * 10_000
LISTS = "[" + "[]," * 199_900 + "[]]"
VALUES = "[" + "1e9," * 999_900 + "1]"
KEYS = "{" + ",".join(f'"{number:06d}":1' for number in range(500_000)) + "}"
RECORDS = "[" + ",".join(f'{{"a":"{number}","b":1,"c":2,"d":3}}' for number in range(199_000)) + "]"
Spoil = Callable[[FakeRun], object]


def sparse(path: str) -> Spoil:
    def spoil(run: FakeRun) -> None:
        file = Path(os.path.normpath(run.path(path)))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.truncate(file, SPARSE_BYTES)

    return spoil


def in_file(path: str, text: str) -> Spoil:
    def spoil(run: FakeRun) -> None:
        file = Path(os.path.normpath(run.path(path)))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    return spoil


def in_newest_entry(part: str, key: str, text: str) -> Spoil:
    """Put JSON under a key of a part of the newest entry, which has the digest of its bytes."""

    def spoil(run: FakeRun) -> None:
        file = run.path(entry_path(run.head.number))
        entry: dict[str, Any] = json.loads(file.read_bytes())
        entry.pop("sha256", None)
        entry[part][key] = "HERE"
        file.write_bytes(with_digest(json.dumps(entry).replace('"HERE"', text).encode()))

    return spoil


def newest(run: FakeRun) -> str:
    return entry_path(run.head.number)


ROWS: dict[str, Spoil] = {
    "HINT": sparse("log/HINT"),
    "newest entry": lambda run: sparse(newest(run))(run),
    "first entry": sparse("log/00000000.json"),
    "entry after the newest": lambda run: sparse(entry_path(run.head.number + 1))(run),
    "attempt": sparse(f"attempts/{'a' * 32}.json"),
    "pack of attempts": sparse("attempts/closed/0123.json"),
    "answer": sparse("answers/0123.json"),
    "audit": sparse("audits/20260101T000000Z-0a.json"),
    "proof": sparse("proofs/20260101T000000Z-0a.json"),
    "code": sparse(CODE),
    "confusion": lambda run: sparse(f"confusion/{run.tip.path.rpartition('/')[2]}.json")(run),
    "report": sparse("report/index.html"),
    "curves": sparse("tensorboard/events.out.tfevents.1.baton.0"),
    "fork": sparse("fork.json"),
    "checkpoint manifest": lambda run: sparse(f"{run.tip.path}/manifest.json")(run),
    "checkpoint index": lambda run: sparse(f"{run.tip.path}/ckpt.index")(run),
    "dataset manifest": sparse(f"../{DATASET}/manifest.json"),
    "deep entry": in_newest_entry("body", "history", DEEP),
    "deep unknown key": in_newest_entry("head", "unknown", DEEP),
    "deep attempt": in_file(f"attempts/{'a' * 32}.json", DEEP),
    "deep audit": in_file("audits/20260101T000000Z-0a.json", DEEP),
    "deep proof": in_file("proofs/20260101T000000Z-0a.json", DEEP),
    "deep code": in_file(CODE, DEEP),
    "deep dataset manifest": in_file(f"../{DATASET}/manifest.json", DEEP),
    "lists in an entry": in_newest_entry("body", "history", LISTS),
    "lists under an unknown key": in_newest_entry("body", "unknown", LISTS),
    "values in an entry": in_newest_entry("body", "history", VALUES),
    "keys in an entry": in_newest_entry("body", "seconds", KEYS),
    "records in an entry": in_newest_entry("head", "retired", RECORDS),
    "keys in a head": in_newest_entry("head", "identity", KEYS),
    "records in a dataset manifest": in_file(f"../{DATASET}/manifest.json", f'{{"train": {RECORDS}}}'),
    "keys in a dataset manifest": in_file(f"../{DATASET}/manifest.json", KEYS),
    "keys in code": in_file(CODE, KEYS),
    "records in a proof": in_file("proofs/20260101T000000Z-0a.json", RECORDS),
    "keys in an attempt": in_file(f"attempts/{'a' * 32}.json", KEYS[:999_999] + "}"),
}


# They are counted as others are, and reading one takes ten seconds.
AT_NIGHT = {name: ROWS.pop(name) for name in ("lists under an unknown key", "records in an entry", "keys in a head")}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [ROWS, pytest.param(AT_NIGHT, marks=pytest.mark.nightly)], ids=["by day", "at night"])
def test_light_verbs_take_little_memory(rows: dict[str, Spoil], tmp_path: Path) -> None:
    """One process runs them on all homes, so its memory is that of the worst of them."""
    runs = {}
    for number, (row, spoil) in enumerate(rows.items()):
        folder = tmp_path / str(number)
        run = runs[row] = FakeRun(folder, identity={SAVED_CODE: CODE}).train(100, 200)
        run.evaluate(0.5)
        spoil(run)
    outcomes = run_light_verbs([run.address for run in runs.values()], watched=[tmp_path])
    for (row, run), done in zip(runs.items(), outcomes, strict=True):
        assert set(done.codes) == set(VERBS), row
        assert set(done.codes.values()) <= {0, 2, 4}, (row, done)
        assert "Traceback" not in "".join(done.printed.values()), row
        assert done.megabytes < LARGEST_MEGABYTES, f"{row}: {done.megabytes:.0f} MB"
        outside = [path for path in done.opened if not path.startswith(str(run.folder / "runs"))]
        assert outside in ([], [str(run.folder)]), (row, outside)
