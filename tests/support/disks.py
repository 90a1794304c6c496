"""A real file system that is small, full or read-only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class SmallDisk:
    """A tmpfs that tests fill, enlarge and make read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Write until the disk is full."""
        with suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

    def free(self) -> None:
        """Delete what `fill` wrote."""
        self._filler.unlink(missing_ok=True)

    def remount(self, options: str) -> None:
        _mount("-o", f"remount,{options}", str(self.folder))


def can_mount() -> bool:
    """Whether this process can mount file systems. It mounts one to find out."""
    if os.geteuid() != 0 or shutil.which("mount") is None or shutil.which("umount") is None:
        return False
    folder = Path(f"/tmp/can-mount-{os.getpid()}")  # noqa: S108 - the process id makes it unique
    folder.mkdir(exist_ok=True)
    try:
        _mount("-t", "tmpfs", "-o", "size=4k", "none", str(folder))
    except subprocess.CalledProcessError:
        return False
    else:
        subprocess.run(["umount", str(folder)], check=True)  # noqa: S607
        return True
    finally:
        folder.rmdir()


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[SmallDisk]:
    """Mount a tmpfs of `size`, such as 64k or 2m, on a new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    try:
        yield SmallDisk(folder)
    finally:
        # Lazily, because a killed process may still have a file open there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # noqa: S607


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)  # noqa: S607
