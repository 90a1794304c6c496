"""A folder of this process for files that others name and make: what is left of a killed process is swept by the next.

Each process has its own one, below the folder for temporary files, so that processes never meet in one. It is locked
while its process lives (`storage/local_files.py`), so no process id or clock says whose it is.
"""

import atexit
import os
import sys
import tempfile
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from tasks.foundation.storage.local_files import temporary_folder

_PREFIX = "baton-process-"
# The folder of each process, by its id: a fork inherits its parent's entry. It is empty until the folder is needed.
_folders: dict[int, Path] = {}


def process_folder() -> Path | None:
    """Return this process's folder, which is made at the first call; None if no folder can be made."""
    own = os.getpid()
    if own not in _folders:
        kept = ExitStack()
        try:
            _folders[own] = kept.enter_context(temporary_folder(_PREFIX)).resolve()
        except OSError:
            return None  # what needs temporary files says so, with the size that it needs

        def remove() -> None:
            if os.getpid() == own:  # a fork runs the functions of its parent, too
                kept.close()

        atexit.register(remove)
    return _folders[own]


def keep_generated_sources_together() -> None:
    """Let AutoGraph write the sources that it generates to this process's folder, if TensorFlow is imported.

    It removes them when the process exits, and a process that is killed does not exit.
    """
    if "tensorflow" not in sys.modules:
        return
    folder = process_folder()
    with suppress(ImportError):
        from tensorflow.python.autograph.pyct import loader  # no public setting names the folder

        if folder is not None and hasattr(loader, "tempfile"):
            named = partial(tempfile.NamedTemporaryFile, dir=folder)
            loader.tempfile = SimpleNamespace(NamedTemporaryFile=named)
