"""Relative paths in user code start at the run file's folder.

The working folder belongs to the whole process, so it is changed only while user code runs. Baton's own paths are
absolute: storage roots, run files and temporary folders do not depend on it.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

# User code of two threads must not change the folder under each other; the same thread may enter twice.
_IN_USE = threading.RLock()


@contextmanager
def in_user_folder(folder: Path) -> Iterator[None]:
    """Make a folder the working folder during the block; if the folder is gone, the working folder stays.

    Args:
        folder: the run file's folder.
    """
    with _IN_USE, ExitStack() as back:
        try:
            # A descriptor, because the folder that was current may have been moved or deleted.
            before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            before = None
        if before is not None:
            back.callback(os.close, before)
            try:
                os.chdir(folder)
            except OSError:
                pass
            else:
                back.callback(os.fchdir, before)
        yield
