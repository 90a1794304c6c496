"""GUIDE.md: its files are those of deploy/runs/classifier, and its commands print what it shows.

Run as a program, this file writes the files and the outputs into the page.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.support import forked
from tests.support.checkout import CHECKOUT
from tests.support.prefect_server import environment_with, post, running_server

PAGE = CHECKOUT / "GUIDE.md"
FILES = CHECKOUT / "deploy" / "runs" / "classifier"
REGENERATE = "PYTHONPATH=. .venv/bin/python tests/end_to_end/test_guide.py"
FILE = re.compile(r"(?<=^```)(python|yaml)\n# (\S+)\n.*?(?=^```$)", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"(?<=^```console\n).*?(?=^```$)", re.MULTILINE | re.DOTALL)
PROGRAMS = {"baton": ["-m", "baton.flows.commands.main"], "prefect": ["-m", "prefect"], "python": []}
# The command that the page shows with this last line is killed when it prints what `KILLED_AT` finds.
KILLED, KILLED_AT = "Killed", re.compile(r"^step 250  evaluated")
# Of what Prefect prints, the page has the box.
BOX = ("\u256d", "\u2502", "\u2570")
# Lines about steps and epochs: the page has the first and the last ones.
OF_STEPS = re.compile(r"step \d|Epoch|\d+/\d+ - ")
FIRST_LINES, LAST_LINES, CUT = 3, 3, "..."
# What these lines say, and whether the second kind is printed, depends on how busy the machine is.
VARIES = re.compile(r"^(started in|time|goodput|badput|away|commits|worker|committed segments|examples/s)\b.*")
BY_THE_WAY = re.compile(r"warning: Prefect is ")


class Terminal:
    """Types commands in a copy of the files of the guide."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder = folder / "classifier"
        shutil.copytree(FILES, self.folder, ignore=shutil.ignore_patterns("runs", "__pycache__", "*.csv", "*.keras"))
        self.environment = environment_with(
            folder / "prefect", PREFECT_API_URL=server, COLUMNS="100", TF_CPP_MIN_LOG_LEVEL="3"
        )
        self.printed: list[str] = []
        with suppress(HTTPError):  # it is there
            post(server, "work_pools/", {"name": "baton-process", "type": "process"})

    def type(self, typed: str, *, is_killed: bool) -> list[str]:
        """Run a command; returns the lines that it printed."""
        program, *words = shlex.split(typed)
        lines = []
        process = forked.Popen(
            [sys.executable, *PROGRAMS[program], *words],
            cwd=CHECKOUT if program == "prefect" else self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        with process:
            for line in process.stdout or ():
                lines.append(self._shown(line))
                self.printed.append(lines[-1])
                if is_killed and KILLED_AT.search(line):
                    forked.kill_all(process)
                    break
        if program == "prefect":
            return [line for line in lines if line[:1] in BOX]
        lines = [line for line in lines if not BY_THE_WAY.match(line)]
        if is_killed:
            return [*lines, KILLED]
        return lines if process.returncode == 0 else [*lines, f"exit code {process.returncode}"]

    def _shown(self, line: str) -> str:
        """A line with a short path and short ids, as on a terminal."""
        line = line.rstrip().replace(str(self.folder.parent), "~")
        return re.sub(r"\b([0-9a-f]{8})[0-9a-f]{24,}\b", r"\1", line)


def shape_of(line: str) -> str:
    """A line without its numbers and ids, which depend on the machine."""
    line = re.sub(r"[\u2581-\u2588]|'?\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "", VARIES.sub(r"\1", line))
    words = re.sub(r"\b\d+e[+-]\d+|\b[0-9a-f]*\d[0-9a-f]*\b|\d+", "N", line)
    return " ".join(re.sub(r"N([.,:-]N)*", "N", words).split())


def shortened(lines: list[str]) -> list[str]:
    """Without most of the lines about steps that follow each other."""
    kept: list[str] = []
    for of_steps, group in groupby(lines, key=lambda line: bool(OF_STEPS.match(line))):
        row = list(group)
        if of_steps and len(row) > FIRST_LINES + LAST_LINES:
            row = [*row[:FIRST_LINES], CUT, *row[-LAST_LINES:]]
        kept += row
    return kept


def page(type_command: Callable[..., list[str]]) -> str:
    """GUIDE.md, a function of the files and of what its commands print."""
    text = PAGE.read_text(encoding="utf-8")

    def with_file(block: re.Match[str]) -> str:
        return f"{block[1]}\n# {block[2]}\n{(FILES / block[2]).read_text(encoding='utf-8')}"

    def with_outputs(block: re.Match[str]) -> str:
        lines = []
        parts = re.split(r"^\$ (.+)$", block[0], flags=re.MULTILINE)[1:]
        for typed, shown in zip(parts[::2], parts[1::2], strict=True):
            lines += [f"$ {typed}", *shortened(type_command(typed, is_killed=shown.rstrip().endswith(KILLED)))]
        return "\n".join(lines) + "\n"

    return TYPED.sub(with_outputs, FILE.sub(with_file, text))


@pytest.mark.slow
def test_guide_shows_what_its_commands_print(server: str, tmp_path: Path) -> None:
    terminal = Terminal(tmp_path, server)
    made = page(terminal.type)
    # Other tests share the server: no worker of theirs gets scheduled flow runs of this one.
    [deployment] = post(server, "deployments/filter", {"deployments": {"name": {"any_": ["classifier"]}}})
    post(server, f"deployments/{deployment['id']}/pause_deployment", {})
    printed = {shape_of(line) for line in (*terminal.printed, *made.splitlines())}
    shown = PAGE.read_text(encoding="utf-8").splitlines()
    assert not [line for line in shown if shape_of(line) not in printed], f"it shows other lines: {REGENERATE}"
    differences = [float(number) for number in re.findall(r"largest difference (\d\S*)", made)]
    assert len(differences) == 5  # four metrics, and the export
    assert max(differences) < 1e-5


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name, running_server(Path(name)) as url:
        PAGE.write_text(page(Terminal(Path(name), url).type), encoding="utf-8")
