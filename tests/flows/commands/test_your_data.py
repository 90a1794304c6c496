"""tasks/prepare_data/README.md shows what `baton init --data` prints and writes, and what preparing copies.

Run as a program, this file writes them into the page.
"""

import contextlib
import io
import os
import re
import tempfile
from pathlib import Path

import pytest

from baton.flows.commands.main import main
from baton.tasks.foundation.contracts.run_file import RunFile, load_run_file
from baton.tasks.foundation.contracts.stage_calls import PrepareDataCall
from baton.tasks.foundation.dataset.manifest import load_manifest
from baton.tasks.foundation.stage import Place
from baton.tasks.foundation.storage.local import LocalStorage
from baton.tasks.foundation.telemetry.events import Silent
from baton.tasks.prepare_data.stage import prepare_data
from tests.support.checkout import CHECKOUT
from tests.support.data_folders import (
    Made,
    book,
    customers,
    photos,
    pictures,
    prepared,
    records,
    saved,
    shards,
)

PAGE = CHECKOUT / "tasks" / "prepare_data" / "README.md"
REGENERATE = "PYTHONPATH=. .venv/bin/python tests/flows/commands/test_your_data.py"
BLOCK = re.compile(r"(?<=^<!-- generated: )(\w+)( -->\n).*?(?=^<!-- end of generated -->$)", re.MULTILINE | re.DOTALL)
SHOWN: tuple[Made, ...] = (customers, saved, prepared, shards, records, photos, pictures, book)


def shown(made: Made, folder: Path) -> tuple[str, RunFile]:
    """Type `baton init --data`; returns what it prints, `data` of the run file, and the run file."""
    path = made(folder)
    name = Path(path).parts[0].split(".")[0]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["init", f"{name}-run", "--data", path]) == 0
    run = load_run_file(folder / f"{name}-run" / "run.yaml")
    data = re.search(r"^data:\n(  .*\n)+", run.path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert data is not None
    typed = f"$ baton init {name}-run --data {path}\n{printed.getvalue()}"
    return f"```console\n{typed}```\n\n```yaml\n{data[0]}```\n", run


def row(run: RunFile, store: Path) -> str:
    """Prepare the dataset of a run; returns what was copied, as a row of a table."""
    storage = LocalStorage(store)
    place = Place.of(storage, run.spec.run, code_folder=run.folder, telemetry=Silent())
    ref = prepare_data(PrepareDataCall(spec=run.spec), place)
    manifest = load_manifest(storage, ref)
    in_place = sum(shard.size for shard in manifest.train if shard.is_external)
    copied = sum(
        shard.size for part in (manifest.train, manifest.validation) for shard in part if not shard.is_external
    )
    return f"| `{run.spec.data.source}` | {in_place:,} | {copied:,} |"


def page(folder: Path) -> str:
    found = {made: shown(made, folder) for made in SHOWN}
    blocks = {run.spec.data.source: text for text, run in found.values()}
    rows = [row(run, folder / "store") for _, run in found.values()]
    head = "| source | bytes read from where they are | bytes copied |\n| --- | --- | --- |"
    blocks["copied"] = "\n".join([head, *rows, ""])
    return BLOCK.sub(lambda block: f"{block[1]}{block[2]}\n{blocks[block[1]]}\n", PAGE.read_text(encoding="utf-8"))


def test_page_shows_what_init_prints_and_what_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert PAGE.read_text(encoding="utf-8") == page(tmp_path), f"regenerate it with {REGENERATE}"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        PAGE.write_text(page(Path(name)), encoding="utf-8")
