"""The very end of a command's process, which must not take longer than it has to: a machine may be about to go.

The interpreter's own teardown frees, over seconds and piece by piece, what TensorFlow holds, and the kernel frees it
anyway. So once everybody who registered with `atexit` has been called, the process leaves. To be imported before
anything else: who registers first is called last.
"""

import atexit
import logging
import os
import sys

# Enough for the last sign of life.
_LAST_SECONDS = 10.0
_codes: list[int] = []
_nobody_listens: list[bool] = []


def nobody_listens() -> None:
    """Prefect's API is gone: this process ends without the minutes in which Prefect would try to tell it the rest."""
    _nobody_listens.append(True)


def leaves_with(code: int) -> int:
    """This process is to end with `code`, which is handed back for `sys.exit`."""
    from tasks.foundation.storage.deadline import LEAVING

    _codes.append(code)
    # The interpreter waits for threads of abandoned transfers; this limits how long they wait for the store.
    LEAVING.bind(_LAST_SECONDS)
    if _nobody_listens:
        # Before the interpreter waits for Prefect's threads, which it does before it calls these.
        atexit._run_exitfuncs()
    return code


def _leave() -> None:
    if not _codes or "tensorflow" not in sys.modules:
        return
    from tasks.foundation.telemetry.ledger import sign_off

    sign_off()
    logging.shutdown()  # registered before us, so it would have come after
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a closed pipe: nobody reads it any more
            continue
    os._exit(_codes[-1])


atexit.register(_leave)
