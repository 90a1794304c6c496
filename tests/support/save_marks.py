"""Tells whether a process that was interrupted had a save in flight: between its snapshot and its log entry.

The process appends one byte to a file when it begins to write a snapshot, and one when the log names the checkpoint.
Both are one system call, so a SIGKILL loses neither.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "BATON_TEST_SAVE_MARKS"
_BEGUN, _NAMED = b"b", b"n"


def mark_saves() -> None:
    """Mark the saves of this process, if the environment names a file for them."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    from baton.tasks.foundation.checkpoint import save as committing
    from baton.tasks.foundation.checkpoint.save import AsyncSaves

    marks = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    begin, commit = AsyncSaves.begin, committing.commit

    def marked_begin(saves: AsyncSaves, write: Callable[[], Any]) -> None:
        def marked_write() -> Any:
            os.write(marks, _BEGUN)
            return write()

        begin(saves, marked_write)

    def marked_commit(*arguments: Any) -> Any:
        entry = commit(*arguments)
        os.write(marks, _NAMED)
        return entry

    AsyncSaves.begin = marked_begin  # type: ignore[method-assign]
    committing.commit = marked_commit


def save_in_flight(marks: Path) -> bool:
    """Whether a save has begun whose checkpoint no log entry names yet."""
    return marks.exists() and marks.read_bytes().endswith(_BEGUN)
