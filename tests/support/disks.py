"""A disk that is really small, really full or really read-only, by whatever way this machine permits."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class SmallDisk:
    """A tmpfs that can be filled, enlarged and made read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self) -> None:
        """Take every byte that is left."""
        with suppress(OSError), self._filler.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(1 << 12))

    def free(self) -> None:
        """Give back what `fill` took."""
        self._filler.unlink(missing_ok=True)

    def remount(self, options: str) -> None:
        _mount("-o", f"remount,{options}", str(self.folder))


def may_mount() -> bool:
    """Whether this process may mount; found out by doing it."""
    if os.geteuid() != 0 or shutil.which("mount") is None or shutil.which("umount") is None:
        return False
    folder = Path(f"/tmp/may-mount-{os.getpid()}")  # noqa: S108 - nobody else's
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
    """A tmpfs of `size` (as 64k or 2m) on `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size}", "none", str(folder))
    try:
        yield SmallDisk(folder)
    finally:
        # Lazily: a process that is just dying may still hold a file there.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # noqa: S607


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)  # noqa: S607
