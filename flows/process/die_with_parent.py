"""Run a command that ends with its parent: `python -I -S die_with_parent.py PARENT DESCRIPTOR COMMAND...`.

`flows.process.children` starts it and says why. It becomes the command, under the same process id. It uses only the
standard library: it must start at once, in any working folder.
"""

import os
import select
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # prctl(2); it is kept by exec, and belongs to the thread that started this process
_LOOK_EVERY_SECONDS = 1.0
_NO_PIPE = -1


def main(words: list[str]) -> NoReturn:
    """Ask for the death signal, or leave a watcher behind, and become the command.

    Args:
        words: the parent's process id; the reading end of a pipe whose writing end the parent holds, or -1 where the
            kernel has a death signal; the command.
    """
    parent, descriptor, command = int(words[0]), int(words[1]), words[2:]
    if descriptor == _NO_PIPE:
        import ctypes

        if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
        if os.getppid() != parent:  # it died before the kernel was asked
            os._exit(1)
    else:
        watched = os.getpid()
        if os.fork() == 0:
            _watch(watched, descriptor)
        os.close(descriptor)
    os.execv(command[0], command)  # noqa: S606 - the command is Baton's own


def _watch(watched: int, descriptor: int) -> NoReturn:
    """Kill the process when the pipe closes; end when the process does."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # whoever reads the command's output waits until all have closed it
        os.dup2(null, standard)
    while os.getppid() == watched:
        closed, _, _ = select.select([descriptor], [], [], _LOOK_EVERY_SECONDS)
        if closed:
            if os.getppid() == watched:  # its number is still its own
                os.kill(watched, signal.SIGKILL)
            break
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
