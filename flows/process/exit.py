"""Ends a command's process quickly, because the machine may disappear within seconds.

Python's own teardown takes seconds to free TensorFlow's memory, which the kernel frees anyway. So the process exits as
soon as all functions registered with `atexit` were called. Import this module before any other: the function that
registers first is called last.
"""

import atexit
import logging
import os
import sys
from dataclasses import dataclass

# Time limit of the last transfers; enough for the last heartbeat.
_LAST_SECONDS = 10.0


@dataclass(slots=True)
class _ExitState:
    code: int | None = None
    skip_prefect: bool = False


# One per process: `atexit` calls `_exit` without arguments.
_STATE = _ExitState()


def skip_prefect_shutdown() -> None:
    """Exit without waiting for Prefect, which would retry an unreachable API for minutes."""
    _STATE.skip_prefect = True


def exits_with(code: int) -> int:
    """Make this process exit with `code`, and limit the time that the exit takes.

    Returns:
        `code`, for `sys.exit`.
    """
    from tasks.foundation.machine.threads import limit_exit
    from tasks.foundation.storage.transfers import PROCESS_DEADLINE

    _STATE.code = code
    # Python waits for the threads of abandoned transfers, so the deadline limits how long those wait for the store.
    PROCESS_DEADLINE.start(_LAST_SECONDS)
    limit_exit(code)
    if _STATE.skip_prefect:
        # Python waits for Prefect's threads before it calls the registered functions.
        atexit._run_exitfuncs()
    return code


def _exit() -> None:
    if _STATE.code is None or "tensorflow" not in sys.modules:
        return
    from tasks.foundation.telemetry.ledger import write_last_heartbeat

    write_last_heartbeat()
    logging.shutdown()  # registered before this function, so `atexit` would call it too late
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed before the process started
            continue
        try:
            stream.flush()
        except (OSError, ValueError):  # a closed pipe
            continue
    os._exit(_STATE.code)


atexit.register(_exit)
