"""Runs light verbs of `baton` on homes in one fresh process; tells their exit codes, its memory and what it opened.

`python -m tests.support.light_verbs` prints one line of JSON; `run_light_verbs` starts it and returns what it prints.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LIMIT_SECONDS = 300.0  # a pipe that is opened never ends
VERBS = ("status", "log", "verify", "report", "list", "compare", "fork")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a process with light verbs did.

    Attributes:
        codes: exit code of each verb.
        printed: what each verb printed.
        megabytes: the most memory that the process had.
        opened: files and folders that it opened, made, moved or removed below the watched places, links resolved.
        reached: that it started another process, or connected to a machine.
    """

    codes: dict[str, int]
    printed: dict[str, str]
    megabytes: float
    opened: list[str]
    reached: list[str]


# What Python tells of each access to a path before it happens; code that is run is compiled under the name of its file.
_ON_PATHS = {
    *("open", "compile", "shutil.rmtree", "shutil.copyfile", "shutil.move"),
    *(f"os.{name}" for name in ("listdir", "scandir", "mkdir", "rmdir", "remove", "rename", "link", "symlink")),
    *(f"os.{name}" for name in ("truncate", "chmod", "chown", "utime", "setxattr")),
}
_BEYOND = {"socket.connect", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork"}


def run_light_verbs(homes: Sequence[Path | str], *, watched: Sequence[Path | str]) -> list[Outcome]:
    """Run the verbs on one home after another, all in one process, whose start takes longer than they do.

    Args:
        homes: their folders.
        watched: the places of which the opened files are told.
    """
    words = json.dumps([[str(home) for home in homes], [str(place) for place in watched]])
    command = [sys.executable, "-m", "tests.support.light_verbs", words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_SECONDS)
    if done.returncode:
        raise AssertionError(done.stderr[-3000:])
    return [Outcome(**outcome) for outcome in json.loads(done.stdout.splitlines()[-1])]


def _main(homes: list[str], watched: list[str]) -> None:
    opened: set[str] = set()
    reached: set[str] = set()

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in _BEYOND:
            reached.add(event)
        for argument in arguments if event in _ON_PATHS else ():
            if isinstance(argument, str | bytes | os.PathLike):
                path = os.fsdecode(argument)
                opened.update(each for each in (path, os.path.realpath(path)) if each.startswith(tuple(watched)))

    sys.addaudithook(watch)
    outcomes = []
    for home in homes:
        opened.clear()
        reached.clear()
        codes, printed = _run_all(home)
        facts = {"codes": codes, "printed": printed, "megabytes": _peak_megabytes()}
        outcomes.append({**facts, "opened": sorted(opened), "reached": sorted(reached)})
    sys.stdout.write(json.dumps(outcomes) + "\n")


def _run_all(home: str) -> tuple[dict[str, int], dict[str, str]]:
    from baton.flows.commands.main import main

    codes, printed = {}, {}
    for verb in VERBS:
        words = {
            "list": ["list", home.rpartition("/")[0]],
            "compare": ["compare", home, home],
            "fork": ["fork", home, "--as", "forked"],
        }.get(verb, [verb, home])
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            codes[verb] = main(words)
        printed[verb] = text.getvalue()[-20_000:]
    return codes, printed


def _peak_megabytes() -> float:
    """Peak resident memory since this program began: `ru_maxrss` also counts the process that started it."""
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    return int(peak[1]) / 1024


if __name__ == "__main__":
    _main(*json.loads(sys.argv[1]))
