"""flows/commands/README.md has the help of every command.

Run as a program, this file writes that page.
"""

import contextlib
import io
import os
from unittest import mock

import typer

from flows.commands.main import app, main
from tests.support.checkout import CHECKOUT

PAGE = CHECKOUT / "flows" / "commands" / "README.md"
REGENERATE = "PYTHONPATH=. .venv/bin/python tests/flows/commands/test_reference.py"
COLUMNS = "100"

HEAD = """# Commands

What `baton COMMAND --help` prints. How the commands are used together: [flows/README.md](../README.md).
"""


def help_of(*words: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), mock.patch.dict(os.environ, {"COLUMNS": COLUMNS, "TERM": "dumb"}):
        assert main([*words, "--help"]) == 0
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def verbs() -> list[str]:
    return list(getattr(typer.main.get_command(app), "commands"))  # noqa: B009 - a group has it, a command has not


def page() -> str:
    """flows/commands/README.md, a function of the commands."""
    links = " · ".join(f"[{verb}](#baton-{verb})" for verb in verbs())
    parts = [HEAD, f"{links}\n", f"```\n{help_of()}\n```\n"]
    parts += [f"## baton {verb}\n\n```\n{help_of(verb)}\n```\n" for verb in verbs()]
    return "\n".join(parts)


def test_reference_is_the_help_of_every_command() -> None:
    assert len(verbs()) > 10
    assert PAGE.read_text(encoding="utf-8") == page(), f"regenerate it with {REGENERATE}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
