"""One hash seed for all processes of a run.

Python draws the seed of its hashes anew in each process, and with it the order of sets. A table that is made from a set
would then be another one after each cut. The log of a run has the seed that it began with (`hash_seed` of the
environment). A process cannot change its own, so the process of a command starts itself anew with it: the same process
id, streams, and arguments. Where nobody has set PYTHONHASHSEED it is 0, from the first line on, so that this is rarely
needed twice. Child processes inherit the variable.

Only the process of a command may do so. In others, such as a notebook or a flow run, a difference is a warning.
"""

import os
import sys
from collections.abc import Collection
from contextlib import suppress

from tasks.foundation.machine.processes import HASH_SEED, hash_seed

_DEFAULT = 0
# The verbs that run the user's code.
_VERBS = frozenset({"audit", "doctor", "evaluate", "export", "prove", "run"})
# Whether this process is that of a command; it is at most one element.
_of_command: list[bool] = []


def begin_with_fixed_hashes(verb: str = "run") -> None:
    """Call it first in the process of a command, before anything else is imported.

    Args:
        verb: of the command; nothing happens if it runs no code of the user.
    """
    if verb not in _VERBS:
        return
    _of_command[:] = [True]
    if hash_seed() is None:
        _start_anew(_DEFAULT)


def keep_hash_seed(recorded: int | None) -> str:
    """Go on with the hash seed that a run began with. The process of a command starts anew with it, and never returns.

    Args:
        recorded: the seed in the run's log; None in logs of earlier versions, whose runs may go on with any.

    Returns:
        A warning, if this process hashes otherwise and cannot start anew; or nothing.
    """
    own = hash_seed()
    if recorded is None or recorded == own:
        return ""
    if _of_command:
        from flows.process.standard_streams import HOME, has_temporary_home  # slow to import, but it is by now

        # A temporary home is removed once this program has ended; the next one makes its own.
        _start_anew(recorded, without=(HOME,) if has_temporary_home() else ())
    return (
        f"sets have another order here than in the run's other processes, which have {HASH_SEED}={recorded}, and this "
        f"one has {'none' if own is None else own}; start it with {HASH_SEED}={recorded} too"
    )


def _start_anew(seed: int, *, without: Collection[str] = ()) -> None:
    """Replace this process by one with another hash seed, unless that was tried, or Python ignores the variable.

    Args:
        seed: the seed.
        without: variables that the new program does not get.
    """
    if sys.flags.ignore_environment or os.environ.get(HASH_SEED) == str(seed):
        return
    for stream in filter(None, (sys.stdout, sys.stderr)):  # None: its descriptor is closed
        with suppress(OSError, ValueError):
            stream.flush()
    kept = {name: value for name, value in os.environ.items() if name not in without}
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**kept, HASH_SEED: str(seed)})  # noqa: S606 - it is this process
