"""A stand-in for the Python interpreter that runs its module in a fork of a fork server.

forked.py writes a copy with the two values below filled in, and makes it the `sys.executable` of a process that starts
Python processes, such as a Prefect worker. Those are then forks too. This process lives as long as its fork, passes
signals on and ends with the same exit code or signal. Any command but `[-P] -m MODULE` starts the real interpreter.
"""

import json
import os
import signal
import socket
import sys
import time

INTERPRETER = "@INTERPRETER@"
SERVER = "@SERVER@"
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def main(words: list[str]) -> None:
    safe_path = words[:1] == ["-P"]
    program = words[1:] if safe_path else words
    if program[:1] != ["-m"]:
        os.execv(INTERPRETER, [INTERPRETER, *words])  # noqa: S606
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    module = program[1]
    # Pipes that the starter has passed on, as for events.
    more = [each for each in map(int, os.listdir("/proc/self/fd")) if each > 2 and _is_inherited(each)]  # noqa: PTH208
    request = {
        "kind": "module",
        "what": module,
        "words": program[2:],
        "warnings": [],
        "safe_path": safe_path,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),  # noqa: PTH109 - pathlib takes longer to import than this process lives
        "session": True,
        "group": None,
        "descriptors": more,
        # Prefect's supervisor of a flow run starts the flow's process, which starts the trainer of a stage.
        "executable": __file__ if module.startswith("prefect.") else None,
    }
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    while True:  # its process may just have been started
        try:
            server.connect(SERVER)
            break
        except (FileNotFoundError, ConnectionRefusedError):
            time.sleep(0.02)
    socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, *more])
    process = int(server.recv(64))

    def forward(number: int, _frame: object) -> None:
        # A signal to the group that this process leads is for the fork's children too.
        send = os.killpg if os.getpgrp() == os.getpid() else os.kill
        try:
            send(process, number)
        except ProcessLookupError:
            return

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    exit_code = int(server.recv(64) or 255)
    if exit_code >= 0:
        os._exit(exit_code)
    if -exit_code not in {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(-exit_code, signal.SIG_DFL)
    os.kill(os.getpid(), -exit_code)


def _is_inherited(descriptor: int) -> bool:
    try:
        return os.get_inheritable(descriptor)
    except OSError:  # that of the listing
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
