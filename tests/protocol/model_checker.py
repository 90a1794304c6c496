"""Checks the model of the protocol, baton.pml, with Spin, and replays real logs in it.

Spin turns the model into a C program that visits every state. See https://spinroot.com and Holzmann, "The SPIN Model
Checker" (2003). On Debian: `apt-get install spin gcc libc6-dev`.
"""

import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.tasks.foundation.contracts.log_entry import Commit, Entry, Quarantine, Retire, Rewind

_MODEL = Path(__file__).with_name("baton.pml")
_PROGRAMS = ("spin", "gcc")
_STATES = re.compile(r"([\d.]+(?:e\+\d+)?) states, stored")
_FAULT = re.compile(r"^pan:\d+: (.+)$", re.MULTILINE)
_DEPTH = 1_000_000


def missing_programs() -> list[str]:
    """Programs that are not installed."""
    return [name for name in _PROGRAMS if shutil.which(name) is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the checker found.

    Attributes:
        states: how many were visited.
        fault: the assertion that fails, or another fault; "" if the whole space is sound.
    """

    states: int
    fault: str


def check(settings: Mapping[str, int] = {}, *, mutation: str = "", trace: str = "", megabytes: int = 4000) -> Verdict:
    """Visit all states, or stop at the first fault.

    Args:
        settings: bounds and features, such as `{"WRITERS": 3}`; see baton.pml.
        mutation: name of a broken rule, without `M_`.
        trace: statements that replay a log; see `trace_of`.
        megabytes: most memory to use.

    Raises:
        RuntimeError: the model is invalid, or the space is too large.
    """
    defines = [f"-D{name}={value}" for name, value in settings.items()]
    defines += [f"-DM_{mutation}"] if mutation else []
    defines += ["-DTRACE"] if trace else []
    with tempfile.TemporaryDirectory(prefix="baton-model-") as name:
        folder = Path(name)
        shutil.copy(_MODEL, folder)
        (folder / "trace.h").write_text(trace, encoding="utf-8")
        _run(folder, "spin", *defines, "-a", _MODEL.name)
        # Of few states, to compile takes longer than to visit them.
        level = "-O0" if mutation or trace else "-O1"
        _run(folder, "gcc", level, "-DSAFETY", "-DCOLLAPSE", f"-DMEMLIM={megabytes}", "-o", "pan", "pan.c")
        said = _run(folder, "./pan", f"-m{_DEPTH}")
    states, fault = _STATES.search(said), _FAULT.search(said)
    if states is None or "error: max search depth" in said or "out of memory" in said:
        raise RuntimeError(f"the model was not checked whole:\n{said}")
    return Verdict(states=int(float(states[1])), fault=fault[1] if fault else "")


def _run(folder: Path, *command: str) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def accept(entries: Sequence[Entry]) -> Verdict:
    """Replay the entries of a log, in order; a fault says which rule they break."""
    checkpoints = sum(isinstance(entry.body, Commit) for entry in entries)
    bounds = {"CHECKPOINTS": max(checkpoints, 1), "ENTRIES": len(entries) + 1, "WIDE": 1}
    return check(bounds, trace=trace_of(entries))


def trace_of(entries: Sequence[Entry]) -> str:
    """The entries of a log as statements of the model."""
    numbers: dict[str, int] = {}
    lines = []
    for entry in entries:
        lines += [*_statements(entry, numbers), f"assert(base == {entry.head.base});"]
        tip = entry.head.tip
        lines.append(f"assert(tip == {'NOBODY' if tip is None else numbers[tip.path]});")
    return "\n".join(lines) + "\n"


def _statements(entry: Entry, numbers: dict[str, int]) -> list[str]:
    body = entry.body
    match body:
        case Commit():
            number = numbers.setdefault(body.checkpoint.path, len(numbers))
            parent = "NOBODY" if body.parent is None else str(numbers[body.parent])
            return [f"replay_commit({number}, {body.checkpoint.base}, {parent});"]
        case Retire():
            deleted = [f"replay_deleted({numbers[path]});" for path in body.deleted]
            return [*deleted, *(f"replay_retired({numbers[path]});" for path in body.paths), "append();"]
        case Rewind():
            return [f"append_rewind({numbers[body.to.path]});"]
        case Quarantine():
            return [f"replay_quarantine({numbers[body.path]});"]
        case _:
            return ["append();"]
