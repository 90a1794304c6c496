"""Run a command that ends with its parent: `python -I -S die_with_parent.py PARENT DESCRIPTOR COMMAND...`.

`flows.process.children` starts this script. It replaces itself with the command, which keeps its process id. It
imports only the standard library, so that it starts fast and in any working folder.
"""

import os
import select
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # prctl(2): a signal when the thread that started this process ends; exec keeps the setting
_POLL_SECONDS = 1.0
_NO_PIPE = -1


def main(words: list[str]) -> NoReturn:
    """Request the death signal, or fork a watcher, and become the command.

    Args:
        words: the parent's process id; the reading end of a pipe whose writing end the parent holds, or -1 if the
            kernel has death signals; the command.

    Raises:
        OSError: the kernel refuses the death signal, or the command cannot be started.
    """
    parent, descriptor, command = int(words[0]), int(words[1]), words[2:]
    if descriptor == _NO_PIPE:
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # the parent died before the request
            os._exit(1)
    else:
        watched = os.getpid()
        if os.fork() == 0:
            _watch(watched, descriptor)
        os.close(descriptor)
    os.execv(command[0], command)  # noqa: S606 - the command comes from Baton


def _watch(watched: int, descriptor: int) -> NoReturn:
    """Kill the process `watched` when the pipe closes. Exit when that process ends."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # otherwise a reader of the command's output would wait for the watcher, too
        os.dup2(null, standard)
    while os.getppid() == watched:
        closed, _, _ = select.select([descriptor], [], [], _POLL_SECONDS)
        if closed:
            if os.getppid() == watched:  # the process id has not been reused
                os.kill(watched, signal.SIGKILL)
            break
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
