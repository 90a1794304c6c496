"""Reads exports back in forks."""

import subprocess
from types import SimpleNamespace

import pytest

from tests.support import forked


@pytest.fixture
def forked_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each export back in a fork: a process of its own, too, which need not import TensorFlow anew."""
    as_fork = SimpleNamespace(run=forked.run, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr("baton.tasks.evaluate.serving.subprocess", as_fork)
