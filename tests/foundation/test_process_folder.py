"""What a killed process leaves in the temporary folder is removed by the next one; a live process keeps its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import forked

MODEL = """
import keras
import tensorflow as tf


@tf.function
def build(x):
    if x > 0:  # AutoGraph writes its own source of this function to a file
        return x
    return -x
"""
SCRIPT = """
import sys
from pathlib import Path

from baton.tasks.foundation.user_functions import load_function

print(float(load_function("model.py:build", Path.cwd())(-2.0)), flush=True)
sys.stdin.read()
"""


class Process:
    def __init__(self, folder: Path) -> None:
        self.process = forked.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=folder,
            env=os.environ | {"TMPDIR": str(folder / "tmp")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"2.0\n"

    def end(self) -> None:
        self.process.communicate()
        assert self.process.returncode == 0

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@pytest.mark.slow
def test_generated_sources_do_not_pile_up(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "tmp").mkdir()

    def folders() -> set[Path]:
        found = set((tmp_path / "tmp").iterdir())
        assert all(each.name.startswith("baton-process-") for each in found), found
        return {each for each in found if list(each.glob("__autograph_generated_file*.py"))}

    killed = Process(tmp_path)
    left = folders()
    assert len(left) == 1
    killed.kill()
    assert folders() == left
    first, second = Process(tmp_path), Process(tmp_path)
    assert not left & folders()
    assert len(folders()) == 2
    first.end()
    assert len(folders()) == 1
    second.end()
    assert not folders()
