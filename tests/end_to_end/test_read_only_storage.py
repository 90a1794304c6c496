"""A disk that may only be read is refused in the first second, before anything is waited for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.disks import may_mount, small_disk
from tests.support.shipped_runs import run_file, settings

ASK = (
    "import sys; from flows.commands.main import main; code = main(sys.argv[1:]); "
    "print([name for name in ('tensorflow', 'prefect') if name in sys.modules]); sys.exit(code)"
)


@pytest.mark.skipif(not may_mount(), reason="no disk can be mounted here")
@pytest.mark.parametrize("folder", [".", "runs"], ids=["storage is there", "storage would have to be made"])
def test_storage_that_is_read_only_is_refused(tmp_path: Path, folder: str) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk:
        disk.remount("ro")
        words = settings("digits", tmp_path / "disk" / folder)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", ASK, "run", str(run_file("digits")), *words],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ,
        )
        assert done.returncode == 2, done.stderr
        assert str(tmp_path / "disk") in done.stderr
        told = "the disk is mounted read-only; make it writable" if folder == "." else "does not let you make folders"
        assert told in done.stderr
        assert done.stdout == "[]\n", "neither was waited for"
        assert list((tmp_path / "disk").iterdir()) == []
