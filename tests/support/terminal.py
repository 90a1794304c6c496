"""A real terminal device of some width, and what a command prints on it."""

import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton.flows.commands.main import main

COLOR_VARIABLES = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE")
_CODE = re.compile(r"\x1b\[[0-9;]*m")


class Screen:
    """What was written to a terminal."""

    text = ""

    @property
    def plain(self) -> str:
        """The text without its colors."""
        return _CODE.sub("", self.text)


@contextmanager
def terminal(columns: int) -> Iterator[tuple[int, Screen]]:
    """Open a terminal; a thread reads it, because a terminal holds only a few kB.

    Yields:
        The descriptor to write to, and the screen, which has all of it once the block has ended.
    """
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    screen, parts = Screen(), list[bytes]()

    def read() -> None:
        while True:
            try:
                part = os.read(reader, 65536)
            except OSError:  # nobody can write any more
                return
            parts.append(part)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield writer, screen
    finally:
        os.close(writer)
        thread.join()
        os.close(reader)
        screen.text = b"".join(parts).decode().replace("\r\n", "\n")


def shown_by(monkeypatch: pytest.MonkeyPatch, columns: int, *words: str, code: int = 0) -> Screen:
    """What a command prints on a terminal, to stdout and stderr."""
    with terminal(columns) as (descriptor, screen), monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, os.fdopen(os.dup(descriptor), "w"))
        try:
            assert main(words) == code
        finally:
            sys.stdout.close()
            sys.stderr.close()
    return screen
