"""A read-only disk is refused within a second, before Prefect or TensorFlow start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.disks import can_mount, small_disk
from tests.support.shipped_runs import run_file, settings

RUN_BATON = (
    "import sys; from baton.flows.commands.main import main; code = main(sys.argv[1:]); "
    "print([name for name in ('tensorflow', 'prefect') if name in sys.modules]); sys.exit(code)"
)


@pytest.mark.skipif(not can_mount(), reason="no disk can be mounted")
@pytest.mark.parametrize("folder", [".", "runs"], ids=["existing storage", "new storage"])
def test_read_only_storage_is_refused(tmp_path: Path, folder: str) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        disk.remount("ro")
        words = settings("digits", tmp_path / "disk" / folder)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", RUN_BATON, "run", str(run_file("digits")), *words],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ,
        )
        assert done.returncode == 2, done.stderr
        assert str(tmp_path / "disk") in done.stderr
        problem = (
            "the disk is mounted read-only; make it writable" if folder == "." else "no permission to create folders"
        )
        assert problem in done.stderr
        assert done.stdout == "[]\n", "TensorFlow or Prefect was imported"
        assert list((tmp_path / "disk").iterdir()) == []
