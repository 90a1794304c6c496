"""flows/commands/README.md has the help of every command, and the commands of other pages have their options.

Run as a program, this file writes that page.
"""

import contextlib
import io
import os
import re
import shlex
from pathlib import Path
from unittest import mock

import pytest
import typer

from baton.flows.commands.main import app, main
from tests.support.checkout import CHECKOUT

PAGE = CHECKOUT / "flows" / "commands" / "README.md"
REGENERATE = "PYTHONPATH=. .venv/bin/python tests/flows/commands/test_reference.py"
COLUMNS = "100"

HEAD = """# Commands

What `baton COMMAND --help` prints. How the commands are used together: [flows/README.md](../README.md).

<!-- generated -->
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
    return "\n".join([*parts, "<!-- end of generated -->\n"])


def test_reference_is_the_help_of_every_command() -> None:
    assert len(verbs()) > 10
    assert PAGE.read_text(encoding="utf-8") == page(), f"regenerate it with {REGENERATE}"


# Their commands need files, buckets or machines that no test has. Other pages are typed whole: tests/test_documents.py.
@pytest.mark.parametrize(
    "page",
    ["flows/README.md", "flows/homes.md", "tasks/README.md", "deploy/google-cloud.md", "containers/README.md",
     "CONTRIBUTING.md"],
)  # fmt: skip
def test_commands_of_the_page_have_their_options(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").touch()
    text = (CHECKOUT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = "\n".join(re.findall(r"^ *```\w*\n(.*?)^ *```$", text, flags=re.MULTILINE | re.DOTALL))
    typed = re.findall(r"^ *(?:\.venv/bin/)?baton ([^#\n]+)", blocks, flags=re.MULTILINE)
    typed += re.findall(r"`baton (\w+ [^`]+)`", text)
    group = typer.main.get_command(app)
    for line in typed:
        verb, *words = shlex.split(re.sub(r"[\[\]]|\|\S+", "", line))  # one of several, and what may be left out
        command = getattr(group, "commands")[verb]  # noqa: B009 - as above
        assert command.make_context(verb, words).params, line


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
