"""Clones of this checkout in which a test types what a document says."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import CHECKOUT

_MODULES = {"prefect": "-m prefect", "baton": "-m baton.flows.commands.main", "python": ""}


def add_programs(clone: Path) -> None:
    """Make a clone's `.venv` as `make install` does, of the packages installed here and of the clone's own code."""
    folder = clone / ".venv" / "bin"
    folder.mkdir(parents=True)
    for name, words in _MODULES.items():
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n', encoding="utf-8")
        script.chmod(0o755)
    (clone / ".venv" / "installed").touch()


def type_clone(typed: str, folder: Path) -> None:
    """Type a command that clones URL; skips the test if this checkout is no git repository."""
    command = ["/bin/sh", "-ec", typed.replace("URL", f"'{CHECKOUT}'")]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this checkout is no git repository: {done.stderr}")
