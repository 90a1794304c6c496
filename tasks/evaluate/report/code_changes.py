"""What accepted changes did to the run file and the user's code: a section of the report's page."""

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from tasks.evaluate.report.saved_code_sections import cut_text, read_saved_code, yaml_text
from tasks.evaluate.report.tables import Section
from tasks.foundation.contracts.log_entry import Change, Entry
from tasks.foundation.contracts.saved_code import SAVED_CODE
from tasks.foundation.masking import masked_values
from tasks.foundation.storage.base import Storage

_CHANGES_SHOWN = 50
_RUN_FILE = "run file, all keys"


def code_changes_section(home: Storage, entries: Sequence[Entry]) -> Iterator[Section]:
    """Differences of the saved code at each accepted change, newest last; no section if there are none.

    Args:
        home: the run's.
        entries: its log, oldest first.
    """
    changed = [
        (before.head, entry)
        for before, entry in pairwise(entries)
        if isinstance(entry.body, Change)
        and before.head.identity.get(SAVED_CODE) != entry.head.identity.get(SAVED_CODE)
    ]

    @functools.cache  # what one change leaves is where the next begins
    def files(path: object) -> Mapping[str, str] | None:
        return _files(home, path)

    texts = []
    for before, entry in changed[-_CHANGES_SHOWN:]:
        old, new = files(before.identity.get(SAVED_CODE)), files(entry.head.identity.get(SAVED_CODE))
        if old is None or new is None:
            continue
        step = 0 if entry.head.tip is None else entry.head.tip.step
        for name in dict.fromkeys([*old, *new]):
            lines = difflib.unified_diff(
                old.get(name, "").splitlines(), new.get(name, "").splitlines(), "before", "after", lineterm=""
            )
            if found := "\n".join(lines):
                texts.append((f"entry {entry.number:,}, from step {step:,} on: {name}", cut_text(found)))
    if texts:
        yield Section(heading="What accepted changes changed", texts=tuple(texts))


def _files(home: Storage, path: object) -> Mapping[str, str] | None:
    """The run file and the files of the code that are text, by name."""
    saved = read_saved_code(home, path)
    if saved is None:
        return None
    run_file = yaml_text(masked_values(saved.run_file.model_dump(mode="json")))
    return {_RUN_FILE: run_file, **{file.path: file.text for file in saved.files if file.text is not None}}
